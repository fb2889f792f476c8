"""Products of consecutive rows with a matrix each: what a mixture of experts multiplies.

`product` is `jax.lax.ragged_dot` where a compiler has a kernel for it. On a CPU that computes every row with every
matrix, so there each expert's rows are taken in blocks: large ones, then small ones for the rest. Blocks are written in
the order of the experts. The last block of an expert may reach into rows of the next, which then overwrites them, so
that nothing is padded or masked; only the gradient of the matrices, a sum over rows, leaves foreign rows out.

Axes: D inputs, F outputs, E experts, m rows, sorted by expert.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix.mesh import platform

BLOCKS = (32, 8)
"""Rows of a block on a CPU: of 128 experts with 128 rows each, this is the fastest of the pairs up to (128, 32). Larger
blocks pad more, smaller ones read a matrix more often."""

Rows = Float[Array, "m D"]


def product(rows: Rows, matrices: Float[Array, "E D F"], sizes: Int[Array, "E"]) -> Float[Array, "m F"]:
    """The first `sizes[0]` rows times the first matrix, the next `sizes[1]` times the second, ...; zeros for the rest.

    Gradients in the dtypes of what they are of; sums over rows are in float32.
    """
    by_group = _blocked if platform() == "cpu" else jax.lax.ragged_dot
    computed = jnp.arange(len(rows)) < jnp.sum(sizes)
    # Rows behind the last expert's hold whatever a kernel leaves there.
    return jnp.where(computed[:, None], by_group(rows, matrices, sizes), 0)


@jax.custom_vjp
def _blocked(rows: Rows, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return _products(rows, matrices, sizes, transposed=False)


def _forward(rows: Rows, matrices: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple]:
    return _blocked(rows, matrices, sizes), (rows, matrices, sizes)


def _backward(saved: tuple, d: Float[Array, "m F"]) -> tuple[jax.Array, jax.Array, None]:
    rows, matrices, sizes = saved
    return _products(d, matrices, sizes, transposed=True), _gradients(rows, d, matrices, sizes), None


_blocked.defvjp(_forward, _backward)


def _products(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """Each expert's rows times its matrix, or times its transposed matrix."""
    padded = jnp.pad(rows, ((0, BLOCKS[0]), (0, 0)))
    inputs, outputs = (2, 1) if transposed else (1, 2)
    ends = jnp.cumsum(sizes)

    def expert(number: jax.Array, y: jax.Array) -> jax.Array:
        matrix = matrices[number]

        def block(size: int, at: jax.Array, y: jax.Array) -> jax.Array:
            some = jax.lax.dynamic_slice_in_dim(padded, at, size)
            found = jax.lax.dot_general(some, matrix, (((1,), (inputs - 1,)), ((), ())))
            return jax.lax.dynamic_update_slice_in_dim(y, found, at, axis=0)

        return _over_blocks(block, ends[number] - sizes[number], ends[number], y)

    y = jnp.zeros((len(padded), matrices.shape[outputs]), rows.dtype)
    return jax.lax.fori_loop(0, len(matrices), expert, y)[: len(rows)]


def _gradients(rows: jax.Array, d: jax.Array, matrices: jax.Array, sizes: jax.Array) -> Float[Array, "E D F"]:
    """Each matrix's gradient: its rows, transposed, times the gradients of their products."""
    padded, d_padded = (jnp.pad(x, ((0, BLOCKS[0]), (0, 0))) for x in (rows, d))
    ends = jnp.cumsum(sizes)

    def expert(number: jax.Array, found: jax.Array) -> jax.Array:
        def block(size: int, at: jax.Array, summed: jax.Array) -> jax.Array:
            some, d_some = (jax.lax.dynamic_slice_in_dim(x, at, size).astype(jnp.float32) for x in (padded, d_padded))
            own = at + jnp.arange(size) < ends[number]
            return summed + jnp.einsum("mD,mF->DF", jnp.where(own[:, None], some, 0.0), d_some)

        nothing = jnp.zeros(matrices.shape[1:], jnp.float32)
        summed = _over_blocks(block, ends[number] - sizes[number], ends[number], nothing)
        return jax.lax.dynamic_update_index_in_dim(found, summed.astype(found.dtype), number, axis=0)

    return jax.lax.fori_loop(0, len(matrices), expert, jnp.zeros_like(matrices))


def _over_blocks(
    block: Callable[[int, jax.Array, jax.Array], jax.Array], start: jax.Array, end: jax.Array, so_far: jax.Array
) -> jax.Array:
    """`block(size, at, so_far)` for blocks that cover the rows from `start` to `end`, large ones first."""
    large, small = BLOCKS

    def of(size: int) -> Callable[[tuple], tuple]:
        return lambda state: (state[0] + size, block(size, *state))

    state = jax.lax.while_loop(lambda state: state[0] + large <= end, of(large), (start, so_far))
    return jax.lax.while_loop(lambda state: state[0] < end, of(small), state)[1]
