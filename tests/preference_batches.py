"""Small pairs and labelled completions with known log-probs, packed as a run packs them.

A `Side` gives one number per token of a completion; the prompt's two tokens stand before it. Current and reference
log-probs travel through `pack` as per-token values, so that a loss sees them where the model would put them.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from tunix.data.packing import pack
from tunix.types import Batch, LossInputs, Sequence

PROMPT = 2
LENGTH = 24


@dataclass(frozen=True)
class Side:
    """One completion."""

    current: List[float]
    reference: List[float]
    trained: List[bool] | None = None
    """All of them where left out."""
    weight: float = 1.0
    named: dict[str, float] = field(default_factory=dict)
    """Per-sequence values."""

    def sequence(self, first: int, fill: float = 0.0) -> Sequence:
        """The same as a record whose completion's ids begin with `first`; `fill` stands wherever nothing is trained."""
        number = len(self.current)
        mask = np.array([False] * PROMPT + list(self.trained or [True] * number))
        values = {"current": self.current, "reference": self.reference}
        padded = {name: np.array([fill] * PROMPT + list(x), np.float32) for name, x in values.items()}
        per_token = {name: np.where(mask, x, np.float32(fill)) for name, x in padded.items()}
        tokens = np.array([7, 8, *range(first, first + number)], np.int32)
        return Sequence(tokens, mask, self.weight, per_token, self.named)


def batch_of(sides: List[Side], sequences_per_example: int = 2, packing: bool = True, fill: float = 0.0) -> Batch:
    """The completions in rows of 24, a pair's two one after the other with ids that differ from the first."""
    sequences = [side.sequence(10 + 20 * (i % 2), fill) for i, side in enumerate(sides)]
    return pack(sequences, len(sides), LENGTH, packing, sequences_per_example)


def inputs_of(batch: Batch, asked_before: bool = False) -> LossInputs:
    """What a loss reads of such a batch.

    Args:
        asked_before: the reference's log-probs stand among the batch's values, as those that were computed beforehand.
    """
    current, reference = (jnp.asarray(batch.per_token[name]) for name in ("current", "reference"))
    kept = {"reference_logprobs": reference} if asked_before else {}
    inputs = LossInputs(replace(batch, per_token=kept), current)
    return inputs if asked_before else replace(inputs, reference_logprobs=reference)
