"""The `algorithm` section of a recipe for KTO. Loads without jax."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from tunix.algorithms.config import REFERENCE_PATH_GONE, Above0
from tunix.config import AlgorithmConfig, RowKind


class KTOConfig(AlgorithmConfig):
    """Completions that are labelled desirable or not, one by one."""

    name: str = "kto"
    loss: Literal["kto", "apo_zero"] = "kto"
    """`kto` compares a completion's reward with the batch's KL from the reference, `apo_zero` with 0."""
    beta: Above0 = 0.1
    """Scale of the rewards: the larger, the closer to the reference."""
    desirable_weight: Above0 = 1.0
    """Weight of desirable completions. With n desirable and m undesirable ones, n times this should be 1 to 4/3 times
    m times the other weight."""
    undesirable_weight: Above0 = 1.0
    """Weight of undesirable completions."""

    gone: ClassVar[Mapping[str, str]] = {"reference_path": REFERENCE_PATH_GONE}

    @property
    def reads(self) -> RowKind:
        """Completions with labels."""
        return RowKind.LABELS

    def complaints(self, batch_size: int) -> Iterator[str]:
        """A message where the batch has a single row, for which the KL cannot be estimated."""
        if self.loss == "kto" and batch_size < 2:
            yield "batch_size: 1 row has no other row's prompt, from which kto measures the KL; take 2 or more"
