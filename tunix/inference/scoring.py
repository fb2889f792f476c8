"""Per-token log-probs of given rows under a model, computed by the training code. Nothing is truncated.

Axes: T time.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from tunix.config import RowKind
from tunix.data.accounting import Kept
from tunix.data.examples import to_example
from tunix.data.shapes import Rendering, detect_format
from tunix.data.sources import Rows
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.mesh import row_shards
from tunix.models.model import Model, Params
from tunix.trainer.logprobs import Scorer
from tunix.trainer.microbatches import Microbatcher
from tunix.types import Sequence


@dataclass(frozen=True)
class RowScore:
    """The log-probs of one row under a model."""

    tokens: np.ndarray
    """`[T]` int32 ids, e.g. `[2, 17, 9]`."""
    logprobs: np.ndarray
    """`[T - 1]` float32 log-probs in nats of each token after the first, e.g. `[-1.2, -0.3]`."""

    @property
    def sum(self) -> float:
        """Total log-prob in nats of the tokens after the first, e.g. -1.5."""
        return float(self.logprobs.sum(dtype=np.float64))


def sequences_to_score(rows: Rows, tokenizer: Tokenizer | None, vocab_size: int, max_length: int) -> list[Sequence]:
    """Renders rows as sequences whose tokens after the first are all scored.

    Raises:
        UserError: a row is too long, too short, or invalid.
    """
    shape = detect_format(rows[0], {}, f"row 1 of {rows.name}")
    rendering = Rendering(shape, max_length=sys.maxsize, train_on=RowKind.ALL, vocab_size=vocab_size)
    return [_sequence(rows, index, tokenizer, rendering, max_length) for index in range(len(rows))]


def scored(
    model: Model,
    params: Params,
    mesh: Mesh,
    sequences: list[Sequence],
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[RowScore]:
    """Computes the log-probs of sequences, in their order.

    Args:
        batch_size: rows of a micro-batch.
        progress: receives the number of sequences that are done.
    """
    # One shape for all micro-batches, no longer than the rows need.
    length = -(-max(len(s.tokens) for s in sequences) // 64) * 64
    rows = -(-batch_size // row_shards(mesh)) * row_shards(mesh)
    scorer = Scorer(model, Microbatcher(rows, mesh), length)
    scores: list[RowScore] = []
    for group in _groups(sequences, 8 * batch_size):
        values = scorer.scores("logprobs", params, group, size=8 * batch_size)
        scores += [RowScore(one.tokens, logprobs[1:]) for one, logprobs in zip(group, values, strict=True)]
        progress(len(scores))
    return scores


def _sequence(rows: Rows, index: int, tokenizer: Tokenizer | None, rendering: Rendering, max_length: int) -> Sequence:
    where = f"row {index + 1} of {rows.name}"
    example = to_example(rows[index], tokenizer, rendering, where)
    if not isinstance(example, Kept):
        raise UserError(
            f"{where}: {example.detail or 'nothing to score in a row of fewer than two tokens; leave it out'}"
        )
    (sequence,) = example.sequences
    size = len(sequence.tokens)
    if size > max_length:
        raise UserError(f"{where} has {size} tokens, more than max_length (--max-length) {max_length}: raise it")
    return sequence


def _groups(sequences: list[Sequence], size: int) -> Iterator[list[Sequence]]:
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]
