"""Whole runs that begin more groups than a step trains on: their metrics, and a run that was killed and resumed.

Most printable characters end an answer, so that answers end after one to twelve tokens, and groups in different
dispatches.
"""

import json
import string
from pathlib import Path
from typing import Any

import pytest

from tests.run.test_kill import assert_same_end
from tests.run.test_rl_run import steps
from tests.tiny_rl import write_policy
from tests.tiny_runs import train

OVER: dict[str, Any] = {
    "algorithm": {"name": "grpo", "group_size": 4, "dynamic_sampling": True, "kl": 0.05},
    "rollout": {"oversample": 1.5, "stop": list(string.printable[:75])},
    "checkpoint": {"every": 1, "keep": 9},
    "steps": 4,
}


WORLD = '''
from tunix.rollout.environments.base import Environment, Step


class World(Environment):
    """One to three turns, by chance, each answered with its length; what was said is worth something."""

    def reset(self, row, rng):
        self.left, self.sum = int(rng.integers(1, 4)), 0
        return f"{self.left}:"

    def step(self, action, tokens):
        self.left, self.sum = self.left - 1, self.sum + sum(map(int, tokens)) % 7
        return Step(f"{len(tokens)};") if self.left else Step(reward=self.sum / 10, done=True)


class Elsewhere(World):
    replayable = False
'''
IN_WORLD: dict[str, Any] = {
    **OVER,
    "reward": None,
    "rollout": {
        "oversample": 1.5,
        "stop": list(string.printable[:50]),
        "environment": {"name": "world.py:World"},
        "slots": 8,
    },
}


def write_world(folder: Path, **changes: Any) -> Path:
    """The recipe of a run whose episodes have several turns, with its environment."""
    (folder / "world.py").write_text(WORLD)
    return write_policy(folder, **{**IN_WORLD, **changes})


def begun(run: Path, step: int) -> list[dict[str, Any]]:
    """What the checkpoint of a step has of groups that were begun."""
    record = json.loads((run / f"checkpoints/{step}/record/metadata").read_text())
    return record["data"]["begun"]


@pytest.mark.slow  # tests/rollout/test_oversample.py has the same without a model
@pytest.mark.parametrize("world", [False, True], ids=["completions", "episodes"])
def test_a_run_that_was_stopped_ends_like_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: bool
):
    for name, stops in (("whole", (4,)), ("stopped", (2, 3, 4))):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write_world(tmp_path / name) if world else write_policy(tmp_path / name, **OVER)
        for stop in stops:
            train("r.yaml", f"steps={stop}")
    whole = tmp_path / "whole/run"
    assert_same_end(tmp_path / "stopped/run", whole)
    rows = steps(whole)
    assert all(row["mismatch/max"] < 1e-4 and row["compile/count"] == 0 for row in rows)
    assert [row["rollout/stale"] > 0 for row in rows] == [False, True, True, True]
    assert rows[1]["rollout/oldest"] == 1
    assert rows[-1]["data/kept"] >= 4 * 4 + 2
    saved = [x for step in (1, 2, 3) for one in begun(whole, step) for x in one["so_far"]]
    assert any(x is not None and x["finish"] == "paused" and len(x["turns"]) > world for x in saved)
