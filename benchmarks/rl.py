"""`python -m benchmarks.rl`: a whole GRPO step, split into rollout, reward and update.

2 prompts of 64 tokens x 8 completions of 64, the small Llama shape, float32: the work that google/tunix and TRL were
measured on. Steps run one after the other, as a run has them; the medians of what each part took.

`--slow`: rollouts of 8 x 8 completions of very different lengths, where half of the rewards take half a second. Two
runs that are equal to the bit take turns: one begins rewards while others sample, the other when all have been sampled.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.plain import plain_work
from benchmarks.shapes import LORA, SHAPES, Shape
from benchmarks.train import interleaved
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.sources import open_rows
from tunix.protocols import Sampler
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.rewards.config import RewardFunction
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.setup import MISMATCH
from tunix.types import Completion, Sampling, Workload

PARTS = ("rollout", "reward", "update")


class Sizes(NamedTuple):
    """The work of a step."""

    prompts: int = 2
    group: int = 8
    """Completions of each prompt."""
    length: int = 64
    """Tokens of a prompt."""
    new: int = 64
    """Tokens of a completion."""


SIZES = Sizes()
RAGGED = Sizes(prompts=8, new=512)
"""Of steps with slow rewards; a token of VOCABULARY in 64 ends a completion, so that a few are four times the mean."""
VOCABULARY, SLOW, WORKERS = 1024, 0.5, 8


def even(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    """A reward by which completions differ: the share of even tokens."""
    return [float(np.mean(np.array(ids) % 2 == 0)) for ids in completion_ids]


def stream(sampling: Sampling, scorer: Scorer, shape: Shape, together: int, length: int, sizes: Sizes) -> RolloutStream:
    """Endless rollouts of random prompts, in rows of `length` tokens that `together` answers to a prompt share."""
    rng = np.random.default_rng(0)
    rows = [{"prompt_ids": rng.integers(0, shape.config.vocab_size, sizes.length).tolist()} for _ in range(64)]
    config = DataConfig(train="given", max_length=sizes.length + sizes.new, completion_length=sizes.new)
    like = RolloutStep(
        collector=Collector(None, sampling, scorer),
        stream=Prompts(Examples(open_rows(rows), None, config, RowKind.PROMPT), seed=0),
        size=sizes.prompts,
        seed=0,
        packed=partial(pack, max_length=length, together=together),
        tolerance=MISMATCH[shape.dtype],
    )
    return RolloutStream(like)


def measure(
    steps: int,
    *,
    lora: bool,
    kl: float,
    shape: Shape = SHAPES["small"],
    sizes: Sizes = SIZES,
    after: Callable[[Callable[[], Any]], Any] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each step and of its parts, after two steps that compile.

    Args:
        steps: how many are measured.
        lora: whether an adapter is trained.
        kl: weight of the divergence from the reference; 0 keeps none.
        shape: the model.
        sizes: the prompts and completions.
        after: called at the end with what computes another step, e.g. a profiler.
    """
    sampling = Sampling(max_tokens=sizes.new)
    longest, answers = sizes.length + sizes.new, sizes.prompts * sizes.group
    together, length = shape.together(sizes.group, sizes.prompts, longest, sizes.new)
    rows: dict[str, Any] = {"length": length, "rows": answers // together, "unit": together, "longest": longest}
    client = shape.trainer(LORA if lora else None, **rows, reference=bool(kl))
    algorithm = GRPO(GRPOConfig(group_size=sizes.group, kl=kl), sampling)
    seconds: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
    client.warm(Workload(answers, sizes.length, longest))
    with Scorer([even]) as scorer:
        data = stream(sampling, scorer, shape, together, length, sizes)
        for step in range(steps + 2):
            rollouts, start = next(data), time.perf_counter()
            algorithm.update(client, rollouts)
            if step >= 2:
                seconds["step"].append(time.perf_counter() - start)
                for part in PARTS:
                    seconds[part].append(rollouts.clock[part])
        if after is not None:
            after(partial(algorithm.update, client, next(data)))
        data.close()
    return seconds


def half_slow(completion: str, completion_ids: list[int]) -> float:
    """The same reward of one sample, for which half of the samples take half a second."""
    if sum(completion_ids) % 2:
        time.sleep(SLOW)
    return sum(number % 2 == 0 for number in completion_ids) / len(completion_ids)


class Silent(Sampler):
    """A sampler that reports nothing before all have been sampled."""

    def __init__(self, engine: Sampler):
        self.engine = engine
        self.publish, self.warm = engine.publish, engine.warm

    def run(self, requests, reply=None, on_done=None) -> list[Completion]:
        """Samples without `on_done`."""
        return self.engine.run(requests, reply)


def slow_steps(silent: bool) -> Iterator[dict[str, Any]]:
    """What one step after the other reports; updates are left out."""
    sampling = Sampling(max_tokens=RAGGED.new, stop_ids=tuple(range(16)))
    small = SHAPES["small"]
    shape = replace(small, config=replace(small.config, vocab_size=VOCABULARY))
    longest = RAGGED.length + RAGGED.new
    client = shape.trainer(length=longest, rows=RAGGED.prompts * RAGGED.group, longest=longest)
    if silent:
        client.sampler = Silent(client.sampler)
    algorithm = GRPO(GRPOConfig(group_size=RAGGED.group), sampling)
    reward = RewardFunction(name="benchmarks.rl:half_slow")
    with (
        Scorer([reward], workers=WORKERS) as scorer,
        closing(stream(sampling, scorer, shape, 1, longest, RAGGED)) as data,
    ):
        for rollouts in data:
            groups = algorithm.rollout(client, rollouts).groups
            rewards = [list(episode.rewards.values()) for group in groups for episode in group]
            lengths = [len(episode.completion.tokens) for group in groups for episode in group]
            yield {**rollouts.clock.metrics, "rewards": rewards, "tokens": float(np.mean(lengths))}


def show_slow(steps: int, console: Console) -> None:
    """Measures and prints steps with slow rewards."""
    runs = {"while others sample": slow_steps(silent=False), "afterwards": slow_steps(silent=True)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for turn in range(steps + 2):
        for name, run in runs.items():
            metrics = next(run)
            if turn >= 2:
                found[name].append(metrics)
    rewards = [[metrics["rewards"] for metrics in rows] for rows in found.values()]
    assert rewards[0] == rewards[1], "the two runs are one"
    told = {
        "rollout, s": "perf/rollout_seconds",
        "waited for rewards, s": "perf/reward_seconds",
        "overlap": "perf/reward_overlap",
        "tokens": "tokens",
    }
    title = f"GRPO, {RAGGED.prompts} x {RAGGED.group}, half of the rewards take {SLOW} s; {WORKERS} workers"
    table = Table("rewards begin", *told, title=title)
    for name, rows in found.items():
        table.add_row(name, *(f"{np.median([row.get(key, 0.0) for row in rows]):.3f}" for key in told.values()))
    console.print(table)


def plain_seconds(steps: int) -> float:
    """Seconds of the plain step of SFT on as many tokens, with which an update is compared."""
    work = interleaved({"plain": plain_work(SHAPES["small"])}, steps)
    return float(np.median(work["plain"]))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each kind")
    parser.add_argument("--slow", action="store_true", help="steps in which half of the rewards are slow")
    arguments, console = parser.parse_args(), Console(width=120)
    if arguments.slow:
        show_slow(arguments.steps, console)
        return
    found = Table(
        "",
        "step, ms",
        *(f"{part}, ms" for part in PARTS),
        "update of plain",
        title=f"GRPO, {SIZES.prompts} x {SIZES.group}, {SIZES.length} + {SIZES.new}",
    )
    plain = plain_seconds(arguments.steps)
    for name, lora, kl in (("full", False, 0.0), ("full, with reference", False, 0.04), ("lora", True, 0.0)):
        seconds = measure(arguments.steps, lora=lora, kl=kl)
        medians = [f"{np.median(seconds[part]) * 1e3:.0f}" for part in ("step", *PARTS)]
        found.add_row(name, *medians, f"{np.median(seconds['update']) / plain:.2f}")
    console.print(found)
    console.print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
