"""The closed set of shapes that an engine uses, so that compiling ends.

There are as many slots as the requests need, and NARROW times fewer when only the last requests are left. Cache lengths
double. A prompt is cut into whole chunks and a rest, which is padded to a power of two; prompts that are cut into equal
chunks share a dispatch in ROWS rows. `warmup.py` compiles all of these shapes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tunix.config import DType

ROWS = (16, 4, 1)
"""Numbers of rows that a prefill may have."""
SMALLEST = 16
"""Tokens of the smallest padded rest of a prompt."""
SHORTEST = 128
"""Length of the shortest cache, in tokens."""
NARROW = 4
"""Factor between one number of slots that is compiled and the next smaller one."""
SLOTS = {"cpu": 64}
"""Completions that are sampled at a time, by platform: more only cost memory."""
SLOTS_ELSEWHERE = 256
"""Completions that are sampled at a time on any other platform."""


def usual_slots(platform: str) -> int:
    """Slots that fill a device of this platform, e.g. 64 for `cpu`."""
    return SLOTS.get(platform, SLOTS_ELSEWHERE)


@dataclass(frozen=True)
class Sizes:
    """The shapes of one engine."""

    slots: int
    """Requests that are answered at a time."""
    length: int
    """Tokens of prompt and completion at most."""
    chunk: int
    """Tokens of a prefill at most, e.g. 256; a power of two."""
    piece: int
    """Tokens that are added to a cache in one program at most: those of a chunk, or of a dispatch's steps."""
    dtype: DType
    """Dtype of the cache."""

    def width(self, requests: int) -> int:
        """The number of slots for so many requests."""
        width = self.slots
        while requests <= narrowed(width) < width:
            width = narrowed(width)
        return width

    def widths(self, requests: int) -> list[int]:
        """All numbers of slots that so many requests may need, falling."""
        widths = [self.width(requests)]
        while widths[-1] > 1:
            widths.append(narrowed(widths[-1]))
        return widths

    def bucket(self, tokens: int) -> int:
        """The length of a cache that holds `tokens`: 128, 256, 512, ... up to `length`."""
        return min(max(SHORTEST, 1 << (tokens - 1).bit_length()), self.length)

    def lengths(self, tokens: int) -> list[int]:
        """All cache lengths that up to so many tokens may need, rising."""
        lengths = [self.bucket(1)]
        while lengths[-1] < self.bucket(tokens):
            lengths.append(self.bucket(lengths[-1] + 1))
        return lengths

    def cut(self, tokens: int) -> tuple[int, int]:
        """(whole chunks, padded size of what is left) of `tokens` >= 1 tokens; the rest is never empty."""
        whole = (tokens - 1) // self.chunk
        return whole, max(min(SMALLEST, self.chunk), 1 << (tokens - whole * self.chunk - 1).bit_length())

    def cuts(self, tokens: int) -> list[int]:
        """All padded sizes that pieces of up to so many tokens are computed in, rising."""
        padded = [self.cut(1)[1]]
        while padded[-1] < min(tokens, self.chunk):
            padded.append(2 * padded[-1])
        return padded

    def prompt_cuts(self, tokens: int, length: int) -> list[int]:
        """All padded sizes for prompts of up to so many tokens whose caches are `length` long, rising."""
        padded: set[int] = set()
        for begin in range(0, tokens, self.chunk):
            for size in self.cuts(tokens - begin):
                number = min(begin + size, tokens)
                if self.bucket(number) == length:
                    padded |= {self.cut(number)[1], *([self.chunk] if begin else [])}
        return sorted(padded)


def narrowed(width: int) -> int:
    """The next smaller number of slots, e.g. 16 for 64."""
    return -(-width // NARROW)


def batches(items: Sequence[int], key: Callable[[int], tuple]) -> Iterator[list[int]]:
    """Batches of items with equal keys, in sizes of ROWS, so that every row of a batch is used."""
    by_key: dict[tuple, list[int]] = defaultdict(list)
    for item in items:
        by_key[key(item)].append(item)
    for group in by_key.values():
        while group:
            size = next(size for size in ROWS if size <= len(group))
            yield group[:size]
            group = group[size:]
