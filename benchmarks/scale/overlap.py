"""The real buffer of asynchronous rollouts between a sampler and a learner that sleep: steps a second, for each bound.

Two cores cannot compute two things at once that each want both, so nothing is computed: what is measured is how much of
the waiting `tunix.rollout.asynchronous.AsyncRollouts` takes away. Durations are the same for all contenders; the
synchronous one sleeps in one thread. What `simulation.py` predicts of the same durations, with one slot, stands beside
it.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.scale.arithmetic import log_normal
from benchmarks.scale.simulation import WARM, simulate
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.sources import open_rows
from tunix.protocols import Client, SamplingClient
from tunix.rollout.asynchronous import AsyncRollouts, Holding, Journal
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.types import Scored
from tunix.types import Completion, OnDone, Reply, Request, Sampling

STALENESS = (0, 1, 2, 4)
MEAN = 0.05
"""Seconds of sampling, and of learning, at the mean."""
SAMPLING = Sampling(max_tokens=1)


class Durations(NamedTuple):
    """Seconds of each step."""

    sampling: np.ndarray
    """`[steps]`"""
    learning: np.ndarray
    """`[steps]`"""


def durations(steps: int, seed: int = 0) -> dict[str, Durations]:
    """Sampling and learning that take equally long at the mean, constant and log-normal."""
    rng, even = np.random.default_rng(seed), np.full(steps, MEAN)
    found = {"constant": Durations(even, even)}
    for sigma in (0.5, 1.0):
        lengths = log_normal(sigma)
        sampling, learning = (MEAN * lengths.draw(rng, (steps,)) for _ in range(2))
        found[f"sampling log-normal, sigma {sigma:g}"] = Durations(sampling, even)
        found[f"both log-normal, sigma {sigma:g}"] = Durations(sampling, learning)
    return found


class SleepingSampler(Holding):
    """Sleeps for as long as its next step takes, and answers with one token of the weights that it was given."""

    def __init__(self, seconds: np.ndarray):
        self.version, self._left = 0, iter(seconds)

    @property
    def exclusive(self) -> bool:
        """Whether a publication waits until nobody holds the weights before: it does not."""
        return False

    def hold(self) -> int:
        """The version of the weights that were published last."""
        return self.version

    def run(
        self,
        requests: Sequence[Request],
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        pause: Callable[[int], bool] | None = None,
        held: Any = None,
    ) -> list[Completion]:
        """One completion of one prompt."""
        time.sleep(next(self._left))
        version = np.array([self.version if held is None else held], np.int32)
        return [Completion(version, -np.ones(1, np.float32), "stop", version, requests[0].sampling, ((0, 1),))]


class SleepingLearner:
    """Publishes the number of its updates as its weights; `AsyncRollouts` asks its client for nothing else."""

    def __init__(self, sampler: SleepingSampler):
        self.sampler, self.learned = sampler, 0

    def publish(self) -> int:
        """The new version."""
        self.sampler.version, self.learned = self.learned, self.learned + 1
        return self.sampler.version


def gather(client: SamplingClient, step: RolloutStep) -> list[list[Scored]]:
    """The completion of a step's prompt, without rewards."""
    (prompt,) = step.prompts
    groups = client.sample([prompt.tokens], 1, SAMPLING, 0)
    return [[Scored(prompt, completion, "", {}) for completion in group] for group in groups]


def in_turns(each: Durations) -> float:
    """Steps a second where one thread samples and learns."""
    began = 0.0
    for number, (sampling, learning) in enumerate(zip(*each, strict=True)):
        if number == WARM:
            began = time.monotonic()
        time.sleep(sampling)
        time.sleep(learning)
    return (len(each.sampling) - WARM) / (time.monotonic() - began)


def beside(each: Durations, staleness: int, steps: int, folder: Path) -> float:
    """Steps a second of `AsyncRollouts`; the first step is sampled by the caller, as in a run."""
    rows = open_rows([{"prompt_ids": [number]} for number in range(len(each.sampling))])
    data = DataConfig(train="rows", max_length=32, completion_length=16, shuffle=False)
    common: dict[str, Any] = {"size": 1, "seed": 0, "packed": partial(pack, max_length=32), "tolerance": 1e-3}
    prompts = Prompts(Examples(rows, None, data, RowKind.PROMPT), 0, 1)
    stream = RolloutStream(RolloutStep(Collector(None, SAMPLING, None), prompts, **common))
    sampler, began = SleepingSampler(each.sampling), 0.0
    ahead = AsyncRollouts(
        stream,
        cast(Client, SleepingLearner(sampler)),
        sampler,
        gather,
        Journal(folder / f"replay.{staleness}.jsonl", "benchmark"),
        max_staleness=staleness,
        total=len(each.sampling),
        in_flight=None,
        stop=threading.Event(),
    )
    try:
        for number in range(steps):
            step = next(ahead)
            if step.sampled is None:
                sampler.run([Request(np.zeros(1, np.int32), SAMPLING, 0)])
            time.sleep(each.learning[number])
            if number + 1 == WARM:
                began = time.monotonic()
        return (steps - WARM) / (time.monotonic() - began)
    finally:
        ahead.close()


def predicted(each: Durations, staleness: int, steps: int) -> float:
    """Steps a second by the simulation, of the same durations."""
    number = steps + staleness
    return simulate(each.sampling[:number, None], each.learning[:number], 1, staleness).steps


def show(console: Console, steps: int = 120) -> None:
    """Measures and prints; a busy machine wakes a single thread late as well, so all is compared with the durations."""
    title = f"{steps} steps, {MEAN * 1e3:.0f} ms each of both; times the steps/s of these in turns (as simulated)"
    table = Table("durations", "one thread", *(f"k = {k}" for k in STALENESS), title=title)
    for name, each in durations(steps + max(STALENESS)).items():
        turns = predicted(each, 0, steps)
        row = [name, f"{in_turns(Durations(each.sampling[:steps], each.learning[:steps])) / turns:.2f} (1.00)"]
        for k in STALENESS:
            with tempfile.TemporaryDirectory() as folder:
                rate = beside(each, k, steps, Path(folder))
            row.append(f"{rate / turns:.2f} ({predicted(each, k, steps) / turns:.2f})")
        table.add_row(*row)
    console.print(table)
