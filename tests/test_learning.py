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
    # An answer and its end fit, in both stages alike; whoever goes on finds the weights where they were exported.
    assert {cell.data.completion_length for cell in cells} == {start.data.completion_length}
    assert {cell.model.path for cell in cells} == {f"{start.output}/export"}
    assert len({cell.output for cell in [start, *cells]}) == 1 + len(learning.ALGORITHMS)


def write(folder: Path, cell: str, scores: list[float]) -> None:
    """The metrics of a run that was measured after every `EVERY` steps."""
    rows = [{"step": i * learning.EVERY, "time/seconds": 1.0, "eval/reward": x} for i, x in enumerate(scores)]
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
