"""What sampling hands to an algorithm: the completions of a step with their rewards, and the step itself.

Axes: P prompts, G group.
"""

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tunix.data.types import Prompt
from tunix.protocols import SamplingClient
from tunix.types import Batch, Completion, Sequence

ENVIRONMENT = "environment"
"""The name of the reward that an environment gives."""


@dataclass(frozen=True)
class Scored:
    """One completion and its rewards."""

    prompt: Prompt
    completion: Completion
    text: str
    """The completion as rewards read it: without special tokens; empty where there is no tokenizer."""
    rewards: Mapping[str, float]
    """Reward by name, e.g. `{"exact_match": 1.0}`; NaN where it failed."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Name of a reward that failed -> the reason."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's reward for each turn; their sum is its reward for the episode."""

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut the completion off."""
        return self.completion.finish == "length"


class Clock(dict[str, float]):
    """Seconds spent, by the name of the activity."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time spent in the `with` block."""
        began = time.monotonic()
        yield
        self[name] = self.get(name, 0.0) + time.monotonic() - began


@runtime_checkable
class Rollouts(Protocol):
    """One step of an on-policy algorithm: its prompts, and what samples, scores and packs their completions."""

    prompts: list[Prompt]
    """The step's prompts."""
    size: int
    """Prompts of a full step, e.g. 32."""
    first: bool
    """Whether this is the first step of the run: the policy is still the reference."""
    tolerance: float
    """Largest difference between the trainer's and the sampler's log-probs with which a run goes on, e.g. 1e-3."""
    shown: int
    """Groups that are written to `samples.jsonl`."""
    clock: Clock
    """Seconds spent in each part of this step."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward in the sum, by its name."""
        ...

    def more(self, number: int) -> list[Prompt]:
        """Reads `number` further prompts; fewer where the data is exhausted."""
        ...

    def collect(self, client: SamplingClient, prompts: List[Prompt], n: int) -> list[list[Scored]]:
        """Samples and scores `n` episodes of each prompt: `[P][G]`."""
        ...

    def packed(self, sequences: List[Sequence], size: int) -> Batch:
        """Packs up to `size` sequences into rows of this run's length."""
        ...
