"""Which pages each slot holds, and which are free.

A page belongs to all sequences that begin with its tokens, and is free again when the last of them has let it go. Where
requests come one after the other, those of sequences that have ended are kept until they are needed. Each shard of the
slots has its own pages, and each kind of layer: one with a window lets pages go that it has passed. Programs run in the
order in which they are sent, so a page that is let go may be given away at once.

Axes: Sl slots, Co columns of a page table, s shards of the rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tunix.rollout.engine.experts import Known
from tunix.rollout.engine.shapes import Sizes

FAR = 1 << 30
"""The position of the first token of a page that is only padding."""
WORTH = 8
"""A page is shared with a sequence that has ended where one in so many of its tokens is the same."""
Held = dict[int, int]
"""Index of a page within its sequence -> the page."""


class Copy(NamedTuple):
    """A page to copy to another, in every layer of a kind."""

    kind: int
    source: int
    target: int


class Reads(NamedTuple):
    """The pages that a dispatch reads, of one kind of layer; see `models.attention.pages.Gathered`."""

    sources: np.ndarray | None
    """None, with the next two, where pages are read in their places."""
    owners: np.ndarray | None
    starts: np.ndarray | None
    places: np.ndarray
    """`[Sl Co]` the place of each slot's pages in the pool, or among those that are gathered; -1 for none."""
    first: np.ndarray
    """`[Sl]` index within its sequence of each slot's first page."""

    @classmethod
    def of(cls, table: np.ndarray, first: np.ndarray, shards: int, number: int, page: int) -> "Reads":
        """The pages `[Sl Co]` of slots, gathered into so many for each shard."""
        columns = table.shape[1]
        held = table.reshape(shards, -1) >= 0
        places = np.where(held, np.cumsum(held, axis=1) - 1, -1)
        shard, index = np.nonzero(held)
        sources, owners, starts = np.zeros((3, shards, number), np.int32)
        starts[:] = FAR
        at = shard, places[shard, index]
        sources[at], owners[at] = table.reshape(shards, -1)[shard, index], index // columns
        starts[at] = (first.reshape(shards, -1)[at[0], index // columns] + index % columns) * page
        return cls(sources, owners, starts, places.reshape(table.shape).astype(np.int32), first)


class Prefix(NamedTuple):
    """A prompt whose pages are kept for requests that come later."""

    shard: int
    held: tuple[Held, ...]
    """Its pages, for each kind of layer."""
    experts: tuple[Known, ...]
    """What is known of the experts of its tokens."""


@dataclass(frozen=True, eq=False)
class Ended:
    """A sequence that has ended, whose pages are kept for sequences that begin with its tokens."""

    shard: int
    adapter: str | None
    """Name of the adapter that computed it; None for none."""
    tokens: np.ndarray
    """`[T]`."""
    held: tuple[Held, ...]
    """Its pages, for each kind of layer."""
    experts: np.ndarray | None
    """`[T L k]` of its tokens; None for a model without."""
    block_hashes: tuple[int, ...]
    """A hash of all tokens up to the end of each block."""


class Pool:
    """The pages of one kind of layer in one shard."""

    def __init__(self, number: int):
        """All of them free."""
        self.free = list(range(number))[::-1]
        self._uses = [0] * number  # a list: each is changed alone

    def share(self, page: int) -> int:
        """The page, which one more sequence holds."""
        self._uses[page] += 1
        return page

    def drop(self, page: int) -> None:
        """One sequence lets a page go."""
        self._uses[page] -= 1
        if not self._uses[page]:
            self.free.append(page)


class PageTables:
    """The pages of all slots."""

    def __init__(self, sizes: Sizes):
        """All pages free."""
        self.sizes = sizes
        kinds = range(len(sizes.windows))
        self._pools = [[Pool(number) for _ in range(sizes.shards)] for number in sizes.pages]
        self._kinds: dict[bool | None, list[tuple[int, list[Pool]]]] = {
            windows: [
                (kind, self._pools[kind])
                for kind, window in enumerate(sizes.windows)
                if windows is None or windows == (window is not None)
            ]
            for windows in (None, True, False)
        }
        """Number and pools of all kinds of layers, of those with a window, and of those without."""
        self._held: list[list[Held]] = [[{} for _ in range(sizes.slots)] for _ in kinds]
        self._tables = [np.full((sizes.slots, sizes.columns(kind)), -1, np.int32) for kind in kinds]
        self._firsts = [np.zeros(sizes.slots, np.int32) for _ in kinds]
        self._ends = np.zeros((len(kinds), sizes.slots), np.int32)
        self._changed: set[int] = set()
        self.prefixes: dict[tuple, Prefix] = {}
        """Prompts that are kept, the first one at the front."""
        self._block = max(sizes.page // WORTH, 1)
        """Tokens of a block: as few as are worth sharing."""
        self._ended: dict[Ended, None] = {}
        """Sequences that are kept, the one that was used last at the end; they make room for whatever is at work."""
        self._by_block: dict[int, dict[Ended, None]] = {}
        """Those of them that have a block with this hash of all tokens up to its end."""

    def shard(self, slot: int) -> int:
        """The shard of a slot."""
        return slot // self.sizes.slots_of_shard

    def lacks(self, slot: int, tokens: int) -> bool:
        """Whether a slot needs more pages for a sequence of so many tokens than its shard has, of a kind of layers
        without a window."""
        if not self._kinds[False]:
            return False
        shard = self.shard(slot)
        held = min(len(self._held[kind][slot]) for kind, _ in self._kinds[False])
        need = max(-(-tokens // self.sizes.page) - held, 0)
        self._evict(shard, need, windows=False)
        return need > min(min(len(pools[shard].free), self._left(kind, shard)) for kind, pools in self._kinds[False])

    def fits(self, shard: int, tokens: int, spare: int, *, shared: bool) -> bool:
        """Whether a shard has pages for another sequence of so many tokens, of which all but the last page may be
        shared, and some to spare."""
        pages = -(-tokens // self.sizes.page)
        if any(self._left(kind, shard) < pages + spare for kind, _ in self._kinds[False]):
            return False
        need = (1 if shared else pages) + spare
        self._evict(shard, need, windows=False)
        return all(len(pools[shard].free) >= need for _, pools in self._kinds[False])

    def _left(self, kind: int, shard: int) -> int:
        """Pages that slots of a shard may hold beside those that they hold: where a dispatch gathers the pages of its
        slots, all slots hold no more than there are, shared ones included. In their places, shared ones are one."""
        if self.sizes.in_place:
            return self.sizes.pages[kind]
        slots = slice(shard * self.sizes.slots_of_shard, (shard + 1) * self.sizes.slots_of_shard)
        return self.sizes.pages[kind] - sum(map(len, self._held[kind][slots]))

    def held(self, slot: int) -> tuple[Held, ...]:
        """The pages of a slot, for each kind of layer."""
        return tuple(of_kind[slot] for of_kind in self._held)

    def short(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Those of these slots that lack a page for their next tokens, up to so many each."""
        goal = -(-tokens // self.sizes.page)
        return slots[np.any(self._ends[:, slots] < goal, axis=0)]

    def cover(self, slot: int, start: int, stop: int, *, windows: bool | None = None) -> None:
        """Takes the pages of positions `start` to `stop` - 1, which are free; `windows` says whether only for layers
        with a window, or only for those without."""
        for kind, _ in self._kinds[windows]:
            held = self._held[kind][slot]
            for index in range(start // self.sizes.page, -(-stop // self.sizes.page)):
                if index not in held:
                    held[index] = self._take(kind, self.shard(slot))
        self._note(slot)

    def covers(self, slot: int, start: int, stop: int, spare: int) -> bool:
        """Whether layers with a window have free pages for these positions of a slot, and so many to spare."""
        indices = set(range(start // self.sizes.page, -(-stop // self.sizes.page)))
        missing = [(len(indices - self._held[kind][slot].keys()), pools) for kind, pools in self._kinds[True]]
        self._evict(self.shard(slot), max((number for number, _ in missing), default=0) + spare, windows=True)
        return all(number + spare <= len(pools[self.shard(slot)].free) for number, pools in missing)

    def leave(self, slot: int, position: int) -> None:
        """Lets the pages go that no token from this position on sees."""
        for kind, pools in self._kinds[True]:
            held, first = self._held[kind][slot], self.sizes.first_seen(kind, position)
            left = [index for index in held if index < first]
            for index in left:
                pools[self.shard(slot)].drop(held.pop(index))
            if left:
                self._note(slot)

    def rewind(self, slot: int, tokens: int) -> int:
        """Lets the pages behind a slot's first tokens go; how many of these it still holds, in whole pages, which other
        sequences may share: none where a window has left what the next token sees."""
        full, page = tokens // self.sizes.page, self.sizes.page
        for kind, held in enumerate(self.held(slot)):
            if not held.keys() >= {*range(self.sizes.first_seen(kind, full * page), full)}:
                full = 0
        for kind, pools in self._kinds[None]:
            held = self._held[kind][slot]
            for index in [index for index in held if index >= full or not full]:
                pools[self.shard(slot)].drop(held.pop(index))
        self._note(slot)
        return full * page

    def release(self, slot: int) -> None:
        """Lets all pages of a slot go."""
        self.drop(self.shard(slot), self.held(slot))
        for of_kind in self._held:
            of_kind[slot] = {}
        self._note(slot)

    def keep(self, key: tuple, slot: int, tokens: int, experts: tuple[Known, ...]) -> None:
        """Keeps the pages of a slot's first tokens, in place of others under this key; until `forget`, or until they
        are needed."""
        self.forget(key)
        shard = self.shard(slot)
        self.prefixes[key] = Prefix(shard, self.share(shard, self._seen(slot, tokens)), experts)

    def _seen(self, slot: int, tokens: int) -> tuple[Held, ...]:
        """The pages of a slot's first tokens that the next token sees."""
        last, held = (tokens - 1) // self.sizes.page, []
        for kind, pages in enumerate(self.held(slot)):
            first = self.sizes.first_seen(kind, tokens - 1)
            held.append({index: page for index, page in pages.items() if first <= index <= last})
        return tuple(held)

    def _block_hashes(self, tokens: np.ndarray, adapter: str | None) -> tuple[int, ...]:
        """A hash of all tokens up to the end of each whole block of a sequence `[T]`."""
        last, hashes = hash(adapter), list[int]()
        for end in range(self._block, len(tokens) + 1, self._block):
            last = hash((last, tokens[end - self._block : end].tobytes()))
            hashes.append(last)
        return tuple(hashes)

    def retain(self, slot: int, tokens: np.ndarray, adapter: str | None, experts: np.ndarray | None) -> None:
        """Keeps the pages of a slot whose sequence `[T]` has ended, until they are needed. What it continues goes,
        where all that was kept of that is kept of this."""
        shard, blocks = self.shard(slot), self._block_hashes(tokens, adapter)
        if not blocks:
            return
        if not self._kinds[True]:
            alike = [x for x in self._by_block.get(blocks[-1], ()) if x.shard == shard]
            if any(in_common(ended.tokens, tokens) == len(tokens) for ended in alike):
                return
            candidates = [x for block in blocks for x in self._by_block.get(block, ()) if x.block_hashes[-1] == block]
            for ended in candidates:
                if ended.shard == shard and in_common(ended.tokens, tokens) == len(ended.tokens):
                    self._let_go(ended)
        ended = Ended(shard, adapter, tokens, self.share(shard, self._seen(slot, len(tokens))), experts, blocks)
        self._ended[ended] = None
        for block in blocks:
            self._by_block.setdefault(block, {})[ended] = None

    def find(self, tokens: np.ndarray, adapter: str | None) -> tuple[Ended, int] | None:
        """The kept sequence that has most tokens in common with the beginning of a prompt `[T]`, which is used now, and
        how many they are, without the last of the prompt; None where it is not worth a copy."""
        for block in reversed(self._block_hashes(tokens[:-1], adapter)):
            usable = dict[Ended, int]()
            for ended in self._by_block.get(block, ()):
                number = in_common(ended.tokens, tokens[:-1])
                stop = -(-number // self.sizes.page)
                seen = ({*range(self.sizes.first_seen(kind, number), stop)} for kind in range(len(ended.held)))
                holds_all = all(held.keys() >= pages for held, pages in zip(ended.held, seen, strict=True))
                if number >= self._block and holds_all:
                    usable[ended] = number
            if usable:
                best = max(usable, key=usable.__getitem__)
                self._ended[best] = self._ended.pop(best)
                return best, usable[best]
        return None

    def _evict(self, shard: int, need: int, *, windows: bool) -> None:
        """Lets kept sequences go until so many pages of each of these kinds are free, or none is kept."""
        for _, pools in self._kinds[windows]:
            while len(pools[shard].free) < need and (kept := [x for x in self._ended if x.shard == shard]):
                self._let_go(kept[0])

    def _let_go(self, ended: Ended) -> None:
        del self._ended[ended]
        for block in ended.block_hashes:
            del self._by_block[block][ended]
            if not self._by_block[block]:
                del self._by_block[block]
        self.drop(ended.shard, ended.held)

    def forget(self, key: tuple) -> None:
        """Lets the pages under this key go, if any are kept."""
        if prefix := self.prefixes.pop(key, None):
            self.drop(prefix.shard, prefix.held)

    def share(self, shard: int, held: tuple[Held, ...]) -> tuple[Held, ...]:
        """The same pages, held once more; until `drop`."""
        for pools, of_kind in zip(self._pools, held, strict=True):
            for page in of_kind.values():
                pools[shard].share(page)
        return held

    def drop(self, shard: int, held: tuple[Held, ...]) -> None:
        """Lets pages go."""
        for pools, of_kind in zip(self._pools, held, strict=True):
            for page in of_kind.values():
                pools[shard].drop(page)

    def adopt(self, slot: int, source: tuple[Held, ...], tokens: int, *, windows: bool | None = None) -> list[Copy]:
        """Makes a slot of the same shard, which holds nothing yet, hold the first tokens of another sequence; the page
        that it will write to is a copy. `windows` as for `cover`."""
        # Under the place of the last token a head that drafts will keep the token after it.
        full, shard, copies = (tokens - self.sizes.mtp) // self.sizes.page, self.shard(slot), []
        for kind, pools in self._kinds[windows]:
            adopted = self._held[kind][slot]
            for index, page in source[kind].items():
                if index < full:
                    adopted[index] = pools[shard].share(page)
                elif index == full and full * self.sizes.page < tokens:
                    adopted[index] = self._take(kind, shard)
                    copies.append(Copy(kind, page, adopted[index]))
        self._note(slot)
        return copies

    def reads(self, slots: np.ndarray, numbers: tuple[int, ...] | None = None) -> tuple[Reads, ...]:
        """What a dispatch of these slots `[Sl]` (as many of each shard, in their order) reads, for each kind of layer;
        `numbers` says how many pages of each are gathered, None as few as can be."""
        changed = list(self._changed.intersection(slots.tolist()))
        self._changed.difference_update(changed)
        # Written all at once, as numpy takes a microsecond for each call.
        for held, table, firsts in zip(self._held, self._tables, self._firsts, strict=True):
            rows, columns, pages = [], [], []
            for slot in changed:
                pages_of_slot = held[slot]
                first = firsts[slot] = min(pages_of_slot, default=0)
                rows += [slot] * len(pages_of_slot)
                columns += [index - first for index in pages_of_slot]
                pages += pages_of_slot.values()
            table[changed] = -1
            table[rows, columns] = pages
        tables = [(table[slots], first[slots]) for table, first in zip(self._tables, self._firsts, strict=True)]
        if self.sizes.in_place:
            return tuple(Reads(None, None, None, table, first) for table, first in tables)
        shards = self.sizes.shards
        number = [(table.reshape(shards, -1) >= 0).sum(axis=1).max() for table, _ in tables]
        sizes = self.sizes.gathered(len(slots))
        if numbers is None:
            numbers = next(size for size in reversed(sizes) if np.all(np.greater_equal(size, number)))
        return tuple(
            Reads.of(table, first, shards, size, self.sizes.page)
            for (table, first), size in zip(tables, numbers, strict=True)
        )

    def _take(self, kind: int, shard: int) -> int:
        """A free page; where there is none, pages that are only kept go."""
        pool = self._pools[kind][shard]
        while not pool.free and (kept := [x for x in self._ended if x.shard == shard]):
            self._let_go(kept[0])
        while not pool.free:
            self.forget(next(key for key, prefix in self.prefixes.items() if prefix.shard == shard))
        return pool.share(pool.free.pop())

    def _note(self, slot: int) -> None:
        """Notes that a slot's pages are others now."""
        self._changed.add(slot)
        for kind, held in enumerate(self._held):
            self._ends[kind, slot] = max(held[slot], default=-1) + 1


def in_common(sequence: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    number = min(len(sequence), len(other))
    differ = sequence[:number] != other[:number]
    return int(differ.argmax()) if differ.any() else number
