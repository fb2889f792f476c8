"""The `algorithm` section of a recipe for a reward model. Loads without jax."""

from typing import Annotated, ClassVar

from pydantic import Field

from tunix.config import AlgorithmConfig, Reads


class RewardModelConfig(AlgorithmConfig):
    """How scores of pairs become a loss."""

    name: str = "reward"
    speaks: ClassVar[bool] = False
    centring: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the squared sum of a pair's scores, which keeps them around 0 (Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244); 0.01 is usual, 0 for none."""

    @property
    def reads(self) -> Reads:
        """Two completions, of which one is better."""
        return "pairs"

    def sequences_per_update(self, batch_size: int) -> int:
        """Two for each pair."""
        return 2 * batch_size
