"""What is measured on held-out rows while a run goes on: the loss of given completions, the reward of the model's own.

Axes: B rows, T time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tunix.algorithms.advantages import weighted_sum
from tunix.algorithms.base import Algorithm
from tunix.algorithms.on_policy import rewards_of
from tunix.data.pipeline import Packed, Prompt
from tunix.protocols import Client
from tunix.rollout.collect import Collector, require_scores
from tunix.types import Batch


@dataclass(frozen=True)
class Evaluation:
    """The held-out rows of a run and how they are looked at."""

    algorithm: Algorithm
    held_out: list[Packed] = field(default_factory=list)
    """Given completions, for `eval/loss`; empty where there are none."""
    prompts: list[Prompt] = field(default_factory=list)
    """Answered greedily and scored, for `eval/reward`; empty without rewards."""
    collector: Collector | None = None
    until: Mapping[str, float] = field(default_factory=dict)
    """Metric -> value at which the run has reached what it is for."""

    def __bool__(self) -> bool:
        return bool(self.held_out or self.prompts)

    @property
    def batches(self) -> list[Batch]:
        """The given completions, packed."""
        return [packed.batch for packed in self.held_out]

    def values(self, client: Client) -> dict[str, float]:
        """`eval/loss` and the loss's metrics, `eval/reward` and each reward's own."""
        found = self.algorithm.evaluate(client, self.held_out) if self.held_out else {}
        return found | (self._rewards(client) if self.prompts else {})

    def reached(self, values: Mapping[str, float]) -> str | None:
        """The first metric that is where `until` wants it: a loss at or below, a reward at or above."""
        for name, wanted in self.until.items():
            if name in values and (values[name] <= wanted if "loss" in name else values[name] >= wanted):
                return name
        return None

    def _rewards(self, client: Client) -> dict[str, float]:
        assert self.collector is not None
        client.publish()
        groups = self.collector.collect(client, self.prompts, 1, seed=0)
        require_scores(groups)
        named = rewards_of(groups)
        each = {f"eval/reward/{name}": float(np.nanmean(values)) for name, values in named.items()}
        total = float(np.nanmean(weighted_sum(named, self.collector.weights)))
        return {"eval/reward": total} | (each if len(each) > 1 else {})
