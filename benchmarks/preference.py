"""`python -m benchmarks.preference`: a DPO step on 4 pairs x 256 tokens, full and LoRA, against SFT on as many tokens.

All contenders take turns within one run, because the machine may be shared: medians and their ratios say more than any
one time. Peak memory is measured in processes of its own.

Axes: P pairs, T time.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.plain import plain_work
from benchmarks.shapes import LORA, SHAPES
from benchmarks.train import LOSS, SIDE, interleaved
from tunix.algorithms.dpo.algorithm import DPO
from tunix.algorithms.dpo.config import DPOConfig
from tunix.data.config import DataConfig
from tunix.data.packing import pack
from tunix.data.pipeline import Layout
from tunix.trainer.perf import matmul_weights, peak_memory, training_flops
from tunix.trainer.trainer import Trainer
from tunix.types import Batch, Loss, Sequence

SHAPE = SHAPES["small"]
PAIRS, LENGTH = 4, 256
ROW = 2 * LENGTH
SHORT = Layout(sequences_per_example=2).length(
    DataConfig(train="given", max_length=LENGTH, completion_length=LENGTH // 2)
)
"""Tokens of a row where completions have their own limit."""


def pair(rng: np.random.Generator, prompt: int, chosen: int, rejected: int) -> list[Sequence]:
    """A pair of random ids; the completions are trained, and come with made-up reference log-probs."""

    def side(start: np.ndarray, length: int) -> Sequence:
        tokens = np.concatenate([start, rng.integers(0, SHAPE.config.vocab_size, length)]).astype(np.int32)
        made = {"reference_logprobs": np.full(len(tokens), -8.0, np.float32)}
        return Sequence(tokens, np.arange(len(tokens)) >= len(start), per_token=made)

    start = rng.integers(0, SHAPE.config.vocab_size, prompt)
    return [side(start, chosen), side(start, rejected)]


def even(prompt: int) -> list[Sequence]:
    """P pairs of which each side has LENGTH tokens, the first `prompt` of them in common."""
    rng = np.random.default_rng(0)
    return [side for _ in range(PAIRS) for side in pair(rng, prompt, LENGTH - prompt, LENGTH - prompt)]


def ragged(number: int = 16) -> list[Sequence]:
    """Pairs of log-normal lengths, as chat data has, that fit into a row."""
    rng = np.random.default_rng(1)

    def lengths() -> list[int]:
        return np.clip(rng.lognormal(4.0, 0.7, 3), 4, LENGTH // 2).astype(int).tolist()

    return [side for _ in range(number) for side in pair(rng, *lengths())]


@dataclass(frozen=True)
class Contender:
    """One kind of training step, with its batch."""

    name: str
    loss: Loss
    batch: Batch
    lora: bool = False
    reference: bool = False
    """Whether a frozen copy of the weights is kept as the reference."""

    @property
    def flops(self) -> float:
        """FLOPs of the tokens that are computed: those of a step, and 2 N T for the reference."""
        step = training_flops(SHAPE.config, self.batch, LORA if self.lora else None)
        if not self.loss.reference:
            return step
        # A forward pass: 2 N T, and a third of attention's 12 N H.
        attention = training_flops(SHAPE.config, self.batch, None) - 6 * matmul_weights(SHAPE.config) * self.tokens
        return step + 2 * matmul_weights(SHAPE.config) * self.tokens + attention / 3

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed, without padding."""
        return int(np.count_nonzero(self.batch.segment_ids))

    def trainer(self) -> Trainer:
        """A trainer whose micro-batches hold the whole batch."""
        rows, length = self.batch.tokens.shape
        return SHAPE.trainer(LORA if self.lora else None, rows=rows, length=length, reference=self.reference)

    def step(self, trainer: Trainer) -> None:
        """One finished step."""
        jax.block_until_ready((trainer.step(self.batch, self.loss), trainer.state))


def contenders() -> list[Contender]:
    """The kinds of steps that take turns."""
    dpo = DPO(DPOConfig()).objective
    known, simpo = replace(dpo, reference=False), DPO(DPOConfig(loss="simpo")).objective
    half, longer = (pack(even(LENGTH // 2), 2 * PAIRS, row, sequences_per_example=2) for row in (SHORT, ROW))
    apart = pack(even(LENGTH // 2), 2 * PAIRS, ROW, packing=False, sequences_per_example=2)
    sides, size = ragged(), 2 * 16
    packed = pack(sides, size, ROW, sequences_per_example=2)
    padded = pack(sides, size, ROW, packing=False, sequences_per_example=2)
    return [
        Contender("sft, 8 x 256", LOSS, SHAPE.batch()),
        Contender("full", dpo, half, reference=True),
        Contender("full, rows of two sides", dpo, longer, reference=True),
        Contender("full, prompts not shared", dpo, apart, reference=True),
        Contender("full, reference known", known, half),
        Contender("full, simpo", simpo, half),
        Contender("lora", dpo, half, lora=True),
        Contender("lora, reference known", known, half, lora=True),
        Contender("ragged, packed", dpo, packed, reference=True),
        Contender("ragged, padded", dpo, padded, reference=True),
    ]


def memory_of(name: str) -> dict[str, float]:
    """Peak memory of three steps, and that of the weights and moments alone, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.preference", "--memory", name]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure_memory(name: str) -> None:
    """What the process that `memory_of` starts runs: prints its measurements as JSON."""
    contender = next(one for one in contenders() if one.name == name)
    trainer = contender.trainer()
    for _ in range(3):
        contender.step(trainer)
    held = sum(x.nbytes for x in jax.live_arrays())
    print(json.dumps({"peak": peak_memory(), "held": held}))


COLUMNS = (
    "",
    "step, ms",
    "min, ms",
    "tokens",
    "tokens/s",
    "share of peak",
    "of sft",
    "of plain",
    "memory, MB",
    "held, MB",
)


def table(listed: list[Contender], seconds: dict[str, list[float]], memory: dict[str, dict[str, float]]) -> Table:
    """The table of measurements."""
    peak = 2 * SIDE**3 / min(seconds["product"] + seconds["turned"])
    title = f"{PAIRS} pairs x {LENGTH}, prompts of {LENGTH // 2}, small Llama, float32; peak {peak / 1e9:.0f} GFLOP/s"
    found = Table(*COLUMNS, title=title)
    for one in listed:
        own = seconds[one.name]
        median = float(np.median(own))
        row = [one.name, f"{median * 1e3:.0f}", f"{min(own) * 1e3:.0f}", f"{one.tokens}", f"{one.tokens / median:.0f}"]
        row += [
            f"{one.flops / median / peak:.1%}",
            f"{np.median(np.array(own) / np.array(seconds[listed[0].name])):.2f}",
            f"{np.median(np.array(own) / np.array(seconds['plain'])):.2f}",
        ]
        row += [f"{memory[one.name][kind] / 1e6:.0f}" if one.name in memory else "" for kind in ("peak", "held")]
        found.add_row(*row)
    return found


def work(listed: list[Contender]) -> dict[str, Callable[[], Any]]:
    """The work that takes turns: steps, the plain step of SFT, and the products that give the machine's peak."""
    square = jnp.ones((SIDE, SIDE))
    product, turned = jax.jit(lambda a, b: a @ b), jax.jit(lambda a, b: a @ b.T)
    return {one.name: partial(one.step, one.trainer()) for one in listed} | {
        "plain": plain_work(SHAPE),
        "product": lambda: product(square, square).block_until_ready(),
        "turned": lambda: turned(square, square).block_until_ready(),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender")
    parser.add_argument("--memory", metavar="NAME", help="used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.memory:
        return measure_memory(arguments.memory)
    listed = contenders()
    memory = {one.name: memory_of(one.name) for one in listed if not one.name.startswith("ragged")}
    console = Console(width=150)
    console.print(table(listed, interleaved(work(listed), arguments.rounds), memory))
    console.print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
