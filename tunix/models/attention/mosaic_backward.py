"""The gradients of attention on NVIDIA's Hopper GPUs, at the cost of what the queries see.

tokamax's backward kernels visit each block of keys before a query's, other documents of its row included. These visit
a range of blocks: from the first to the last that holds a key that some query of the block sees, or a query that sees
some key of it. XLA computes the ranges from the intervals of keys that the queries see (`mosaic.intervals`). Within it
the blocks that all see whole are computed without a mask.

The scheme is FlashAttention's (https://arxiv.org/abs/2307.08691): a kernel for the gradients of queries, which goes
over keys, and one for those of keys and values, which goes over queries; both make the weights again from the
log-sum-exp. Two warpgroups of a program multiply, each its half of a tile, and a third copies what they meet.

Axes: B rows, T time, N query heads, K kv heads, H head dim.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as gpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from tunix.models.attention.inputs import Gradients, Keys, Queries

BLOCK = 64
"""Queries and keys of the products of one warpgroup."""
WARPGROUPS = 2
"""Those of a program that multiply."""
TILE = WARPGROUPS * BLOCK
"""Queries, or keys, of a program; rows are whole numbers of it (`inputs.LANES`)."""
SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on an SM of Hopper."""
COPYING_REGISTERS = 40
"""Registers of a thread that only copies; the others get the rest."""
LOG2_E = math.log2(math.e)

_TILED, _ROW, _COLUMN = gpu.Layout.WGMMA, gpu.Layout.WGMMA.reduce(1), gpu.Layout.WGMMA.reduce(0)


def load(ref: Any, index: tuple[Any, ...], *, layout: Any) -> Array:
    """Numbers of memory in registers, by `gpu.load`: with jax 0.12 an index belongs to the reference."""
    read: Any = partial(gpu.load, layout=layout, optimized=False)
    if "idx" in inspect.signature(gpu.load).parameters:
        return read(ref, index)
    return read(ref.at[index] if index else ref)


# What jax's interpreter, on a CPU, needs other ones of.
iota, wgmma = gpu.broadcasted_iota, gpu.wgmma
STAGING: tuple[Any, ...] = ()
"""The types of shared memory that a product needs besides its operands, for all warpgroups."""
INTERPRETER: Any = None
"""The interpreter's parameters; None on a GPU."""


def gradients(
    q: Queries,
    k: Keys,
    v: Keys,
    d_mixed: Queries,
    lse: Float[Array, "B T N"],
    inner: Float[Array, "B T N"],
    start: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    *,
    scale: float,
    softcap: float | None,
) -> Gradients:
    """The gradients of `softmax(scale q.k) v` where each query sees an interval of keys.

    Args:
        q: queries; their number and that of the keys are multiples of TILE.
        k: keys.
        v: values.
        d_mixed: the gradient by what was mixed.
        lse: log-sum-exp of each query's scores, of all keys that it saw.
        inner: `inputs.inner_products` of the result.
        start: the first column that each query sees.
        stop: the column after the last; not after `start` where it sees none.
        scale: multiplies q.k.
        softcap: as in `attend.attend`.
    """
    rows, queries, heads, dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    q, k, v, d_mixed = (jnp.pad(x, ((0, 0),) * 3 + ((0, -dim % 64),)) for x in (q, k, v, d_mixed))
    width = q.shape[-1]
    by_queries, by_keys = ranges(start, stop, keys)
    lse, inner = (lse * LOG2_E).swapaxes(1, 2), inner.swapaxes(1, 2)
    # A tile of both operands, and those of as many steps of a block as fit beside it.
    stages = 2 if (TILE + 2 * BLOCK) * 2 * width * 2 + 4096 <= SHARED_MEMORY else 1

    def call(kernel: Any, results: int, length: int, limits: Array) -> Any:
        tiles = [gpu.SMEM((WARPGROUPS, BLOCK, width), q.dtype, transforms=_swizzled(width, q.dtype))] * 2
        return gpu.kernel(
            partial(kernel, group=group, scale=scale, softcap=softcap, stages=stages),
            out_type=[jax.ShapeDtypeStruct((rows, length, heads, width), q.dtype)] * results,
            scratch_types=[*tiles, gpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=2), *STAGING],
            compiler_params=gpu.CompilerParams(approx_math=True),
            grid=(rows, heads, length // TILE),
            grid_names=("rows", "heads", "tiles"),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            interpret=INTERPRETER,
        )(q, k, v, d_mixed, lse, inner, start, stop, limits)

    (d_q,) = call(_of_queries, 1, queries, by_queries)
    d_k, d_v = call(_of_keys, 2, keys, by_keys)
    d_k, d_v = (x.reshape(rows, keys, -1, group, width).sum(3) for x in (d_k, d_v))
    return d_q[..., :dim], d_k[..., :dim], d_v[..., :dim]


def ranges(
    start: Int[Array, "B T"], stop: Int[Array, "B T"], keys: int
) -> tuple[Int[Array, "B tiles_of_queries 4"], Int[Array, "B tiles_of_keys 4"]]:
    """The blocks that the programs visit: of keys for each tile of queries, and of queries for each tile of keys.

    Four numbers each: the first block and the one after the last, and the same of those within that need no mask. At
    least one block is visited.

    Args:
        start, stop: as in `gradients`.
        keys: columns of a row.
    """
    sees, rows = start < stop, len(start)

    def of(size: int) -> tuple[Array, Array, Array, Array]:
        """The first column that some of `size` queries see, the one after the last; the same of what all see."""
        first, last = (x.reshape(rows, -1, size) for x in (jnp.where(sees, start, keys), jnp.where(sees, stop, 0)))
        return first.min(-1), last.max(-1), first.max(-1), last.min(-1)

    first, last, from_all, to_all = of(TILE)
    begin = jnp.minimum(first // BLOCK, keys // BLOCK - 1)
    by_queries = (begin, jnp.maximum(-(-last // BLOCK), begin + 1), -(-from_all // BLOCK), to_all // BLOCK)

    first, last, from_all, to_all = (x[:, None] for x in of(BLOCK))
    tile = jnp.arange(0, keys, TILE)[None, :, None]
    seen, whole = (first < tile + TILE) & (last > tile), (from_all <= tile) & (to_all >= tile + TILE)
    count, index = seen.shape[-1], jnp.arange(seen.shape[-1])
    begin, from_all = jnp.argmax(seen, -1), jnp.argmax(whole, -1)
    end = jnp.where(seen.any(-1), count - jnp.argmax(seen[..., ::-1], -1), 1)
    # Only where the intervals of later queries begin and end later are these blocks one range: the first is taken.
    part = ~whole & (index >= from_all[..., None])
    by_keys = (begin, end, from_all, jnp.where(part.any(-1), jnp.argmax(part, -1), count))
    return jnp.stack(by_queries, -1).astype(jnp.int32), jnp.stack(by_keys, -1).astype(jnp.int32)


def _of_queries(*refs: Any, group: int, scale: float, softcap: float | None, stages: int) -> None:
    """The gradients of a tile of queries: each warpgroup has a block of them, and both meet the same keys."""
    q, k, v, d_mixed, lse, inner, start, stop, limits, d_q, q_tile, d_tile, ready, *staging = refs
    row, head, tile, warpgroup = (lax.axis_index(name) for name in ("rows", "heads", "tiles", "warpgroup"))
    kv_head, width = lax.div(head, jnp.int32(group)), q_tile.shape[-1]
    place = pl.ds(tile * TILE + warpgroup * BLOCK, BLOCK)
    begin, end, from_all, to_all = (limits[row, tile, i] for i in range(4))
    q_tile, d_tile, ready = q_tile.at[warpgroup], d_tile.at[warpgroup], ready.at[warpgroup]

    def multiply(total: Any, left: Any, right: Any) -> None:
        wgmma(total, left, right, *(x.at[warpgroup] for x in staging))

    def context(over_keys: Any) -> None:
        gpu.copy_gmem_to_smem(q.at[row, place, head], q_tile, ready)
        gpu.copy_gmem_to_smem(d_mixed.at[row, place, head], d_tile, ready)
        known = [load(x, (row, head, place), layout=_ROW) for x in (lse, inner)]
        known += [load(x, (row, place), layout=_ROW) for x in (start, stop)]
        gpu.barrier_wait(ready)

        def summed(total: Any) -> Array:
            over_keys((total, *known))
            return total[...] * scale

        q_tile[...] = pl.run_scoped(summed, gpu.WGMMAAccumulatorRef((BLOCK, width), jnp.float32)).astype(q_tile.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(q_tile, d_q.at[row, place, head])
        gpu.wait_smem_to_gmem(0, wait_read_only=True)

    def step(index: Any, v_block: Any, k_block: Any, v_free: Any, k_free: Any, carry: Any) -> Any:
        total, lse, inner, start, stop = carry
        block = begin + index[0]
        scores = _product(multiply, q_tile, k_block.T)
        whole = (block >= from_all) & (block < to_all)
        weights, slope = _weights(scores, lse, lambda: (start, stop), block * BLOCK, 0, whole, scale, softcap)
        d_weights = _product(multiply, d_tile, v_block.T)
        gpu.barrier_arrive(v_free)
        d_scores = weights * (d_weights - lax.broadcast_in_dim(inner, weights.shape, [0])) * slope
        multiply(total, d_scores.astype(k_block.dtype), k_block)
        gpu.wgmma_wait(0)
        gpu.barrier_arrive(k_free)
        return carry

    _pipeline(step, context, begin, end, stages, [_block(width, q.dtype, begin)] * 2)(
        v.at[row, :, kv_head], k.at[row, :, kv_head]
    )


def _of_keys(*refs: Any, group: int, scale: float, softcap: float | None, stages: int) -> None:
    """The gradients of a tile of keys and values, of one query head; products are transposed, keys before queries."""
    q, k, v, d_mixed, lse, inner, start, stop, limits, d_k, d_v, k_tile, v_tile, ready, *staging = refs
    row, head, tile, warpgroup = (lax.axis_index(name) for name in ("rows", "heads", "tiles", "warpgroup"))
    kv_head, width = lax.div(head, jnp.int32(group)), k_tile.shape[-1]
    first = tile * TILE + warpgroup * BLOCK
    place = pl.ds(first, BLOCK)
    begin, end, from_all, to_all = (limits[row, tile, i] for i in range(4))
    k_tile, v_tile, ready = k_tile.at[warpgroup], v_tile.at[warpgroup], ready.at[warpgroup]

    def multiply(total: Any, left: Any, right: Any) -> None:
        wgmma(total, left, right, *(x.at[warpgroup] for x in staging))

    def context(over_queries: Any) -> None:
        gpu.copy_gmem_to_smem(k.at[row, place, kv_head], k_tile, ready)
        gpu.copy_gmem_to_smem(v.at[row, place, kv_head], v_tile, ready)
        gpu.barrier_wait(ready)

        def summed(of_k: Any, of_v: Any) -> tuple[Array, Array]:
            over_queries((of_k, of_v))
            return of_k[...], of_v[...]

        of_k, of_v = pl.run_scoped(summed, *[gpu.WGMMAAccumulatorRef((BLOCK, width), jnp.float32)] * 2)
        k_tile[...] = (of_k * scale).astype(k_tile.dtype)
        v_tile[...] = of_v.astype(v_tile.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(k_tile, d_k.at[row, place, head], commit_group=False)
        gpu.copy_smem_to_gmem(v_tile, d_v.at[row, place, head], commit_group=False)
        gpu.commit_smem_to_gmem_group()
        gpu.wait_smem_to_gmem(0, wait_read_only=True)

    def step(index: Any, *blocks: Any) -> Any:
        lse_block, start, stop, inner_block, d_block, q_block, *free, (of_k, of_v) = blocks
        block = begin + index[0]
        scores = _product(multiply, k_tile, q_block.T)
        read = partial(load, layout=_COLUMN)
        lse = read(lse_block, ())
        gpu.barrier_arrive(free[0])
        # Sixteen registers of a thread each: what is not needed yet is read later.
        whole, interval = (block >= from_all) & (block < to_all), lambda: (read(start, ()), read(stop, ()))
        weights, slope = _weights(scores, lse, interval, first, 1, whole, scale, softcap)
        gpu.barrier_arrive(free[1])
        gpu.barrier_arrive(free[2])

        def both(out: Any) -> Array:
            multiply(out, v_tile, d_block.T)
            multiply(of_v, weights.astype(d_block.dtype), d_block)
            return out[...]

        d_weights = pl.run_scoped(both, gpu.WGMMAAccumulatorRef((BLOCK, BLOCK), jnp.float32))
        gpu.barrier_arrive(free[4])
        inner = read(inner_block, ())
        gpu.barrier_arrive(free[3])
        d_scores = weights * (d_weights - lax.broadcast_in_dim(inner, weights.shape, [1])) * slope
        multiply(of_k, d_scores.astype(q_block.dtype), q_block)
        gpu.wgmma_wait(0)
        gpu.barrier_arrive(free[5])
        return of_k, of_v

    numbers = gpu.BlockSpec((BLOCK,), lambda i: (begin + i,))
    specs = [*[numbers] * 4, *[_block(width, q.dtype, begin)] * 2]
    _pipeline(step, context, begin, end, stages, specs)(
        lse.at[row, head],
        start.at[row],
        stop.at[row],
        inner.at[row, head],
        d_mixed.at[row, :, head],
        q.at[row, :, head],
    )


def _weights(
    scores: Array,
    lse: Array,
    interval: Callable[[], tuple[Array, Array]],
    first: Array,
    axis: int,
    whole: Array,
    scale: float,
    softcap: float | None,
) -> tuple[Array, Array | float]:
    """The weights of a block of queries and keys, and the derivative of their scores by the plain product.

    Args:
        scores: the plain product, by queries and keys or by keys and queries.
        lse: log-sum-exp of the queries, times LOG2_E.
        interval: reads the first column that each query sees, and the one after the last.
        first: the column of the first key.
        axis: that of the queries.
        whole: whether all queries see all keys.
    """
    over = partial(lax.broadcast_in_dim, shape=scores.shape, broadcast_dimensions=[axis])
    slope: Array | float = 1.0
    if softcap is None:
        scores *= scale * LOG2_E
    else:
        bent = jnp.tanh(scores * (scale / softcap))
        scores, slope = bent * (softcap * LOG2_E), 1 - bent * bent
    weights = jnp.exp2(scores - over(lse))

    def masked() -> Array:
        start, stop = interval()
        column = first + iota(jnp.int32, scores.shape, 1 - axis, layout=_TILED)
        return jnp.where(column < over(stop), jnp.where(column >= over(start), weights, 0.0), 0.0)

    return lax.cond(whole, lambda: weights, masked), slope


def _product(multiply: Callable[..., None], left: Any, right: Any) -> Array:
    def compute(out: Any) -> Array:
        multiply(out, left, right)
        return out[...]

    return pl.run_scoped(compute, gpu.WGMMAAccumulatorRef((left.shape[0], right.shape[1]), jnp.float32))


def _pipeline(step: Any, context: Any, begin: Array, end: Array, stages: int, specs: list) -> Any:
    """Runs `step` for each block of the range, whose inputs the third warpgroup copies before."""
    return gpu.emit_pipeline_warp_specialized(
        step,
        grid=(end - begin,),
        in_specs=specs,
        max_concurrent_steps=stages,
        num_compute_wgs=WARPGROUPS,
        memory_registers=COPYING_REGISTERS,
        wg_axis="warpgroup",
        manual_consumed_barriers=True,
        compute_context=context,
    )


def _block(width: int, dtype: Any, begin: Array) -> gpu.BlockSpec:
    return gpu.BlockSpec((BLOCK, width), lambda i: (begin + i, 0), transforms=_swizzled(width, dtype))


def _swizzled(width: int, dtype: Any) -> tuple[Any, ...]:
    """How tensor cores want vectors to lie in shared memory."""
    bits = jnp.finfo(dtype).bits
    swizzle = gpu.find_swizzle(width * bits)
    return gpu.TilingTransform((8, 8 * swizzle // bits)), gpu.SwizzleTransform(swizzle)
