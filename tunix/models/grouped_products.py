"""Grouped products on accelerators: consecutive rows times the matrix of their group.

On a TPU `jax.lax.ragged_dot` is a kernel of its compiler, but the gradient of the matrices is not, and would be a
product of every row for every group: there jax's `tgmm` is taken. For NVIDIA's GPUs XLA has no kernel at all and
multiplies every row with every matrix. There tokamax's Mosaic kernels are taken on Hopper for products of 16 bits,
where tokamax is installed, and Triton kernels (`grouped_triton.py`) from Ampere on for all others. So say the compiled
programs; none was run on such a device yet.

Groups are those of the rows of an expert.

Axes: E experts; D inputs and F outputs of a product, r rows: those of all pairs in their order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Float, Int

from tunix.mesh import platform
from tunix.models import grouped_triton
from tunix.models.attention.tokamax_ops import capability, for_the_device_in_use, missing, operation

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
    if spec.capability is None or spec.capability < grouped_triton.CAPABILITY:
        return f"it needs an NVIDIA GPU of compute capability {grouped_triton.CAPABILITY:.0f} or more"
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
    texts = []
    for spec in specs:
        reasons = [f"{name}: {reason}" for name, lacks in IMPLEMENTATIONS if (reason := lacks(spec))]
        texts.append(implementation(spec) + (f" ({'; '.join(reasons)})" if reasons else ""))
    return "; ".join(dict.fromkeys(texts))


def grouped_products(
    rows: Float[Array, "r _"], matrices: Float[Array, "E _ _"], sizes: Int[Array, "E"], *, transposed: bool
) -> Float[Array, "r _"]:
    """Each group's rows times its matrix, `[D, F]`; rows after those of all groups hold anything, NaN as well.

    Args:
        rows: `[r, D]`, or `[r, F]` where the matrices are transposed.
        sizes: how many rows each group has.
    """
    name = implementation(_spec(rows, matrices))
    if name == "triton":
        return grouped_triton.products(rows, matrices, sizes, transposed=transposed)
    if name == "ragged_dot":
        return jax.lax.ragged_dot(rows, jnp.swapaxes(matrices, 1, 2) if transposed else matrices, sizes)
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
        return grouped_triton.gradients(rows, d, sizes, matrices.dtype)
    # Blocks of rows are whole, and reach into the next group, whose rows are multiplied by 0: NaN would remain.
    real = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
    rows, d = (jnp.pad(jnp.where(real, x, 0), ((0, -len(x) % BLOCK), (0, 0))) for x in (rows, d))
    if platform() == "tpu":
        return tgmm(rows.T, d, sizes, matrices.dtype, TILES)
    if name == "ragged_dot":
        return jax.vjp(lambda w: jax.lax.ragged_dot(rows, w, sizes), matrices)[1](d)[0]
    settings = {"ragged_dot_dimension_numbers": OF_GROUPS, "preferred_element_type": matrices.dtype}
    with for_the_device_in_use():
        gradients = operation("ragged_dot")(rows, d, group_sizes=sizes, **settings)
    # Not promised for a group without rows: a kernel may leave what was there.
    return jnp.where((sizes > 0)[:, None, None], gradients, 0)


def _spec(rows: jax.Array, matrices: jax.Array) -> GroupedSpec:
    _, inner, outer = matrices.shape
    return GroupedSpec(len(rows), (inner, outer), (str(rows.dtype), str(matrices.dtype)), capability())
