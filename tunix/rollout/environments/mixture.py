"""The recipe's section `data` with rewards and an environment for each data set of a mixture. Loads without jax."""

from typing import Annotated

from pydantic import Discriminator, Tag

from tunix.config import Place
from tunix.data.config import DataConfig, SourceConfig, form_of
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.rewards.config import RewardConfig


class RolloutSource(SourceConfig):
    """One of the data sets of `data.train`; what it leaves out is as the rest of the recipe says."""

    reward: RewardConfig | None = None
    """How completions of its prompts are scored, in place of the recipe's `reward`: by functions alone."""
    environment: EnvironmentConfig | None = None
    """The environment of its episodes, in place of `rollout.environment`."""

    @property
    def in_environment(self) -> bool:
        """Whether an environment of its own makes its prompts."""
        return self.environment is not None


class MixtureConfig(DataConfig):
    """Where the rows come from and how they become sequences."""

    train: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]  (frozen, so that it may be narrower)
        Annotated[Place, Tag("path[]")] | Annotated[tuple[RolloutSource, ...], Tag("list[]")], Discriminator(form_of)
    ]

    @property
    def sources(self) -> tuple[RolloutSource, ...]:
        """The data sets of a mixture; empty where `train` is a single one."""
        return () if isinstance(self.train, str) else self.train
