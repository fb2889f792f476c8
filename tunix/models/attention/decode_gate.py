"""The parity gate of kernels that decode: an engine uses one only where it gives the gathered pages' numbers.

As in `gate.py`, the first start on a device compares them: slots of several lengths, with pages in no order.

Axes: B rows, N query heads, K kv heads, H head dim, Pg pages, Pt tokens of a page, Co columns of a page table.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tunix.models.attention.decode_spec import DecodeSpec
from tunix.models.attention.decoding import BY_NAME, Reader, reader
from tunix.models.attention.gate import LIMIT, off, remembered
from tunix.models.attention.inputs import Mixed, past_sinks
from tunix.models.attention.layouts import rounded
from tunix.models.attention.pages import NOWHERE, Gathered, Pages, SlotsView, Table, Writes, of_slots
from tunix.util.exact import jit

HELD = (1, 300, 900, 1024)
"""Tokens of the slots."""


def reader_here(specs: Sequence[DecodeSpec], mesh: Mesh) -> Reader:
    """The implementation that reads a cache on a mesh: a kernel has to give the right numbers where its devices are.

    Args:
        specs: of each shape of the cache's heads.
        mesh: the sampler's.
    """
    one = reader(specs)
    if not one.in_place or mesh.devices.flat[0] not in jax.local_devices():
        return one
    apart = max(remembered([one.name, spec], partial(measured, one, spec)) for spec in specs)
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
    keys, how = jax.random.split(jax.random.key(0), 3), {"scale": spec.head_dim**-0.5, "softcap": spec.softcap}
    # Of the size of a log-sum-exp of a few to a thousand scores.
    sinks = jnp.linspace(0, 8, spec.heads) if spec.sinks else None
    shape = (len(HELD) * columns, spec.page, spec.kv_heads, spec.head_dim)
    k, v = (jax.random.normal(key, shape).astype(spec.dtype) for key in keys[:2])
    q = jax.random.normal(keys[2], (len(HELD), 1, spec.heads, spec.head_dim)).astype(spec.dtype)
    order = np.random.default_rng(0).permutation(len(k)).astype(np.int32)

    def view(places: np.ndarray, own: Gathered | None) -> SlotsView:
        positions = jnp.asarray(HELD)[:, None] - 1
        table = Table(jnp.asarray(places.reshape(len(HELD), columns)), jnp.zeros(len(HELD), jnp.int32))
        return SlotsView(Writes(jnp.full_like(positions, NOWHERE), positions), positions, table, own, window)

    def filled(layout: type[Pages], at: np.ndarray) -> Pages:
        pages = layout.empty(len(k), spec.kv_heads, spec.head_dim, spec.page, spec.cache)
        new = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rounded(k, v, spec.cache))
        return pages.with_tokens(jnp.repeat(jnp.asarray(at), spec.page), jnp.tile(jnp.arange(spec.page), len(k)), new)

    def mixed(reader: Callable[..., Mixed], pages: Pages, places: SlotsView, q: jax.Array) -> jax.Array:
        return past_sinks(reader(q, pages, places, **how), sinks)[0]

    found = jit(lambda q: mixed(one.of_slots, filled(one.layout, order), view(order, None), q))(q)
    every = np.arange(len(k), dtype=np.int32)
    side = Gathered(*(jnp.asarray(x)[None] for x in (every, every // columns, every % columns * spec.page)))
    plain = BY_NAME["gathered"].layout
    with jax.default_matmul_precision("highest"):
        exact = jit(lambda q: mixed(of_slots, filled(plain, every), view(every, side), q))(q.astype(jnp.float32))
    return off(np.asarray(found, np.float32), np.asarray(exact))
