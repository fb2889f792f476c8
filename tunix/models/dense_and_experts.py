"""A dense ffn and a mixture of experts side by side, each with norms of its own, as Gemma 4 26B-A4B has them.

    y = norm(dense(norm(x))) + norm(experts(norm(x)))

where the four norms have different weights and x is the residual stream. The router scores what is normed with a weight
of its own, and divided by sqrt(D); the weights of the chosen experts, divided by their sum, are multiplied by a factor
that each expert has (transformers' `models/gemma4`).

Axes: B rows, T time, D model width, E experts, k chosen experts of a token.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.models.config import DecoderConfig, Experts
from tunix.models.gated_ffn import gated
from tunix.models.layers import Norm, TokenKeys
from tunix.models.moe import Choice, MixtureOfExperts, Router


class NormedRouter(Router):
    """A router of the residual stream, which it norms, and a factor for each expert."""

    def __init__(self, config: DecoderConfig, experts: Experts, rngs: nnx.Rngs):
        super().__init__(config, experts, rngs)
        self.norm = Norm(config.d_model, "embed", eps=config.norm_eps, offset=False)
        self.factor = nnx.Param(jnp.ones((experts.number,), jnp.float32), axes=(None,))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        return super().__call__(self.norm(x.astype(jnp.float32)) * x.shape[-1] ** -0.5)


class DenseAndExperts(MixtureOfExperts):
    """The two ffns of a layer. `Experts.shared` is the width of the dense one, whose projections and first norm are
    called as in layers without experts."""

    router_class = NormedRouter
    router: NormedRouter

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        d, norm = config.d_model, {"eps": config.norm_eps, "offset": config.norm_offset}
        self.pre_mlp_norm = Norm(d, "embed", **norm)
        self.dense_norm = Norm(d, "embed", **norm)
        self.pre_experts_norm = Norm(d, "embed", **norm)
        self.experts_norm = Norm(d, "embed", **norm)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        dropout_keys: TokenKeys | None = None,
        real: Bool[Array, "B T"] | None = None,
        given: Int[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        """The sum of both results, each normed.

        Args:
            x: the residual stream.
        """
        three = (self.gate, self.up, self.down)
        dense = gated(three, self.activation, self.pre_mlp_norm(x), dropout_keys)
        mixed, auxiliary = self.routed(self.pre_experts_norm(x), x, real, given)
        return self.dense_norm(dense) + self.experts_norm(mixed), auxiliary

    def chosen(self, scores: Float[Array, "B T E"], given: Int[Array, "B T k"] | None = None) -> Choice:
        """As for any mixture, but for the factor of each expert."""
        choice = super().chosen(scores, given)
        factor = self.router.factor[...].astype(jnp.float32)
        return choice._replace(weights=choice.weights * factor[choice.experts])
