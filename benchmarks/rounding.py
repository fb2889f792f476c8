"""`python -m benchmarks.rounding`: the loss of few bits: rounded after training, and with the rounding in training.

A small model learns docstring lines from nothing, in half of the steps that `recipes/sft_pydoc.yaml` takes. From there
training goes on for as many steps without rounding, and the result is rounded (PTQ); and once more with the rounding in
each step (QAT), on the same batches. An interrupted call continues when it is repeated.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.finetune import trained
from tunix.commands.evaluate import EvalOptions
from tunix.commands.quantize import quantize, read_words
from tunix.inference.model import InferenceOptions
from tunix.run.train import RunResult

RATE = 1e-3
"""The better one of full training in `benchmarks.finetune`."""
RULES = (".*=int8", ".*=int8/int8", ".*=int4:32", ".*=int4:128", ".*=nf4:128")


def held_out(result: RunResult) -> float:
    """Held-out loss after the last step."""
    return next(one["eval/loss"] for one in reversed(result.metrics) if "eval/loss" in one)


def step_time(result: RunResult) -> float:
    """Milliseconds from one step's end to the next's, the median: evaluations are few."""
    ends = [one["time/seconds"] for one in result.metrics if "train/loss" in one]
    return float(np.median(np.diff(ends))) * 1e3


def after_training(run: RunResult, rules: str, out: Path) -> float:
    """Held-out loss of a run's weights, rounded."""
    shutil.rmtree(out, ignore_errors=True)  # written by this benchmark, and written again
    return quantize(InferenceOptions(str(run.folder)), out, rules, EvalOptions())["loss/after"]


def main() -> None:
    """Trains, rounds and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs=2, default=(120, 60), help="of the base, and after it")
    parser.add_argument("--output", type=Path, default=Path("runs/rounding"), help="folder of the runs")
    arguments = parser.parse_args()
    before, after = arguments.steps
    base = trained(arguments.output / "base", before)
    words = [f"model={{path: {base.folder}, dtype: float32}}", f"optimizer.learning_rate={RATE}"]
    plain = trained(arguments.output / "plain", after, *words)
    title = f"held-out loss, {after} steps after {before} of the base; without rounding {held_out(plain):.3f}"
    found = Table("", "base rounded", "PTQ", "QAT", "step, ms", title=title)
    found.add_row("plain", "", "", "", f"{step_time(plain):.0f}")
    for rules in RULES:
        name = rules.removeprefix(".*=")
        section = f"quantization={json.dumps({'mode': 'qat', **read_words(rules).model_dump(mode='json')})}"
        qat = trained(arguments.output / name.replace(":", "_").replace("/", "_"), after, *words, section)
        rounded = [after_training(run, rules, arguments.output / "rounded") for run in (base, plain)]
        found.add_row(name, *(f"{loss:.3f}" for loss in (*rounded, held_out(qat))), f"{step_time(qat):.0f}")
    Console(width=120).print(found)


if __name__ == "__main__":
    main()
