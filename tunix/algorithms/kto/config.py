"""The `algorithm` section of a recipe for KTO. Loads without jax."""

from collections.abc import Iterator
from typing import Any, Literal

from tunix.algorithms.config import Above0
from tunix.config import AlgorithmConfig, Place, RowKind


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

    reference_path: Place | None = None
    """Another model of the same structure as the reference: a hub id, a folder or a run. Null: the weights that the run
    starts from, or the base under an adapter."""

    @property
    def reads(self) -> RowKind:
        """Completions with labels."""
        return RowKind.LABELS

    def tiny(self, batch_size: int) -> dict[str, Any]:
        """The section for a `--tiny` run, without a `reference_path`: that model is of another structure."""
        return super().tiny(batch_size) | {"reference_path": None}

    def complaints(self, batch_size: int) -> Iterator[str]:
        """A message where the batch has a single row, for which the KL cannot be estimated."""
        if self.loss == "kto" and batch_size < 2:
            yield "batch_size: 1 row has no other row's prompt, from which kto measures the KL; take 2 or more"
