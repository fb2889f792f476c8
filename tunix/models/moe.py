"""Mixtures of experts: an ffn of which each token uses few parts, chosen by a router.

    s = softmax(x W_router),   C = the k largest of s,   y = sum over e in C of w_e down_e(act(gate_e x) * up_e x)

where w_e is s_e, or s_e divided by the sum of s over C (`Experts.renormalise`). That is the mixture of Shazeer et al.
2017 (https://arxiv.org/abs/1701.06538) with the softmax before the choice, as Qwen 3 and Mixtral have it (renormalised,
both orders give the same). Qwen 3.5 adds a shared expert, that all tokens use, times sigmoid(g x) (`Experts.shared`).
gpt-oss has biases (`Experts.biases`): the router's before the softmax, an expert's after each of its matrices.
No expert has a capacity: no token is dropped, and none depends on the others.

An expert's adapter adds `s x A_e B_e` to its product (LoRA). Gate and up share an A, and their B's are one, as in PEFT,
for which both are one parameter of the model: so an adapter means the same in both. Biases stay as they are. Its
products are grouped by expert as the experts' own are; `A_e B_e`, which is as large as the matrix, is never computed.

On a mesh each device has some experts (`expert`) and columns of them (`tensor`). A token goes once to each device that
has any of its experts, with its choice and weights; that device's part of its sum comes back, and the parts are added
up at home; where the mesh does not divide the rows, all devices have all tokens and add up their parts. That is the
dispatch and combine of Lepikhin et al. 2020 (GShard, https://arxiv.org/abs/2006.16668) without a capacity: each device
has room for all tokens of all devices, a block for each, so that none is dropped. Accelerators send of a block what is
in it (`jax.lax.ragged_all_to_all`). XLA has no such program for CPUs, where blocks are sent whole: as many bytes as if
every device gathered all tokens.

Axes: B rows, T time, D model width, F ffn width, E experts, k chosen experts of a token; n tokens (of a shard), r rows,
s shards of the rows; in shapes of weights r is the rank, and 2 is gate and up.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num

from tunix.errors import UserError
from tunix.mesh import Axes, constrain, partition, platform
from tunix.models.config import EXPERTS, DecoderConfig, Experts
from tunix.models.expert_products import (
    Fp8Bank,
    Matrices,
    RoundedBank,
    Routes,
    from_experts,
    in_rows,
    routes,
    sums,
    taken,
    to_experts,
)
from tunix.models.layers import GatedFFN, Matrix, Norm, Stored, TokenKeys, joined, weight
from tunix.models.quantization.formats import Simulated
from tunix.util.loops import needed_first

BANK_PAIRS: Mapping[str, tuple[str, int | None]] = {
    "gates": ("gates", 0),
    "ups": ("gates", 1),
    "downs": ("downs", None),
}
"""Our name of an experts' matrix -> the bank whose A and B adapt it, and which half of the B; None for all of it."""
Arrays = Mapping[str, jax.Array]
"""The parameters of a bank by name: `w`, with biases `b`, where it is rounded `w_scale`, with an adapter `w_lora_a` and
`w_lora_b`."""


class Bank(Stored):
    """A matrix of each expert."""

    w_lora_a: nnx.Variable
    w_lora_b: nnx.Variable
    """An adapter's A `[E inputs r]` and B `[E r outputs]`; those of the gates are also for the ups: `[E r 2 F]`."""

    def __init__(self, shape: tuple[int, int, int], axes: Axes, rngs: nnx.Rngs, *, bias: bool = False):
        self.w = weight(rngs, shape, axes, std=shape[1] ** -0.5)
        of_bias = (axes[0], axes[2])
        self.b = nnx.Param(jnp.zeros((shape[0], shape[2]), jnp.float32), axes=of_bias) if bias else None
        self.contracted, self.stacked = 1, True
        self.scale: float | None = None
        """Multiplies x A B; None where there is no adapter, or another bank holds it."""

    def simulate(self, name: str, rounding: Simulated) -> None:
        """As for any matrix, whose inputs cannot be rounded here.

        Raises:
            UserError: no tile fits the matrices, or what comes into them would be rounded too.
        """
        if rounding.activations is not None:
            raise UserError(
                f"quantization.rules: what comes into experts ({name}) cannot be rounded ({rounding.activations}): "
                "leave activations out for experts.*"
            )
        super().simulate(name, rounding)

    @property
    def arrays(self) -> Arrays:
        """Its parameters by name."""
        by_name = {"w": self.w[...]}
        if self.b is not None:
            by_name["b"] = self.b[...]
        if self.quantized:
            by_name["w_scale"] = self.w_scale[...]
        if self.scale is not None:
            by_name |= {"w_lora_a": self.w_lora_a[...], "w_lora_b": self.w_lora_b[...]}
        return by_name

    def sharded(self, mesh: AbstractMesh) -> tuple[Arrays, dict[str, PartitionSpec]]:
        """Its parameters as the devices of a mesh multiply them, whole along D, and how each is split over these.

        Where the inputs are split, scales of fewer tiles are repeated until each part has its own.
        """
        arrays, specs = dict(self.arrays), dict[str, PartitionSpec]()
        for name in arrays:
            of = "w" if name == "w_scale" else name
            axes: Axes = tuple(None if x in ("embed", "rank") else x for x in getattr(self, of).get_metadata("axes"))
            specs[name] = partition(axes, arrays[of].shape, mesh)
        if "w_scale" in arrays and (over := specs["w"][1]) is not None:
            scales, parts = arrays["w_scale"], mesh.shape[over]
            arrays["w_scale"] = jnp.repeat(scales, math.lcm(len(scales[0]), parts) // len(scales[0]), axis=1)
        return arrays, specs


def _matrices(bank: Arrays, x: Float[Array, "_ _"], fp8: bool) -> Matrices:
    """What multiplies `x`: a bank's matrices, or how they are rounded."""
    if fp8:
        return Fp8Bank(bank["w"], bank.get("w_scale"))
    return RoundedBank(bank["w"], bank["w_scale"], x[:0, 0]) if "w_scale" in bank else bank["w"]


def by_row(where: Routes) -> Routes:
    """Routes for what is in rows already: row after row, each the token of one pair."""
    number = where.places.size
    rows = jnp.arange(number, dtype=where.pairs.dtype)
    computed = rows < jnp.sum(where.sizes)
    return Routes(jnp.pad(rows, (0, len(where.pairs) - number)), rows[:, None], computed[:, None], where.sizes)


AXIS = "expert"


class Destinations(NamedTuple):
    """Which tokens of a device go to which device of the axis."""

    tokens: Int[Array, "s n"]
    """The tokens of the block for each device, in their order; those that do not go there come last."""
    places: Int[Array, "n s"]
    """The row of each token in all blocks together, one after the other."""
    there: Bool[Array, "n s"]
    """Whether a token goes to a device."""
    sent: Int[Array, "s"]
    """How many tokens go to each device."""
    received: Int[Array, "s"]
    """How many come from each device."""

    @property
    def arrived(self) -> Bool[Array, "s n"]:
        """Whether a row of the blocks that came has a token."""
        return jnp.arange(len(self.places)) < self.received[:, None]


def destinations(experts: Int[Array, "n k"], real: Bool[Array, "n"], per_device: int) -> Destinations:
    """Where the tokens of this device go; every device of the axis calls it with its tokens.

    Args:
        experts: what each token has chosen.
        real: which tokens are not padding, which goes nowhere.
        per_device: how many experts each device has; those of the first device are 0 to `per_device` - 1.
    """
    devices = jax.lax.axis_size(AXIS)
    there = jnp.any(experts[..., None] // per_device == jnp.arange(devices), axis=1) & real[:, None]
    order, back = needed_first(there.T)
    places = back.T + len(experts) * jnp.arange(devices)
    sent = jnp.sum(there, axis=0, dtype=jnp.int32)
    return Destinations(order, places, there, sent, jax.lax.all_to_all(sent, AXIS, 0, 0, tiled=True))


@jax.custom_vjp
def dispatch(x: Float[Array, "n D"], where: Destinations) -> Float[Array, "s n D"]:
    """What came of each device's tokens; rows without one hold anything. Its transpose is `combine`."""
    return _sent(taken(x, where.tokens), where.sent, where.received)


@jax.custom_vjp
def combine(parts: Float[Array, "s n D"], where: Destinations) -> Float[Array, "n D"]:
    """For each token the sum of what the devices computed of it, in float32; 0 for one that went nowhere."""
    back = _sent(parts, where.received, where.sent)
    return sums(back.reshape(-1, parts.shape[-1]), where.places, where.there)


dispatch.defvjp(lambda x, where: (dispatch(x, where), where), lambda where, d: (combine(d, where), None))
combine.defvjp(lambda parts, where: (combine(parts, where), where), lambda where, d: (dispatch(d, where), None))


def _sent(blocks: Float[Array, "s n _"], sent: Int[Array, "s"], received: Int[Array, "s"]) -> Float[Array, "s n _"]:
    """The block for this device from each device; of each block only its first rows are meant, as many as are sent."""
    if platform() == "cpu":
        return jax.lax.all_to_all(blocks, AXIS, 0, 0, tiled=True)
    devices, n = blocks.shape[:2]
    starts = n * jnp.arange(devices, dtype=jnp.int32)
    places = jnp.full(devices, n * jax.lax.axis_index(AXIS), jnp.int32)
    rows = blocks.reshape(devices * n, -1)
    came = jax.lax.ragged_all_to_all(rows, jnp.zeros_like(rows), starts, sent, places, received, axis_name=AXIS)
    return came.reshape(blocks.shape)


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


class Choice(NamedTuple):
    """Which experts each token uses."""

    experts: Int[Array, "B T k"]
    """Their numbers, the most probable first; of equal ones the one with the lower number."""
    weights: Float[Array, "B T k"]
    """What their results are multiplied by, in float32."""


class MixtureOfExperts(GatedFFN):
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
            super().__init__(config, rngs, width=config.experts.shared)
        weighed = config.experts.shared and config.feed_forward == EXPERTS
        # Its sigmoid weighs the shared expert, one number for each token.
        self.shared_gate = Matrix(weight(rngs, (d,), ("embed",), std=d**-0.5)) if weighed else None

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
            shared = self.gated(x, dropout_keys)
            y = y + jax.nn.sigmoid(jnp.einsum("BTD,D->BT", x, self.shared_gate.w[...])[..., None]) * shared
        return y, auxiliary

    @jax.named_scope("experts")
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
            real: as in `__call__`, as is `replayed`.
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
        banks = (self.gates, self.ups, self.downs)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return self._mixed(0, x, choice, real, *(bank.arrays for bank in banks))
        tokens, wide = (partition(("rows", "time", None)[:rank], x.shape[:rank], mesh) for rank in (2, 3))
        matrices, specs = zip(*(bank.sharded(mesh) for bank in banks), strict=True)
        of_gates = specs[0]["w"]
        split = [axis for axis, there in zip(SPLIT, (of_gates[0], of_gates[2]), strict=True) if there]
        # Rows that the mesh does not divide are on all of its devices.
        shared = "expert" in split and tokens[0] is not None
        summed = tuple(axis for axis in split if axis != "expert" or not shared)

        def part(x: jax.Array, experts: jax.Array, weights: jax.Array, real: jax.Array, *matrices: Arrays) -> jax.Array:
            per_device = len(matrices[0]["w"])
            first = jax.lax.axis_index("expert") * per_device if "expert" in split else 0
            local, choice = partial(self._mixed, first), Choice(experts, weights)
            if shared:
                # Each token is computed where its experts are.
                flat, flat_experts, flat_weights = (rows.reshape(-1, rows.shape[-1]) for rows in (x, experts, weights))
                where = destinations(flat_experts, real.reshape(-1), per_device)
                # Together, in float32, which has all numbers of experts: a TPU sends rows of 128 numbers at least.
                sent = jnp.concatenate([flat_weights, flat_experts], axis=1)
                weights, experts = jnp.split(dispatch(sent, where), 2, axis=-1)
                choice = Choice(experts.astype(jnp.int32), weights)
                y = combine(local(dispatch(flat, where), choice, where.arrived, *matrices), where).reshape(x.shape)
            else:
                y = local(x, choice, real, *matrices)
            return jax.lax.psum(y, summed) if summed else y

        places = (wide, wide, wide, tokens, *specs)
        spread = jax.shard_map(part, mesh=mesh, in_specs=places, out_specs=wide, check_vma=False)
        y = spread(x, *choice, real, *matrices)
        return constrain(y, "rows", "time", None)

    def _mixed(
        self,
        first: Int[Array, ""] | int,
        x: Float[Array, "B T D"],
        choice: Choice,
        real: Bool[Array, "B T"],
        gates: Arrays,
        ups: Arrays,
        downs: Arrays,
    ) -> Float[Array, "B T D"]:
        """The weighted results of the experts from `first` on whose matrices these are; other choices add nothing."""
        active, width, number = choice.experts.shape[-1], x.shape[-1], len(gates["w"])
        experts = choice.experts - first
        computed = real[..., None] & (experts >= 0) & (experts < number)
        where, tokens = routes(experts.reshape(-1, active), number, computed.reshape(-1, active)), x.reshape(-1, width)

        def product(bank: Arrays) -> Float[Array, "r F"]:
            """Each pair's token times its expert's matrix, with the bias where there is one."""
            y = to_experts(tokens, _matrices(bank, tokens, self.gates.fp8), where)
            if "b" not in bank:
                return y
            # A product with rows that are 1 at their expert: a gather's gradient would be scattered. What rows of pairs
            # that are not computed hold has no part in it.
            ends, at = jnp.cumsum(where.sizes), jnp.arange(len(y))[:, None]
            of_expert = ((at >= ends - where.sizes) & (at < ends)).astype(bank["b"].dtype)
            added = jnp.einsum("rE,EF->rF", of_expert, bank["b"], precision=jax.lax.Precision.HIGHEST)
            return y + jnp.where(at < ends[-1], added, 0).astype(y.dtype)

        gate, up = product(gates), product(ups)
        if self.gates.scale is not None:
            narrow, b = self.gates.scale * to_experts(tokens, gates["w_lora_a"], where), gates["w_lora_b"]
            both = to_experts(narrow[: where.places.size], b.reshape(*b.shape[:2], -1), by_row(where))
            of_gate, of_up = jnp.split(both, 2, axis=1)
            gate, up = gate + of_gate, up + of_up
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        weights = in_rows(choice.weights.reshape(-1, active), where)[:, None]
        rows = (joined(self.activation, self.experts.clamp, gate, up) * weights).astype(x.dtype)
        mixed = from_experts(rows, _matrices(downs, rows, self.downs.fp8), where)
        if self.downs.scale is not None:
            narrow = self.downs.scale * to_experts(rows[: where.places.size], downs["w_lora_a"], by_row(where))
            mixed = mixed + from_experts(narrow, downs["w_lora_b"], where)
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
        dense = self.gated(self.pre_mlp_norm(x), dropout_keys)
        mixed, auxiliary = self.routed(self.pre_experts_norm(x), x, real, replayed)
        return self.dense_norm(dense) + self.experts_norm(mixed), auxiliary

    def chosen(self, scores: Float[Array, "B T E"], replayed: Int[Array, "B T k"] | None = None) -> Choice:
        """As for any mixture, but for the factor of each expert."""
        choice = super().chosen(scores, replayed)
        factor = self.router.factor[...].astype(jnp.float32)
        return choice._replace(weights=choice.weights * factor[choice.experts])
