"""The `algorithm` section of a recipe for PPO. Loads without jax."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tunix.algorithms.config import PolicyConfig, Rule, Settings
from tunix.config import Positive

Unit = Annotated[float, Field(ge=0, le=1)]


class PPOConfig(PolicyConfig):
    """A critic values every token; advantages are generalised (GAE)."""

    name: str = "ppo"
    group_size: Positive = 1
    """Completions of each prompt."""
    gamma: Unit = 1.0
    """Discount per drawn token."""
    lam: Unit = 0.95
    """GAE's lambda: 1 trusts the rewards alone, 0 the critic's next value."""
    lam_length: Annotated[float, Field(gt=0)] | None = None
    """The policy's lambda is 1 - 1 / (this times the completion's tokens), at least 0: the longer, the nearer to 1.
    VAPO (https://arxiv.org/abs/2504.05118) takes 0.05. Null: lam."""
    lam_critic: Unit | None = None
    """Lambda of the returns that the critic learns; VAPO and VC-PPO take 1. Null: the policy's."""
    whiten: bool = True
    """Advantages are shifted and scaled to mean 0 and deviation 1 over the batch's trained tokens."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """Nats per completion to which the KL coefficient adapts, starting from `kl`; null keeps it."""
    critic: Literal["own", "shared"] = "own"
    """A model of its own, which starts from the policy's weights; or a head on the policy's trunk."""
    critic_learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Of the critic of its own; null: the optimizer's."""
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    """First steps in which the critic of its own alone trains."""
    value_coefficient: Annotated[float, Field(gt=0)] | None = None
    """Weight of the value loss beside the policy's. Null: 0.5 with a shared trunk, 1 with a critic of its own."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Values count as within this of what they were at the rollout, where that makes the loss worse; null: no clip."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *PolicyConfig.rules,
        Rule(("std",), lambda s: bool(s["whiten"]), "without whiten: true"),
        Rule(("lam",), lambda s: s["lam_length"] is None, "with lam_length, which stands in its place: set lam_critic"),
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
        """What null stands for, given the other settings."""
        shared = settings["critic"] == "shared"
        usual = super().usual(settings)
        return {**usual, "kl_in": "reward", "value_coefficient": 0.5 if shared else 1.0}
