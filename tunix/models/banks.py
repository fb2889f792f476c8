"""The matrices of a mixture's experts, stacked over them, with adapters: what they are, and what rows become by them.

An expert's adapter adds `s x A_e B_e` to its product (LoRA). Gate and up share an A, and their B's are one, as in PEFT,
for which both are one parameter of the model: so an adapter means the same in both. Its products are grouped by expert
as the experts' own are (`expert_products.py`); `A_e B_e`, which is as large as the matrix, is never computed.

Axes: E experts, D model width, F ffn width, r rows or rank, n tokens, m pairs of a token and an expert, k chosen
experts of a token; 2 is gate and up.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.mesh import Axes
from tunix.models.expert_products import Routes, from_experts, to_experts
from tunix.models.layers import weight

START_OF_A = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=1, out_axis=2, batch_axis=0)
"""An expert's initial A is that of any matrix: uniform within 1 / sqrt(inputs), as in PEFT."""
BANK_PAIRS: Mapping[str, tuple[str, int | None]] = {
    "gates": ("gates", 0),
    "ups": ("gates", 1),
    "downs": ("downs", None),
}
"""Our name of an experts' matrix -> the bank whose A and B adapt it, and which half of the B; None for all of it."""
Arrays = Mapping[str, jax.Array]
"""The parameters of a bank by name: `w`, and with an adapter `w_lora_a` and `w_lora_b`."""


class Bank(nnx.Module):
    """A matrix of each expert."""

    w_lora_a: nnx.Variable
    w_lora_b: nnx.Variable
    """An adapter's A `[E inputs r]` and B `[E r outputs]`; those of the gates are also for the ups: `[E r 2 F]`."""

    def __init__(self, shape: tuple[int, int, int], axes: Axes, rngs: nnx.Rngs):
        self.w = weight(rngs, shape, axes, std=shape[1] ** -0.5)
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

    @property
    def arrays(self) -> Arrays:
        """Its parameters by name."""
        found = {"w": self.w[...]}
        if self.scale is not None:
            found |= {"w_lora_a": self.w_lora_a[...], "w_lora_b": self.w_lora_b[...]}
        return found


def split_of(name: str, rank: int, axes: Axes) -> Axes:
    """Logical axes of a bank's parameter while it multiplies.

    Args:
        name: as in `Arrays`.
        rank: how many axes the parameter has.
        axes: those of `w`: of the experts, the inputs, and the outputs.
    """
    of_expert, of_input, of_output = axes
    if name == "w_lora_b":
        return (of_expert, *[None] * (rank - 2), of_output)
    return (of_expert, of_input, None) if name == "w_lora_a" else axes


def gate_and_up(
    x: Float[Array, "n D"], gates: Arrays, ups: Arrays, scale: float | None, where: Routes
) -> tuple[Float[Array, "r F"], Float[Array, "r F"]]:
    """Each pair's token times the gate and the up matrix of its expert.

    Args:
        scale: multiplies the adapter's product; None where there is no adapter.
    """
    gate, up = to_experts(x, gates["w"], where), to_experts(x, ups["w"], where)
    if scale is None:
        return gate, up
    narrow = scale * to_experts(x, gates["w_lora_a"], where)
    b = gates["w_lora_b"]
    both = to_experts(narrow[: where.places.size], b.reshape(*b.shape[:2], -1), by_row(where))
    of_gate, of_up = jnp.split(both, 2, axis=1)
    return gate + of_gate, up + of_up


def down(rows: Float[Array, "r F"], downs: Arrays, scale: float | None, where: Routes) -> Float[Array, "n D"]:
    """For each token the sum of its pairs' rows times the down matrices of their experts; `scale` as above."""
    y = from_experts(rows, downs["w"], where)
    if scale is None:
        return y
    narrow = scale * to_experts(rows[: where.places.size], downs["w_lora_a"], by_row(where))
    return y + from_experts(narrow, downs["w_lora_b"], where)


def by_row(where: Routes) -> Routes:
    """Routes for what is in rows already: row after row, each the token of one pair."""
    number = where.places.size
    rows = jnp.arange(number, dtype=where.pairs.dtype)
    here = rows < jnp.sum(where.sizes)
    return Routes(jnp.pad(rows, (0, len(where.pairs) - number)), rows[:, None], here[:, None], where.sizes)
