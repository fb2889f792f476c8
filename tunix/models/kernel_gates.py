"""The parity gates: a kernel computes attention or experts only on devices where it gives plain products' numbers.

Kernels depend on a device, its compiler and a library, and are seldom tested together as they are met. So the first
start on a device computes a small packed row by the kernel and by the einsums, with gradients, for each kind of layer.
An engine uses a kernel that reads pages only where it gives the gathered pages' numbers: slots of several lengths that
decode, with pages in no order, and a piece of prompts that continues some of them.

Experts train only where devices multiply and exchange them as they should. The first start on a device multiplies some
rows by a kernel and, group by group, by plain products in float32, with both gradients. Devices have to send each other
the tokens that they should, which is tried on the whole mesh and by all processes at every start: none may take part
alone.

Axes: B rows, T time, N query heads, K kv heads, H head dim, Co columns of a page table; E experts; D inputs and F
outputs of a product, r rows; s shards of the rows.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from tunix.models.attention import decoding, einsum
from tunix.models.attention.attend import BY_NAME, Implementation
from tunix.models.attention.decoding import Reader, reader
from tunix.models.attention.inputs import AttentionSpec, DecodeSpec, Segments, past_sinks
from tunix.models.attention.pages import (
    NOWHERE,
    Gathered,
    PieceView,
    SlotsView,
    Table,
    Visits,
    Writes,
    block_of,
    rounded,
)
from tunix.models.grouped_products import grouped_gradients, grouped_products
from tunix.models.moe import AXIS, combine, destinations, dispatch
from tunix.util.atomic_io import write_text_atomic
from tunix.util.exact import jit

LIMIT = 1e-2
"""The largest difference of a result or a gradient, relative to its size: four roundings to bfloat16. A query that sees
another document, or a wrong window, is off by half of it and more."""
LENGTH = 512
"""Tokens of the row."""
DOCUMENTS = (200, 90, 110, 60)
"""Tokens of its documents; of shared prompts the first is the prompt of the next two. The rest is padding."""
MEASURED = Path("~/.cache/tunix/attention.json")
"""The file of the differences that were found, by device, versions, kernel and spec."""


def difference(name: str, spec: AttentionSpec) -> float:
    """How far a kernel is from the einsums on this device, relative to their size; remembered for later starts.

    Args:
        name: the implementation, e.g. "splash".
        spec: the call that it is for; the row here is a short one.
    """
    spec = replace(spec, queries=LENGTH, keys=LENGTH)
    return remembered([name, spec], lambda: measured(BY_NAME[name], spec))


def remembered(call: list, measure: Callable[[], float]) -> float:
    """What was measured of a kernel's call on such a device before; else it is measured."""
    versions = []
    for package in ("jax", "jaxlib", "tokamax", "libtpu"):
        try:
            versions.append(version(package))
        except PackageNotFoundError:
            versions.append("none")
    text = str([jax.local_devices()[0].device_kind, *versions, *call])
    key, path = hashlib.sha256(text.encode()).hexdigest()[:16], MEASURED.expanduser()
    try:
        known: dict[str, float] = json.loads(path.read_text())
    except (OSError, ValueError):  # None yet, or not ours: both are measured anew.
        known = {}
    if key not in known:
        known[key] = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(known, indent=1))
    return known[key]


def measured(kernel: Implementation, spec: AttentionSpec) -> float:
    """The largest relative difference of attention, its log-sum-exp and its gradients from float32 einsums."""
    # A packed row of DOCUMENTS and padding.
    ids, positions, parents = (np.zeros((1, LENGTH), np.int32) for _ in range(3))
    start = 0
    for number, length in enumerate(DOCUMENTS, 1):
        span, shared = np.s_[0, start : start + length], spec.branched and number in (2, 3)
        ids[span], parents[span] = number, 1 if shared else number
        positions[span] = np.arange(length) + (DOCUMENTS[0] if shared else 0)
        start += length
    above = jnp.asarray(parents) if spec.branched else None
    view = Segments(jnp.asarray(ids), jnp.asarray(positions), above, window=spec.window)
    heads = (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads)
    shapes = [(1, LENGTH, number, spec.head_dim) for number in heads]
    keys = jax.random.split(jax.random.key(0), 4)
    # q, k, v and the gradient by the result.
    inputs = tuple(jax.random.normal(key, shape).astype(spec.dtype) for key, shape in zip(keys, shapes, strict=True))
    scale, softcap, real = spec.head_dim**-0.5, spec.softcap, np.asarray(view.ids > 0)

    def results(implementation: Any, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, pull = inputs
        result = implementation.forward(q, k, v, view, scale=scale, softcap=softcap)
        gradients = implementation.backward(q, k, v, view, result, pull, scale=scale, softcap=softcap)
        return tuple(x[real] for x in (*result, *gradients))

    return _apart(partial(results, kernel), partial(results, einsum), inputs)


def _apart(computed: Callable, exact: Callable, inputs: Sequence[jax.Array]) -> float:
    """The largest relative difference of what two programs return on one device; the second one computes in float32."""
    with jax.set_mesh(Mesh(jax.local_devices()[:1], ("alone",))):
        results = jit(computed)(*inputs)
        with jax.default_matmul_precision("highest"):
            right = jit(exact)(*(x.astype(jnp.float32) for x in inputs))
    return max(off(np.asarray(x), np.asarray(y)) for x, y in zip(results, right, strict=True))


def off(computed: np.ndarray, right: np.ndarray) -> float:
    """The root mean square of a difference, relative to that of what is right; infinite where one is not a number."""
    computed, right = computed.astype(np.float32), right.astype(np.float32)
    apart = float(np.sqrt(np.mean((computed - right) ** 2)) / np.sqrt(np.mean(right**2)))
    return apart if np.isfinite(apart) else float("inf")


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
    chosen = reader(specs)
    if not chosen.in_place or mesh.devices.flat[0] not in jax.local_devices():
        return chosen
    apart = max(remembered([chosen.name, spec, PIECE], partial(reader_difference, chosen, spec)) for spec in specs)
    if apart <= LIMIT:
        return chosen
    logging.getLogger(__name__).warning(
        "decoding: %s is off gathered pages by %.2g of their size on this device, more than %g: pages are gathered",
        *(chosen.name, apart, LIMIT),
    )
    return decoding.BY_NAME["gathered"]


def reader_difference(candidate: Reader, spec: DecodeSpec) -> float:
    """The largest relative difference of a kernel from float32 products over gathered pages, of all kinds of layers."""
    return max(_of_window(candidate, spec, window) for window in spec.windows)


def _of_window(candidate: Reader, spec: DecodeSpec, window: int | None) -> float:
    columns = -(-max(HELD) // spec.page)
    keys, scale, softcap = jax.random.split(jax.random.key(0), 4), spec.head_dim**-0.5, spec.softcap
    # Of the size of a log-sum-exp of a few to a thousand scores.
    sinks = jnp.linspace(0, 8, spec.heads) if spec.sinks else None
    shape = (len(HELD) * columns, spec.page, spec.kv_heads, spec.head_dim)
    k, v = (jax.random.normal(key, shape).astype(spec.dtype) for key in keys[:2])
    q = jax.random.normal(keys[2], (len(HELD), 1, spec.heads, spec.head_dim)).astype(spec.dtype)
    length = sum(number for _, number in PIECE)
    queries = jax.random.normal(keys[3], (1, length, spec.heads, spec.head_dim)).astype(spec.dtype)
    order = np.random.default_rng(0).permutation(len(k)).astype(np.int32)

    def mixed(
        reader: Reader, at: np.ndarray, origin: Gathered | None, q: jax.Array, queries: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        pages = reader.layout.empty(len(k), spec.kv_heads, spec.head_dim, spec.page, spec.cache)
        new = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rounded(k, v, spec.cache))
        page, offsets = jnp.repeat(jnp.asarray(at), spec.page), jnp.tile(jnp.arange(spec.page), len(k))
        pages, places = pages.with_tokens(page, offsets, new), at.reshape(len(HELD), columns)
        positions, table = jnp.asarray(HELD)[:, None] - 1, Table(jnp.asarray(places), jnp.zeros(len(HELD), jnp.int32))
        writes = Writes(jnp.full_like(positions, NOWHERE), positions)
        view = SlotsView(writes, positions, table, origin, window)
        slots = past_sinks(reader.of_slots(q, pages, view, scale=scale, softcap=softcap), sinks)[0]
        # The log-sum-exp of earlier tokens is always read: it is compared by what sinks leave of the mean.
        piece = reader.before_piece(queries, pages, _piece(places, spec.page, window), scale=scale, softcap=softcap)
        return slots, past_sinks(piece, jnp.linspace(0, 8, spec.heads))[0]

    every = np.arange(len(k), dtype=np.int32)
    side = Gathered(*(jnp.asarray(x)[None] for x in (every, every // columns, every % columns * spec.page)))
    plain = partial(mixed, decoding.BY_NAME["gathered"], every, side)
    return _apart(partial(mixed, candidate, order, None), plain, (q, queries))


def _piece(places: Int[np.ndarray, "B Co"], page: int, window: int | None) -> PieceView:
    """The piece, given the pages of the slots."""
    slots, numbers = np.array(PIECE).T
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
    blocks, pages, starts, of = jnp.asarray(np.array(visits).T, jnp.int32)[:, None]
    writes = Writes(jnp.full_like(ids, NOWHERE), jnp.zeros_like(ids))
    visits = Visits(blocks, pages, starts, of, jnp.array([len(visits)]))
    return PieceView(ids, positions, begins, visits, writes, window)


SIZES = (100, 0, 33, 27, 1, 60, 0, 19)
"""Rows of each group: some have none, one has a single one, and none is a whole number of a kernel's blocks."""
FOREIGN = 16
"""Rows after those of all groups, which hold NaN."""


def grouped_difference(d: int, f: int, dtype: str) -> float:
    """How far grouped products and gradients are from plain ones on this device, relative to their size.

    Args:
        d: inputs of an expert's first products, e.g. 2048.
        f: their outputs, e.g. 768.
        dtype: of rows and matrices, e.g. "bfloat16"; of 8-bit floats there are no gradients of matrices.
    """
    return remembered(["grouped", d, f, dtype], lambda: max(_measured(d, f, dtype), _measured(f, d, dtype)))


def _measured(d: int, f: int, dtype: str) -> float:
    """The largest relative difference of a product and its two gradients."""
    shapes = ((sum(SIZES), d), (sum(SIZES), f), (len(SIZES), d, f))
    keys, in_8_bits = jax.random.split(jax.random.key(0), 3), jnp.dtype(dtype).itemsize == 1
    kinds = (dtype, "float8_e5m2" if in_8_bits else dtype, dtype)
    drawn = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    inputs = [x.astype(kind) for x, kind in zip(drawn, kinds, strict=True)]

    def results(rows: jax.Array, pulls: jax.Array, matrices: jax.Array) -> tuple[jax.Array, ...]:
        sizes = jnp.asarray(SIZES, jnp.int32)
        rows, pulls = (jnp.pad(x, ((0, FOREIGN), (0, 0)), constant_values=np.nan) for x in (rows, pulls))
        products = grouped_products(rows, matrices, sizes, transposed=False)
        back = grouped_products(pulls, matrices, sizes, transposed=True)
        gradients = () if in_8_bits else (grouped_gradients(rows, pulls, matrices, sizes),)
        return products[:-FOREIGN], back[:-FOREIGN], *gradients

    def plain(rows: jax.Array, pulls: jax.Array, matrices: jax.Array) -> tuple[jax.Array, ...]:
        groups = [np.s_[end - size : end] for size, end in zip(SIZES, np.cumsum(SIZES), strict=True)]
        products = [rows[group] @ w for group, w in zip(groups, matrices, strict=True)]
        back = [pulls[group] @ w.T for group, w in zip(groups, matrices, strict=True)]
        gradients = () if in_8_bits else (jnp.stack([rows[group].T @ pulls[group] for group in groups]),)
        return jnp.concatenate(products), jnp.concatenate(back), *gradients

    return _apart(results, plain, inputs)


TOKENS, WIDTH, EXPERTS, ACTIVE = 24, 128, 2, 3
"""Tokens of a shard and their width, experts of a device and of a token."""


def exchange_difference(mesh: Mesh) -> float:
    """How far results and gradients of tokens that devices exchange are from those computed at home, relative to the
    largest; NaN where they are no numbers.

    Device d multiplies what it is sent by d + 1, so that a row which goes astray is off by a whole.

    Args:
        mesh: with an axis `expert`.
    """
    rows = jax.P(AXIS)

    def part(x: jax.Array, experts: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        where = destinations(experts, real, EXPERTS)

        def multiplied(x: jax.Array) -> jax.Array:
            came = jnp.where(where.arrived[..., None], dispatch(x, where), jnp.nan)
            return combine((jax.lax.axis_index(AXIS) + 1.0) * came, where)

        y, back = jax.vjp(multiplied, x)
        return y, back(x)[0]

    def apart() -> jax.Array:
        shards = mesh.shape[AXIS]
        of_tokens, of_experts, of_padding = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(of_tokens, (shards * TOKENS, WIDTH))
        every = jnp.broadcast_to(jnp.arange(shards * EXPERTS), (len(x), shards * EXPERTS))
        experts = jax.random.permutation(of_experts, every, axis=1, independent=True)[:, :ACTIVE]
        real = jax.random.bernoulli(of_padding, 0.8, (len(x),))
        exchange = jax.shard_map(part, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        goes = jnp.any(experts[..., None] // EXPERTS == jnp.arange(shards), axis=1) & real[:, None]
        right = jnp.sum(jnp.where(goes, jnp.arange(1.0, 1 + shards), 0.0), axis=1, keepdims=True) * x
        return jnp.max(jnp.abs(jnp.stack(exchange(x, experts, real)) - right)) / jnp.max(jnp.abs(right))

    with jax.set_mesh(mesh):
        return float(jit(apart, out_shardings=jax.NamedSharding(mesh, jax.P()))())
