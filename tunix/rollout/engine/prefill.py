"""Computes prompts in rows of their own, from which slots are filled, so that a group's prompt is computed once.

Prompts that are cut into equal chunks (`shapes.py`) share a dispatch. Their rows are as long as the prompts need, so
that few lengths are compiled and little memory is read, and are then lengthened to that of the slots.

Axes: B rows, T time.
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
    """Tokens to append to a row of the cache that holds `start` tokens already."""

    tokens: np.ndarray
    start: int
    adapter: int
    """Number of the row's adapter, from 1; 0 for none."""


@dataclass
class Rows:
    """The caches of prompts that were computed together."""

    state: State
    length: int
    """Length of the caches, in tokens."""

    def lengthen(self, model: Model, sizes: Sizes, length: int) -> None:
        """Lengthens the caches to `length`, that of the slots."""
        same_rows = np.arange(self.state.hidden.shape[0], dtype=np.int32)
        while self.length < length:
            self.length = sizes.bucket(self.length + 1)
            self.state = resize(model, self.state, same_rows, self.length, sizes.piece)


@dataclass(frozen=True)
class Prefix:
    """A computed prompt: row `row` of `rows`."""

    rows: Rows
    row: int
    logprobs: np.ndarray | None
    """`[T]` log-probs of its tokens; None where the request does not want them."""


def append(
    model: Model, weights: Weights, rows: State, pieces: Sequence[Piece], sizes: Sizes, settings: Sequence[Sampling]
) -> tuple[State, np.ndarray | None]:
    """Appends a piece to each row; also the log-probs `[B T]` of each piece's tokens after its first.

    Args:
        model: what computes them.
        weights: its weights.
        rows: caches to append to.
        pieces: one for each row, all cut into equal chunks.
        sizes: the engine's shapes.
        settings: the sampling settings of each row; empty where no log-probs are wanted.
    """
    whole, last = sizes.cut(len(pieces[0].tokens))
    start = np.array([piece.start for piece in pieces], np.int32)
    total = np.array([len(piece.tokens) for piece in pieces], np.int32)
    adapters = np.array([piece.adapter for piece in pieces], np.int32)
    padded = np.zeros((len(pieces), whole * sizes.chunk + last + 1), np.int32)
    for row, piece in zip(padded, pieces, strict=True):
        row[: len(piece.tokens)] = piece.tokens
    logprobs = []
    for chunk in range(whole + 1):
        begin = chunk * sizes.chunk
        here = slice(begin, begin + (sizes.chunk if chunk < whole else last))
        count = np.minimum(total - begin, here.stop - begin)
        rows, hidden = prefill(model, weights, rows, padded[:, here], start + np.int32(begin), count, adapters)
        if settings:
            targets = padded[:, here.start + 1 : here.stop + 1]
            logprobs.append(score(model, weights.top, hidden, targets, Transform.of(settings)))
    return rows, np.concatenate(logprobs, axis=1) if logprobs else None


def compute(
    model: Model,
    weights: Weights,
    prompts: Sequence[np.ndarray],
    adapters: Sequence[int],
    settings: Sequence[Sampling],
    sizes: Sizes,
) -> list[Prefix]:
    """Computes the prefix of each prompt.

    Args:
        model: what computes them.
        weights: its weights.
        prompts: `[T]` token ids each.
        adapters: number of each prompt's adapter, from 1; 0 for none.
        settings: each prompt's sampling settings; prompt log-probs are computed where these want them.
        sizes: the engine's shapes.
    """
    made: dict[int, Prefix] = {}

    def key(item: int) -> tuple:
        return (*sizes.cut(len(prompts[item])), settings[item].prompt_logprobs)

    for batch in batches(range(len(prompts)), key):
        # The length is the same for all prompts of a batch.
        length = sizes.bucket(len(prompts[batch[0]]))
        state = blank(model, len(batch), length, sizes.piece, sizes.dtype)
        scored = [settings[item] for item in batch if settings[item].prompt_logprobs]
        pieces = [Piece(prompts[item], 0, adapters[item]) for item in batch]
        state, logprobs = append(model, weights, state, pieces, sizes, scored)
        rows = Rows(state, length)
        for row, item in enumerate(batch):
            of_prompt = None if logprobs is None else np.pad(logprobs[row], (1, 0))[: len(prompts[item])]
            made[item] = Prefix(rows, row, of_prompt)
    return [made[item] for item in range(len(prompts))]
