"""Prompts are computed in pieces: tokens of many sequences, packed side by side, and long prompts piece after piece.

A job is the computation of some tokens of a slot: a prompt, an environment's answer, the tokens of a request that had
lost its pages, or the last token of a prompt whose pages are there already. Jobs of a shard are packed in their order
into its row of a piece; all tokens of a row have one adapter.

Axes: C tokens at a time, Sl slots, T time, Vi visits, s shards of the rows, Pi pictures,
Pp patches, Pr rows of a patch, Pc columns of a patch, Rb colours.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from tunix.models.attention.pages import NOWHERE, Copies, Visits, block_of
from tunix.rollout.engine.experts import Known, Recorded
from tunix.rollout.engine.page_tables import Copy, Held, PageTables
from tunix.rollout.engine.sampling import Transform
from tunix.types import Pictures, Sampling

FIRST, CONTINUES = -1, -2
"""In `States.sources`: a chunk with the first tokens of a sequence, and one that continues the chunk before it."""
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
    scored: Sampling | None = None
    """Settings under which log-probs of the tokens are wanted; None where they are not."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """Log-probs of the tokens computed so far, but for the first."""
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
    states: "States | None"
    """What layers with states read; None where there are none."""
    seen: "Seen | None"
    """The pictures among the tokens; None where the model sees none."""


class States(NamedTuple):
    """Where the sequences of a piece begin and end; see `models.deltanet.PieceStates`."""

    sources: np.ndarray
    """`[s c]`."""
    ends: np.ndarray
    """`[Sl]`."""


class Seen(NamedTuple):
    """The pictures of a piece, as `types.Pictures`; each is whole in it."""

    pixels: np.ndarray
    """`[s Pi Pp Pr Pc Rb]` uint8."""
    grids: np.ndarray
    """`[s Pi 2]`."""
    places: np.ndarray
    """`[s C]`."""
    rope: np.ndarray | None
    """`[s C 3]`, also of text; None where rope turns tokens to their places."""


class Part(NamedTuple):
    """What of a job is in a piece."""

    job: Job
    row: int
    begin: int
    """Column of its first token."""
    tokens: np.ndarray
    position: int
    """Position of its first token in the sequence."""


class Piece:
    """A piece that is being packed."""

    def __init__(self, page_tables: PageTables, length: int):
        """An empty one with so many tokens a shard (C)."""
        self.page_tables, sizes = page_tables, page_tables.sizes
        self.sizes, self.length, shape, kinds = sizes, length, (sizes.shards, length), range(len(sizes.windows))
        self.parts: list[Part] = []
        self.done: list[Job] = []
        self._filled = np.zeros(sizes.shards, np.int32)
        self._longest = max((window for window in sizes.windows if window is not None), default=0)
        tokens, positions, ids, begins = np.zeros((4, *shape), np.int32)

        def none(number: int) -> Visits:
            blocks, pages, starts, owners = np.zeros((4, sizes.shards, number), np.int32)
            return Visits(blocks, pages, starts, owners, np.zeros(sizes.shards, np.int32))

        visits = tuple(none(sizes.visits(length, kind)) for kind in kinds)
        writes = tuple(np.full(shape, NOWHERE, np.int32) for _ in kinds)
        last, adapters = np.full(sizes.slots, -1, np.int32), np.zeros(sizes.shards, np.int32)
        states = None
        if sizes.chunk is not None:
            sources = np.full((sizes.shards, length // sizes.chunk), CONTINUES, np.int32)
            states = States(sources, np.full(sizes.slots, -1, np.int32))
        seen = None
        if sizes.vision is not None:  # room for as many of the largest pictures as a piece has at most
            number = length // sizes.vision.tokens
            pixels = np.zeros((sizes.shards, number, *sizes.vision.shape), np.uint8)
            rope = np.zeros((*shape, 3), np.int32) if sizes.vision.any_shape else None
            seen = Seen(pixels, np.zeros((sizes.shards, number, 2), np.int32), np.zeros(shape, np.int32), rope)
        self.inputs = Inputs(tokens, positions, ids, begins, visits, writes, last, adapters, states, seen)
        self._copies: list[list[list[Copy]]] = [[[] for _ in range(sizes.shards)] for _ in kinds]

    def fill(self, row: int, jobs: deque[Job]) -> None:
        """Packs jobs into a row until it is full; those that end here leave the queue."""
        copied = 0
        while jobs and self._filled[row] < self.length:
            job, begin = jobs[0], int(self._filled[row])  # a multiple of the chunk, where there is one
            if begin and job.adapter != self.inputs.adapters[row]:
                break
            number = job.whole(min(len(job.tokens), self.length - begin), self._room(row))
            if not number:
                break
            # A job that is alone always has room: before it is queued no slot holds more than a window.
            last, copied = job.start + number, copied + len(job.followers)
            if begin and not self.page_tables.covers(job.slot, max(job.start, last - self._longest), last, copied):
                break
            if not self._visit(row, begin, number, job):
                break
            self._add(row, begin, number, job)
            if not len(job.tokens):
                self.done.append(jobs.popleft())

    def finish(self, job: Job, copies: Sequence[Copy]) -> None:
        """The slots that sample from the last token of a job that ends here, and the pages copied for them."""
        row, inputs = self.page_tables.shard(job.slot), self.inputs
        (part,) = [part for part in self.parts if part.job is job]
        slots, end = [job.slot, *job.followers], part.begin + len(part.tokens) - 1
        inputs.last[slots] = end
        if inputs.states is not None:
            inputs.states.ends[slots] = end
        for copy in (*job.copies, *copies):
            self._copies[copy.kind][row].append(copy)

    def copies(self) -> Iterator[tuple[Copies, ...]]:
        """What is copied when the piece is computed: for each kind of layer, up to COPIES pages of each shard."""
        most = max((len(copies) for of_kind in self._copies for copies in of_kind), default=0)
        for start in range(0, most, COPIES):
            yield tuple(copies_of([copies[start : start + COPIES] for copies in of_kind]) for of_kind in self._copies)

    def leave(self) -> None:
        """Lets pages go that nobody reads after this piece, when it is packed and those that end in it have finished.

        Before, they could be given away within it, and be written to before it reads them. What the last token sees
        stays: requests that come later compute it again.
        """
        for job in [part.job for part in self.parts]:
            self.page_tables.leave(job.slot, job.start - 1)

    def record(self, experts: jax.Array | None) -> list[Recorded]:
        """Notes for each job where the experts `[s C L k]` of its tokens are; returns what is still to be read."""
        if experts is None:
            return []
        recorded = Recorded(experts)
        for part in self.parts:
            part.job.experts.append(Known(recorded, part.row, part.begin, len(part.tokens), part.position))
        return [recorded]

    def targets(self) -> tuple[np.ndarray, Transform]:
        """`[s C]` the token after each one that is scored, and the settings of each."""
        targets = np.zeros_like(self.inputs.tokens)
        plain = Sampling()
        settings = [[plain] * self.length for _ in range(self.sizes.shards)]
        for job, row, begin, tokens, _ in self.parts:
            if job.scored is not None:
                after = np.append(tokens[1:], job.tokens[:1])
                targets[row, begin : begin + len(after)] = after
                settings[row][begin : begin + len(tokens)] = [job.scored] * len(tokens)
        rows = [Transform.of(row) for row in settings]
        return targets, jax.tree.map(lambda *each: np.stack(each), *rows)

    def _add(self, row: int, begin: int, number: int, job: Job) -> None:
        """Writes the next tokens of a job into the row."""
        at, positions = np.s_[row, begin : begin + number], np.arange(job.start, job.start + number)
        inputs, end = self.inputs, job.start + number
        inputs.tokens[at], inputs.positions[at] = job.tokens[:number], positions
        inputs.ids[at], inputs.begins[at] = len(self.parts) + 1, job.start
        inputs.adapters[row] = job.adapter
        for kind, window in enumerate(self.sizes.windows if job.reads is None else ()):
            # Tokens before the first one are not seen again.
            first = job.start if window is None else max(job.start, end - window)
            if window is not None:
                self.page_tables.cover(job.slot, first, end, windows=True)
            held, lowest = self.page_tables.held(job.slot)[kind], first // self.sizes.page
            pages = np.array([held[index] for index in range(lowest, -(-end // self.sizes.page))], np.int32)
            written = np.s_[row, begin + first - job.start : begin + end - job.start]
            inputs.writes[kind][written] = pages[np.arange(first, end) // self.sizes.page - lowest]
        if inputs.states is not None and self.sizes.chunk is not None:
            slot = job.slot % self.sizes.slots_of_shard
            inputs.states.sources[row, begin // self.sizes.chunk] = slot if job.start else FIRST
            inputs.states.ends[job.slot] = begin + number - 1
        seen = inputs.seen
        if seen is not None and seen.rope is not None:
            seen.rope[at] = positions[:, None]
        if seen is not None and job.pictures is not None:
            pictures, used = job.pictures.within(job.start, end), seen.pixels.shape[1] - self._room(row)
            free = np.s_[row, used : used + pictures.number]
            seen.places[at] = np.where(pictures.places > 0, pictures.places + np.max(seen.places[row]), 0)
            seen.pixels[free], seen.grids[free] = pictures.pixels, pictures.grids
            if seen.rope is not None:
                seen.rope[at] = pictures.rope
        self.parts.append(Part(job, row, begin, job.tokens[:number], job.start))
        job.tokens, job.start = job.tokens[number:], end
        chunk = self.sizes.chunk or 1
        self._filled[row] = -(-(begin + number) // chunk) * chunk

    def _room(self, row: int) -> int:
        """How many more pictures a row can have."""
        return 0 if self.inputs.seen is None else int(np.sum(self.inputs.seen.grids[row, :, 0] == 0))

    def _visit(self, row: int, begin: int, number: int, job: Job) -> bool:
        """Notes what the next tokens of a job see of earlier ones; whether there was room for it."""
        if not job.start:
            return True
        size, new = block_of(self.length), []
        blocks = np.arange(begin // size, (begin + number - 1) // size + 1, dtype=np.int32)
        reads = self.page_tables.held(job.slot) if job.reads is None else job.reads
        for held, window, visits in zip(reads, self.sizes.windows, self.inputs.visits, strict=True):
            first = 0 if window is None else max(0, job.start - window + 1) // self.sizes.page
            seen = [index for index in held if first <= index and index * self.sizes.page < job.start]
            if visits.number[row] + len(seen) * len(blocks) > visits.blocks.shape[1]:
                return False
            new.append(seen)
        for held, seen, visits in zip(reads, new, self.inputs.visits, strict=True):
            pages = np.tile(np.array([held[index] for index in seen], np.int32), len(blocks))
            starts = np.tile(np.array(seen, np.int32) * self.sizes.page, len(blocks))
            at = np.s_[row, visits.number[row] : visits.number[row] + len(pages)]
            visits.blocks[at], visits.pages[at], visits.starts[at] = np.repeat(blocks, len(seen)), pages, starts
            visits.owners[at] = len(self.parts) + 1
            visits.number[row] += len(pages)
        return True


def copies_of(rows: Sequence[Sequence[Copy]]) -> Copies:
    """The copies `[s COPIES]` of one kind of layer in each shard."""
    copies = Copies(np.zeros((len(rows), COPIES), np.int32), np.full((len(rows), COPIES), NOWHERE, np.int32))
    for row, new in enumerate(rows):
        copies.sources[row, : len(new)] = [copy.source for copy in new]
        copies.targets[row, : len(new)] = [copy.target for copy in new]
    return copies
