"""Pages on NVIDIA's GPUs: Triton kernels read them where they are, for slots that decode and for pieces of prompts.

Of a slot a program computes one kv head's queries over PART tokens of its sequence, up to its last token, and what the
parts find is joined by XLA. Parts are counted from a sequence's first page, so that neither company nor the longest
slot changes a digit. Of a piece a program computes a block of queries over the pages before the piece: how many these
are is data, and a loop around XLA's operations would cost a round trip to the host for each. On a CPU the kernels are
interpreted, for tests.

Axes: B rows, C tokens at a time, Q queries of a block, Co columns of a page table, N query heads, K kv heads, J query
heads of a kv head (filled up to ROWS of a tile), H head dim, Pg pages, Pt tokens of a page.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float

from tunix.mesh import platform
from tunix.models.attention.inputs import HIDDEN, DecodeSpec, Mixed, grouped, scaled
from tunix.models.attention.pages import PieceView, Rows, SlotsView, block_of, normalised, scaled_up
from tunix.models.attention.pages import before_piece as plain_before_piece

ROWS = 16
"""Rows of the smallest tile that tensor cores multiply."""
PART = 1024
"""Tokens of a sequence that one program reads."""
TILE = 128 * 128
"""Numbers of a tile of keys: with more of them a program would have no room for the next."""
CAPABILITY = 8.0
"""The oldest GPUs whose tensor cores multiply bfloat16; those of 8.9 and later read e4m3."""
WARPS, STAGES = 4, 2
WIDE = 128
"""The head dim above which a program that computes a block of queries has twice the warps."""
Partials = tuple[Float[Array, "Q"], Float[Array, "Q"], Float[Array, "Q H"]]
"""A softmax over some tokens, of each query: the highest score, the mass relative to it, and the sum of values."""


def lacks(spec: DecodeSpec) -> str | None:
    """Why the kernel cannot read a cache; None where it can."""
    if spec.platform != "gpu" or spec.capability is None or spec.capability < CAPABILITY:
        return "it needs an NVIDIA GPU of compute capability 8 or more"
    if spec.cache == "fp8" and spec.capability < 8.9:
        return "fp8 needs compute capability 8.9 or more"
    if spec.head_dim & (spec.head_dim - 1) or spec.head_dim < ROWS:
        return f"a head dim of {spec.head_dim} is no power of two of at least {ROWS}"
    if spec.page < ROWS:
        return f"pages of {spec.page} tokens are smaller than a tile of {ROWS}"
    return None


def of_slots(q: Float[Array, "B 1 N H"], pages: Rows, view: SlotsView, *, scale: float, softcap: float | None) -> Mixed:
    """As `pages.of_slots`, over pages that stay where they are."""
    queries = grouped(scaled(q, scale), pages.kv_heads)[:, :, :, 0]
    slots, kv_heads, group, dim = queries.shape
    rows = max(ROWS, pl.next_power_of_2(group))
    table, tokens = jnp.maximum(view.table.pages, 0), view.table.pages.shape[1] * pages.size
    parts = pl.cdiv(tokens, PART)
    # Positions count from the first page of the table. Slots without pages see nothing.
    stops = jnp.minimum(view.positions[:, 0] + 1 - view.table.first * pages.size, tokens)
    stops = jnp.where(view.table.pages[:, 0] >= 0, stops, 0)
    starts = jnp.zeros_like(stops) if view.window is None else jnp.maximum(stops - view.window, 0)
    block = min(pages.size, TILE // dim, PART)
    scales = () if pages.scales is None else (pages.scales,)
    shapes = ((slots, kv_heads, parts, group), (slots, kv_heads, parts, group), (slots, kv_heads, parts, group, dim))
    partials = pl.pallas_call(
        partial(_kernel, rows=rows, block=block, size=pages.size, softcap=softcap),
        grid=(slots, kv_heads, parts),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=platform() == "cpu",
        name="paged_decode",
    )(table, starts, stops, queries, pages.keys, pages.values, *scales)
    peaks, masses, sums = partials
    peak = jnp.max(peaks, axis=2)
    share = jnp.exp(peaks - peak[:, :, None])
    mass, mixed = jnp.sum(share * masses, axis=2), jnp.sum(share[..., None] * sums, axis=2)
    return normalised(peak[..., None], mass[..., None], mixed[..., None, :], q.dtype)


def _kernel(*refs: Any, rows: int, block: int, size: int, softcap: float | None) -> None:
    """One program; there are scales where there are any."""
    table, starts, stops, q, keys, values, *scales, peaks, masses, sums = refs
    slot, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    # It begins at a computed 0: from 0.12 on jax refuses a slice that is known to end beyond its array, masked or not.
    start, stop, every = starts[slot], stops[slot], pl.ds(0 * part, rows)
    # What fills a tile up is neither read nor written: most rows of it where few queries share a kv head.
    real = jnp.arange(rows) < q.shape[2]
    whole = jnp.broadcast_to(real[:, None], (rows, q.shape[3]))
    queries = triton.load(q.at[slot, head, every], mask=whole, other=0.0)

    def tile(number: Array, partials: Partials) -> Partials:
        first = number * block
        tokens = first + jnp.arange(block)
        page, places = table[slot, first // size], pl.ds(first % size, block)
        k, v = (_tokens(pool, scales, i, (page, head, places), queries.dtype) for i, pool in enumerate((keys, values)))
        return _with_tile(partials, queries, k, v, ((tokens >= start) & (tokens < stop))[None], softcap)

    low = jnp.maximum(part * PART, start) // block
    high = pl.cdiv(jnp.minimum((part + 1) * PART, stop), block)
    partials = jax.lax.fori_loop(low, high, tile, _nothing(queries))
    for where, x, mask in zip((peaks, masses, sums), partials, (real, real, whole), strict=True):
        triton.store(where.at[slot, head, part, every], x, mask=mask)


def before_piece(
    q: Float[Array, "1 C N H"], pages: Rows, view: PieceView, *, scale: float, softcap: float | None
) -> Mixed:
    """As `pages.before_piece`. A program computes one query head of a block of queries over all visits of the block,
    which stand side by side."""
    (_, length, heads, dim), visits, width = q.shape, view.visits, block_of(q.shape[1])
    if width < ROWS and platform() != "cpu":
        return plain_before_piece(q, pages, view, scale=scale, softcap=softcap)
    blocks = length // width
    there = jnp.arange(visits.blocks.shape[1]) < visits.number[0]
    borders = jnp.sum(there & (visits.blocks[0] < jnp.arange(blocks + 1)[:, None]), axis=1, dtype=jnp.int32)
    tokens = [x.reshape(blocks, width) for x in (view.ids, view.begins, view.positions)]
    kernel = partial(_piece_kernel, group=heads // pages.kv_heads, block=min(pages.size, TILE // dim), size=pages.size)
    mixed, lse = pl.pallas_call(
        partial(kernel, window=view.window, softcap=softcap),
        grid=(blocks, heads),
        out_shape=[
            jax.ShapeDtypeStruct((blocks, heads, width, dim), q.dtype),
            jax.ShapeDtypeStruct((blocks, heads, width), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=WARPS if dim <= WIDE else 2 * WARPS, num_stages=STAGES),
        interpret=platform() == "cpu",
        name="paged_prefill",
    )(
        borders,
        *(x[0] for x in (visits.pages, visits.starts, visits.owners)),
        *tokens,
        scaled(q, scale).reshape(blocks, width, heads, dim).swapaxes(1, 2),
        pages.keys,
        pages.values,
        *(() if pages.scales is None else (pages.scales,)),
    )
    return mixed.swapaxes(1, 2).reshape(q.shape), lse.swapaxes(1, 2).reshape(1, length, heads)


def _piece_kernel(*refs: Any, group: int, block: int, size: int, window: int | None, softcap: float | None) -> None:
    """One program; there are scales where there are any."""
    borders, pages, starts, owners, ids, begins, positions, q, keys, values, *scales, mixed, lse = refs
    row, head = pl.program_id(0), pl.program_id(1)
    queries, tiles = q[row, head], size // block
    segment, ends, firsts = ids[row], begins[row], None if window is None else positions[row] - window

    def tile(number: Array, partials: Partials) -> Partials:
        visit, at = number // tiles, number % tiles * block
        tokens = starts[visit] + at + jnp.arange(block)
        seen = (tokens[None] < ends[:, None]) & (segment == owners[visit])[:, None]
        if firsts is not None:
            seen &= tokens[None] > firsts[:, None]
        where = pages[visit], head // group, pl.ds(at, block)
        k, v = (_tokens(pool, scales, i, where, queries.dtype) for i, pool in enumerate((keys, values)))
        return _with_tile(partials, queries, k, v, seen, softcap)

    partials = jax.lax.fori_loop(borders[row] * tiles, borders[row + 1] * tiles, tile, _nothing(queries))
    peak, mass, total = partials
    mass = jnp.where(peak > HIDDEN, mass, 1.0)
    mixed[row, head] = jnp.where((peak > HIDDEN)[:, None], total / mass[:, None], 0.0).astype(mixed.dtype)
    lse[row, head] = peak + jnp.log(mass)


def _tokens(pool: Any, scales: list[Any], which: int, where: tuple, dtype: jax.typing.DTypeLike) -> Array:
    """Keys (0) or values (1) `[tokens H]` at a page, a kv head and some places."""
    page, head, places = where
    numbers = pool[page, head, places, :]
    return scaled_up(numbers, scales[0][page, head, which, places][:, None], dtype) if scales else numbers.astype(dtype)


def _nothing(queries: Float[Array, "Q H"]) -> Partials:
    return jnp.full(queries.shape[:1], HIDDEN), jnp.zeros(queries.shape[:1]), jnp.zeros(queries.shape)


def _with_tile(
    partials: Partials,
    queries: Float[Array, "Q H"],
    k: Float[Array, "tokens H"],
    v: Float[Array, "tokens H"],
    seen: Bool[Array, "_ tokens"],
    softcap: float | None,
) -> Partials:
    """The partials of the softmax with another tile of tokens."""
    peak, mass, total = partials
    exact = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    product = partial(jnp.dot, preferred_element_type=jnp.float32, precision=exact)
    scores = product(queries, k.T)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, HIDDEN)
    new = jnp.maximum(peak, jnp.max(scores, axis=1))
    share, weights = jnp.exp(peak - new), jnp.exp(scores - new[:, None])
    more = product(weights.astype(queries.dtype), v)
    return new, share * mass + jnp.sum(weights, axis=1), share[:, None] * total + more
