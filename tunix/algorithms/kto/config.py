"""The `algorithm` section of a recipe for KTO. Loads without jax."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from tunix.config import AlgorithmConfig, Reads

Weight = Annotated[float, Field(gt=0)]


class KTOConfig(AlgorithmConfig):
    """Completions with a label each, desirable or not; no pairs."""

    name: str = "kto"
    loss: Literal["kto", "apo_zero"] = "kto"
    """`kto` values a completion against the batch's KL from the reference, `apo_zero` against 0."""
    beta: Weight = 0.1
    """Scale of the rewards: the larger, the nearer to the reference."""
    desirable_weight: Weight = 1.0
    """Weight of desirable completions. With n of the one kind and m of the other, n times this should be 1 to 4/3 times
    m times the other weight."""
    undesirable_weight: Weight = 1.0
    """Weight of undesirable completions."""

    reference_path: str | None = None
    """Another model of the same structure as the reference: a hub id, a folder or a run. Null: the weights that the run
    starts from, or the base under an adapter."""

    @property
    def reads(self) -> Reads:
        """A completion and its label."""
        return "labels"

    def complaints(self, batch_size: int) -> Iterator[str]:
        """The KL is measured over mismatched rows."""
        if self.loss == "kto" and batch_size < 2:
            yield "batch_size: 1 row has no other row's prompt, from which kto measures the KL; take 2 or more"
