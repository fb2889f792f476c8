"""Grouped products on accelerators: consecutive rows times the matrix of their group.

On a TPU `jax.lax.ragged_dot` is a kernel of its compiler, but the gradient of the matrices is not, and would be a
product of every row for every group: there jax's `tgmm` is taken. For NVIDIA's GPUs XLA has no kernel at all and
multiplies every row with every matrix, so tokamax's kernels are taken where it is installed: its Mosaic kernels on
Hopper for products of 16 bits, its Triton kernels from Ampere on for all others. So say the compiled programs; none was
run on such a device yet.

Groups are those of the rows of an expert.

Axes: E experts; D inputs and F outputs of a product, r rows: those of all pairs in their order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Float, Int

from tunix.mesh import platform
from tunix.models.attention.tokamax_ops import capability, for_the_device_in_use, installed, operation

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


def grouped_products(
    rows: Float[Array, "r _"], matrices: Float[Array, "E _ _"], sizes: Int[Array, "E"], *, transposed: bool
) -> Float[Array, "r _"]:
    """Each group's rows times its matrix, `[D, F]`; rows after those of all groups hold anything, NaN as well.

    Args:
        rows: `[r, D]`, or `[r, F]` where the matrices are transposed.
        sizes: how many rows each group has.
    """
    kernel = _kernel(rows, matrices)
    if kernel is None:
        return jax.lax.ragged_dot(rows, jnp.swapaxes(matrices, 1, 2) if transposed else matrices, sizes)
    numbers = {"ragged_dot_dimension_numbers": TRANSPOSED} if transposed else {}
    if transposed:
        # The kernel has them transposed first. XLA would do so with the stack of all layers, before its loop over them.
        matrices = with_layout_constraint(matrices, AS_STORED)
    with for_the_device_in_use():
        return kernel(rows, matrices, group_sizes=sizes, **numbers)


def grouped_gradients(
    rows: Float[Array, "r D"], d: Float[Array, "r F"], matrices: Float[Array, "E D F"], sizes: Int[Array, "E"]
) -> Float[Array, "E D F"]:
    """The gradient of each group's matrix: its rows, transposed, times the gradients of their products.

    Rows after those of all groups add nothing, whatever they hold.
    """
    # Blocks of rows are whole, and reach into the next group, whose rows are multiplied by 0: NaN would remain.
    own = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
    rows, d = (jnp.pad(jnp.where(own, x, 0), ((0, -len(x) % BLOCK), (0, 0))) for x in (rows, d))
    if platform() == "tpu":
        return tgmm(rows.T, d, sizes, matrices.dtype, TILES)
    kernel = _kernel(rows, matrices)
    if kernel is None:
        return jax.vjp(lambda w: jax.lax.ragged_dot(rows, w, sizes), matrices)[1](d)[0]
    how = {"ragged_dot_dimension_numbers": OF_GROUPS, "preferred_element_type": matrices.dtype}
    with for_the_device_in_use():
        found = kernel(rows, d, group_sizes=sizes, **how)
    # A group without rows is given those before it (Triton, tokamax 0.0.12).
    return jnp.where((sizes > 0)[:, None, None], found, 0)


def _kernel(rows: jax.Array, matrices: jax.Array) -> Any:
    """tokamax's operation for these products; None where there is none."""
    generation = capability()
    if generation is None or generation < 8 or not installed():
        return None
    narrow = rows.dtype == matrices.dtype and rows.dtype in (jnp.bfloat16, jnp.float16)
    whole = len(rows) % ALIGNED == 0 and all(size % BLOCK == 0 for size in matrices.shape[1:])
    if int(generation) == 9 and narrow and whole:
        return operation("ragged_dot.pallas_mosaic_gpu", "PallasMosaicGpuRaggedDot")
    return operation("ragged_dot.pallas_triton", "PallasTritonRaggedDot")
