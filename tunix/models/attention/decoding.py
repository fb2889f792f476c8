"""How slots that decode, and pieces of prompts, read pages: the table of implementations, chosen once for an engine.

An implementation comes with the layout of pages that it reads. To add a kernel, write one file with `lacks` and
`of_slots`, and one line of `IMPLEMENTATIONS`.

Axes: B rows, C tokens at a time, N query heads, H head dim.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jaxtyping import Array, Float

from tunix.models.attention import decode_triton, pages
from tunix.models.attention.inputs import LANES, DecodeSpec, Mixed, because, scaled
from tunix.models.attention.pages import LARGEST, STORED, Columns, Interleaved, Pages, Rows, SlotsView, kind_of

TOKENS = 1024
"""Tokens of a sequence that are fetched at a time."""
QUERIES = 8
"""Queries, each of a slot, of one step of the kernel's grid."""
VMEM = 64 * 2**20
"""Bytes of the chip's vector memory that the kernel may take."""


def lacks_ragged(spec: DecodeSpec) -> str | None:
    """Why the kernel cannot read a cache; None where it can."""
    if spec.platform != "tpu":
        return "it needs a TPU"
    if spec.head_dim % LANES:
        return f"a head dim of {spec.head_dim} is no multiple of {LANES}"
    if spec.sinks:
        return "it tells no log-sum-exp, by which sinks take their share"
    if spec.cache == "int8":
        return "it knows one scale for a whole cache, and int8 has one for each token and head"
    packed = 4 // jnp.dtype(STORED[spec.cache]).itemsize
    tiled = 2 * spec.kv_heads / packed
    if tiled not in (1, 2, 4, 8) and tiled % 8:
        return f"{spec.kv_heads} kv heads of {spec.cache} on a device fill no tile"
    return None


def of_slots_by_ragged(
    q: Float[Array, "B 1 N H"], pages: Interleaved, view: SlotsView, *, scale: float, softcap: float | None
) -> Mixed:
    """As `pages.of_slots`, over pages that stay where they are; the kernel tells no log-sum-exp, which is nan."""
    table, slots = view.table.pages, len(q)
    held = view.positions[:, 0] + 1 - view.table.first * pages.size
    # Idle slots read a token: a sequence without one would leave what was in the kernel's memory.
    held = jnp.clip(held, 1, table.shape[1] * pages.size)
    eight_bits = kind_of(pages) == "fp8"
    mixed = ragged_paged_attention(
        scaled(q, scale)[:, 0],
        pages.both,
        held.astype(jnp.int32),
        jnp.maximum(table, 0),
        jnp.arange(slots + 1, dtype=jnp.int32),
        jnp.full(1, slots, jnp.int32),
        sliding_window=view.window,
        soft_cap=softcap,
        k_scale=1.0 if eight_bits else None,
        v_scale=1.0 if eight_bits else None,
        num_kv_pages_per_block=min(max(TOKENS // pages.size, 1), table.shape[1]),
        num_queries_per_block=min(QUERIES, slots),
        vmem_limit_bytes=VMEM,
    )
    return mixed[:, None], jnp.full(q.shape[:-1], jnp.nan)


class Reader(NamedTuple):
    """One way to read the pages of slots that decode."""

    name: str
    lacks: Callable[[DecodeSpec], str | None]
    """Why it cannot read a cache, e.g. "it needs a TPU"; None where it can."""
    layout: type[Pages]
    """The layout that it reads, which no other one does."""
    of_slots: Callable[..., Mixed]
    """Called as `of_slots(q, pages, view, scale=..., softcap=...)` on each device, with a `SlotsView`."""
    before_piece: Callable[..., Mixed] = pages.before_piece
    """Called likewise with a `PieceView`: what the tokens of a piece see of earlier ones."""
    in_place: bool = True
    """Whether it reads pages where they are; else they are gathered once a dispatch, and are there twice."""


IMPLEMENTATIONS: tuple[Reader, ...] = (
    Reader("ragged", lacks_ragged, Interleaved, of_slots_by_ragged),
    Reader("triton", decode_triton.lacks, Rows, decode_triton.of_slots, decode_triton.before_piece),
    Reader("gathered", lambda spec: None, Columns, pages.of_slots, in_place=False),
)
"""The implementations, the fastest first; the last one reads every cache."""
BY_NAME = {one.name: one for one in IMPLEMENTATIONS}


def reader(specs: Sequence[DecodeSpec]) -> Reader:
    """The first implementation of the table that can read a cache, given the spec of each shape of its heads."""
    return next(one for one in IMPLEMENTATIONS if _lacks(one, specs) is None)


def _lacks(candidate: Reader, specs: Sequence[DecodeSpec]) -> str | None:
    """Why an implementation cannot read a cache: what it lacks for the first shape of heads that it cannot read."""
    return next(filter(None, map(candidate.lacks, specs)), None)


def described(specs: Sequence[DecodeSpec], chosen: str) -> str:
    """The implementation that was chosen, and why no faster one: `triton (ragged: it needs a TPU)`."""
    faster = IMPLEMENTATIONS[: IMPLEMENTATIONS.index(BY_NAME[chosen])]
    other = "it gives other numbers on this device"
    return because(chosen, ((kernel.name, _lacks(kernel, specs) or other) for kernel in faster))


def unsaved(specs: Sequence[DecodeSpec]) -> str | None:
    """Why a cache of 8 bits would save nothing on this platform; None where it does, and for other caches.

    Where pages are gathered they are there twice. A CPU does so with every cache.
    """
    if specs[0].cache not in LARGEST or specs[0].platform == "cpu" or reader(specs).in_place:
        return None
    kernel = IMPLEMENTATIONS[0 if specs[0].platform == "tpu" else 1]
    return f"{kernel.name} cannot read it in its place: {_lacks(kernel, specs)}"


def of_slots(
    q: Float[Array, "B C N H"], cache: Pages, view: SlotsView, *, scale: float, softcap: float | None
) -> Mixed:
    """Attention of new tokens of slots to their pages, on each device, by who reads pages of this layout."""
    implementation, (slots, number) = reader_of(cache), q.shape[:2]
    if number == 1 or not implementation.in_place:
        return implementation.of_slots(q, cache, view, scale=scale, softcap=softcap)
    # Kernels read for one query: guesses have slots of their own.
    each = q.reshape(-1, 1, *q.shape[2:])
    mixed, lse = implementation.of_slots(each, cache, view.by_token(), scale=scale, softcap=softcap)
    return mixed.reshape(q.shape), lse.reshape(slots, number, -1)


def reader_of(cache: Pages) -> Reader:
    """The implementation that reads pages of this layout."""
    return next(one for one in IMPLEMENTATIONS if one.layout is type(cache))
