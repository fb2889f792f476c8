"""Grouped products on accelerators: consecutive rows times the matrix of their group.

On a TPU `jax.lax.ragged_dot` is a kernel of its compiler, but the gradient of the matrices is not, and would be a
product of every row for every group: there jax's `tgmm` is taken. For NVIDIA's GPUs XLA has no kernel at all and
multiplies every row with every matrix. There tokamax's Mosaic kernels are taken on Hopper for products of 16 bits,
where tokamax is installed, and Triton kernels by Pallas alone from Ampere on for all others. So say the compiled
programs; none was run on such a device yet.

For the Triton kernels consecutive rows are cut into tiles that end with their group, so that a program multiplies rows
of one matrix, and a group without rows has none. Which group a tile belongs to is computed before, by XLA. Products of
float32 are as exact as XLA's own (`jax_default_matmul_precision`). On a CPU the kernels are interpreted, for tests.

Groups are those of the rows of an expert.

Axes: E experts; D inputs and F outputs of a product, r rows: those of all pairs in their order; n tiles of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import triton
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Float, Int

from tunix.mesh import platform
from tunix.models.attention.inputs import because
from tunix.models.attention.tokamax_ops import capability, for_the_device_in_use, missing, operation

CAPABILITY = 8.0
"""The oldest GPUs whose tensor cores multiply bfloat16."""
LEAST_SIDE, MOST_SIDE = 16, 128
"""Bounds of a tile's sides: tensor cores multiply no fewer numbers, and sums of more do not fit the registers."""
STRIP = 128
"""Bytes of a row that are read at once: with STAGES of them in flight, tiles take 96 KiB of a multiprocessor's shared
memory, of which the smallest (8.6, 8.9) have 99."""
WARPS, STAGES = 8, 3


def triton_products(
    rows: Float[Array, "r _"], matrices: Float[Array, "E _ _"], sizes: Int[Array, "E"], *, transposed: bool
) -> Float[Array, "r _"]:
    """As `grouped_products.grouped_products`: rows after those of all groups are not written, and hold anything."""
    number, inner = rows.shape
    kind = jnp.float32 if rows.dtype.itemsize == 1 else jnp.promote_types(rows.dtype, matrices.dtype)
    outputs, experts = matrices.shape[1 if transposed else 2], len(sizes)
    block = _side(pl.cdiv(number, experts))
    # The group of each tile of at most `block` rows, its first row, and the row after the last of its group. Tiles that
    # are not needed start where the last group has no rows any more.
    stops, counts = jnp.cumsum(sizes, dtype=jnp.int32), (sizes + block - 1) // block
    ends, index = jnp.cumsum(counts, dtype=jnp.int32), jnp.arange(pl.cdiv(number, block) + experts, dtype=jnp.int32)
    groups = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), experts - 1)
    starts, stops = (stops - sizes)[groups] + (index - (ends - counts)[groups]) * block, stops[groups]
    groups = groups.astype(jnp.int32)
    return pl.pallas_call(
        partial(_product, block=block, side=_side(outputs), strip=_strip(rows, inner), transposed=transposed),
        grid=(pl.cdiv(outputs, _side(outputs)), len(groups)),
        out_shape=jax.ShapeDtypeStruct((number, outputs), kind),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=platform() == "cpu",
        name="grouped_product",
    )(groups, starts, stops, rows, matrices)


def triton_gradients(
    rows: Float[Array, "r D"], d: Float[Array, "r F"], sizes: Int[Array, "E"], dtype: Any
) -> Float[Array, "E D F"]:
    """As `grouped_products.grouped_gradients`, in this dtype: 0 for a group without rows."""
    (number, inner), outputs, stops = rows.shape, d.shape[1], jnp.cumsum(sizes, dtype=jnp.int32)
    sides = _side(inner), _side(outputs)
    return pl.pallas_call(
        partial(_gradient, sides=sides, strip=_strip(rows, number)),
        grid=(pl.cdiv(outputs, sides[1]), pl.cdiv(inner, sides[0]), len(sizes)),
        out_shape=jax.ShapeDtypeStruct((len(sizes), inner, outputs), dtype),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=platform() == "cpu",
        name="grouped_gradient",
    )(stops - sizes, stops, rows, d)


def _product(
    groups: Any, starts: Any, stops: Any, rows: Any, matrices: Any, out: Any, *, block, side, strip, transposed
):
    """One program: a tile of rows times a part of the columns of its group's matrix."""
    tile = pl.program_id(1)
    group, start, stop = groups[tile], starts[tile], stops[tile]
    column, inner = pl.program_id(0) * side, rows.shape[1]
    at, columns = pl.ds(start, block), pl.ds(column, side)
    real = start + jnp.arange(block) < stop
    there = column + jnp.arange(side) < out.shape[1]

    def step(index: Array, total: Array) -> Array:
        some = pl.ds(index * strip, strip)
        within = index * strip + jnp.arange(strip) < inner
        x = triton.load(rows.at[at, some], mask=real[:, None] & within[None], other=0.0)
        if transposed:
            matrix = triton.load(matrices.at[group, columns, some], mask=there[:, None] & within[None], other=0.0).T
        else:
            matrix = triton.load(matrices.at[group, some, columns], mask=within[:, None] & there[None], other=0.0)
        if x.dtype.itemsize == 1 and x.dtype != matrix.dtype:
            # Pallas multiplies no e5m2 with e4m3; bfloat16 has the numbers of both.
            x, matrix = x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)
        return total + jnp.dot(x, matrix, preferred_element_type=jnp.float32)

    steps = pl.cdiv(inner, strip) * (start < stop).astype(jnp.int32)
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((block, side), jnp.float32))
    triton.store(out.at[at, columns], total.astype(out.dtype), mask=real[:, None] & there[None])


def _gradient(starts: Any, stops: Any, rows: Any, d: Any, out: Any, *, sides, strip):
    """One program: a tile of the gradient of a group's matrix, summed over the group's rows."""
    group = pl.program_id(2)
    start, stop = starts[group], stops[group]
    firsts = pl.program_id(1) * sides[0], pl.program_id(0) * sides[1]
    inputs, outputs = (pl.ds(first, side) for first, side in zip(firsts, sides, strict=True))
    there = [first + jnp.arange(side) < n for first, side, n in zip(firsts, sides, out.shape[1:], strict=True)]

    def step(index: Array, total: Array) -> Array:
        some = pl.ds(start + index * strip, strip)
        real = start + index * strip + jnp.arange(strip) < stop
        x = triton.load(rows.at[some, inputs], mask=real[:, None] & there[0][None], other=0.0)
        y = triton.load(d.at[some, outputs], mask=real[:, None] & there[1][None], other=0.0)
        return total + jnp.dot(x.T, y, preferred_element_type=jnp.float32)

    total = jax.lax.fori_loop(0, pl.cdiv(stop - start, strip), step, jnp.zeros(sides, jnp.float32))
    triton.store(out.at[group, inputs, outputs], total.astype(out.dtype), mask=there[0][:, None] & there[1][None])


def _side(numbers: int) -> int:
    """The side of a tile over so many rows or columns."""
    return min(max(pl.next_power_of_2(numbers), LEAST_SIDE), MOST_SIDE)


def _strip(x: jax.Array, numbers: int) -> int:
    """How many of the numbers that are summed are read at once."""
    least = LEAST_SIDE if x.dtype.itemsize > 1 else 2 * LEAST_SIDE
    return min(STRIP // x.dtype.itemsize, max(pl.next_power_of_2(numbers), least))


BLOCK = 128
"""Numbers that kernels sum at once: tokamax's Mosaic kernel would leave out a remainder of inputs."""
ALIGNED = 8
"""Rows that its copies take at once."""
TILES = (BLOCK, 512, 512)
"""Rows, inputs and outputs that `tgmm` multiplies at once."""
AS_STORED = Layout((0, 1, 2))
"""Rows of a matrix follow each other, as those of its layer do."""
TRANSPOSED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([1], [2]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
"""Rows times the transposed matrix of their group."""
OF_GROUPS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
"""The rows of a group, transposed, times other rows of it: a matrix of each group."""


@dataclass(frozen=True)
class GroupedSpec:
    """What an implementation has to compute, and where."""

    rows: int
    """r, or any multiple of `ALIGNED` where only the model is known."""
    widths: tuple[int, int]
    """D and F, e.g. (2880, 5760)."""
    dtypes: tuple[str, str]
    """The dtypes of rows and matrices."""
    capability: float | None
    """The compute capability of a GPU, e.g. 9.0; None on other devices."""


def lacks_mosaic(spec: GroupedSpec) -> str | None:
    """Why tokamax's kernels for Hopper cannot compute a product and its gradients; None where they can."""
    if spec.capability is None or int(spec.capability) != 9:
        return "it needs an NVIDIA GPU of compute capability 9 (Hopper)"
    if spec.dtypes not in (("bfloat16", "bfloat16"), ("float16", "float16")):
        return f"it multiplies numbers of 16 bits, not {' and '.join(dict.fromkeys(spec.dtypes))}"
    if ragged := [str(width) for width in spec.widths if width % BLOCK]:
        return f"widths of {' and '.join(ragged)} are no multiples of {BLOCK}"
    if spec.rows % ALIGNED:
        return f"{spec.rows} rows are no multiple of {ALIGNED}"
    return missing("ragged_dot")


def lacks_triton(spec: GroupedSpec) -> str | None:
    """Why Triton's kernels cannot compute a product and its gradients; None where they can."""
    if spec.capability is None or spec.capability < CAPABILITY:
        return f"it needs an NVIDIA GPU of compute capability {CAPABILITY:.0f} or more"
    return None


IMPLEMENTATIONS: tuple[tuple[str, Callable[[GroupedSpec], str | None]], ...] = (
    ("mosaic", lacks_mosaic),
    ("triton", lacks_triton),
    ("ragged_dot", lambda spec: None),
)
"""The implementations, the fastest first, with what each lacks; XLA's own computes every product."""


def implementation(spec: GroupedSpec) -> str:
    """The first implementation of the table that can compute a product."""
    return next(name for name, lacks in IMPLEMENTATIONS if lacks(spec) is None)


def described(specs: Sequence[GroupedSpec]) -> str:
    """Which implementation computes these products, and why no faster one: `triton (mosaic: widths of 2880 ...)`."""
    texts = [because(implementation(spec), ((name, lacks(spec)) for name, lacks in IMPLEMENTATIONS)) for spec in specs]
    return "; ".join(dict.fromkeys(texts))


def grouped_products(
    rows: Float[Array, "r _"], matrices: Float[Array, "E _ _"], sizes: Int[Array, "E"], *, transposed: bool
) -> Float[Array, "r _"]:
    """Each group's rows times its matrix, `[D, F]`, of 8-bit floats in float32; rows after those of all groups hold
    anything, NaN as well.

    Args:
        rows: `[r, D]`, or `[r, F]` where the matrices are transposed.
        sizes: how many rows each group has.
    """
    name = implementation(_spec(rows, matrices))
    if name == "triton":
        return triton_products(rows, matrices, sizes, transposed=transposed)
    if name == "ragged_dot":
        matrices, kind = jnp.swapaxes(matrices, 1, 2) if transposed else matrices, None
        if rows.dtype.itemsize == 1:  # no compiler is known to have such a kernel; bfloat16 has the same numbers
            rows, matrices, kind = rows.astype(jnp.bfloat16), matrices.astype(jnp.bfloat16), jnp.float32
        return jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=kind)
    numbers = {"ragged_dot_dimension_numbers": TRANSPOSED} if transposed else {}
    if transposed:
        # The kernel has them transposed first. XLA would do so with the stack of all layers, before its loop over them.
        matrices = with_layout_constraint(matrices, AS_STORED)
    with for_the_device_in_use():
        return operation("ragged_dot")(rows, matrices, group_sizes=sizes, **numbers)


def grouped_gradients(
    rows: Float[Array, "r D"], d: Float[Array, "r F"], matrices: Float[Array, "E D F"], sizes: Int[Array, "E"]
) -> Float[Array, "E D F"]:
    """The gradient of each group's matrix: its rows, transposed, times the gradients of their products.

    Rows after those of all groups add nothing, whatever they hold.
    """
    name = implementation(_spec(rows, matrices))
    if name == "triton":
        return triton_gradients(rows, d, sizes, matrices.dtype)
    # Blocks of rows are whole, and reach into the next group, whose rows are multiplied by 0: NaN would remain.
    real = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
    rows, d = (jnp.pad(jnp.where(real, x, 0), ((0, -len(x) % BLOCK), (0, 0))) for x in (rows, d))
    if platform() == "tpu":
        return tgmm(rows.T, d, sizes, matrices.dtype, TILES)
    if name == "ragged_dot":
        return jax.vjp(lambda w: jax.lax.ragged_dot(rows, w, sizes), matrices)[1](d)[0]
    with for_the_device_in_use():
        gradients = operation("ragged_dot")(
            rows, d, group_sizes=sizes, ragged_dot_dimension_numbers=OF_GROUPS, preferred_element_type=matrices.dtype
        )
    # Not promised for a group without rows: a kernel may leave what was there.
    return jnp.where((sizes > 0)[:, None, None], gradients, 0)


def _spec(rows: jax.Array, matrices: jax.Array) -> GroupedSpec:
    _, inner, outer = matrices.shape
    return GroupedSpec(len(rows), (inner, outer), (str(rows.dtype), str(matrices.dtype)), capability())
