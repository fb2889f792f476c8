"""Prompts are computed in pieces: tokens of many sequences, packed side by side, and long prompts piece after piece.

A job is the computation of some tokens of a slot: a prompt, an environment's answer, the tokens of a request that had
lost its pages, or the last token of a prompt whose pages are there already. Jobs of a shard are packed in their order
into its row of a piece; all tokens of a row have one adapter.

Axes: C tokens at a time, Sl slots, T time, s shards of the rows.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tunix.models.attention.pages import NOWHERE, Copies, Visits, block_of
from tunix.rollout.engine.experts import Known
from tunix.rollout.engine.page_tables import Copy, Held, PageTables
from tunix.types import Pictures, TokenScores

FIRST, CONTINUES = -1, -2
"""In `Inputs.sources`: a chunk with the first tokens of a sequence, and one that continues the chunk before it."""
COPIES = 32
"""Pages of each shard that are copied together: what they take is there once more meanwhile, of a layer at a time."""


@dataclass
class Job:
    """Tokens to compute for a slot."""

    slot: int
    tokens: np.ndarray
    """`[T]`, those that are left."""
    start: int
    """Position of the first of them; what comes before is in pages."""
    adapter: int = 0
    """Number of the request's adapter, from 1; 0 for none."""
    experts: list[Known] = field(default_factory=list)
    """What the pieces that computed the tokens tell about their experts."""
    followers: list[int] = field(default_factory=list)
    """Slots whose sequence begins with this one, and which start when it is computed."""
    copies: list[Copy] = field(default_factory=list)
    """Pages to copy when the job is done."""
    reads: tuple[Held, ...] | None = None
    """The pages of the tokens before; None for those that the slot holds."""
    pictures: Pictures | None = None
    """Those of the whole sequence, from its first token on; None without any."""
    scores: TokenScores | None = None
    """Receives log-probs of the prompt's tokens; None where nobody asks for them."""

    def whole(self, number: int, room: int) -> int:
        """So many of its next tokens, or fewer: no picture is cut, and there are no more of them than there is room."""
        if self.pictures is None:
            return number
        at, ends = self.pictures.places[self.start : self.start + number], np.cumsum(np.prod(self.pictures.grids, -1))
        if not np.any(at):
            return number
        first, last = np.searchsorted(ends, (np.min(at[at > 0]), np.max(at)))
        stop = min(first + room, last + (ends[last] == np.max(at)))
        return number if stop > last else int(np.argmax(at > (ends[stop - 1] if stop else 0)))


class Inputs(NamedTuple):
    """A piece as the device reads it; arrays of layers are one for each kind."""

    tokens: np.ndarray
    """`[s C]`."""
    positions: np.ndarray
    """`[s C]` of each token in its sequence."""
    ids: np.ndarray
    """`[s C]` the segment of each token, from 1; 0 for padding."""
    begins: np.ndarray
    """`[s C]` position of the first token of each token's segment."""
    visits: tuple[Visits, ...]
    """What the tokens see of earlier ones."""
    writes: tuple[np.ndarray, ...]
    """`[s C]` the page that each token is written to; NOWHERE for tokens that nobody will read again."""
    last: np.ndarray
    """`[Sl]` the token, within the row of its shard, from whose state a slot samples next; -1 to leave the slot."""
    adapters: np.ndarray
    """`[s]` the adapter of each row."""
    sources: np.ndarray | None
    """`[s c]`, with the next where sequences begin and end, as in `models.deltanet.PieceStates`; None where no layer
    has states."""
    ends: np.ndarray | None
    """`[Sl]`."""
    targets: np.ndarray | None
    """`[s C]` the token after each, whose log-prob is computed; 0 where nobody asks, None where nobody asks of any."""
    before: np.ndarray | None
    """`[s C]` the page of the token before each, where a head that drafts keeps what it knows of both; NOWHERE for the
    first of a sequence, None where no head drafts."""
    before_rope: np.ndarray | None
    """`[s C 3]` where rope turns that token to; None where that is its place, or where no head drafts."""
    pictures: Pictures | None
    """Those of each row, all of them whole; places for rope are also of text. None where the model sees none."""


class Piece:
    """A piece that is being packed."""

    def __init__(self, page_tables: PageTables, length: int):
        """An empty one with so many tokens a shard (C)."""
        self.page_tables, sizes = page_tables, page_tables.sizes
        self.sizes, self.length, shape, kinds = sizes, length, (sizes.shards, length), range(len(sizes.windows))
        self.parts: list[tuple[Job, int, int, int, int]] = []
        """What of jobs is in it: row, column of the first token, how many, and the first one's position."""
        self._filled = np.zeros(sizes.shards, np.int32)
        tokens, positions, ids, begins = np.zeros((4, *shape), np.int32)
        visits = []
        for kind in kinds:
            blocks, pages, starts, owners = np.zeros((4, sizes.shards, sizes.visits(length, kind)), np.int32)
            visits.append(Visits(blocks, pages, starts, owners, np.zeros(sizes.shards, np.int32)))
        writes = tuple(np.full(shape, NOWHERE, np.int32) for _ in kinds)
        last, adapters = np.full(sizes.slots, -1, np.int32), np.zeros(sizes.shards, np.int32)
        sources = ends = pictures = rope = before = before_rope = None
        if sizes.chunk is not None:
            sources, ends = np.full((sizes.shards, length // sizes.chunk), CONTINUES, np.int32), last.copy()
        if sizes.vision is not None:  # room for as many of the largest pictures as a piece has at most
            number = length // sizes.vision.tokens
            pixels = np.zeros((sizes.shards, number, *sizes.vision.shape), np.uint8)
            rope = np.zeros((*shape, 3), np.int32) if sizes.vision.any_shape else None
            pictures = Pictures(pixels, np.zeros((sizes.shards, number, 2), np.int32), np.zeros(shape, np.int32), rope)
        if sizes.mtp:
            before, before_rope = np.full(shape, NOWHERE, np.int32), None if rope is None else rope.copy()
        self.inputs = Inputs(
            tokens,
            positions,
            ids,
            begins,
            tuple(visits),
            writes,
            last,
            adapters,
            sources,
            ends,
            None,
            before,
            before_rope,
            pictures,
        )

    def fill(self, row: int, jobs: deque[Job]) -> None:
        """Packs jobs into a row until it is full; those that end here leave the queue."""
        inputs, sizes, copied = self.inputs, self.sizes, 0
        chunk, seen = sizes.chunk or 1, inputs.pictures
        longest = max((window for window in sizes.windows if window is not None), default=0)
        while jobs and self._filled[row] < self.length:
            job, begin = jobs[0], int(self._filled[row])  # a multiple of the chunk, where there is one
            if begin and job.adapter != inputs.adapters[row]:
                break
            room = 0 if seen is None else int(np.sum(seen.grids[row, :, 0] == 0))  # for more pictures
            number = job.whole(min(len(job.tokens), self.length - begin), room)
            if not number:
                break
            # A job that is alone always has room: before it is queued no slot holds more than a window.
            last, copied = job.start + number, copied + len(job.followers)
            if begin and not self.page_tables.covers(job.slot, max(job.start, last - longest), last, copied):
                break
            # What the tokens see of earlier ones: each block of them a page after the other.
            size, reads = block_of(self.length), self.page_tables.held(job.slot) if job.reads is None else job.reads
            blocks, earlier = np.arange(begin // size, (begin + number - 1) // size + 1, dtype=np.int32), []
            for kind, held in enumerate(reads):
                first = sizes.first_seen(kind, job.start)
                earlier.append([index for index in held if first <= index and index * sizes.page < job.start])
            if any(
                visits.number[row] + len(indices) * len(blocks) > visits.blocks.shape[1]
                for indices, visits in zip(earlier, inputs.visits, strict=True)
            ):
                break
            for held, indices, visits in zip(reads, earlier, inputs.visits, strict=True):
                pages = np.tile(np.array([held[index] for index in indices], np.int32), len(blocks))
                visit = np.s_[row, visits.number[row] : visits.number[row] + len(pages)]
                visits.blocks[visit], visits.pages[visit] = np.repeat(blocks, len(indices)), pages
                visits.starts[visit] = np.tile(np.array(indices, np.int32) * sizes.page, len(blocks))
                visits.owners[visit] = len(self.parts) + 1
                visits.number[row] += len(pages)
            at, positions = np.s_[row, begin : begin + number], np.arange(job.start, last)
            inputs.tokens[at], inputs.positions[at] = job.tokens[:number], positions
            inputs.ids[at], inputs.begins[at] = len(self.parts) + 1, job.start
            inputs.adapters[row] = job.adapter
            if job.scores is not None:
                targets = np.zeros_like(inputs.tokens) if inputs.targets is None else inputs.targets
                following = job.tokens[1 : number + 1]
                targets[row, begin : begin + len(following)] = following
                self.inputs = inputs = inputs._replace(targets=targets)
            for kind, window in enumerate(sizes.windows if job.reads is None else ()):
                # Tokens before the first one are not seen again.
                first = job.start if window is None else max(job.start, last - window)
                if window is not None:
                    self.page_tables.cover(job.slot, first, last, windows=True)
                held, lowest = self.page_tables.held(job.slot)[kind], first // sizes.page
                pages = np.array([held[index] for index in range(lowest, -(-last // sizes.page))], np.int32)
                written = np.s_[row, begin + first - job.start : begin + number]
                inputs.writes[kind][written] = pages[np.arange(first, last) // sizes.page - lowest]
            if inputs.before is not None:
                held = self.page_tables.held(job.slot)[sizes.windows.index(None)]
                pages = [held[(place - 1) // sizes.page] if place else NOWHERE for place in positions.tolist()]
                inputs.before[at] = pages
            if inputs.sources is not None and inputs.ends is not None:
                inputs.sources[row, begin // chunk] = job.slot % sizes.slots_of_shard if job.start else FIRST
                inputs.ends[job.slot] = begin + number - 1
            if seen is not None and seen.rope is not None:
                rope = None if job.pictures is None else job.pictures.rope
                for turned, places in ((seen.rope, positions), (inputs.before_rope, np.maximum(positions - 1, 0))):
                    if turned is not None:
                        turned[at] = places[:, None] if rope is None else rope[places]
            if seen is not None and job.pictures is not None:
                pictures, used = job.pictures.within(job.start, last), seen.number - room
                free = np.s_[row, used : used + pictures.number]
                seen.places[at] = np.where(pictures.places > 0, pictures.places + np.max(seen.places[row]), 0)
                seen.pixels[free], seen.grids[free] = pictures.pixels, pictures.grids
            self.parts.append((job, row, begin, number, job.start))
            job.tokens, job.start = job.tokens[number:], last
            self._filled[row] = -(-(begin + number) // chunk) * chunk
            if not len(job.tokens):
                jobs.popleft()

    def finish(self) -> tuple[list[Job], list[tuple[Copies, ...]]]:
        """Ends the packing: says which slots sample from the jobs that end here, and lets pages go. Returns these jobs,
        and what is copied when the piece is computed: for each kind of layer, up to COPIES pages of each shard at a
        time."""
        copies: list[list[list[Copy]]] = [[[] for _ in range(self.sizes.shards)] for _ in self.sizes.windows]
        done = [part for part in self.parts if not len(part[0].tokens)]
        for job, row, begin, number, _ in done:
            slots = [job.slot, *job.followers]
            self.inputs.last[slots] = begin + number - 1
            if self.inputs.ends is not None:
                self.inputs.ends[slots] = begin + number - 1
            held = self.page_tables.held(job.slot)
            for slot in job.followers:  # they get their pages of layers with a window
                job.copies += self.page_tables.adopt(slot, held, job.start, windows=True)
            for copy in job.copies:
                copies[copy.kind][row].append(copy)
        # Only now: before, pages could be given away within the piece, and be written to before it reads them. What the
        # last token sees stays: requests that come later compute it again.
        for job, *_ in self.parts:
            for slot in (job.slot, *job.followers):
                self.page_tables.leave(slot, job.start - 1)
        return [job for job, *_ in done], copy_calls(copies)


def copy_calls(copies: Sequence[Sequence[Sequence[Copy]]]) -> list[tuple[Copies, ...]]:
    """What calls of `copy_pages` copy, for each kind of layer and shard: up to COPIES pages at a time."""
    most = max((len(of_shard) for of_kind in copies for of_shard in of_kind), default=0)
    return [
        tuple(copies_of([of_shard[start : start + COPIES] for of_shard in of_kind]) for of_kind in copies)
        for start in range(0, most, COPIES)
    ]


def copies_of(rows: Sequence[Sequence[Copy]]) -> Copies:
    """The copies `[s COPIES]` of one kind of layer in each shard."""
    copies = Copies(np.zeros((len(rows), COPIES), np.int32), np.full((len(rows), COPIES), NOWHERE, np.int32))
    for row, new in enumerate(rows):
        copies.sources[row, : len(new)] = [copy.source for copy in new]
        copies.targets[row, : len(new)] = [copy.target for copy in new]
    return copies
