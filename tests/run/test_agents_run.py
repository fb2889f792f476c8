"""Runs whose environment is a program: what it asks is learned from."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.test_rl_run import steps
from tests.tiny_rl import write_policy
from tests.tiny_runs import lines, train

AGENT = Path(__file__).parents[1] / "small_agent.py"


def write(folder: Path, what: str, agent: dict[str, Any] | None = None, **changes: Any) -> str:
    """A recipe whose episodes the program plays in a way, with settings of the agent."""
    command = [sys.executable, "-I", str(AGENT), what]
    section = {"agent": {"command": command, "concurrency": 4, "reward": "file", **(agent or {})}}
    return str(
        write_policy(folder, **{"reward": changes.pop("reward", None), "rollout__environment": section, **changes})
    )


def test_a_program_is_the_environment(tmp_path: Path):
    """Two turns of one transcript: recorded log-probs are the trainer's, and each episode has its own reward."""
    (tmp_path / "rewards.py").write_text(
        "from pathlib import Path\n"
        "def answered(completion, workdir):\n"
        "    left = {x.name for x in Path(workdir).iterdir()}\n"
        "    return len(left) if left == {'reward.json'} else -1\n"
    )
    train(
        write(
            tmp_path,
            "two turns",
            reward={"functions": ["rewards.py:answered"]},
            data__eval="held.jsonl",
            steps=2,
            eval__rows=2,
        )
    )
    rows = steps("run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["mismatch/max"] < 1e-4
        assert row["rollout/turns"] == 2
        assert row["reward/answered"] == 1
        assert row["reward/failed"] == 0
        assert row["train/grad_norm"] > 0
    samples = [row for row in lines(Path("run/samples.jsonl")) if row.get("step") == 1]
    assert len(samples) == 16
    assert len({sample["completion"] for sample in samples}) > 8
    for sample in samples:
        first, between, second = sample["completion"].partition("and")
        text = first + second
        assert between
        assert sample["rewards"]["environment"] == pytest.approx(
            sum(c.isascii() and c.isalnum() for c in text) / len(text)
        )
        assert sample["logged"]["agent"] == {"exit": 0, "printed": ""}


def test_forks_are_learned_from_as_well(tmp_path: Path):
    train(write(tmp_path, "forks", steps=1))
    (row,) = steps("run")
    assert row["mismatch/max"] < 1e-4
    assert row["rollout/turns"] == 2
    assert row["reward/std"] > 0
