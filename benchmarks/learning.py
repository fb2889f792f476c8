"""`python -m benchmarks.learning`: what ten tasks of reasoning-gym teach six algorithms, from three seeds each.

A small model that is trained from nothing learns each task by example until a third of its answers are right, once for
a task and a seed; every algorithm goes on from those weights, by the task's own verifier. Each run is `tunix run` on a
recipe of its own below `runs/learning`, so that what is there is not run again, and what was interrupted goes on:
the whole takes a night on two cores, `--tasks`, `--algorithms` and `--seeds` choose a part. `docs/learning.md` gets a
table and curves of all that has ended. Needs `pip install '.[reasoning-gym]'`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix.util.yaml_io import write_yaml

ROOT = Path(__file__).parents[1]
PAGE, CURVES, BEGIN, END = ROOT / "docs/learning.md", ROOT / "docs/learning.svg", "<!-- table -->", "<!-- end -->"
ROWS, HELD_OUT, THIRD = 4096, 256, 0.33
"""Examples of a task, and rows that the supervised stage is measured on; where it ends."""
STEPS, EVERY = 60, 10
"""Steps of an algorithm, each of 32 prompts with 8 answers in four updates, and how often it is measured."""


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym at settings that a model of 0.8 million weights can learn."""

    config: Mapping[str, Any]
    prompt: int
    """Bytes of a question at most."""
    answer: int = 6
    """Bytes of an answer at most."""


TASKS = {
    "chain_sum": Task({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 76),
    "spell_backward": Task({"min_word_len": 3, "max_word_len": 4}, 60),
    "count_bits": Task({"min_n": 1, "max_n": 127}, 80),
    "basic_arithmetic": Task({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 32),
    "simple_equations": Task({"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9}, 48),
    "lcm": Task({"min_value": 1, "max_value": 20}, 68),
    "gcd": Task({"min_value": 1, "max_value": 50}, 112),
    "coin_flip": Task({"min_trials": 2, "max_trials": 4}, 84, 10),
    "number_sequence": Task({"min_terms": 4, "max_terms": 4, "min_value": 0, "max_value": 9, "max_complexity": 1}, 40),
    "letter_counting": Task({"min_words": 2, "max_words": 3}, 112),
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
SIZES = {"vocab_size": 320, "d_model": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}


def items(name: str, seed: int, size: int) -> list[dict[str, str]]:
    """Questions and answers of a task, as rows with `prompt` and `completion`."""
    import reasoning_gym

    data = reasoning_gym.create_dataset(name, seed=seed, size=size, **TASKS[name].config)
    return [{"prompt": item["question"], "completion": str(item["answer"])} for item in data]


def start_recipe(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """The supervised stage, whose rows are written into `folder`."""
    for kind, size, place in (("train", ROWS, 2 * seed), ("held_out", HELD_OUT, 2 * seed + 1)):
        rows = items(name, 1_000_000 + place * 10_000, size)
        (folder / f"{name}-{seed}-{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"init": "random", "family": "gemma", "sizes": {**SIZES, "ffn": 384}, "tokenizer": "bytes"},
        "data": {
            "train": str(folder / f"{name}-{seed}-train.jsonl"),
            "eval": str(folder / f"{name}-{seed}-held_out.jsonl"),
            **lengths(TASKS[name]),
        },
        "reward": {"functions": [{"name": "exact_match", "columns": {"answer": "completion"}}]},
        "algorithm": {"name": "sft"},
        "optimizer": {"learning_rate": 1e-3, "b2": 0.98, "weight_decay": 0.01},
        "batch_size": 128,
        "steps": 600,
        "eval": {"every": 10, "until": {"eval/reward": THIRD}},
        "seed": seed,
        "output": str(folder / f"{name}-start-{seed}"),
    }


def recipe(name: str, algorithm: str, seed: int, folder: Path) -> dict[str, Any]:
    """An algorithm that goes on from the supervised stage."""
    return {
        "model": {"path": str(folder / f"{name}-start-{seed}"), "dtype": "float32"},
        "data": {"eval": "environment", **lengths(TASKS[name])},
        "rollout": {
            "environment": {
                "name": "reasoning_gym",
                "options": {"tasks": name, "config": {name: dict(TASKS[name].config)}, "size": ROWS},
            }
        },
        "algorithm": {**ALGORITHMS[algorithm], "group_size": 8, "updates": 4},
        "optimizer": {"learning_rate": 3e-4, "b2": 0.95, "schedule": "constant", "warmup": 5},
        "batch_size": 32,
        "steps": STEPS,
        "eval": {"every": EVERY, "rows": HELD_OUT},
        "seed": seed,
        "output": str(folder / f"{name}-{algorithm}-{seed}"),
    }


def lengths(task: Task) -> dict[str, int]:
    """Limits with room for the special tokens."""
    return {"max_length": task.prompt + task.answer + 4, "completion_length": task.answer + 2}


def run(sections: Mapping[str, Any], title: str) -> list[dict[str, Any]]:
    """Runs a recipe unless it has ended; the rows of its metrics."""
    output = Path(sections["output"])
    file = output.with_suffix(".yaml")
    if not (output / "export").is_dir():
        print(title, flush=True)
        file.write_text(write_yaml(dict(sections)))
        subprocess.run([sys.executable, "-m", "tunix.cli", "run", str(file)], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


Curve = list[tuple[float, float, float]]
"""Step, seconds of training and the reward of greedy answers to held-out questions."""


def curve(rows: list[dict[str, Any]]) -> Curve:
    """The points at which a run was measured."""
    return [(row["step"], row["time/seconds"], row["eval/reward"]) for row in rows if "eval/reward" in row]


def table(curves: Mapping[tuple[str, str], list[Curve]]) -> str:
    """Mean reward of the seeds at the start and the end, with the range of the ends, and the seconds of a run."""
    lines = ["| task | algorithm | seeds | reward before | after | range | seconds |", "|---|---|---|---|---|---|---|"]
    for (name, algorithm), runs in curves.items():
        ends, times = [x[-1][2] for x in runs], [x[-1][1] for x in runs]
        before = statistics.mean(x[0][2] for x in runs)
        lines.append(
            f"| {name} | {algorithm} | {len(runs)} | {before:.2f} | **{statistics.mean(ends):.2f}** | "
            f"{min(ends):.2f} to {max(ends):.2f} | {statistics.mean(times):.0f} |"
        )
    return "\n".join(lines)


def draw(curves: Mapping[tuple[str, str], list[Curve]]) -> None:
    """A panel for each task, a line for each algorithm: the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for name, _ in curves))
    figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 3), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for algorithm in (algorithm for task, algorithm in curves if task == name):
            points = list(zip(*curves[name, algorithm], strict=False))
            axis.plot(
                [point[0][0] for point in points],
                [statistics.mean(x[2] for x in point) for point in points],
                label=algorithm,
            )
        axis.set(title=name, xlabel="step", ylim=(0, 1))
    axes[0][0].set_ylabel("reward of held-out questions")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(CURVES, metadata={"Date": None})


def main() -> None:
    """Runs what is missing of the chosen part, then writes the table of all that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/learning")
    parser.add_argument("--write", action="store_true", help="write the table and the curves into docs")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for seed in chosen.seeds:
        for name in chosen.tasks:
            run(start_recipe(name, seed, chosen.folder), f"{name}, seed {seed}: by example")
            for algorithm in chosen.algorithms:
                run(recipe(name, algorithm, seed, chosen.folder), f"{name}, seed {seed}: {algorithm}")
    curves: dict[tuple[str, str], list[Curve]] = {}
    for name in TASKS:
        for algorithm in ALGORITHMS:
            ended = [x for x in sorted(chosen.folder.glob(f"{name}-{algorithm}-?")) if (x / "export").is_dir()]
            if ended:
                rows = [x / "metrics.jsonl" for x in ended]
                curves[name, algorithm] = [curve([json.loads(y) for y in x.read_text().splitlines()]) for x in rows]
    text = table(curves)
    print(text)
    if chosen.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
        draw(curves)


if __name__ == "__main__":
    main()
