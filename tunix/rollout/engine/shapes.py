"""The closed set of shapes that an engine uses, so that compiling ends.

Slots are decoded all together, or NARROW and NARROW^2 times fewer where only the last requests are left. Prompts are
computed in long or short pieces. What a sequence holds is counted in pages; a layer with a window keeps those of
its window. `Engine.warm` compiles all of these shapes: nine programs at most.

`within` has as many slots and pages as there are bytes for. Where a dispatch gathers the pages of its slots, each page
counts twice; where a kernel reads them in place, once.

Axes: Pt tokens of a page, Co columns of a page table, Vi visits, St decode steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.config import CacheType
from tunix.errors import UserError
from tunix.models.attention.decoding import BY_NAME
from tunix.models.attention.pages import SCALE_BYTES, STORED, block_of
from tunix.models.config import DELTANET, DecoderConfig, LayerKind, VisionConfig
from tunix.models.deltanet import SlotStates

NARROW = 8
"""Factor between one number of slots that is decoded at a time and the next smaller one."""
WIDTHS = 3
"""How many of these numbers there are at most, no more than LEVELS."""
FEW = 4
"""Slots up to which there is no smaller number: a program for one of them saves less than it takes to compile."""
FEWER = 4
"""Factor between one number of pages and the next smaller one, where requests need few."""
LEVELS = 3
"""How many numbers of pages a dispatch of all slots may read; one less for each smaller number of slots."""
SHORTER = 8
"""Factor between the two lengths of pieces."""
FULL = 0.75
"""Share of a long piece that is filled at least; else short ones are taken."""
PAGE = 128
"""Pt unless an engine is told another."""


def usual_slots(platform: str) -> int:
    """Slots that fill a device of this platform, e.g. 64 for `cpu`: more only cost memory."""
    return 64 if platform == "cpu" else 256


@dataclass(frozen=True)
class Sizes:
    """The shapes of one engine."""

    slots: int
    """Requests that are answered at a time; the shards divide them."""
    max_length: int
    """Tokens of prompt and completion at most."""
    piece: int
    """Tokens that a shard computes of prompts at a time, at most, e.g. 2048; a power of two."""
    page: int
    """Pt, e.g. 128."""
    steps: int
    """St: tokens that a slot samples in one dispatch at most."""
    ahead: int
    """Dispatches that are sent before the last one is read, e.g. 1."""
    speculate: int
    """Draft tokens of each step, which are checked in one pass (`lookup.py`, `DraftHead`); 0 for none."""
    windows: tuple[int | None, ...]
    """Window of each kind of layer; None where it sees everything."""
    pages: tuple[int, ...]
    """Pages of each kind of layer, in each shard."""
    shards: int
    """Into how many shards the slots are split: each has its own pages, and computes its own pieces."""
    cache_dtype: CacheType
    """What keys and values are kept in."""
    reader: str = "gathered"
    """Who reads pages while slots decode (`models/attention/decoding.py`)."""
    chunk: int | None = None
    """Where layers have states, tokens at whose multiples each sequence begins in a piece; None where none has."""
    mtp: bool = False
    """Whether the model's own head drafts: it keeps what it knows of a token, with the next one, under the token's
    place, so that a slot also writes there what it keeps of the last token of its prompt."""
    vision: VisionConfig | None = None
    """The tower, whose pictures are each computed in one piece; None where the model sees none."""

    def of_requests(self, tokens: Sequence[int]) -> "Sizes":
        """The shapes for requests that take so many tokens each: fewer slots and pages where they need no more."""
        slots = self.width(min(-(-len(tokens) // self.shards), self.slots_of_shard)) // self.shards
        longest = sorted((min(number, self.max_length) for number in tokens), reverse=True)[:slots]
        # One more for each: a slot may want the next page early, and prompts are kept for requests that come later.
        need, pages = sum(-(-number // self.page) + 1 for number in longest), []
        for number, most, window in zip(self.pages, self.most_pages(slots), self.windows, strict=True):
            pages.append(min(number, most))
            while window is None and pages[-1] // FEWER >= need:
                pages[-1] //= FEWER
        return replace(self, slots=slots * self.shards, pages=tuple(pages))

    def covers(self, other: "Sizes") -> bool:
        """Whether there are as many slots and pages as in these shapes of the same engine."""
        return self.slots >= other.slots and all(x >= y for x, y in zip(self.pages, other.pages, strict=True))

    def most_pages(self, slots: int) -> tuple[int, ...]:
        """Pages of each kind that so many slots hold at most; of a layer with a window they are never fewer. A sequence
        that is computed in pieces holds the window before a piece and that at its end."""
        return tuple(self.columns(kind) * (slots + (window is not None)) for kind, window in enumerate(self.windows))

    @property
    def in_place(self) -> bool:
        """Whether dispatches read pages where they are; else they gather them, and each is there twice."""
        return BY_NAME[self.reader].in_place

    @property
    def slots_of_shard(self) -> int:
        """Slots of each shard; those of a shard lie side by side."""
        return self.slots // self.shards

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of slots that are decoded at a time, falling."""
        widths = [self.slots_of_shard]
        while len(widths) < WIDTHS and widths[-1] > FEW:
            widths.append(-(-widths[-1] // NARROW))
        return tuple(self.shards * width for width in widths)

    def width(self, most: int) -> int:
        """The number of slots to decode where no shard has more than `most` at work."""
        return next(width for width in reversed(self.widths) if width >= most * self.shards)

    def gathered(self, width: int) -> list[tuple[int, ...]]:
        """Numbers of pages, of each kind of layer, that a dispatch of so many slots reads in a shard, from what they
        can hold at most down to one page each by equal factors. One entry stands for all where they are read in their
        places."""
        if self.in_place:
            return [self.pages]
        width //= self.shards
        most = [min(width * self.columns(kind), pages) for kind, pages in enumerate(self.pages)]
        levels = LEVELS - self.widths.index(width * self.shards)
        kinds, numbers = list(zip(most, self.windows, strict=True)), list[tuple[int, ...]]()
        for level in range(levels):
            part = level / max(levels - 1, 1)
            numbers.append(
                tuple(
                    pages if window is not None else round(pages * (min(width, pages) / pages) ** part)
                    for pages, window in kinds
                )
            )
        return list(dict.fromkeys(numbers))

    @property
    def pieces(self) -> tuple[int, ...]:
        """Tokens of a piece, falling."""
        soft = self.vision.tokens if self.vision else 1
        return tuple(
            dict.fromkeys((self.piece, max(self.piece // SHORTER, self.chunk or 1, 1 << (soft - 1).bit_length())))
        )

    def piece_of(self, tokens: int) -> int:
        """The length of the next piece where so many tokens of a shard wait."""
        return next((length for length in self.pieces if FULL * length <= tokens), self.pieces[-1])

    def columns(self, kind: int) -> int:
        """Co of a kind of layer: pages that a slot holds at most while it decodes, of everything, or of the window
        before a dispatch, and of all tokens that may be sampled before one is read."""
        whole, window, most = -(-self.max_length // self.page), self.windows[kind], (1 + self.ahead) * self.steps
        return whole if window is None else min(whole, -(-(window + most) // self.page) + 1)

    def first_seen(self, kind: int, position: int) -> int:
        """Index within its sequence of the first page that a token at a position sees, in a kind of layer."""
        window = self.windows[kind]
        return 0 if window is None else max(0, position - window + 1) // self.page

    def visits(self, piece: int, kind: int) -> int:
        """Vi for a piece: each of its blocks may see all pages of one sequence."""
        return piece // block_of(piece) * min(-(-self.max_length // self.page), self.columns(kind) + 1)


MOST_SLOTS = 1024
"""Slots of a shard at most: with so many, reading the weights is a small part of a token's time."""
MOST_NUMBERS = 2**31
"""Numbers of the keys of a layer's pages on a device: kernels count them in 32 bits."""


class NoRoom(UserError):
    """There is no room for one request."""

    def __init__(self, message: str, need: float):
        """`need` bytes for keys and values on each device would be enough."""
        super().__init__(message)
        self.need = need


def page_bytes(config: DecoderConfig, mesh: Mesh, sizes: Sizes) -> tuple[int, ...]:
    """Bytes of a page (Pt) in all layers of each kind with pages, on each device."""
    number, scale = jnp.dtype(STORED[sizes.cache_dtype]).itemsize, SCALE_BYTES if sizes.cache_dtype == "int8" else 0
    return tuple(
        2 * _heads(kind, mesh) * sizes.page * (kind.head_dim * number + scale) * config.cached_kinds.count(kind)
        for kind in config.paged_kinds
    )


def state_bytes(config: DecoderConfig, mesh: Mesh) -> int:
    """Bytes of the states of a slot in all layers that have some, on each device, at most; 0 where none has."""
    delta, tensor = config.delta, mesh.shape["tensor"]
    if delta is None:
        return 0
    held = jax.eval_shape(lambda: SlotStates.empty(delta, 1, "float32"))
    each = sum(x.size * x.dtype.itemsize for x in held)
    split = tensor if delta.key_heads % tensor == 0 else 1
    return each // split * len(config.layers_with(DELTANET))


def _heads(kind: LayerKind, mesh: Mesh) -> int:
    """Kv heads of which a device has the keys and values."""
    tensor = mesh.shape["tensor"]
    return kind.kv_heads // (tensor if kind.kv_heads % tensor == 0 else 1)


def within(sizes: Sizes, config: DecoderConfig, mesh: Mesh, slots: int | None, room: float | None) -> Sizes:
    """The shapes with as many slots and pages as there is room for on a mesh that samples.

    Args:
        slots: as the user wants them; None for as many as have half of the longest sequence each, beside the whole
            window of layers with one, and no more than this kind of device can use.
        room: bytes for keys and values on each device; None where that is not known, and all that slots can need
            is taken.

    Raises:
        NoRoom: there is no room for one request.
    """
    # A dispatch takes those of its slots out, and has them before and after each token where drafts are checked.
    states = (2 + (2 + sizes.speculate if sizes.speculate else 0)) * state_bytes(config, mesh)
    each = [number * (1 if sizes.in_place else 2) for number in page_bytes(config, mesh, sizes)]
    near = [kind for kind, window in enumerate(sizes.windows) if window is not None]
    whole = [kind for kind, window in enumerate(sizes.windows) if window is None]
    local, longest = (sum(sizes.columns(kind) * each[kind] for kind in kinds) for kinds in (near, whole))
    if slots is None and room is not None:
        # Windows are never short, and a slot more has one (`Sizes.most_pages`).
        slots = sizes.shards * max(1, min(int((room - local) / (local + states + longest / 2)), MOST_SLOTS))
    slots = -(-(slots or usual_slots(mesh.devices.flat[0].platform)) // sizes.shards) * sizes.shards
    counted = MOST_NUMBERS // max(_heads(kind, mesh) * sizes.page * kind.head_dim for kind in config.paged_kinds)
    # Layers with a window are never short of pages: slots give way (`Sizes.most_pages`).
    widest = max((sizes.columns(kind) for kind in near), default=1)
    slots = min(slots, sizes.shards * max(1, counted // widest - 1))
    most = tuple(min(number, counted) for number in sizes.most_pages(slots // sizes.shards))
    if room is None:
        return replace(sizes, slots=slots, pages=most)
    taken = sum(most[kind] * each[kind] for kind in near) + slots // sizes.shards * states
    pages = int((room - taken) / max(sum(each[kind] for kind in whole), 1))
    if room < taken or any(pages < sizes.columns(kind) for kind in whole):
        need = taken + longest
        raise NoRoom(
            f"rollout.memory: {max(room, 0) / 1e9:.3g} GB are left for keys and values on each device, and one request "
            f"of {sizes.max_length} tokens beside {slots} slot(s) takes {need / 1e9:.3g} GB; allow more memory, fewer "
            "rollout.slots, a larger rollout.mesh.tensor or a shorter data.max_length",
            float(need),
        )
    pages = tuple(min(number, pages) if kind in whole else number for kind, number in enumerate(most))
    return replace(sizes, slots=slots, pages=pages)
