"""The records that leave the data pipeline: packed batches of given sequences, and prompts to sample completions for.

Axes: T time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
