"""Sequences for a model with a scalar head: the score is read at one extra position after the last token.

Axes: T time.
"""

from dataclasses import replace

import numpy as np

from tunix.types import Sequence


def with_spare(tokens: np.ndarray) -> Sequence:
    """`[T + 1]` tokens with a placeholder at the end, for the state after the last one: it is trained, never read."""
    longer = np.append(tokens, 0).astype(np.int32)
    return Sequence(longer, np.arange(len(longer)) == len(tokens))


def as_scored(sequence: Sequence) -> Sequence:
    """A given sequence up to its last trained token, followed by the placeholder where its score is read.

    What a template writes after the stop token is cut off: a sampled completion, which is scored as it was sampled,
    does not have it either.
    """
    end = int(np.flatnonzero(sequence.loss_mask)[-1]) + 1
    return replace(with_spare(sequence.tokens[:end]), weight=sequence.weight, per_sequence=sequence.per_sequence)
