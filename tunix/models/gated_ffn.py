"""The feed-forward part of two factors, of which one is a gate: `down(act(gate x) * up x)` (GLU variants, Shazeer 2020,
https://arxiv.org/abs/2002.05202).

Axes: B rows, T time, D model width, F ffn width.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from tunix.models.config import Clamp, DecoderConfig
from tunix.models.layers import Projection, TokenKeys


class GatedFFN(nnx.Module):
    """A gated ffn, whose projections are named as the parameters are."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.activation = config.activation
        self.gate, self.up, self.down = projections(config.d_model, config.ffn, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        dropout_keys: TokenKeys | None = None,
        real: Bool[Array, "B T"] | None = None,
        given: Int[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        return gated((self.gate, self.up, self.down), self.activation, x, dropout_keys), {}


class WideFFN(nnx.Module):
    """`GatedFFN` of twice the width, whose parameters have names of their own: a parameter has one shape."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.activation = config.activation
        self.wide_gate, self.wide_up, self.wide_down = projections(config.d_model, 2 * config.ffn, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        dropout_keys: TokenKeys | None = None,
        real: Bool[Array, "B T"] | None = None,
        given: Int[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        return gated((self.wide_gate, self.wide_up, self.wide_down), self.activation, x, dropout_keys), {}


Three = tuple[Projection, Projection, Projection]
"""The gate, the other factor, and what their product is multiplied with."""


def projections(d: int, f: int, rngs: nnx.Rngs) -> Three:
    """The three projections of a gated ffn that is `f` wide."""
    gate = Projection("BTD,DF->BTF", (d, f), ("embed", "ffn"), rngs, contracted=1)
    up = Projection("BTD,DF->BTF", (d, f), ("embed", "ffn"), rngs, contracted=1)
    return gate, up, Projection("BTF,FD->BTD", (f, d), ("ffn", "embed"), rngs, contracted=1)


def gated(
    three: Three, activation: str, x: Float[Array, "B T D"], dropout_keys: TokenKeys | None
) -> Float[Array, "B T D"]:
    """The output of a gated ffn."""
    gate, up = three[0](x, dropout_keys), three[1](x, dropout_keys)
    gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
    return three[2](activated(activation, gate) * up, dropout_keys)


def joined(
    activation: str, clamp: Clamp | None, gate: Float[Array, "..."], up: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The product of a gate, after its activation, and the other factor; clamped as `Clamp` says where there is one."""
    if clamp is None:
        return activated(activation, gate) * up
    gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
    return (up + 1) * gate * jax.nn.sigmoid(clamp.slope * gate)


def activated(activation: str, gate: Float[Array, "..."]) -> Float[Array, "..."]:
    """The gate after the activation that a config names."""
    return jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
