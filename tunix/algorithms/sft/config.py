"""The `algorithm` section of a recipe for supervised fine-tuning. Loads without jax."""

from typing import Literal

from tunix.algorithms.config import NonNegative
from tunix.config import AlgorithmConfig, RowKind


class SFTConfig(AlgorithmConfig):
    """Which tokens are trained, and how their losses are averaged."""

    name: str = "sft"
    train_on: Literal["completion", "all"] = "completion"
    """`completion`: the assistant's turns with their stop tokens. `all`: every token but the first."""
    reduction: Literal["tokens", "sequences"] = "tokens"
    """`tokens`: mean over the batch's trained tokens. `sequences`: mean over sequences of each one's token mean."""
    neftune_alpha: NonNegative = 0.0
    """Noise on the embeddings while training (Jain et al. 2023, https://arxiv.org/abs/2310.05914); 5 is usual."""

    @property
    def sees_pictures(self) -> bool:
        """Always."""
        return True

    @property
    def reads(self) -> RowKind:
        """Given text, all of it or its completion."""
        return RowKind(self.train_on)
