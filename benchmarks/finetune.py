"""`python -m benchmarks.finetune`: what full training, LoRA and QLoRA reach in the same steps from the same weights.

A small model learns docstring lines from nothing, in half of the steps that `recipes/sft_pydoc.yaml` takes. Every kind
goes on from there, on the same batches. Adapters need other learning rates than full training: two are tried for each.
An interrupted call continues when it is repeated.
"""

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tunix.run.opening import train
from tunix.run.train import RunResult

RECIPE = Path(__file__).parents[1] / "recipes/sft_pydoc.yaml"
KINDS = {
    "full": ("null", (1e-3, 3e-3)),
    "lora": ("{rank: 16}", (3e-3, 1e-2)),
    "int8": ("{kind: qlora, base: int8, rank: 16}", (3e-3,)),
    "nf4": ("{kind: qlora, base: nf4, rank: 16}", (3e-3,)),
    "nf4, tile 32": ("{kind: qlora, base: nf4, tile: 32, rank: 16}", (3e-3,)),
}
"""Kind of training -> the adapter, and the learning rates that are tried."""
LAST = 20
"""Steps over which the training loss is averaged."""


def trained(output: Path, steps: int, *overrides: str) -> RunResult:
    """The finished run of the recipe."""
    words = [*overrides, f"steps={steps}", "eval={every: 20, samples: 0}", f"output={output}"]
    return train(RECIPE, words)


def row(kind: str, rate: float, result: RunResult) -> list[str]:
    """A kind's losses: held-out before the first step and after the last, and of the last batches."""
    held_out = [one["eval/loss"] for one in result.metrics if "eval/loss" in one]
    losses = [one["train/loss"] for one in result.metrics if "train/loss" in one]
    numbers = (held_out[0], held_out[-1], float(np.mean(losses[-LAST:])))
    return [kind, f"{rate:g}", *(f"{number:.3f}" for number in numbers)]


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs=2, default=(120, 60), help="of the base, and of each kind after it")
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"), help="folder of the runs")
    arguments = parser.parse_args()
    before, after = arguments.steps
    base = trained(arguments.output / "base", before)
    title = f"{after} steps after {before} of the base; nats per token"
    found = Table("", "rate", "held-out, before", "after", f"last {LAST} batches", title=title)
    for kind, (adapter, rates) in KINDS.items():
        for rate in rates:
            words = [f"model={{path: {base.folder}, dtype: float32}}", f"adapter={adapter}"]
            folder = arguments.output / f"{kind.replace(', ', '_').replace(' ', '_')}_{rate:g}"
            result = trained(folder, after, *words, f"optimizer.learning_rate={rate}")
            found.add_row(*row(kind, rate, result))
    Console(width=120).print(found)


if __name__ == "__main__":
    main()
