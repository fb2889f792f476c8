"""The `algorithm` section of a recipe for a reward model. Loads without jax."""

from typing import ClassVar

from tunix.algorithms.config import NonNegative
from tunix.config import AlgorithmConfig, RowKind


class RewardModelConfig(AlgorithmConfig):
    """Settings of the loss on the scores of pairs."""

    name: str = "reward"
    has_lm_head: ClassVar[bool] = False
    centring: NonNegative = 0.0
    """Coefficient of the squared sum of a pair's scores, which centres them at 0 (Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244); 0.01 is usual, 0 for none."""

    @property
    def reads(self) -> RowKind:
        """Pairs of completions, of which one is better."""
        return RowKind.PAIRS

    def sequences_per_update(self, batch_size: int) -> int:
        """Sequences of one update: two for each pair."""
        return 2 * batch_size
