"""The matrices of a mixture's experts, stacked over them, with adapters: what they are, and what rows become by them.

An expert's adapter adds `s x A_e B_e` to its product (LoRA). Gate and up share an A, and their B's are one, as in PEFT,
for which both are one parameter of the model: so an adapter means the same in both. Biases stay as they are. Its
products are grouped by expert as the experts' own are (`expert_products.py`); `A_e B_e`, which is as large as the
matrix, is never computed.

Axes: E experts, D model width, F ffn width; n tokens, r rows, k chosen experts of a token; in shapes of weights r is
the rank, and 2 is gate and up.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float

from tunix.errors import UserError
from tunix.mesh import Axes, partition
from tunix.models.expert_products import RoundedBank, Routes, from_experts, from_rounded, to_experts, to_rounded
from tunix.models.layers import weight
from tunix.models.quantization.fake_quant import Simulated
from tunix.models.quantization.formats import Quantization, check_tile, quantize

START_OF_A = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=1, out_axis=2, batch_axis=0)
"""An expert's initial A is that of any matrix: uniform within 1 / sqrt(inputs), as in PEFT."""
BANK_PAIRS: Mapping[str, tuple[str, int | None]] = {
    "gates": ("gates", 0),
    "ups": ("gates", 1),
    "downs": ("downs", None),
}
"""Our name of an experts' matrix -> the bank whose A and B adapt it, and which half of the B; None for all of it."""
Arrays = Mapping[str, jax.Array]
"""The parameters of a bank by name: `w`, with biases `b`, where it is rounded `w_scale`, with an adapter `w_lora_a` and
`w_lora_b`."""


class Bank(nnx.Module):
    """A matrix of each expert."""

    w_lora_a: nnx.Variable
    w_lora_b: nnx.Variable
    """An adapter's A `[E inputs r]` and B `[E r outputs]`; those of the gates are also for the ups: `[E r 2 F]`."""

    w_scale: nnx.Variable
    """The scales of a quantized `w`: those of each expert's matrix, stacked."""

    def __init__(self, shape: tuple[int, int, int], axes: Axes, rngs: nnx.Rngs, *, bias: bool = False):
        self.w = weight(rngs, shape, axes, std=shape[1] ** -0.5)
        of_bias = (axes[0], axes[2])
        self.b = nnx.Param(jnp.zeros((shape[0], shape[2]), jnp.float32), axes=of_bias) if bias else None
        self.quantized = False
        self.simulated: Simulated | None = None
        """What is rounded in simulation: weights alone."""
        self.scale: float | None = None
        """Multiplies x A B; None where there is no adapter, or another bank holds it."""

    def adapt(self, rank: int, scale: float, halves: int, rngs: nnx.Rngs) -> None:
        """Adds an adapter that changes nothing yet: a random A, and a B of zeros.

        Args:
            rank: r.
            scale: multiplies x A B.
            halves: 2 where the adapter is also another bank's.
            rngs: its `params` stream is used once.
        """
        number, inputs, outputs = self.w.shape
        of_expert, of_input, of_output = self.w.get_metadata("axes")
        self.scale, split = scale, (halves, outputs) if halves > 1 else (outputs,)
        a = START_OF_A(rngs.params(), (number, inputs, rank), jnp.float32)
        self.w_lora_a = nnx.Param(a, axes=(of_expert, of_input, "rank"))
        axes = (of_expert, "rank", *[None] * (len(split) - 1), of_output)
        self.w_lora_b = nnx.Param(jnp.zeros((number, rank, *split), jnp.float32), axes=axes)

    def quantize(self, name: str, quantization: Quantization) -> None:
        """Replaces the matrices by their rounded values and their scales, each expert's for itself.

        Args:
            name: of the bank in its layer, for the error.

        Raises:
            UserError: no tile fits the matrices.
        """
        check_tile(name, self.w.shape[1], quantization)
        axes = self.w.get_metadata("axes")
        values, scales = jax.vmap(lambda w: quantize(w, quantization, 1))(self.w[...])
        self.w, self.w_scale = nnx.Param(values, axes=axes), nnx.Param(scales, axes=axes)
        self.quantized = True

    def simulate(self, name: str, rounding: Simulated) -> None:
        """Makes the bank compute as if its matrices were rounded.

        Args:
            name: of the bank in its layer, for the error.

        Raises:
            UserError: no tile fits the matrices, or what comes into them would be rounded too.
        """
        if rounding.activations is not None:
            raise UserError(
                f"quantization.rules: what comes into experts ({name}) cannot be rounded ({rounding.activations}): "
                "leave activations out for experts.*"
            )
        if rounding.weights is not None:
            check_tile(name, self.w.shape[1], rounding.weights, key="quantization.rules")
        self.simulated = rounding

    def on_grid(self, w: jax.Array) -> jax.Array:
        """The matrices `w` with their simulated rounding, if there is one, before they are cast."""
        rounding = self.simulated
        return w if rounding is None else jax.vmap(lambda matrix: rounding.weight(matrix, 1))(w)

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


def sharded(bank: Arrays, axes: Axes, mesh: AbstractMesh) -> tuple[Arrays, dict[str, PartitionSpec]]:
    """A bank as the devices of a mesh multiply it, and how each of its parameters is split over them.

    Where the inputs are split, scales of fewer tiles are repeated until each part has its own.

    Args:
        axes: logical ones of `w` while it multiplies: of the experts, the inputs, and the outputs.
    """
    of_expert, of_input, of_output = axes
    whole = partition(axes, bank["w"].shape, mesh)
    if "w_scale" in bank and whole[1] is not None:
        scales, parts = bank["w_scale"], mesh.shape[whole[1]]
        bank = {**bank, "w_scale": jnp.repeat(scales, math.lcm(len(scales[0]), parts) // len(scales[0]), axis=1)}
    specs = {"w": whole, "w_scale": whole}
    if "b" in bank:
        specs["b"] = partition((of_expert, of_output), bank["b"].shape, mesh)
    if "w_lora_a" in bank:
        b = bank["w_lora_b"].shape
        specs["w_lora_a"] = partition((of_expert, of_input, None), bank["w_lora_a"].shape, mesh)
        specs["w_lora_b"] = partition((of_expert, *[None] * (len(b) - 2), of_output), b, mesh)
    return bank, {name: specs[name] for name in bank}


def gate_and_up(
    x: Float[Array, "n D"], gates: Arrays, ups: Arrays, scale: float | None, where: Routes
) -> tuple[Float[Array, "r F"], Float[Array, "r F"]]:
    """Each pair's token times the gate and the up matrix of its expert, with their biases where they have some.

    Args:
        scale: multiplies the adapter's product; None where there is no adapter.
    """

    def product(bank: Arrays) -> Float[Array, "r F"]:
        if "w_scale" in bank:
            y = to_rounded(x, RoundedBank(bank["w"], bank["w_scale"], x[:0, 0]), where)
        else:
            y = to_experts(x, bank["w"], where)
        if "b" not in bank:
            return y
        # A product with rows that are 1 at their expert: a gather's gradient would be scattered. What rows of pairs
        # that are not computed hold has no part in it.
        ends, at = jnp.cumsum(where.sizes), jnp.arange(len(y))[:, None]
        of_expert = ((at >= ends - where.sizes) & (at < ends)).astype(bank["b"].dtype)
        added = jnp.einsum("rE,EF->rF", of_expert, bank["b"], precision=jax.lax.Precision.HIGHEST)
        return y + jnp.where(at < ends[-1], added, 0).astype(y.dtype)

    gate, up = product(gates), product(ups)
    if scale is None:
        return gate, up
    narrow = scale * to_experts(x, gates["w_lora_a"], where)
    b = gates["w_lora_b"]
    both = to_experts(narrow[: where.places.size], b.reshape(*b.shape[:2], -1), by_row(where))
    of_gate, of_up = jnp.split(both, 2, axis=1)
    return gate + of_gate, up + of_up


def down(rows: Float[Array, "r F"], downs: Arrays, scale: float | None, where: Routes) -> Float[Array, "n D"]:
    """For each token the sum of its pairs' rows times the down matrices of their experts; `scale` as above."""
    if "w_scale" in downs:
        y = from_rounded(rows, RoundedBank(downs["w"], downs["w_scale"], rows[:0, 0]), where)
    else:
        y = from_experts(rows, downs["w"], where)
    if scale is None:
        return y
    narrow = scale * to_experts(rows[: where.places.size], downs["w_lora_a"], by_row(where))
    return y + from_experts(narrow, downs["w_lora_b"], where)


def by_row(where: Routes) -> Routes:
    """Routes for what is in rows already: row after row, each the token of one pair."""
    number = where.places.size
    rows = jnp.arange(number, dtype=where.pairs.dtype)
    computed = rows < jnp.sum(where.sizes)
    return Routes(jnp.pad(rows, (0, len(where.pairs) - number)), rows[:, None], computed[:, None], where.sizes)
