"""`python -m benchmarks.learning`: what ten tasks of reasoning-gym teach by rewards, rows, pairs and teachers.

A Llama-shaped model that is trained from nothing learns each task by example until a third of its answers are right,
once for a task and a seed. Every algorithm goes on from those weights, by the task's own verifier: as the reward
(`--algorithms`, `--peers`), or as the judge of answers that those weights gave (`--methods`: pairs and labels; beside
them SFT from nothing, and a teacher). A cell is `tunix run` on a recipe of its own below `runs/learning`: what has
ended is not run again, what was interrupted goes on. The whole takes a night on two cores; `--tasks` and `--seeds`
choose a part, too, and `--write` puts all that has ended into `docs/learning.md` and `docs/learning.json`, from which a
cell is taken out to have it run again. Needs `pip install '.[reasoning-gym]'`, the peers `make peers`, the pictures
matplotlib.
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
OTHER_PICTURE = ROOT / "docs/learning-methods.svg"
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


@dataclass(frozen=True)
class Method:
    """An algorithm that learns from rows, pairs or a teacher, and what it is compared with."""

    algorithm: Mapping[str, Any]
    """The section of the recipe."""
    train: str
    """What it learns from: `train`, `pairs` or `labels`, files of the task, or `environment`, which it answers."""
    batch: int
    """Rows, pairs or prompts of a step."""
    steps: int
    """Steps of a cell, which is measured eight times."""
    rate: float
    sizes: Mapping[str, int] | None = None
    """Those of a model that is trained from nothing; None: it goes on from the start's weights."""


LARGE = {**SIZES, "d_model": 256, "num_heads": 8, "num_kv_heads": 4, "ffn": 768}
METHODS = {
    "sft": Method({"name": "sft"}, "train", 64, 240, 1e-3, SIZES),
    "dpo": Method({"name": "dpo"}, "pairs", 32, 80, 1e-4),
    "kto": Method({"name": "kto"}, "labels", 64, 80, 1e-4),
    "reward": Method({"name": "reward", "centring": 0.01}, "pairs", 32, 80, 3e-4),
    "teacher": Method({"name": "sft"}, "train", 64, 200, 1e-3, LARGE),
    "distill": Method(
        {"name": "distill", "on_policy": True, "divergence": "reverse_kl", "group_size": GROUP},
        "environment",
        PROMPTS // UPDATES,
        80,
        1e-4,
    ),
    "alone": Method({"name": "grpo", "group_size": GROUP, "updates": UPDATES}, "environment", PROMPTS, STEPS, RATE),
}
"""`teacher` is the large model that `distill` follows; `alone` is GRPO from the same weights for as long."""
PROBLEMS, JUDGES = 4096, 1024
"""Problems whose sampled answers make the pairs that are trained on, and those that are held out."""
SCORES = ("eval/reward", "eval/answers/reward", "eval/rewards/accuracy")
"""What a cell is measured by, the first that it has: the score of greedy answers, or the share of pairs in order."""
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
    for kind, size, draw in (("train", ROWS, 2 * seed), ("held_out", HELD_OUT, 2 * seed + 1)):
        data = problems(name, 1_000_000 + 10_000 * draw, size)
        rows = [{"prompt": item["question"], "completion": str(item["answer"])} for item in data]
        write_lines(folder / f"{name}-{seed}-{kind}.jsonl", rows)


def problems(name: str, seed: int, size: int) -> Any:
    """A data set of the package: problems of a task, with their verifier."""
    return importlib.import_module("reasoning_gym").create_dataset(name, seed=seed, size=size, **TASKS[name].config)


def write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pairs(name: str, seed: int, folder: Path) -> None:
    """Writes pairs of the start's own sampled answers, right and wrong by the task's verifier, to train on and held
    out, and the sides of the former as labelled rows."""
    for kind, size, draw in (("judged", JUDGES, 2 * seed + 1), ("pairs", PROBLEMS, 2 * seed)):
        data = problems(name, 2_000_000 + 10_000 * draw, size)
        asked, answered = (folder / f"{name}-{seed}-{kind}-{what}.jsonl" for what in ("prompts", "answers"))
        write_lines(asked, [{"prompt": item["question"]} for item in data])
        command = ["generate", str(folder / f"{name}-start-{seed}"), "--input", str(asked), "--out", str(answered)]
        sampling = ["--n", str(GROUP), "--max-tokens", str(ANSWER), "--seed", str(seed)]
        run = [sys.executable, "-m", "tunix.cli", *command, *sampling]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        answers = [json.loads(line) for line in answered.read_text().splitlines()]
        scores = [data.score_answer(answer["text"], data[answer["row"]]) for answer in answers]
        pairs = pairs_of([item["question"] for item in data], answers, scores)
        if kind == "pairs":
            sides = itertools.product(pairs, ("chosen", "rejected"))
            labels = [{"prompt": x["prompt"], "completion": x[side], "label": side == "chosen"} for x, side in sides]
            write_lines(folder / f"{name}-{seed}-labels.jsonl", labels)
        write_lines(folder / f"{name}-{seed}-{kind}.jsonl", pairs)


def pairs_of(
    prompts: Sequence[str], answers: Sequence[Mapping[str, Any]], scores: Sequence[float]
) -> list[dict[str, str]]:
    """A pair of each prompt that was answered both rightly and wrongly: the first answers of either kind.

    Args:
        prompts: by row.
        answers: lines of `tunix generate`; those that were cut off are left out.
        scores: of each answer, by the verifier; right is 1.
    """
    sides: dict[int, dict[str, str]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer["finish"] != "length":
            sides.setdefault(answer["row"], {}).setdefault("chosen" if score == 1 else "rejected", answer["text"])
    return [{"prompt": prompts[row], **pair} for row, pair in sides.items() if len(pair) == 2]


def recipe(name: str, algorithm: str, seed: int, folder: Path) -> dict[str, Any]:
    """The recipe of a cell, which goes on from the supervised stage.

    Args:
        name: of the task.
        algorithm: one of `ALGORITHMS`.
        seed: of the supervised stage, the samples and all problems.
        folder: of all cells.
    """
    return {
        "model": {"path": str(folder / f"{name}-start-{seed}/export"), "dtype": "float32"},
        "data": {"eval": "environment", "max_length": TASKS[name].length, "completion_length": ANSWER},
        "rollout": {"environment": environment(name)},
        "algorithm": {**ALGORITHMS[algorithm], "group_size": GROUP, "updates": UPDATES},
        "optimizer": {"learning_rate": RATE, "b2": B2, "schedule": "constant", "warmup": WARMUP},
        "batch_size": PROMPTS,
        "steps": STEPS,
        "eval": {"every": EVERY, "rows": HELD_OUT},
        "seed": seed,
        "output": str(folder / f"{name}-{algorithm}-{seed}"),
    }


def environment(name: str) -> dict[str, Any]:
    """The section of a task: its problems and its verifier."""
    options = {"tasks": name, "config": {name: dict(TASKS[name].config)}, "size": ROWS}
    return {"name": "reasoning_gym", "options": options}


def method_recipe(name: str, column: str, seed: int, folder: Path) -> dict[str, Any]:
    """The recipe of a cell of `METHODS`; `write_rows` and `write_pairs` make its files.

    Args:
        name: of the task.
        column: one of `METHODS`.
        seed: of all weights, samples and problems; those that are held out are `recipe`'s.
        folder: of all cells.
    """
    method = METHODS[column]
    length = {"max_length": TASKS[name].length, "completion_length": ANSWER}
    judged = {"eval": {"every": method.steps // 8, "rows": HELD_OUT}}
    if method.train == "environment":
        data = {"data": {"eval": "environment", **length}, "rollout": {"environment": environment(name)}}
    else:
        data = {"data": {"train": str(folder / f"{name}-{seed}-{method.train}.jsonl"), **length}}
        if column == "reward":
            data["data"]["eval"] = str(folder / f"{name}-{seed}-judged.jsonl")
            judged["eval"]["rows"] = JUDGES
        else:
            tasks = [{"name": "answers", "environment": environment(name), "n": HELD_OUT}]
            judged = {"eval": {"every": method.steps // 8, "tasks": tasks}}
    start = start_recipe(name, seed, folder)
    model = {"path": f"{start['output']}/export", "dtype": "float32"}
    optimizer = {"learning_rate": method.rate, "b2": B2, "schedule": "constant", "warmup": WARMUP}
    if method.sizes:
        model, optimizer = {**start["model"], "sizes": method.sizes}, start["optimizer"]
    teacher = {"teacher": {"path": str(folder / f"{name}-teacher-{seed}/export"), "dtype": "float32"}}
    return {
        "model": model,
        **data,
        **(teacher if column == "distill" else {}),
        "algorithm": dict(method.algorithm),
        "optimizer": optimizer,
        "batch_size": method.batch,
        "steps": method.steps,
        **judged,
        "seed": seed,
        "output": str(folder / f"{name}-{column}-{seed}"),
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
        name = next((name for name in SCORES if any(name in row for row in rows)), "")
        curve = [(row["step"], row[name], row["time/seconds"]) for row in rows if name in row]
        column = file.parent.name.split("-")[1]
        steps = METHODS[column].steps if column in METHODS else STEPS
        if curve and curve[-1][0] == steps and column != "start":
            curves[file.parent.name] = curve
    return dict(sorted(curves.items()))


def by_column(cells: Mapping[str, Curve]) -> Curves:
    """The curves of cells by task and algorithm or library, in the order of the tables."""
    columns = [(name, column) for name in TASKS for column in (*ALGORITHMS, *LIBRARIES, *METHODS)]
    seeds = {key: [curve for cell, curve in cells.items() if cell.startswith("-".join(key) + "-")] for key in columns}
    return {key: curves for key, curves in seeds.items() if curves}


def title(column: str) -> str:
    """How the page calls an algorithm, or another library's GRPO."""
    if column in LIBRARIES:
        return f"grpo, {PEERS[column].title}"
    return {"teacher": "sft of the teacher", "alone": "grpo alone", "reward": "reward (pairs)"}.get(column, column)


def tables(curves: Curves) -> str:
    """Markdown: the score of each task at the start and after the last step by algorithm, a cell that was not run
    empty; then the steps between, where a task was trained by another library too."""
    columns = (*ALGORITHMS, *LIBRARIES)
    lines = ["| task | start | " + " | ".join(title(x) for x in columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for name in TASKS:
        starts = [curve[0][1] for column in columns for curve in curves.get((name, column), ())]
        cells = [f"{statistics.mean(starts):.2f}" if starts else ""]
        for column in columns:
            ends = [curve[-1][1] for curve in curves.get((name, column), ())]
            cells.append(mean_and_spread(ends) if ends else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    steps = range(0, STEPS + 1, EVERY)
    lines += ["", "| grpo by step | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|"]
    for (name, column), runs in curves.items():
        if column in ("grpo", *LIBRARIES) and any((name, library) in curves for library in LIBRARIES):
            values = [f"{score:.2f}" for score in means(runs)]
            lines.append(f"| {name}, {who(column)} | {' | '.join(values)} |")
    seconds = "after so many seconds | score then |"
    lines += ["", f"| grpo by time | seconds of {STEPS} steps | {seconds}", "|---|---|---|---|"]
    for name in TASKS:
        lines += by_time({f"{name}, {who(x)}": curves.get((name, x), ()) for x in ("grpo", *LIBRARIES)})
    parts = [f"{i}/8" for i in range(1, 8)]
    lines += ["", f"| by steps | steps | start | {' | '.join(parts)} | end |", "|---" * 11 + "|"]
    for (name, column), runs in curves.items():
        if column in METHODS:
            *values, _ = [f"{score:.2f}" for score in means(runs)]
            ends = mean_and_spread([curve[-1][1] for curve in runs])
            lines.append(f"| {name}, {title(column)} | {METHODS[column].steps} | {' | '.join(values)} | {ends} |")
    lines += ["", f"| by time | seconds of all steps | {seconds}", "|---|---|---|---|"]
    for name in TASKS:
        lines += by_time({f"{name}, {title(x)}": curves.get((name, x), ()) for x in ("distill", "alone")})
    return "\n".join(lines)


def mean_and_spread(values: Sequence[float]) -> str:
    """Markdown: the mean, and of several seeds their number and range."""
    spread = f" ({len(values)} seeds, {min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def by_time(rows: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Markdown: lines that compare runs when the first of a seed's had ended, means over the seeds that all have; none
    where fewer than two runs have seconds."""
    timed = {row: [curve for curve in runs if len(curve[-1]) == 3] for row, runs in rows.items()}
    timed = {row: runs for row, runs in timed.items() if runs}
    if len(timed) < 2:
        return []
    seeds = list(zip(*timed.values(), strict=False))
    shortest = [min(curve[-1][2] for curve in curves) for curves in seeds]
    lines = []
    for row, runs in zip(timed, zip(*seeds, strict=True), strict=True):
        scores = [
            [score for _, score, seconds in curve if seconds <= limit][-1]
            for curve, limit in zip(runs, shortest, strict=True)
        ]
        seconds, limit = statistics.mean(curve[-1][2] for curve in runs), statistics.mean(shortest)
        lines.append(f"| {row} | {seconds:.0f} | {limit:.0f} | {mean_and_spread(scores)} |")
    return lines


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


def draw_methods(curves: Curves) -> None:
    """A row of panels for each task: answers from rows and pairs, pairs in order, and answers beside a teacher by time;
    the mean over seeds, and each of several thinly."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "learning"
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for name, _ in curves))
    panels = (("sft", "teacher"), ("dpo", "kto"), ("reward",), ("distill", "alone"))
    figure, axes = plt.subplots(len(names), len(panels), figsize=(14.5, 3.2 * len(names)), squeeze=False)
    figure.set_layout_engine("constrained")
    for (name, row), (number, columns) in itertools.product(zip(names, axes, strict=True), enumerate(panels)):
        axis = row[number]
        for line, column in enumerate(columns):
            if not (runs := curves.get((name, column), ())):
                continue
            colour, timed = f"C{number * 2 + line}", column in ("distill", "alone")
            mean = [statistics.mean(x) for x in zip(*([p[2 * timed] for p in run] for run in runs), strict=True)]
            for run in runs if len(runs) > 1 else ():
                axis.plot([point[2 * timed] for point in run], [point[1] for point in run], color=colour, alpha=0.25)
            axis.plot(mean, means(runs), color=colour, label=title(column))
        axis.set(
            title=name, xlabel="seconds" if "alone" in columns else "step", ylim=(0 if "sft" in columns else 0.4, 1)
        )
        axis.set_ylabel("held-out pairs in order" if columns == ("reward",) else "score of held-out problems")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(loc="lower right")
    figure.savefig(OTHER_PICTURE, metadata={"Date": None})


def main() -> None:
    """Runs what is missing of the chosen part, then prints the tables of all that has ended."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), help="none: only the tables")
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), help="from rows and teachers")
    parser.add_argument("--peers", nargs="*", choices=LIBRARIES, default=[], help="other libraries' GRPO")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/learning", help="of all cells")
    parser.add_argument("--write", action="store_true", help=f"put tables and curves into docs/{PAGE.name}")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known = stored()
    for seed, name in itertools.product(arguments.seeds, arguments.tasks):
        columns = [*arguments.algorithms, *arguments.methods, *arguments.peers]
        columns = [x for x in columns if f"{name}-{x}-{seed}" not in known]
        if not columns:
            continue
        start = start_recipe(name, seed, folder)
        if not Path(start["data"]["train"]).exists():
            write_rows(name, seed, folder)
        train(start)
        for column in columns:
            if column in METHODS:
                if column == "distill":
                    train(method_recipe(name, "teacher", seed, folder))
                # The last file that is written, so that what was interrupted is made again.
                pairs = folder / f"{name}-{seed}-pairs.jsonl"
                if METHODS[column].train in ("pairs", "labels") and not pairs.exists():
                    write_pairs(name, seed, folder)
                train(method_recipe(name, column, seed, folder))
            elif column in LIBRARIES:
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
        draw({key: runs for key, runs in curves.items() if key[1] not in METHODS})
        draw_methods({key: runs for key, runs in curves.items() if key[1] in METHODS})


if __name__ == "__main__":
    main()
