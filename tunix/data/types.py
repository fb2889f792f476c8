"""The records that leave the data pipeline: packed batches of given sequences, and prompts to sample completions for;
and sequences for a model with a scalar head, whose score is read at one extra position after the last token.

Axes: T time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunix.data.accounting import Accounting
from tunix.types import Batch, Pictures, Sequence


@dataclass(frozen=True)
class Packed:
    """A batch, its sequences, and the accounting of the rows so far."""

    batch: Batch
    """The packed rows as numpy arrays."""
    accounting: Accounting
    """Counts of all rows read up to and including this batch, over all epochs; or of all held-out rows."""
    sequences: tuple[Sequence, ...]
    """The sequences that were packed, for algorithms that also use them unpacked."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that the policy samples completions for."""

    tokens: np.ndarray
    """`[T]` int32 token ids, e.g. `[2, 651, 603]`."""
    text: str
    """The prompt as the row has it, without the template, which rewards read; empty for token ids."""
    row: Mapping[str, Any]
    """The row's columns under our names, which rewards and environments read."""
    pictures: Pictures | None = None
    """Its pictures, e.g. one of 256 soft tokens; None where the model sees none."""


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
