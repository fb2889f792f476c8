"""Evaluation of a run on held-out rows: the loss of given completions, the reward of sampled ones.

Axes: B rows, T time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tunix.algorithms.base import Algorithm
from tunix.algorithms.episodes import require_scores, reward_means, rewards_of, total_rewards
from tunix.data.types import Packed, Prompt
from tunix.protocols import Client
from tunix.rollout.collect import Collector
from tunix.types import Batch


@dataclass(frozen=True)
class Evaluation:
    """The held-out rows of a run and how they are evaluated."""

    algorithm: Algorithm
    held_out: list[Packed] = field(default_factory=list)
    """Batches of given completions, for `eval/loss`; empty without any."""
    prompts: list[Prompt] = field(default_factory=list)
    """Prompts that are answered greedily and scored, for `eval/reward`; empty without rewards."""
    collector: Collector | None = None
    until: Mapping[str, float] = field(default_factory=dict)
    """`eval.until`: metric -> value at which the run ends early, e.g. `{"eval/reward": 0.9}`."""

    def __bool__(self) -> bool:
        return bool(self.held_out or self.prompts)

    @property
    def batches(self) -> list[Batch]:
        """The packed batches of given completions."""
        return [packed.batch for packed in self.held_out]

    def values(self, client: Client) -> dict[str, float]:
        """All metrics: `eval/loss` and the loss's metrics, `eval/reward` and the mean of each reward."""
        metrics = self.algorithm.evaluate(client, self.held_out) if self.held_out else {}
        return metrics | (self._rewards(client) if self.prompts else {})

    def reached(self, values: Mapping[str, float]) -> str | None:
        """The first metric that has reached its target in `until`: a loss at or below it, others at or above."""
        for name, target in self.until.items():
            if name in values and (values[name] <= target if "loss" in name else values[name] >= target):
                return name
        return None

    def _rewards(self, client: Client) -> dict[str, float]:
        assert self.collector is not None
        client.publish()
        groups = self.collector.collect(client, self.prompts, 1, seed=0)
        require_scores(groups)
        each = {f"eval/reward/{name}": mean for name, mean in reward_means(rewards_of(groups)).items()}
        total = float(np.nanmean(total_rewards(groups, self.collector.weights)))
        return {"eval/reward": total} | (each if len(each) > 1 else {})
