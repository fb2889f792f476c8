"""The `algorithm` section of a recipe for PPO. Loads without jax."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tunix.algorithms.config import PolicyConfig, Rule, Settings, Unit


class PPOConfig(PolicyConfig):
    """A critic estimates values of all tokens; advantages are generalised (GAE)."""

    tiny_caps: ClassVar[Mapping[str, int]] = {**PolicyConfig.tiny_caps, "critic_warmup": 2}

    name: str = "ppo"
    gamma: Unit = 1.0
    """Discount per sampled token."""
    lam: Unit = 0.95
    """GAE's lambda: 1 trusts the rewards alone, 0 the critic's next value."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """Nats per completion to which the KL coefficient adapts, starting from `kl`; null leaves it constant."""
    critic: Literal["own", "shared"] = "own"
    """`own`: a separate model, which starts from the policy's weights. `shared`: a head on the policy's trunk."""
    critic_learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of a separate critic; null: the optimizer's."""
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    """Number of first steps in which only a separate critic is trained."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Bound of a value's change since the rollout, used where it makes the loss larger; null: no clip."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *PolicyConfig.rules,
        Rule(("kl_target",), lambda s: bool(s["kl"]), "while kl, its first value, is 0: set kl"),
        Rule(
            ("critic_learning_rate",), lambda s: s["critic"] != "shared", "with critic: shared, which has the policy's"
        ),
        Rule(
            ("critic_warmup",),
            lambda s: s["critic"] != "shared",
            "with critic: shared, whose value loss moves the policy's trunk too",
        ),
    )

    @classmethod
    def usual(cls, settings: Settings) -> Settings:
        return {**super().usual(settings), "kl_in": "reward"}

    @property
    def reference_before_update(self) -> bool:
        """Whether there is a reference: its KL over completions is measured, and the coefficient may follow it."""
        return bool(self.kl)

    @property
    def learning_rate_of_critic(self) -> float | None:
        return self.critic_learning_rate
