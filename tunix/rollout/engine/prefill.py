"""Prompts into rows of their own cache, from which slots are filled: a group's prompt is computed once.

Prompts that are cut alike (`shapes.py`) share a dispatch. Their rows are as long as they need, so that few lengths of
them are compiled and little is read, and grow to the length of the slots that they go to.

Axes: R rows, C tokens of a chunk, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.rollout.engine.programs import State, blank, prefill, resize, score
from tunix.rollout.engine.sampling import Transform
from tunix.rollout.engine.shapes import Sizes, batches
from tunix.types import Sampling


class Piece(NamedTuple):
    """Tokens to append to a row that holds `start` already."""

    tokens: np.ndarray
    start: int
    adapter: int
    """Number of the row's, from 1; 0 for none."""


@dataclass
class Rows:
    """Prompts that were computed together."""

    state: State
    length: int
    """Of their caches."""

    def lengthen(self, model: Model, sizes: Sizes, length: int) -> None:
        """Grows to the length of the slots."""
        own = np.arange(self.state.hidden.shape[0], dtype=np.int32)
        while self.length < length:
            self.length = sizes.bucket(self.length + 1)
            self.state = resize(model, self.state, own, self.length, sizes.piece)


@dataclass(frozen=True)
class Prefix:
    """A prompt that is computed: row `row` of `rows`."""

    rows: Rows
    row: int
    logprobs: np.ndarray | None
    """`[T]` of its tokens, where asked for."""


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
    adapters = np.array([piece.adapter for piece in pieces], np.int32)
    padded = np.zeros((len(pieces), whole * sizes.chunk + last + 1), np.int32)
    for row, piece in zip(padded, pieces, strict=True):
        row[: len(piece.tokens)] = piece.tokens
    found = []
    for chunk in range(whole + 1):
        begin = chunk * sizes.chunk
        here = slice(begin, begin + (sizes.chunk if chunk < whole else last))
        count = np.minimum(total - begin, here.stop - begin)
        rows, hidden = prefill(model, weights, rows, padded[:, here], start + np.int32(begin), count, adapters)
        if settings:
            targets = padded[:, here.start + 1 : here.stop + 1]
            found.append(score(model, weights.top, hidden, targets, Transform.of(settings)))
    return rows, np.concatenate(found, axis=1) if found else None


def compute(
    model: Model,
    weights: Weights,
    prompts: Sequence[np.ndarray],
    adapters: Sequence[int],
    settings: Sequence[Sampling],
    sizes: Sizes,
) -> list[Prefix]:
    """The prefix of each prompt.

    Args:
        adapters: of each.
        settings: of each; prompt log-probs are computed where they ask for them.
    """
    made: dict[int, Prefix] = {}

    def key(item: int) -> tuple:
        return (*sizes.cut(len(prompts[item])), settings[item].prompt_logprobs)

    for batch in batches(range(len(prompts)), key):
        # The same for all prompts that are cut alike.
        length = sizes.bucket(len(prompts[batch[0]]))
        state = blank(model, len(batch), length, sizes.piece, sizes.dtype)
        scored = [settings[item] for item in batch if settings[item].prompt_logprobs]
        pieces = [Piece(prompts[item], 0, adapters[item]) for item in batch]
        state, found = append(model, weights, state, pieces, sizes, scored)
        rows = Rows(state, length)
        for row, item in enumerate(batch):
            own = None if found is None else np.pad(found[row], (1, 0))[: len(prompts[item])]
            made[item] = Prefix(rows, row, own)
    return [made[item] for item in range(len(prompts))]
