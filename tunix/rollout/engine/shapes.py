"""The closed set of shapes that an engine keeps to, so that compiling ends.

Slots are as many as fit the requests, and grow fewer by NARROW when the last requests are being answered. Cache lengths
double. A prompt is cut into whole chunks and a rest, the rest padded to a power of two; prompts that are cut alike
share a dispatch in ROWS rows. `warmup.py` runs through all of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tunix.config import DType

ROWS = (16, 4, 1)
"""Rows of a prefill."""
SMALLEST = 16
"""Of the padded rests, and of the powers of two that they are padded to."""
SHORTEST = 128
"""Length of the shortest cache."""
NARROW = 4
"""Factor between the numbers of slots that are compiled."""


@dataclass(frozen=True)
class Sizes:
    """The shapes of one engine."""

    slots: int
    """Requests that are answered at a time."""
    length: int
    """Tokens of prompt and completion at most."""
    chunk: int
    """Tokens of a prefill at most; a power of two."""
    piece: int
    """Tokens that are new to a cache at most, before it is asked again: of a chunk, or of a dispatch's steps."""
    dtype: DType
    """Of the cache."""

    def width(self, requests: int) -> int:
        """Slots for so many requests."""
        width = self.slots
        while requests <= narrowed(width) < width:
            width = narrowed(width)
        return width

    def widths(self, requests: int) -> list[int]:
        """The numbers of slots that up to so many requests go through, falling."""
        found = [self.width(requests)]
        while found[-1] > 1:
            found.append(narrowed(found[-1]))
        return found

    def bucket(self, tokens: int) -> int:
        """The length of a cache that holds `tokens`: 128, 256, 512, ... up to `length`."""
        return min(max(SHORTEST, 1 << (tokens - 1).bit_length()), self.length)

    def lengths(self, tokens: int) -> list[int]:
        """The lengths that the cache of up to so many tokens goes through, rising."""
        found = [self.bucket(1)]
        while found[-1] < self.bucket(tokens):
            found.append(self.bucket(found[-1] + 1))
        return found

    def cut(self, tokens: int) -> tuple[int, int]:
        """(whole chunks, padded size of what is left) of `tokens` >= 1 tokens; the rest is never empty."""
        whole = (tokens - 1) // self.chunk
        return whole, max(min(SMALLEST, self.chunk), 1 << (tokens - whole * self.chunk - 1).bit_length())

    def cuts(self, tokens: int) -> list[int]:
        """The padded sizes that pieces of up to so many tokens are computed in, rising."""
        found = [self.cut(1)[1]]
        while found[-1] < min(tokens, self.chunk):
            found.append(2 * found[-1])
        return found

    def prompt_cuts(self, tokens: int, length: int) -> list[int]:
        """Those of prompts of up to so many tokens whose caches are `length` long, rising."""
        found: set[int] = set()
        for begin in range(0, tokens, self.chunk):
            for size in self.cuts(tokens - begin):
                number = min(begin + size, tokens)
                if self.bucket(number) == length:
                    found |= {self.cut(number)[1], *([self.chunk] if begin else [])}
        return sorted(found)


def narrowed(width: int) -> int:
    """The next smaller number of slots."""
    return -(-width // NARROW)


def batches(items: Sequence[int], key: Callable[[int], tuple]) -> Iterator[list[int]]:
    """Items of equal keys together, in batches of ROWS: no row is computed in vain."""
    alike: dict[tuple, list[int]] = defaultdict(list)
    for item in items:
        alike[key(item)].append(item)
    for group in alike.values():
        while group:
            size = next(size for size in ROWS if size <= len(group))
            yield group[:size]
            group = group[size:]
