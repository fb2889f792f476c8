"""The learning benchmark: its recipes are valid, and its tables have what was measured and nothing else."""

import json
from pathlib import Path

import pytest

from benchmarks import learning
from benchmarks.peers.run import PEERS
from tunix.recipe.recipe import Recipe


@pytest.mark.parametrize("task", learning.TASKS)
def test_every_cell_is_a_recipe(task: str, tmp_path: Path):
    start = Recipe.model_validate(learning.start_recipe(task, 1, tmp_path))
    cells = [Recipe.model_validate(learning.recipe(task, name, 1, tmp_path)) for name in learning.ALGORITHMS]
    methods = {x: Recipe.model_validate(learning.method_recipe(task, x, 1, tmp_path)) for x in learning.METHODS}
    # An answer and its end fit, in all stages alike; whoever goes on finds the weights where they were exported.
    assert {cell.data.completion_length for cell in [*cells, *methods.values()]} == {start.data.completion_length}
    later = [cell for name, cell in methods.items() if name not in ("sft", "teacher")]
    assert {cell.model.path for cell in [*cells, *later]} == {f"{start.output}/export"}
    assert len({cell.output for cell in [start, *cells, *methods.values()]}) == 1 + len(cells) + len(methods)
    assert methods["distill"].teacher is not None
    assert methods["distill"].teacher.path == f"{methods['teacher'].output}/export"
    # All answers are to the problems of the first cells, which an environment of the same seed and options holds out.
    played = {
        name: x.rollout.environment or x.eval.tasks[0].environment for name, x in methods.items() if name != "reward"
    }
    assert all(environment == cells[0].rollout.environment for environment in played.values())
    assert {cell.seed for cell in methods.values()} == {cells[0].seed}
    # Each is measured at its start and after every eighth of its steps.
    assert all(8 * cell.eval.every == cell.steps for cell in methods.values())
    # No pair is judged that was trained on.
    assert methods["reward"].data.eval != methods["reward"].data.train


def test_pairs_are_of_prompts_that_were_answered_rightly_and_wrongly():
    said = [(0, "ba"), (0, "ab"), (0, "aa"), (0, "ba"), (1, "dc"), (1, "dc"), (2, "x"), (2, "fe"), (2, "ef")]
    answers = [{"row": row, "text": text, "finish": "length" if text == "x" else "stop"} for row, text in said]
    pairs = learning.pairs_of(["ab", "cd", "ef"], answers, [1.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.25])
    # The first of either kind; nothing of the second prompt, all of whose answers are right, nor what was cut off.
    expected = [("ab", "ba", "ab"), ("ef", "fe", "ef")]
    assert [(x["prompt"], x["chosen"], x["rejected"]) for x in pairs] == expected


def write(
    folder: Path,
    cell: str,
    scores: list[float],
    every: int = learning.EVERY,
    name: str = "eval/reward",
    step: float = 0.0,
) -> None:
    """The metrics of a run that was measured after every few steps, of some seconds each."""
    rows = [{"step": i * every, "time/seconds": 1.0 + i * every * step, name: x} for i, x in enumerate(scores)]
    (folder / cell).mkdir()
    lines = [{"step": 1, "reward/mean": 0.9}, *rows]
    (folder / cell / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def test_tables_have_means_and_leave_what_was_not_run_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    points = learning.STEPS // learning.EVERY
    write(tmp_path, "lcm-grpo-0", [0.25] + [0.5] * (points - 1) + [0.75])
    write(tmp_path, "lcm-grpo-1", [0.35] + [0.5] * (points - 1) + [0.85])
    stored = {"lcm-trl-0": [(i * learning.EVERY, x) for i, x in enumerate([0.3] * points + [0.7])]}
    (tmp_path / "learning.json").write_text(json.dumps({"versions": {}, "cells": stored}))
    monkeypatch.setattr(learning, "RESULTS", tmp_path / "learning.json")
    write(tmp_path, "gcd-ppo-0", [0.1] * points + [0.2])
    write(tmp_path, "gcd-grpo-0", [0.1] * points)  # stands before its last step
    text = learning.tables(learning.by_column(learning.ended(tmp_path)))
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    # Mean of both seeds and their range; the start is that of all three runs: (0.25 + 0.35 + 0.3) / 3.
    assert rows["lcm"] == "| lcm | 0.30 | 0.80 (2 seeds, 0.75 to 0.85) |  |  |  |  |  | 0.70 |  |"
    assert rows["gcd"] == "| gcd | 0.10 |  |  |  | 0.20 |  |  |  |  |"
    assert rows["coin_flip"] == "| coin_flip " + "|  " * 9 + "|"
    # By step where another library was measured too: of lcm, and of gcd not.
    middle = " | ".join(["0.50"] * (points - 1))
    assert rows[f"lcm, {PEERS['ours'].title}"].endswith(f"| 0.30 | {middle} | 0.80 |")
    assert f"lcm, {PEERS['trl'].title}" in rows
    assert not any(name.startswith("gcd,") for name in rows)


def test_tables_compare_a_teacher_and_rewards_after_equal_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learning, "RESULTS", tmp_path / "learning.json")
    each = {name: method.steps // 8 for name, method in learning.METHODS.items()}
    # Seconds of the last point: 1 + 4 * steps with the teacher; rewards alone are twice as slow, and as slow.
    long, short = 8 * each["distill"], 8 * each["alone"]
    for seed, factor in ((0, 2), (1, 1)):
        write(tmp_path, f"gcd-distill-{seed}", [0.2] * 8 + [0.8 + seed / 10], each["distill"], step=4.0)
        seconds = 4.0 * long / short * factor
        rising = [0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6]
        write(tmp_path, f"gcd-alone-{seed}", rising, each["alone"], step=seconds)
    write(tmp_path, "gcd-dpo-0", [0.3] * 8 + [0.5], each["dpo"], "eval/answers/reward")
    write(tmp_path, "gcd-reward-0", [0.5] * 8 + [0.75], each["reward"], "eval/rewards/accuracy")
    write(tmp_path, "gcd-kto-0", [0.3] * 8, each["kto"], "eval/answers/reward")  # stands before its last step
    curves = learning.by_column(learning.ended(tmp_path))
    assert list(curves) == [("gcd", name) for name in ("dpo", "reward", "distill", "alone")]
    lines = learning.tables(curves).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert rows["gcd"] == "| gcd " + "|  " * 9 + "|"  # no cell of the first table was run
    assert rows["gcd, dpo"] == f"| gcd, dpo | {8 * each['dpo']} | " + "0.30 | " * 8 + "0.50 |"
    assert rows["gcd, reward (pairs)"].endswith("| 0.50 | 0.75 |")
    # When all steps with the teacher had ended, seed 0 alone was at half of its own, seed 1 at its end: 0.4 and 0.6.
    taught, alone = (
        line
        for line in lines
        if line.startswith(("| gcd, distill |", "| gcd, grpo alone |")) and "to" in line and len(line.split("|")) == 6
    )
    assert taught == f"| gcd, distill | {1 + 4 * long} | {1 + 4 * long} | 0.85 (2 seeds, 0.80 to 0.90) |"
    assert alone == f"| gcd, grpo alone | {1 + 6 * long} | {1 + 4 * long} | 0.50 (2 seeds, 0.40 to 0.60) |"
