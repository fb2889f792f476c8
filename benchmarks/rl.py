"""`python -m benchmarks.rl`: a whole GRPO step, split into rollout, reward and update.

2 prompts of 64 tokens x 8 completions of 64, the small Llama shape, float32: the work that google/tunix and TRL were
measured on. Steps run one after the other, as a run has them; the medians of what each part took.
"""

import argparse
import time
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.plain import plain_work
from benchmarks.shapes import LORA, SHAPES, Shape
from benchmarks.train import interleaved
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.data.config import DataConfig
from tunix.data.pipeline import Prompts
from tunix.data.sources import open_rows
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.rewards.scorer import Scorer
from tunix.types import Sampling

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


def even(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    """A reward by which completions differ: the share of even tokens."""
    return [float(np.mean(np.array(ids) % 2 == 0)) for ids in completion_ids]


def stream(sampling: Sampling, scorer: Scorer, vocab: int, together: int, length: int, sizes: Sizes) -> RolloutStream:
    """Endless rollouts of random prompts, in rows of `length` tokens that `together` answers to a prompt share."""
    rng = np.random.default_rng(0)
    rows = [{"prompt_ids": rng.integers(0, vocab, sizes.length).tolist()} for _ in range(64)]
    config = DataConfig(train="given", max_length=sizes.length + sizes.new, completion_length=sizes.new)
    like = RolloutStep(
        prompts=[],
        collector=Collector(None, sampling, scorer),
        stream=Prompts(open_rows(rows), None, config, seed=0),
        size=sizes.prompts,
        seed=0,
        first=True,
        length=length,
        packing=True,
        together=together,
        tolerance=1e-3,
    )
    return RolloutStream(like)


def measure(
    steps: int, *, lora: bool, kl: float, shape: Shape = SHAPES["small"], sizes: Sizes = SIZES
) -> dict[str, list[float]]:
    """Seconds of each step and of its parts, after two steps that compile."""
    sampling = Sampling(max_tokens=sizes.new)
    longest, answers = sizes.length + sizes.new, sizes.prompts * sizes.group
    together, length = shape.together(sizes.group, sizes.prompts, longest, sizes.new)
    rows = {"length": length, "rows": answers // together, "unit": together, "longest": longest}
    client = shape.trainer(LORA if lora else None, **rows, reference=bool(kl))
    algorithm = GRPO(GRPOConfig(group_size=sizes.group, kl=kl), sampling)
    seconds: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
    with Scorer([even]) as scorer:
        data = stream(sampling, scorer, shape.config.vocab_size, together, length, sizes)
        for step in range(steps + 2):
            rollouts, start = next(data), time.perf_counter()
            algorithm.update(client, rollouts)
            if step >= 2:
                seconds["step"].append(time.perf_counter() - start)
                for part in PARTS:
                    seconds[part].append(rollouts.clock[part])
        data.close()
    return seconds


def plain_seconds(steps: int) -> float:
    """Seconds of the plain step of SFT on as many tokens, with which an update is compared."""
    work = interleaved({"plain": plain_work(SHAPES["small"])}, steps)
    return float(np.median(work["plain"]))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each kind")
    arguments = parser.parse_args()
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
    console = Console(width=120)
    console.print(found)
    console.print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
