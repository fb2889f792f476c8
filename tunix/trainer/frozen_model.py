"""A model that is never trained, such as a reference or a teacher, and log-probs of sequences under it.

Axes: T time.
"""

from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tunix.models.model import Model, Params
from tunix.trainer.logprobs import Scorer
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.replay import unreplayed
from tunix.types import Sequence


@dataclass(frozen=True)
class FrozenModel:
    """A model with its weights."""

    model: Model
    params: Params
    """All weights, in the compute dtype, since they are never updated."""
    microbatcher: Microbatcher
    """Splits batches on the model's mesh."""
    length: int
    """T, the maximum tokens of a sequence, e.g. 2048."""

    def logprobs(
        self, sequences: List[Sequence], temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        """The `[T]` log-probs of each sequence's tokens, 0 for the first; `size` as in `Scorer.logprobs`."""
        return self.scorer.logprobs(self.params, unreplayed(sequences), size, temperature)

    @cached_property
    def scorer(self) -> Scorer:
        return Scorer(self.model, self.microbatcher, self.length)


def beside(base: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a reference that are not the base's own arrays, as all are where it is the base under an adapter.

    A program is given them once: of arrays given twice a TPU's compiler counts both, and a copy that it makes, too.
    """
    return {name: x for name, x in reference.items() if base.get(name) is not x}
