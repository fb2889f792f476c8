"""Keys and values in pages: a sequence holds the pages that its tokens need, and sequences with one prompt share them.

A layer has a pool of pages. Which order of their axes is fast is a matter of what reads them (`decoding.py`): on a CPU
a batched product, on NVIDIA's GPUs and on TPUs a kernel that takes pages where they are. All else goes through the
methods of their classes. Whatever the sampler reads of a token, of its own piece, of earlier ones or while it decodes,
is what the cache holds of it: `rounded` comes first. So neither pieces nor pages change a result.

New tokens are written to their places (`Writes`), then read what came
before them. A piece of prompts reads its own tokens by attention within rows, and pages of earlier tokens by `Visits`.
Slots that decode read their pages by a `Table`: where they are, by a kernel (`decoding.py`), or, where there is none,
side by side. Then a dispatch of many steps first gathers them, each page for one slot (`gathered`), so that every step
is a plain product over whole arrays, and at its end brings back what was written.

A page is read in full, and what is behind a sequence's last token hidden: pages start as zeros and hold only what was
written, so nothing in them is ever not a number.

Axes: B rows, C tokens at a time, Q queries of a block, N query heads, K kv heads, J query heads of a kv head, H head
dim, Pg pages, Pt tokens of a page, Co columns of a page table, Vi visits, Cp copies, s shards of the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tunix.config import CacheType
from tunix.mesh import Axes, shards
from tunix.models.attention.inputs import HIDDEN, Mixed, Segments, grouped, scaled, ungrouped

STORED: dict[CacheType, Any] = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "int8": jnp.int8,
    "fp8": jnp.float8_e4m3fn,
}
"""The dtype of the numbers of a cache."""
LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The largest numbers that 8 bits hold; int8 is scaled up to it, fp8 is cut off there."""
SCALE_BYTES = 4
"""Bytes of the scale that int8 has for each token and kv head, of its key and of its value."""


class Tokens(NamedTuple):
    """Keys and values of some tokens, as a cache holds them."""

    keys: Array
    """`[... K H]`."""
    values: Array
    """`[... K H]`."""
    scales: Float[Array, "... K 2"] | None = None
    """What the keys and the values are multiplied by; None where nothing is."""

    def exact(self, dtype: jax.typing.DTypeLike) -> tuple[Array, Array]:
        """Keys and values as numbers of this dtype."""
        if self.scales is None:
            return self.keys.astype(dtype), self.values.astype(dtype)
        of_keys, of_values = self.scales[..., :1], self.scales[..., 1:]
        return scaled_up(self.keys, of_keys, dtype), scaled_up(self.values, of_values, dtype)


def scaled_up(x: Array, scale: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Integers times their scale, multiplied in float32."""
    return (x.astype(jnp.float32) * scale).astype(dtype)


def rounded(k: Float[Array, "*at K H"], v: Float[Array, "*at K H"], kind: CacheType) -> Tokens:
    """Keys and values as a cache of this type holds them."""
    dtype = STORED[kind]
    if kind == "fp8":
        most = LARGEST[kind]
        return Tokens(*(jnp.clip(x.astype(jnp.float32), -most, most).astype(dtype) for x in (k, v)))
    if kind != "int8":
        return Tokens(k.astype(dtype), v.astype(dtype))

    def scale(x: Array) -> Array:
        largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1)
        return jnp.where(largest > 0, largest / LARGEST[kind], 1.0)

    def number(x: Array) -> Array:
        return jnp.round(x.astype(jnp.float32) / scale(x)[..., None]).astype(dtype)

    return Tokens(number(k), number(v), jnp.stack([scale(k), scale(v)], axis=-1))


class Columns(NamedTuple):
    """The keys' head dim stands before their tokens, `[Pg K H Pt]`, as a batched product on a CPU wants it."""

    keys: Array
    values: Float[Array, "Pg K Pt H"]
    scales: Float[Array, "Pg K 2 Pt"] | None = None
    """For int8, what each token's key and value are multiplied by."""
    TURNED = True
    AXES = (("rows", "kv_heads", None, None),) * 3

    @classmethod
    def empty(cls, number: int, kv_heads: int, head_dim: int, size: int, kind: CacheType) -> "Columns":
        """So many pages (Pg) of zeros, of `size` tokens (Pt) each."""
        shape, dtype = (number, kv_heads, size, head_dim), STORED[kind]
        keys = (number, kv_heads, head_dim, size) if cls.TURNED else shape
        scales = jnp.zeros((number, kv_heads, 2, size), jnp.float32) if kind == "int8" else None
        return cls(jnp.zeros(keys, dtype), jnp.zeros(shape, dtype), scales)

    @property
    def size(self) -> int:
        """Pt."""
        return self.values.shape[2]

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.values.shape[1]

    def read(self, dtype: jax.typing.DTypeLike) -> tuple[Float[Array, "Pg K H Pt"], Float[Array, "Pg K Pt H"]]:
        """Keys and values of all pages, as numbers of this dtype."""
        keys, values = self.keys if self.TURNED else self.keys.swapaxes(-1, -2), self.values
        if self.scales is None:
            return keys.astype(dtype), values.astype(dtype)
        scales = self.scales
        return scaled_up(keys, scales[:, :, :1], dtype), scaled_up(values, scales[:, :, 1, :, None], dtype)

    def with_tokens(self, at: Int[Array, "B"], offsets: Int[Array, "B"], new: Tokens) -> "Columns":
        """The pages with one new token `[B ...]` in each of these places, of which those outside are left out."""
        keys = self.keys.at[at, :, :, offsets] if self.TURNED else self.keys.at[at, :, offsets]
        values = self.values.at[at, :, offsets].set(new.values, mode="drop")
        scales = self.scales
        if scales is not None:
            scales = scales.at[at, :, :, offsets].set(new.scales, mode="drop")
        return type(self)(keys.set(new.keys, mode="drop"), values, scales)


class Rows(Columns):
    """Keys and values both `[Pg K Pt H]`: a head's part of a page is one piece of memory."""

    TURNED = False


class Interleaved(NamedTuple):
    """As `jax.experimental.pallas.ops.tpu.ragged_paged_attention` reads it."""

    both: Float[Array, "Pg Pt _ H"]
    """`[Pg Pt 2K H]`: the key and then the value of each kv head."""
    AXES = (("rows", None, "kv_heads", None),)

    @classmethod
    def empty(cls, number: int, kv_heads: int, head_dim: int, size: int, kind: CacheType) -> "Interleaved":
        """So many pages (Pg) of zeros, of `size` tokens (Pt) each."""
        return cls(jnp.zeros((number, size, 2 * kv_heads, head_dim), STORED[kind]))

    @property
    def size(self) -> int:
        """Pt."""
        return self.both.shape[1]

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.both.shape[2] // 2

    def read(self, dtype: jax.typing.DTypeLike) -> tuple[Float[Array, "Pg K H Pt"], Float[Array, "Pg K Pt H"]]:
        """Keys and values of all pages, as numbers of this dtype."""
        keys, values = self.both[:, :, 0::2], self.both[:, :, 1::2]
        return keys.transpose(0, 2, 3, 1).astype(dtype), values.transpose(0, 2, 1, 3).astype(dtype)

    def with_tokens(self, at: Int[Array, "B"], offsets: Int[Array, "B"], new: Tokens) -> "Interleaved":
        """The pages with one new token `[B ...]` in each of these places, of which those outside are left out."""
        both = jnp.stack([new.keys, new.values], axis=-2)
        both = both.reshape(*both.shape[:-3], -1, both.shape[-1])
        return Interleaved(self.both.at[at, offsets].set(both, mode="drop"))


Pages = Columns | Interleaved
"""The cache of one layer: its class says how it lies."""


def placed(pages: Pages, place: Callable[[Any, Axes], Any]) -> Any:
    """What a function makes of each array of the pages and its logical axes.

    Heads that the mesh in use does not divide have no axis.
    """
    whole = pages.kv_heads % shards("kv_heads") != 0
    result: Any = pages
    for name, axes in zip(pages._fields, pages.AXES, strict=True):
        if (array := getattr(pages, name)) is not None:
            axes = tuple(None if whole and axis == "kv_heads" else axis for axis in axes)
            result = result._replace(**{name: place(array, axes)})
    return result


def kind_of(pages: Pages) -> CacheType:
    """What the pages hold keys and values in."""
    return next(kind for kind, dtype in STORED.items() if pages[0].dtype == dtype)


BLOCK_Q = 64
"""Queries of a piece that visit a page together, at most."""
NOWHERE = 1 << 30
"""A page that does not exist: what is written there is dropped."""

Host = jax.Array | np.ndarray


class Table(NamedTuple):
    """Which pages each slot holds for a kind of layer; column j has the tokens of page `first + j` of the sequence."""

    pages: Int[Array, "B Co"]
    """-1 where the slot holds none."""
    first: Int[Array, "B"]
    """0, or more where a window has left the first pages behind."""


class Gathered(NamedTuple):
    """Pages of slots, side by side: those that several slots hold as often."""

    sources: Int[Array, "s Vi"]
    """The page in the pool."""
    owners: Int[Array, "s Vi"]
    """The slot that reads it, among those of the shard."""
    starts: Int[Array, "s Vi"]
    """Position of its first token; far behind all tokens for padding."""


class Writes(NamedTuple):
    """The place of each new token."""

    pages: Int[Array, "B C"]
    """NOWHERE for tokens that nobody will read again."""
    offsets: Int[Array, "B C"]


class Copies(NamedTuple):
    """Pages that others begin as; none of them is a source and a target."""

    sources: Int[Host, "s Cp"]
    targets: Int[Host, "s Cp"]
    """NOWHERE for padding."""


class Visits(NamedTuple):
    """Which pages of earlier tokens the queries of pieces see: each visit is of a block of queries to a page."""

    blocks: Int[Host, "s Vi"]
    """The block of queries, within its row; in rising order."""
    pages: Int[Host, "s Vi"]
    starts: Int[Host, "s Vi"]
    """Position of the page's first token."""
    owners: Int[Host, "s Vi"]
    """The segment whose tokens the page holds."""
    number: Int[Host, "s"]
    """How many visits there are; the rest is padding."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotsView:
    """New tokens of each slot, one after the other: they are written, then each sees its slot's pages up to itself."""

    writes: Writes
    positions: Int[Array, "B C"]
    table: Table
    """Its pages are places in `gathered`, or of the pool."""
    gathered: Gathered | None
    """None where a kernel reads pages where they are."""
    window: int | None = field(default=None, metadata={"static": True})
    """Positions that a query sees, itself included; None for all of its sequence."""

    def by_token(self) -> "SlotsView":
        """Each token as one of a slot of its own, with the same pages in their places."""
        number = self.positions.shape[1]
        writes, positions = jax.tree.map(lambda x: x.reshape(-1, 1), (self.writes, self.positions))
        table = jax.tree.map(lambda x: jnp.repeat(x, number, axis=0), self.table)
        return SlotsView(writes, positions, table, self.gathered, self.window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PieceView:
    """Pieces of prompts, packed in rows: tokens see their segment, and the pages of its tokens before the piece."""

    ids: Int[Array, "B C"]
    """The segment of each token, 0 for padding."""
    positions: Int[Array, "B C"]
    begins: Int[Array, "B C"]
    """Position of the first token of each token's segment in the piece: those before it are in pages."""
    visits: Visits
    writes: Writes
    window: int | None = field(default=None, metadata={"static": True})
    """Positions that a query sees, itself included; None for all of its sequence."""
    pictures: Int[Array, "B C"] | None = None
    """As in `Segments`: pictures are whole in a piece."""
    ahead: int = field(default=0, metadata={"static": True})
    """As in `Segments`."""

    @property
    def segments(self) -> Segments:
        """The view within the piece, where positions count from a segment's first token."""
        positions = self.positions - self.begins
        return Segments(self.ids, positions, window=self.window, pictures=self.pictures, ahead=self.ahead)


CachedView = SlotsView | PieceView


def block_of(length: int) -> int:
    """Q: queries of a piece of this length, a power of two, that visit a page together."""
    return min(BLOCK_Q, length)


def of_slots(
    q: Float[Array, "B C N H"], pages: Pages, view: SlotsView, *, scale: float, softcap: float | None
) -> Mixed:
    """Attention of the queries of each slot over gathered pages; slots without pages mix nothing."""
    queries, origin = grouped(scaled(q, scale), pages.kv_heads), view.gathered
    assert origin is not None, "pages that are read side by side come with the places they were gathered from"
    owners, starts = origin.owners[0], origin.starts[0]
    # Of each page the slot sees these tokens: comparing positions here and not in the products is once for all layers.
    ends = (view.positions[owners] + 1 - starts[:, None])[..., None]
    at = jnp.arange(pages.size)
    seen = at < ends
    if view.window is not None:
        seen &= at >= ends - view.window
    partials = _page_partials(queries[owners], seen, *pages.read(q.dtype), softcap)
    # Each page has a result of its own, and those of a slot are summed in their order: company changes no digit.
    columns = view.table.pages
    peaks, masses, sums = (x[jnp.maximum(columns, 0)] for x in partials)
    peaks = jnp.where(columns[..., None, None, None] >= 0, peaks, HIDDEN)
    peak = jnp.max(peaks, axis=1)
    share = jnp.exp(peaks - peak[:, None])
    # As products: a CPU's library sums a middle axis of large arrays a hundred times slower.
    mass, mixed = jnp.einsum("BcKJQ,BcKJQ->BKJQ", share, masses), jnp.einsum("BcKJQ,BcKJQH->BKJQH", share, sums)
    return normalised(peak, mass, mixed, q.dtype)


def gathered(pages: Pages, sources: Int[Array, "s Vi"]) -> Pages:
    """Some pages, side by side."""
    return jax.tree.map(lambda x: x[sources[0]], pages)


def brought_back(pages: Pages, taken: Pages, places: Int[Array, "B c"], sources: Int[Array, "s Vi"]) -> Pages:
    """The pool with some of the gathered pages: those at `places`, where these are not negative."""
    places = places.reshape(-1)

    def put_page(index: jax.Array, pages: Pages) -> Pages:
        place = jnp.maximum(places[index], 0)
        target = sources[0, place]

        # Page by page: a scatter of so large pieces is slow on a CPU.
        def put(all: jax.Array, part: jax.Array) -> jax.Array:
            return all.at[target].set(jnp.where(places[index] >= 0, part[place], all[target]))

        return jax.tree.map(put, pages, taken)

    return jax.lax.fori_loop(0, len(places), put_page, pages)


def before_piece(
    q: Float[Array, "B C N H"], pages: Pages, view: PieceView, *, scale: float, softcap: float | None
) -> Mixed:
    """Attention of the queries of one piece to pages of tokens before it; the log-sum is HIDDEN where none are."""
    (_, length, heads, dim), size, visits = q.shape, pages.size, view.visits
    width = block_of(length)
    blocks = length // width
    queries = grouped(scaled(q, scale).reshape(blocks, width, heads, dim), pages.kv_heads)
    owners, positions, begins = (x.reshape(blocks, width) for x in (view.ids, view.positions, view.begins))

    def visit(index: jax.Array, so_far: tuple) -> tuple:
        block, page, start, owner = (x[0, index] for x in visits[:4])
        at = start + jnp.arange(size)
        seen = (at < begins[block][:, None]) & (owners[block] == owner)[:, None]
        if view.window is not None:
            seen &= at > positions[block][:, None] - view.window
        keys, values = jax.tree.map(lambda x: x[page][None], pages).read(q.dtype)
        part = _page_partials(queries[block][None], seen[None], keys, values, softcap)
        # Merged with what the block has met before: both relative to the higher peak.
        old, part = [x[block] for x in so_far], [x[0] for x in part]
        peak = jnp.maximum(old[0], part[0])
        shares = [jnp.exp(x[0] - peak) for x in (old, part)]
        mass = sum(share * x[1] for share, x in zip(shares, (old, part), strict=True))
        sums = sum(share[..., None] * x[2] for share, x in zip(shares, (old, part), strict=True))
        return tuple(all.at[block].set(x) for all, x in zip(so_far, (peak, mass, sums), strict=True))

    shape = queries.shape[:-1]
    start = (jnp.full(shape, HIDDEN), jnp.zeros(shape), jnp.zeros(queries.shape))
    peak, mass, sums = jax.lax.fori_loop(0, visits.number[0], visit, start)
    mixed, lse = normalised(peak, mass, sums, q.dtype)
    return mixed.reshape(1, length, heads, dim), lse.reshape(1, length, heads)


def copied(pages: Pages, copies: Copies) -> Pages:
    """The pages with copies of some in the places of others."""
    sources, targets = copies.sources[0], copies.targets[0]
    return jax.tree.map(lambda x: x.at[targets].set(x.at[sources].get(mode="clip"), mode="drop"), pages)


def _page_partials(
    queries: Float[Array, "g K J Q H"],
    seen: Bool[Array, "g Q Pt"],
    keys: Float[Array, "g K H Pt"],
    values: Float[Array, "g K Pt H"],
    softcap: float | None,
) -> tuple[Float[Array, "g K J Q"], Float[Array, "g K J Q"], Float[Array, "g K J Q H"]]:
    """What some queries find in a page each: the highest score, the mass relative to it, and the sum of values."""
    number, kv_heads, _, _, dim = queries.shape
    flat = queries.reshape(number, kv_heads, -1, dim)
    scores = jnp.einsum("gKQH,gKHp->gKQp", flat, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(*queries.shape[:-1], -1)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, None, None], scores, HIDDEN)
    peak = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - peak[..., None])
    flat = weights.astype(values.dtype).reshape(number, kv_heads, -1, weights.shape[-1])
    sums = jnp.einsum("gKQp,gKpH->gKQH", flat, values, preferred_element_type=jnp.float32)
    return peak, jnp.sum(weights, axis=-1), sums.reshape(queries.shape)


def normalised(peak: jax.Array, mass: jax.Array, sums: jax.Array, dtype: jax.typing.DTypeLike) -> Mixed:
    """The mean of the values and the log-sum-exp; where nothing was seen, zeros and HIDDEN."""
    any_seen = peak > HIDDEN
    mass = jnp.where(any_seen, mass, 1.0)
    mixed = jnp.where(any_seen[..., None], sums / mass[..., None], 0.0).astype(dtype)
    return ungrouped(mixed), ungrouped((peak + jnp.log(mass))[..., None])[..., 0]
