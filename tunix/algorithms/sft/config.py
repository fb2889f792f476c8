"""The `algorithm` section of a recipe for supervised fine-tuning. Loads without jax."""

from typing import Literal

from tunix.algorithms.config import NonNegative
from tunix.config import AlgorithmConfig, Fraction, RowKind


class SFTConfig(AlgorithmConfig):
    """Which tokens are trained, and how their losses are averaged."""

    name: str = "sft"
    train_on: Literal["completion", "all"] = "completion"
    """`completion`: the assistant's turns with their stop tokens. `all`: every token but the first."""
    reduction: Literal["tokens", "sequences"] = "tokens"
    """`tokens`: mean over the batch's trained tokens. `sequences`: mean over sequences of each one's token mean."""
    label_smoothing: Fraction = 0.0
    """Share of the target that is spread over the whole vocabulary (https://arxiv.org/abs/1512.00567), such as 0.1;
    `eval/loss` has none. Not for models with softcapped logits (Gemma 2 and 4)."""
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
