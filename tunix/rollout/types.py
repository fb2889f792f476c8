"""What sampling hands to an algorithm: the completions of a step with their rewards, and the step itself.

Axes: P prompts, G group.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tunix.data.types import Prompt
from tunix.protocols import Metered, SamplingClient
from tunix.types import Batch, Completion, Sequence, TeacherView

ENVIRONMENT = "environment"
"""The name of the reward that an environment gives."""

Pause = Callable[[int], bool]
"""(dispatches that were sent) -> whether a call is paused instead of the next one, to be continued by another."""

SPANS = "spans.jsonl"
"""File of a run folder with the spans of each step."""


Measure = Callable[[List[Sequence], int], Mapping[str, List[np.ndarray]]]
"""(sequences, number that the work is shaped for) -> what a loss reads, by name an array of each, on their way here."""


@dataclass(frozen=True)
class Span:
    """An activity of a step."""

    name: str
    """What it is, e.g. `rollout`."""
    thread: str
    """The thread that was busy with it, e.g. `MainThread`."""
    start: float
    """Seconds since 1970, e.g. 1795551924.3."""
    end: float
    """When it was over, e.g. 1795551926.1."""


@dataclass(frozen=True)
class Scored:
    """One completion and its rewards."""

    prompt: Prompt
    completion: Completion
    text: str
    """The completion as rewards read it: without special tokens; empty where there is no tokenizer."""
    rewards: Mapping[str, float]
    """Reward by name, e.g. `{"exact_match": 1.0}`; NaN where it failed, or left the completion out."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Name of a reward that failed -> the reason."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's reward for each turn; their sum is its reward for the episode."""
    seats: tuple[int, ...] = ()
    """Who took each turn where an environment has several players, e.g. `(0, 1, 0)`; 0 where one takes all."""
    ended: bool = False
    """Whether its environment has ended it, be its last turn cut off by the token limit or not."""
    version: int | None = None
    """The version of its step's weights, e.g. 3, where tokens of it may be of earlier ones; None where none can be."""
    logged: Mapping[str, Any] = field(default_factory=dict)
    """What reward functions in TRL's style logged of it, as `reward/name`."""
    measured: Mapping[str, np.ndarray] = field(default_factory=dict)
    """`[T]` arrays for the loss, prompt included, computed while others were sampled: `{"reference_logprobs": ...}`."""

    @property
    def unscored(self) -> str | None:
        """Why it has no score, e.g. `judge took longer than 10 s`; None where it has one.

        A reward that leaves it out is no part of the sum, but one that failed makes the sum unknown.
        """
        if self.failures:
            return next(iter(self.failures.values()))
        left_out = self.rewards and all(math.isnan(reward) for reward in self.rewards.values())
        return f"{' and '.join(self.rewards)} returned None for it" if left_out else None

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut the completion off."""
        return self.completion.finish == "length"


def sequence_of(prompt: Prompt, completion: Completion) -> Sequence:
    """A prompt and its completion, of which the sampled tokens are trained, with the experts that they used and the ids
    that they were drawn from."""
    number, view = len(prompt.tokens), None
    if prompt.teacher is not None:
        # The completion follows either prompt.
        places = np.arange(number + len(completion.tokens)) - number + len(prompt.teacher.tokens)
        places[:number] = 0
        tokens = np.concatenate([prompt.teacher.tokens, completion.tokens])
        view = replace(prompt.teacher, tokens=tokens.astype(np.int32), places=places.astype(np.int32))
    candidates = completion.candidates
    if candidates is not None:
        candidates = np.pad(candidates, ((number, 0), (0, 0)), constant_values=-1)
    return Sequence(
        tokens=np.concatenate([prompt.tokens, completion.tokens]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(number, bool), completion.drawn]),
        pictures=prompt.pictures and prompt.pictures.followed(len(completion.tokens)),
        experts=completion.experts,
        restarts=tuple(number + place for place in completion.restarts),
        teacher=view,
        candidates=candidates,
    )


class Clock(dict[str, float]):
    """Seconds spent, by the name of the activity; and what the sampler and the rewards counted meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Any = Counter()
        """Amounts by name; `update` adds to them."""
        self.logged: dict[str, list[float]] = {}
        """Values that reward functions logged, as `reward/name`."""
        self.spans: list[Span] = []
        """When each activity went on, in which thread."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time spent in the `with` block."""
        began, now = time.monotonic(), time.time()
        yield
        seconds = time.monotonic() - began
        self[name] = self.get(name, 0.0) + seconds
        self.spans.append(Span(name, threading.current_thread().name, now, now + seconds))

    def meter(self, sampler: SamplingClient) -> None:
        """Adds the work of the sampler's last call, where it counts it."""
        if isinstance(sampler, Metered) and (usage := sampler.usage) is not None:
            self.counted.update(asdict(usage))

    @property
    def metrics(self) -> dict[str, float]:
        """The step's metrics, `perf/...`: seconds of each part, and rates and shares of what was counted."""
        counted, sampling = self.counted, max(self.get("rollout", 0.0), 1e-9)
        numbers = {f"perf/{part}_seconds": seconds for part, seconds in self.items()}
        numbers |= {f"reward/{name}": float(np.mean(values)) for name, values in self.logged.items()}
        if counted["rewards"]:
            numbers["perf/reward_overlap"] = counted["overlapped"] / counted["rewards"]
        if counted["judged"]:
            numbers["perf/judge_cached"] = counted["judge_cached"] / counted["judged"]
        if counted["slot_steps"]:
            numbers["perf/rollout_idle"] = 1 - counted["tokens"] / counted["slot_steps"]
        if counted["drafted"]:
            numbers["perf/rollout_accepted"] = counted["accepted"] / counted["drafted"]
        if counted["tokens"]:
            numbers["perf/rollout_tokens_per_second"] = counted["tokens"] / sampling
        if counted["bytes"]:
            numbers["perf/rollout_bytes_per_second"] = counted["bytes"] / sampling
        return numbers


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
    clock: Clock
    """Seconds spent in each part of this step."""
    version: int
    """The version of the weights that this step is sampled from, e.g. 3; set by the algorithm when it has published
    them."""

    sampled: list[list[Scored]] | None
    """Groups that were sampled while an earlier step was learned from; None where they are still to be."""
    ahead: Mapping[str, float]
    """Metrics of how the prompts were chosen, and of what was sampled ahead, by name."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward in the sum, by its name."""
        ...

    def more(self, number: int) -> list[Prompt]:
        """Reads `number` further prompts; fewer where the data is exhausted."""
        ...

    def collect(
        self, client: SamplingClient, prompts: List[Prompt], n: int, measure: Measure | None = None
    ) -> list[list[Scored]]:
        """Samples and scores `n` episodes of each prompt: `[P][G]`.

        What the loss reads of single completions may be computed meanwhile, by `measure`: see `Scored.measured`.

        Where the run oversamples, further prompts are begun with these, and as many groups as prompts were given come
        back, those that are complete first; the others are among the prompts of the next call or step.
        """
        ...

    def taught(self, prompt: Prompt, texts: Mapping[str, str], /) -> TeacherView | None:
        """The prompt as its teacher reads it where the row has these columns too; None where it has no room for it."""
        ...

    def packed(self, sequences: List[Sequence], size: int, /) -> Batch:
        """Packs up to `size` sequences into rows of this run's length."""
        ...
