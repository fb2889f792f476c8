"""Prompts into rows of their own cache, from which slots are filled: a group's prompt is computed once.

A prompt is cut into whole chunks and a rest, the rest padded to a power of two. Prompts that are cut alike share a
dispatch, 16, 4 or 1 at a time, so that no row is computed in vain and few shapes are compiled.

Axes: R rows, C tokens of a chunk, D model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tunix.config import DType
from tunix.models.cached import Weights
from tunix.models.model import Model
from tunix.rollout.programs import State, blank, prefill, score
from tunix.rollout.sampling import Transform
from tunix.types import Sampling

ROWS = (16, 4, 1)
"""Rows of a prefill."""
SMALLEST = 16
"""Of the padded rests, and of the powers of two that they are padded to."""


class Piece(NamedTuple):
    """Tokens to append to a row that holds `start` already."""

    tokens: np.ndarray
    start: int


@dataclass(frozen=True)
class Prefix:
    """A prompt that is computed: row `row` of `rows`."""

    rows: State
    row: int
    logprobs: np.ndarray | None
    """`[T]` of its tokens, where asked for."""


@dataclass(frozen=True)
class Sizes:
    """The shapes that an engine keeps to."""

    length: int
    """Tokens of prompt and completion at most."""
    chunk: int
    """Tokens of a prefill at most; a power of two."""
    piece: int
    """Tokens that are new to a cache at most, before it is asked again: of a chunk, or of a dispatch's steps."""
    dtype: DType
    """Of the cache."""

    def bucket(self, tokens: int) -> int:
        """The length of a cache that holds `tokens`: 128, 256, 512, ... up to `length`."""
        return min(max(128, 1 << (tokens - 1).bit_length()), self.length)

    def cut(self, tokens: int) -> tuple[int, int]:
        """(whole chunks, padded size of what is left) of `tokens` >= 1 tokens; the rest is never empty."""
        whole = (tokens - 1) // self.chunk
        return whole, max(min(SMALLEST, self.chunk), 1 << (tokens - whole * self.chunk - 1).bit_length())


def batches(items: Sequence[int], key: Callable[[int], tuple]) -> Iterator[list[int]]:
    """Items of equal keys together, in batches of ROWS."""
    alike: dict[tuple, list[int]] = defaultdict(list)
    for item in items:
        alike[key(item)].append(item)
    for group in alike.values():
        while group:
            size = next(size for size in ROWS if size <= len(group))
            yield group[:size]
            group = group[size:]


def append(
    model: Model, weights: Weights, rows: State, pieces: Sequence[Piece], sizes: Sizes, settings: Sequence[Sampling]
) -> tuple[State, np.ndarray | None]:
    """Rows with their pieces (all cut alike), and where `settings` are given the log-probs of the tokens behind the
    first of each piece, `[R T]`.

    Args:
        settings: of each row, or none.
    """
    whole, last = sizes.cut(len(pieces[0].tokens))
    start = np.array([piece.start for piece in pieces], np.int32)
    total = np.array([len(piece.tokens) for piece in pieces], np.int32)
    padded = np.zeros((len(pieces), whole * sizes.chunk + last + 1), np.int32)
    for row, piece in zip(padded, pieces, strict=True):
        row[: len(piece.tokens)] = piece.tokens
    found = []
    for chunk in range(whole + 1):
        begin = chunk * sizes.chunk
        here = slice(begin, begin + (sizes.chunk if chunk < whole else last))
        count = np.minimum(total - begin, here.stop - begin)
        rows, hidden = prefill(model, weights, rows, padded[:, here], start + np.int32(begin), count)
        if settings:
            targets = padded[:, here.start + 1 : here.stop + 1]
            found.append(score(model, weights.top, hidden, targets, Transform.of(settings)))
    return rows, np.concatenate(found, axis=1) if found else None


def compute(
    model: Model, weights: Weights, prompts: Sequence[np.ndarray], settings: Sequence[Sampling], sizes: Sizes
) -> list[Prefix]:
    """The prefix of each prompt.

    Args:
        settings: of each; prompt log-probs are computed where they ask for them.
    """
    made: dict[int, Prefix] = {}

    def key(item: int) -> tuple:
        tokens = len(prompts[item])
        return (sizes.bucket(tokens), *sizes.cut(tokens), settings[item].prompt_logprobs)

    for batch in batches(range(len(prompts)), key):
        rows = blank(model, len(batch), sizes.bucket(len(prompts[batch[0]])), sizes.piece, sizes.dtype)
        scored = [settings[item] for item in batch if settings[item].prompt_logprobs]
        rows, found = append(model, weights, rows, [Piece(prompts[item], 0) for item in batch], sizes, scored)
        for row, item in enumerate(batch):
            own = None if found is None else np.pad(found[row], (1, 0))[: len(prompts[item])]
            made[item] = Prefix(rows, row, own)
    return [made[item] for item in range(len(prompts))]
