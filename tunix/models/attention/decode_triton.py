"""Decoding on NVIDIA's GPUs: a Triton kernel that reads each slot's pages where they are, up to its last token.

A program computes one kv head's queries of one slot over PART tokens of its sequence, and what the parts find is
joined by XLA. Parts are counted from a sequence's first page, so that neither company nor the longest slot changes a
digit. On a CPU the kernel is interpreted, for tests.

Axes: B rows, Co columns of a page table, N query heads, K kv heads, J query heads of a kv head (filled up to
ROWS of a tile), H head dim, Pg pages, Pt tokens of a page.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from tunix.mesh import platform
from tunix.models.attention.decode_spec import DecodeSpec
from tunix.models.attention.inputs import HIDDEN, Mixed, grouped, scaled
from tunix.models.attention.layouts import Rows, scaled_up
from tunix.models.attention.pages import SlotsView, settled

ROWS = 16
"""Rows of the smallest tile that tensor cores multiply."""
PART = 1024
"""Tokens of a sequence that one program reads."""
TILE = 128 * 128
"""Numbers of a tile of keys: with more of them a program would have no room for the next."""
CAPABILITY = 8.0
"""The oldest GPUs whose tensor cores multiply bfloat16; those of 8.9 and later read e4m3."""
WARPS, STAGES = 4, 2


def lacks(spec: DecodeSpec) -> str | None:
    """Why the kernel cannot read a cache; None where it can."""
    if spec.platform != "gpu" or spec.capability is None or spec.capability < CAPABILITY:
        return "it needs an NVIDIA GPU of compute capability 8 or more"
    if spec.cache == "fp8" and spec.capability < 8.9:
        return "fp8 needs compute capability 8.9 or more"
    return unfit(spec)


def unfit(spec: DecodeSpec) -> str | None:
    """Why the kernel cannot read a cache on any device."""
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
    found = pl.pallas_call(
        partial(_kernel, rows=rows, block=block, size=pages.size, softcap=softcap),
        grid=(slots, kv_heads, parts),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=platform() == "cpu",
        name="paged_decode",
    )(table, starts, stops, queries, pages.keys, pages.values, *scales)
    peaks, masses, sums = found
    peak = jnp.max(peaks, axis=2)
    share = jnp.exp(peaks - peak[:, :, None])
    mass, mixed = jnp.sum(share * masses, axis=2), jnp.sum(share[..., None] * sums, axis=2)
    return settled(peak[..., None], mass[..., None], mixed[..., None, :], q.dtype)


def _kernel(
    table: Any, starts: Any, stops: Any, q: Any, keys: Any, values: Any, *rest: Any, rows, block, size, softcap
):
    """One program: `rest` are the scales, where there are any, and the three results."""
    *scales, peaks, masses, sums = rest
    slot, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    # It begins at a computed 0: from 0.12 on jax refuses a slice that is known to end beyond its array, masked or not.
    start, stop, every = starts[slot], stops[slot], pl.ds(0 * part, rows)
    # What fills a tile up is neither read nor written: most rows of it where few queries share a kv head.
    real = jnp.arange(rows) < q.shape[2]
    whole = jnp.broadcast_to(real[:, None], (rows, q.shape[3]))
    queries = triton.load(q.at[slot, head, every], mask=whole, other=0.0)
    exact = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    product = partial(jnp.dot, preferred_element_type=jnp.float32, precision=exact)

    def read(pool: Any, which: int, page: Array, at: Array) -> Array:
        numbers = pool[page, head, pl.ds(at, block), :]
        if not scales:
            return numbers.astype(queries.dtype)
        return scaled_up(numbers, scales[0][page, head, which, pl.ds(at, block)][:, None], queries.dtype)

    def one(number: Array, found: tuple) -> tuple:
        peak, mass, total = found
        first = number * block
        page, at = table[slot, first // size], first % size
        scores = product(queries, read(keys, 0, page, at).T)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        tokens = first + jnp.arange(block)
        scores = jnp.where(((tokens >= start) & (tokens < stop))[None], scores, HIDDEN)
        new = jnp.maximum(peak, jnp.max(scores, axis=1))
        share, weights = jnp.exp(peak - new), jnp.exp(scores - new[:, None])
        more = product(weights.astype(queries.dtype), read(values, 1, page, at))
        return new, share * mass + jnp.sum(weights, axis=1), share[:, None] * total + more

    nothing = (jnp.full(queries.shape[:1], HIDDEN), jnp.zeros(queries.shape[:1]), jnp.zeros(queries.shape))
    low = jnp.maximum(part * PART, start) // block
    high = pl.cdiv(jnp.minimum((part + 1) * PART, stop), block)
    found = jax.lax.fori_loop(low, high, one, nothing)
    for where, x, mask in zip((peaks, masses, sums), found, (real, real, whole), strict=True):
        triton.store(where.at[slot, head, part, every], x, mask=mask)
