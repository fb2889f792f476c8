"""Mixtures of experts: an ffn of which each token uses few parts, chosen by a router.

    s = softmax(x W_router),   C = the k largest of s,   y = sum over e in C of w_e down_e(act(gate_e x) * up_e x)

where w_e is s_e, or s_e divided by the sum of s over C (`Experts.renormalise`). That is the mixture of Shazeer et al.
2017 (https://arxiv.org/abs/1701.06538) with the softmax before the choice, as Qwen 3 and Mixtral have it (renormalised,
both orders give the same). Qwen 3.5 adds a shared expert, that all tokens use, times sigmoid(g x) (`Experts.shared`).
gpt-oss has biases (`Experts.biases`): the router's before the softmax, an expert's after each of its matrices.
No expert has a capacity: no token is dropped, and none depends on the others.

Pairs of a token and one of its experts are sorted by expert, so that each matrix multiplies consecutive rows
(`expert_products.py`), and brought back. On a mesh each device has some experts (`expert`) and columns of them
(`tensor`). Devices of the axis `expert` have rows of their own: tokens go to the devices of their experts, and their
parts of the sums come back (`expert_exchange.py`). Where the mesh does not divide the rows all have all tokens, and add
up their parts.

Axes: B rows, T time, D model width, F ffn width, E experts, k chosen experts of a token; n tokens, m pairs of a token
and a chosen expert.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Num

from tunix.mesh import Axes, constrain, partition
from tunix.models.banks import Arrays, Bank, down, gate_and_up, sharded
from tunix.models.config import EXPERTS, DecoderConfig, Experts
from tunix.models.expert_exchange import combine, destinations, dispatch
from tunix.models.expert_products import in_rows, routes
from tunix.models.layers import Norm, TokenKeys, gated, joined, projections, weight

ROWS, EXPECTED, CHOSEN = "rows", "expected", "chosen"
"""The auxiliary terms of a layer."""
EXACT = jax.lax.Precision.HIGHEST
SPLIT = ("expert", "tensor")
"""Mesh axes over which the experts' results are summed."""


class Router(nnx.Module):
    """The matrix that scores experts, one column each."""

    def __init__(self, config: DecoderConfig, experts: Experts, rngs: nnx.Rngs):
        shape = (config.d_model, experts.number)
        self.w = weight(rngs, shape, ("embed", None), std=config.d_model**-0.5)
        self.b = nnx.Param(jnp.zeros(shape[1:], jnp.float32), axes=(None,)) if experts.biases else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Each token's probabilities of the experts, in float32 throughout: a rounding error can change the choice."""
        w = self.w[...].astype(jnp.float32)
        logits = jnp.einsum("BTD,DE->BTE", x.astype(jnp.float32), w, precision=EXACT)
        logits = logits if self.b is None else logits + self.b[...].astype(jnp.float32)
        return jax.nn.softmax(logits, axis=-1)


class SharedGate(nnx.Module):
    """The sigmoid that weighs the shared expert, one number for each token."""

    def __init__(self, d: int, rngs: nnx.Rngs):
        self.w = weight(rngs, (d,), ("embed",), std=d**-0.5)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T 1"]:
        return jax.nn.sigmoid(jnp.einsum("BTD,D->BT", x, self.w[...])[..., None])


class Choice(NamedTuple):
    """Which experts each token uses."""

    experts: Int[Array, "B T k"]
    """Their numbers, the most probable first; of equal ones the one with the lower number."""
    weights: Float[Array, "B T k"]
    """What their results are multiplied by, in float32."""


class MixtureOfExperts(nnx.Module):
    """The ffn of several experts; its matrices are stacked over them, and named as the parameters are."""

    router_class: type[Router] = Router

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        assert config.experts is not None, "their number comes with the ffn"
        self.experts, self.activation = config.experts, config.activation
        (e, d, f), bias = (config.experts.number, config.d_model, config.ffn), config.experts.biases
        self.router = self.router_class(config, config.experts, rngs)
        self.gates = Bank((e, d, f), ("expert", "embed", "ffn"), rngs, bias=bias)
        self.ups = Bank((e, d, f), ("expert", "embed", "ffn"), rngs, bias=bias)
        self.downs = Bank((e, f, d), ("expert", "ffn", "embed"), rngs, bias=bias)
        if config.experts.shared:
            self.gate, self.up, self.down = projections(d, config.experts.shared, rngs)
        weighed = config.experts.shared and config.feed_forward == EXPERTS
        self.shared_gate = SharedGate(d, rngs) if weighed else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        dropout_keys: TokenKeys | None = None,
        real: Bool[Array, "B T"] | None = None,
        replayed: Int[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Num[Array, "..."]]]:
        """The mixed results of each token's experts, and of a shared one.

        Args:
            real: which tokens are not padding; None where all are.
            replayed: experts to use instead of the router's choice; see `chosen`.
        """
        y, auxiliary = self.routed(x, x, real, replayed)
        if self.shared_gate is not None:
            shared = gated((self.gate, self.up, self.down), self.activation, x, dropout_keys)
            y = y + self.shared_gate(x) * shared
        return y, auxiliary

    def routed(
        self,
        x: Float[Array, "B T D"],
        scored: Float[Array, "B T D"],
        real: Bool[Array, "B T"] | None,
        replayed: Int[Array, "B T k"] | None,
    ) -> tuple[Float[Array, "B T D"], dict[str, Num[Array, "..."]]]:
        """The mixed results of each token's experts, which padding has none of, and how evenly they are used.

        The auxiliary term `rows` counts the tokens that chose each expert, and `expected` is k times the sum of their
        probabilities: the rows that draws from the router would have in the mean, k a token as of `rows`. Sums of
        both over micro-batches are those of the whole. `chosen` are the experts of each token.

        Args:
            x: what the experts compute.
            scored: by what the router chooses.
            real: which tokens are not padding; None where all are.
            replayed: experts to use instead of the router's choice; see `chosen`.
        """
        real = jnp.ones(x.shape[:2], bool) if real is None else real
        scores = self.router(scored)
        choice = self.chosen(scores, replayed)
        number, active = self.experts.number, choice.experts.shape[-1]
        shown = jnp.where(real[..., None], choice.experts, number).reshape(-1)
        rows = jnp.bincount(shown, length=number + 1)[:number].astype(jnp.float32)
        expected = active * jnp.sum(jnp.where(real[..., None], scores, 0.0), axis=(0, 1))
        y = self._spread(x, choice, real)
        if self.downs.b is not None:
            # The weighted sum of the biases of each token's experts, in float32; 0 for padding.
            of_expert = jax.nn.one_hot(choice.experts, number, dtype=jnp.float32) * choice.weights[..., None]
            shares = jnp.where(real[..., None], jnp.sum(of_expert, axis=2), 0.0)
            bias = jnp.einsum("BTE,ED->BTD", shares, self.downs.b[...].astype(jnp.float32), precision=EXACT)
            y = y + bias.astype(y.dtype)
        return y, {ROWS: rows, EXPECTED: expected, CHOSEN: choice.experts}

    def chosen(self, scores: Float[Array, "B T E"], replayed: Int[Array, "B T k"] | None = None) -> Choice:
        """The experts with the largest scores. The choice has no gradient; the weights have that of their scores.

        Args:
            scores: of all experts.
            replayed: the experts of tokens whose choice is replayed (Ma et al. 2025, https://arxiv.org/abs/2510.11370);
                -1 where the router chooses. Their weights are those of these scores, through which the router learns.
        """
        _, experts = jax.lax.top_k(jax.lax.stop_gradient(scores), self.experts.active)
        if replayed is not None:
            experts = jnp.where(replayed >= 0, replayed, experts)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.experts.renormalise:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Choice(experts, weights)

    def _spread(self, x: Float[Array, "B T D"], choice: Choice, real: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        """The weighted results, computed by each device of the mesh in use for its tokens and its experts.

        Biases of the down matrices are left out: where columns are split, each device would add them.
        """
        downs = {name: x for name, x in self.downs.arrays.items() if name != "b"}
        matrices = (self.gates.arrays, self.ups.arrays, downs)
        scales = (self.gates.scale, self.downs.scale)
        join = partial(joined, self.activation, self.experts.clamp)
        mesh, compute = jax.sharding.get_abstract_mesh(), partial(_mixed, join, scales)
        if mesh.empty or mesh.size == 1:
            return compute(0, x, choice, real, *matrices)
        tokens, wide = (partition(("rows", "time", None)[:rank], x.shape[:rank], mesh) for rank in (2, 3))
        matrices, banks = zip(
            *(sharded(bank, axes, mesh) for bank, axes in zip(matrices, _HERE, strict=True)), strict=True
        )
        of_gates = banks[0]["w"]
        split = [axis for axis, there in zip(SPLIT, (of_gates[0], of_gates[2]), strict=True) if there]
        # Rows that the mesh does not divide are on all of its devices.
        shared = "expert" in split and tokens[0] is not None
        summed = tuple(axis for axis in split if axis != "expert" or not shared)

        def part(x: jax.Array, experts: jax.Array, weights: jax.Array, real: jax.Array, *matrices: Arrays) -> jax.Array:
            per_device = len(matrices[0]["w"])
            first = jax.lax.axis_index("expert") * per_device if "expert" in split else 0
            local, choice = partial(compute, first), Choice(experts, weights)
            y = (
                _exchanged(local, per_device, x, choice, real, *matrices)
                if shared
                else local(x, choice, real, *matrices)
            )
            return jax.lax.psum(y, summed) if summed else y

        specs = (wide, wide, wide, tokens, *banks)
        spread = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=wide, check_vma=False)
        y = spread(x, *choice, real, *matrices)
        return constrain(y, "rows", "time", None)


_HERE: tuple[Axes, ...] = (("expert", None, "ffn"), ("expert", None, "ffn"), ("expert", "ffn", None))
"""How the three matrices are split while they multiply: whole columns of the model, of the device's own experts."""


def _exchanged(
    compute: Callable[..., Float[Array, "s n D"]],
    per_device: int,
    x: Float[Array, "B T D"],
    choice: Choice,
    real: Bool[Array, "B T"],
    *matrices: Arrays,
) -> Float[Array, "B T D"]:
    """The weighted results of a device's tokens, each computed where its experts are.

    Args:
        compute: `_mixed` of the experts of this device, of which there are `per_device`.
    """
    x_tokens, experts, weights = (rows.reshape(-1, rows.shape[-1]) for rows in (x, *choice))
    where = destinations(experts, real.reshape(-1), per_device)
    # Together, in float32, which has all numbers of experts: a TPU sends rows of 128 numbers at least.
    weights, experts = jnp.split(dispatch(jnp.concatenate([weights, experts], axis=1), where), 2, axis=-1)
    came = Choice(experts.astype(jnp.int32), weights)
    parts = compute(dispatch(x_tokens, where), came, where.arrived, *matrices)
    return combine(parts, where).reshape(x.shape)


def _mixed(
    join: Callable[[jax.Array, jax.Array], jax.Array],
    scales: tuple[float | None, float | None],
    first: Int[Array, ""] | int,
    x: Float[Array, "B T D"],
    choice: Choice,
    real: Bool[Array, "B T"],
    gates: Arrays,
    ups: Arrays,
    downs: Arrays,
) -> Float[Array, "B T D"]:
    """The weighted results of the experts from `first` on whose matrices these are; other choices add nothing.

    Args:
        join: the product of a gate and the other factor.
        scales: multiply what adapters add, to gates and ups and to downs; None where they have none.
    """
    active, width, number = choice.experts.shape[-1], x.shape[-1], len(gates["w"])
    experts = choice.experts - first
    computed = real[..., None] & (experts >= 0) & (experts < number)
    where = routes(experts.reshape(-1, active), number, computed.reshape(-1, active))
    gate, up = gate_and_up(x.reshape(-1, width), gates, ups, scales[0], where)
    gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
    weights = in_rows(choice.weights.reshape(-1, active), where)[:, None]
    mixed = down((join(gate, up) * weights).astype(x.dtype), downs, scales[1], where)
    return mixed.reshape(x.shape)


class NormedRouter(Router):
    """A router of the residual stream, which it norms, and a factor for each expert."""

    def __init__(self, config: DecoderConfig, experts: Experts, rngs: nnx.Rngs):
        super().__init__(config, experts, rngs)
        self.norm = Norm(config.d_model, "embed", eps=config.norm_eps, offset=False)
        self.factor = nnx.Param(jnp.ones((experts.number,), jnp.float32), axes=(None,))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        return super().__call__(self.norm(x.astype(jnp.float32)) * x.shape[-1] ** -0.5)


class DenseAndExperts(MixtureOfExperts):
    """A dense ffn and a mixture of experts side by side, each with norms of its own, as Gemma 4 26B-A4B has them.

        y = norm(dense(norm(x))) + norm(experts(norm(x)))

    where the four norms have different weights and x is the residual stream. The router scores what is normed with a
    weight of its own, and divided by sqrt(D); the weights of the chosen experts, divided by their sum, are multiplied
    by a factor that each expert has (transformers' `models/gemma4`). `Experts.shared` is the width of the dense ffn,
    whose projections and first norm are called as in layers without experts.
    """

    router_class = NormedRouter
    router: NormedRouter

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        norm = partial(Norm, config.d_model, "embed", eps=config.norm_eps, offset=config.norm_offset)
        self.pre_mlp_norm, self.dense_norm, self.pre_experts_norm, self.experts_norm = norm(), norm(), norm(), norm()

    def __call__(
        self,
        x: Float[Array, "B T D"],
        dropout_keys: TokenKeys | None = None,
        real: Bool[Array, "B T"] | None = None,
        replayed: Int[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        """The sum of both results, each normed.

        Args:
            x: the residual stream.
        """
        ffn = (self.gate, self.up, self.down)
        dense = gated(ffn, self.activation, self.pre_mlp_norm(x), dropout_keys)
        mixed, auxiliary = self.routed(self.pre_experts_norm(x), x, real, replayed)
        return self.dense_norm(dense) + self.experts_norm(mixed), auxiliary

    def chosen(self, scores: Float[Array, "B T E"], replayed: Int[Array, "B T k"] | None = None) -> Choice:
        """As for any mixture, but for the factor of each expert."""
        choice = super().chosen(scores, replayed)
        factor = self.router.factor[...].astype(jnp.float32)
        return choice._replace(weights=choice.weights * factor[choice.experts])
