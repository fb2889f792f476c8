"""`python -m benchmarks.learning`: what ten tasks of reasoning-gym teach six algorithms and two other libraries.

A Llama-shaped model that is trained from nothing learns each task by example until a third of its answers are right,
once for a task and a seed. Every algorithm goes on from those weights, by the task's own verifier. A cell is
`tunix run` on a recipe of its own below `runs/learning`: what has ended is not run again, what was interrupted goes on.
The whole takes a night on two cores; `--tasks`, `--algorithms`, `--peers` and `--seeds` choose a part, and `--write`
puts all that has ended into `docs/learning.md` and `docs/learning.json`, from which a cell is taken out to have it
run again. Needs `pip install '.[reasoning-gym]'`, the peers `make peers`, the picture matplotlib.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.run import PEERS, WORKERS, versions
from tunix.util.yaml_io import write_yaml

ROOT = Path(__file__).parents[1]
PAGE, PICTURE, RESULTS = (ROOT / f"docs/learning.{end}" for end in ("md", "svg", "json"))
BEGIN, END = "<!-- table: python -m benchmarks.learning -->", "<!-- end of the table -->"
ROWS, HELD_OUT = 4096, 256
"""Problems that are trained on, and those that judge a run; they are drawn with different seeds."""
ANSWER = 8
"""Tokens of an answer at most, its end among them."""
STEPS, EVERY, PROMPTS, GROUP, UPDATES = 40, 5, 32, 8, 4
"""Steps of a cell, how often it is measured; prompts of a step, answers to each, and updates."""
RATE, WARMUP, B2 = 3e-4, 5, 0.95
"""AdamW's rate, the updates in which it is reached, and its second decay."""
SIZES = {
    "vocab_size": 320,
    "d_model": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "ffn": 384,
}


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym at settings that a model of 0.8 million weights can learn."""

    config: Mapping[str, Any]
    """Arguments of the package's configuration, e.g. `{"max_terms": 2}`."""
    length: int
    """Tokens of a question and its answer at most; tasks of one length share compiled programs."""


TASKS = {
    "chain_sum": Task({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 96),
    "spell_backward": Task({"min_word_len": 3, "max_word_len": 4}, 64),
    "number_sequence": Task({"min_terms": 4, "max_terms": 4, "min_value": 0, "max_value": 9, "max_complexity": 1}, 64),
    "lcm": Task({"min_value": 1, "max_value": 20}, 96),
    "gcd": Task({"min_value": 1, "max_value": 50}, 128),
    "count_bits": Task({"min_n": 1, "max_n": 127}, 96),
    "basic_arithmetic": Task({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 64),
    "simple_equations": Task({"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9}, 64),
    "coin_flip": Task({"min_trials": 2, "max_trials": 4}, 96),
    "letter_counting": Task({"min_words": 2, "max_words": 3}, 128),
}
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"name": "grpo"},
    "dr_grpo": {"name": "grpo", "preset": "dr_grpo"},
    "rloo": {"name": "grpo", "preset": "rloo", "kl": 0.0},
    "ppo": {"name": "ppo", "critic": "own", "critic_learning_rate": 1e-3},
    "dapo": {"name": "grpo", "preset": "dapo"},
    "gspo": {"name": "grpo", "preset": "gspo"},
}
"""`algorithm` sections; to each is added what all have in common."""
LIBRARIES = {"trl": "trl_learning.py", "tunix": "google_learning.py"}
"""Keys of `benchmarks.peers.run.PEERS`, and the workers that train by their GRPO."""
Curve = list[tuple[int, float, float]]
"""(step, mean score of greedy answers to the held-out problems, seconds since the start) as a cell was measured; the
seconds, which cells of earlier versions lack, have the time of compiling and measuring in them."""
Curves = Mapping[tuple[str, str], Sequence[Curve]]
"""(task, algorithm or library) -> a curve for each seed that has ended."""


def start_recipe(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """The supervised stage of a task; `write_rows` makes its files.

    Args:
        name: of the task.
        seed: of the weights and of all problems.
        folder: of all cells.
    """
    return {
        "model": {"init": "random", "family": "llama", "sizes": SIZES, "tokenizer": "bytes", "dtype": "float32"},
        "data": {
            "train": str(folder / f"{name}-{seed}-train.jsonl"),
            "eval": str(folder / f"{name}-{seed}-held_out.jsonl"),
            "max_length": TASKS[name].length,
            "completion_length": ANSWER,
        },
        "reward": {"functions": [{"name": "exact_match", "columns": {"answer": "completion"}}]},
        "algorithm": {"name": "sft"},
        "optimizer": {"learning_rate": 1e-3, "b2": 0.98, "weight_decay": 0.01},
        "batch_size": 64,
        "steps": 600,
        "eval": {"every": 20, "rows": 128, "until": {"eval/reward": 0.33}},
        "seed": seed,
        "output": str(folder / f"{name}-start-{seed}"),
    }


def write_rows(name: str, seed: int, folder: Path) -> None:
    """Writes examples of a task, and others that stop its supervised stage, as rows of `prompt` and `completion`."""
    gym = importlib.import_module("reasoning_gym")
    for kind, size, draw in (("train", ROWS, 2 * seed), ("held_out", HELD_OUT, 2 * seed + 1)):
        data = gym.create_dataset(name, seed=1_000_000 + 10_000 * draw, size=size, **TASKS[name].config)
        rows = [{"prompt": item["question"], "completion": str(item["answer"])} for item in data]
        (folder / f"{name}-{seed}-{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe(name: str, algorithm: str, seed: int, folder: Path) -> dict[str, Any]:
    """The recipe of a cell, which goes on from the supervised stage.

    Args:
        name: of the task.
        algorithm: one of `ALGORITHMS`.
        seed: of the supervised stage, the samples and all problems.
        folder: of all cells.
    """
    options = {"tasks": name, "config": {name: dict(TASKS[name].config)}, "size": ROWS}
    return {
        "model": {"path": str(folder / f"{name}-start-{seed}/export"), "dtype": "float32"},
        "data": {"eval": "environment", "max_length": TASKS[name].length, "completion_length": ANSWER},
        "rollout": {"environment": {"name": "reasoning_gym", "options": options}},
        "algorithm": {**ALGORITHMS[algorithm], "group_size": GROUP, "updates": UPDATES},
        "optimizer": {"learning_rate": RATE, "b2": B2, "schedule": "constant", "warmup": WARMUP},
        "batch_size": PROMPTS,
        "steps": STEPS,
        "eval": {"every": EVERY, "rows": HELD_OUT},
        "seed": seed,
        "output": str(folder / f"{name}-{algorithm}-{seed}"),
    }


def train(sections: Mapping[str, Any]) -> None:
    """Runs a recipe, unless it has ended."""
    output = Path(sections["output"])
    if not (output / "export").is_dir():
        print(output.name, flush=True)
        file = output.with_suffix(".yaml")
        file.write_text(write_yaml(dict(sections)))
        subprocess.run([sys.executable, "-m", "tunix.cli", "run", str(file)], check=True, stdout=subprocess.DEVNULL)


def train_peer(name: str, library: str, seed: int, folder: Path) -> None:
    """The cell of GRPO in another library's environment, unless it has ended: from the same weights, with the same
    problems, verifier and settings. Its worker writes metrics.jsonl when all is done."""
    output = folder / f"{name}-{library}-{seed}"
    if (output / "metrics.jsonl").exists():
        return
    print(output.name, flush=True)
    output.mkdir(exist_ok=True)
    case = {
        "weights": str(folder / f"{name}-start-{seed}/export"),
        "task": name,
        "config": dict(TASKS[name].config),
        "seed": seed,
        "rows": ROWS,
        "held_out": HELD_OUT,
        "new": ANSWER,
        "steps": STEPS,
        "every": EVERY,
        "prompts": PROMPTS,
        "group": GROUP,
        "updates": UPDATES,
        "learning_rate": RATE,
        "warmup": WARMUP,
        "b2": B2,
        "clip_norm": 1.0,
        # Behind the library's own packages, so that theirs are the ones that are imported.
        "packages": [path for path in sys.path if path.endswith("site-packages")],
        "metrics": str(output / "metrics.jsonl"),
    }
    (output / "case.json").write_text(json.dumps(case, indent=1))
    with (output / "log.txt").open("w") as log:
        command = [PEERS[library].python, str(WORKERS / LIBRARIES[library]), str(output / "case.json")]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run(command, env=environment, check=True, stdout=log, stderr=log)


def stored() -> dict[str, Curve]:
    """The curves of docs/learning.json, by cell, e.g. `lcm-grpo-0`: they outlive the folder of the runs."""
    return json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}


def ended(folder: Path) -> dict[str, Curve]:
    """The curves of all cells that have ended, stored ones included."""
    curves = stored()
    for file in folder.glob("*/metrics.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        curve = [(row["step"], row["eval/reward"], row["time/seconds"]) for row in rows if "eval/reward" in row]
        if curve and curve[-1][0] == STEPS and "-start-" not in file.parent.name:
            curves[file.parent.name] = curve
    return dict(sorted(curves.items()))


def by_column(cells: Mapping[str, Curve]) -> Curves:
    """The curves of cells by task and algorithm or library, in the order of the tables."""
    columns = [(name, column) for name in TASKS for column in (*ALGORITHMS, *LIBRARIES)]
    seeds = {key: [curve for cell, curve in cells.items() if cell.startswith("-".join(key) + "-")] for key in columns}
    return {key: curves for key, curves in seeds.items() if curves}


def title(column: str) -> str:
    """How the page calls an algorithm, or another library's GRPO."""
    return f"grpo, {PEERS[column].title}" if column in LIBRARIES else column


def tables(curves: Curves) -> str:
    """Markdown: the score of each task at the start and after the last step by algorithm, a cell that was not run
    empty; then the steps between, where a task was trained by another library too."""
    columns = (*ALGORITHMS, *LIBRARIES)
    lines = ["| task | start | " + " | ".join(title(x) for x in columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for name in TASKS:
        starts = [curve[0][1] for (task, _), runs in curves.items() if task == name for curve in runs]
        cells = [f"{statistics.mean(starts):.2f}" if starts else ""]
        for column in columns:
            ends = [curve[-1][1] for curve in curves.get((name, column), ())]
            spread = f" ({len(ends)} seeds, {min(ends):.2f} to {max(ends):.2f})" if len(ends) > 1 else ""
            cells.append(f"{statistics.mean(ends):.2f}{spread}" if ends else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    steps = range(0, STEPS + 1, EVERY)
    lines += ["", "| grpo by step | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|"]
    for (name, column), runs in curves.items():
        if column in ("grpo", *LIBRARIES) and any((name, library) in curves for library in LIBRARIES):
            values = [f"{score:.2f}" for score in means(runs)]
            lines.append(f"| {name}, {who(column)} | {' | '.join(values)} |")
    lines += ["", "| grpo by time | seconds of 40 steps | after so many seconds | score then |", "|---|---|---|---|"]
    for name in TASKS:
        runs = {x: curves[name, x][0] for x in ("grpo", *LIBRARIES) if (name, x) in curves}
        runs = {column: curve for column, curve in runs.items() if len(curve[-1]) == 3}
        if len(runs) > 1:
            shortest = min(curve[-1][2] for curve in runs.values())
            for column, curve in runs.items():
                score = [score for _, score, seconds in curve if seconds <= shortest][-1]
                lines.append(f"| {name}, {who(column)} | {curve[-1][2]:.0f} | {shortest:.0f} | {score:.2f} |")
    return "\n".join(lines)


def who(column: str) -> str:
    """The library of a column whose cells are compared with others'."""
    return PEERS[column if column in LIBRARIES else "ours"].title


def means(curves: Sequence[Curve]) -> list[float]:
    """The mean score of several seeds at each step that is measured."""
    return [statistics.mean(score for _, score, *_ in points) for points in zip(*curves, strict=True)]


def draw(curves: Curves) -> None:
    """A panel for each task, a line for each algorithm or library: the mean over its seeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "learning"
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for name, _ in curves))
    size = (4 * len(names) + 1.5, 3.2)
    figure, axes = plt.subplots(1, len(names), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        for number, column in enumerate((*ALGORITHMS, *LIBRARIES)):
            if not any(measured == column for _, measured in curves):
                continue
            if not (runs := curves.get((name, column), ())):
                continue
            style = "--" if column in LIBRARIES else "-"
            axis.plot([step for step, *_ in runs[0]], means(runs), style, color=f"C{number}", label=title(column))
        axis.set(title=name, xlabel="step", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("score of held-out problems")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Runs what is missing of the chosen part, then prints the tables of all that has ended."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), help="none: only the tables")
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--peers", nargs="*", choices=LIBRARIES, default=[], help="other libraries' GRPO")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/learning", help="of all cells")
    parser.add_argument("--write", action="store_true", help=f"put tables and curves into docs/{PAGE.name}")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known = stored()
    for seed, name in itertools.product(arguments.seeds, arguments.tasks):
        columns = [x for x in (*arguments.algorithms, *arguments.peers) if f"{name}-{x}-{seed}" not in known]
        if not columns:
            continue
        start = start_recipe(name, seed, folder)
        if not Path(start["data"]["train"]).exists():
            write_rows(name, seed, folder)
        train(start)
        for column in columns:
            if column in LIBRARIES:
                train_peer(name, column, seed, folder)
            else:
                train(recipe(name, column, seed, folder))
    cells = ended(folder)
    curves = by_column(cells)
    text = tables(curves)
    print(text)
    if arguments.write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        known = json.loads(RESULTS.read_text())["versions"] if RESULTS.exists() else {}
        # Those that measured stay where a library is not installed here.
        known |= {key: said for key in LIBRARIES if (said := versions(PEERS[key])) != "not installed"}
        listed = "; ".join(f"{PEERS[key].title}: {known[key]}" for key in LIBRARIES if key in known)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{listed}.\n{END}{rest.partition(END)[2]}", "utf-8")
        lines = ",\n".join(f"  {json.dumps(cell)}: {json.dumps(curve)}" for cell, curve in cells.items())
        RESULTS.write_text(f'{{\n "versions": {json.dumps(known)},\n "cells": {{\n{lines}\n }}\n}}\n', "utf-8")
        draw(curves)


if __name__ == "__main__":
    main()
