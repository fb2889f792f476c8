"""The parity gate of kernels that read pages: an engine uses one only where it gives the gathered pages' numbers.

As in `gate.py`, the first start on a device compares them: slots of several lengths that decode, with pages in no
order, and a piece of prompts that continues some of them.

Axes: B rows, C tokens at a time, N query heads, K kv heads, H head dim, Pg pages, Pt tokens of a
page, Co columns of a page table.
"""

import logging
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from tunix.models.attention.decode_spec import DecodeSpec
from tunix.models.attention.decoding import BY_NAME, Reader, reader
from tunix.models.attention.gate import LIMIT, off, remembered
from tunix.models.attention.inputs import past_sinks
from tunix.models.attention.layouts import rounded
from tunix.models.attention.pages import NOWHERE, Gathered, Pages, PieceView, SlotsView, Table, Visits, Writes, block_of
from tunix.util.exact import jit

HELD = (1, 300, 900, 1024)
"""Tokens of the slots."""
PIECE = ((1, 40), (2, 60), (0, 28))
"""Slot and tokens of each segment of the piece; the last are padding."""


def reader_here(specs: Sequence[DecodeSpec], mesh: Mesh) -> Reader:
    """The implementation that reads a cache on a mesh: a kernel has to give the right numbers where its devices are.

    Args:
        specs: of each shape of the cache's heads.
        mesh: the sampler's.
    """
    one = reader(specs)
    if not one.in_place or mesh.devices.flat[0] not in jax.local_devices():
        return one
    apart = max(remembered([one.name, spec, PIECE], partial(measured, one, spec)) for spec in specs)
    if apart <= LIMIT:
        return one
    logging.getLogger(__name__).warning(
        "decoding: %s is off gathered pages by %.2g of their size on this device, more than %g: pages are gathered",
        *(one.name, apart, LIMIT),
    )
    return BY_NAME["gathered"]


def measured(one: Reader, spec: DecodeSpec) -> float:
    """The largest relative difference of a kernel from float32 products over gathered pages, of all kinds of layers."""
    with jax.set_mesh(Mesh(jax.local_devices()[:1], ("alone",))):
        return max(_of_window(one, spec, window) for window in spec.windows)


def _of_window(one: Reader, spec: DecodeSpec, window: int | None) -> float:
    columns = -(-max(HELD) // spec.page)
    keys, how = jax.random.split(jax.random.key(0), 4), {"scale": spec.head_dim**-0.5, "softcap": spec.softcap}
    # Of the size of a log-sum-exp of a few to a thousand scores.
    sinks = jnp.linspace(0, 8, spec.heads) if spec.sinks else None
    shape = (len(HELD) * columns, spec.page, spec.kv_heads, spec.head_dim)
    k, v = (jax.random.normal(key, shape).astype(spec.dtype) for key in keys[:2])
    q = jax.random.normal(keys[2], (len(HELD), 1, spec.heads, spec.head_dim)).astype(spec.dtype)
    length = sum(number for _, number in PIECE)
    queries = jax.random.normal(keys[3], (1, length, spec.heads, spec.head_dim)).astype(spec.dtype)
    order = np.random.default_rng(0).permutation(len(k)).astype(np.int32)

    def view(places: np.ndarray, own: Gathered | None) -> SlotsView:
        positions = jnp.asarray(HELD)[:, None] - 1
        table = Table(jnp.asarray(places.reshape(len(HELD), columns)), jnp.zeros(len(HELD), jnp.int32))
        return SlotsView(Writes(jnp.full_like(positions, NOWHERE), positions), positions, table, own, window)

    def filled(layout: type[Pages], at: np.ndarray) -> Pages:
        pages = layout.empty(len(k), spec.kv_heads, spec.head_dim, spec.page, spec.cache)
        new = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rounded(k, v, spec.cache))
        return pages.with_tokens(jnp.repeat(jnp.asarray(at), spec.page), jnp.tile(jnp.arange(spec.page), len(k)), new)

    def mixed(
        reader: Reader, at: np.ndarray, own: Gathered | None, q: jax.Array, queries: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        pages, places = filled(reader.layout, at), at.reshape(len(HELD), columns)
        slots = past_sinks(reader.of_slots(q, pages, view(at, own), **how), sinks)[0]
        # The log-sum-exp of earlier tokens is always read: it is compared by what sinks leave of the mean.
        piece = reader.before_piece(queries, pages, _piece(places, spec.page, window), **how)
        return slots, past_sinks(piece, jnp.linspace(0, 8, spec.heads))[0]

    every = np.arange(len(k), dtype=np.int32)
    side = Gathered(*(jnp.asarray(x)[None] for x in (every, every // columns, every % columns * spec.page)))
    found = jit(partial(mixed, one, order, None))(q, queries)
    with jax.default_matmul_precision("highest"):
        plain = partial(mixed, BY_NAME["gathered"], every, side)
        exact = jit(plain)(q.astype(jnp.float32), queries.astype(jnp.float32))
    return max(off(np.asarray(x, np.float32), np.asarray(y)) for x, y in zip(found, exact, strict=True))


def _piece(places: Int[np.ndarray, "B Co"], page: int, window: int | None) -> PieceView:
    """The piece, given the pages of the slots."""
    slots, numbers = map(np.array, zip(*PIECE, strict=True))
    owners, ends = np.arange(1, len(PIECE) + 1), np.cumsum(numbers)
    begins, firsts = np.repeat(np.array(HELD)[slots], numbers), np.repeat(ends - numbers, numbers)
    ids = np.repeat(np.where(owners < len(PIECE), owners, 0), numbers)
    width = block_of(len(ids))
    visits = [
        (block, places[slot, column], column * page, owner)
        for block in range(len(ids) // width)
        for owner, slot, end, number in zip(owners[:-1], slots, ends, numbers, strict=False)
        if end - number < (block + 1) * width and block * width < end
        for column in range(-(-HELD[slot] // page))
    ]
    positions = begins + np.arange(len(ids)) - firsts
    ids, positions, begins = (jnp.asarray(x, jnp.int32)[None] for x in (ids, positions, begins))
    blocks, pages, starts, of = (jnp.asarray(x, jnp.int32)[None] for x in zip(*visits, strict=True))
    writes = Writes(jnp.full_like(ids, NOWHERE), jnp.zeros_like(ids))
    visits = Visits(blocks, pages, starts, of, jnp.array([len(visits)]))
    return PieceView(ids, positions, begins, visits, writes, window)
