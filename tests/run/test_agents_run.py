"""Runs whose environment is a program: what it asks is learned from."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.run.test_kill import Run
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


@pytest.mark.slow
def test_a_program_is_the_environment(tmp_path: Path):
    """Two turns of one transcript: recorded log-probs are the trainer's, and each episode has its own reward."""
    (tmp_path / "rewards.py").write_text(
        "from pathlib import Path\n"
        "def answered(completion, workdir):\n"
        "    return float([x.name for x in Path(workdir).iterdir()] == ['reward.json'])\n"
    )
    train(write(tmp_path, "two turns", reward={"functions": ["rewards.py:answered"]}, steps=2))
    rows = steps("run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["mismatch/max"] < 1e-4
        assert row["rollout/turns"] == 2
        assert row["reward/answered"] == 1
        assert row["reward/failed"] == 0
        assert row["train/grad_norm"] > 0
    samples = [row for row in lines(Path("run/samples.jsonl")) if row["step"] == 1]
    assert len(samples) == 16
    assert len({sample["rewards"]["environment"] for sample in samples}) > 4
    for sample in samples:
        assert sample["logged"]["agent"] == {"exit": 0, "printed": ""}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"name": "grpo", "group_size": 4, "updates": 2}, {"name": "ppo"}])
def test_forks_are_learned_from_as_well(algorithm: dict[str, Any], tmp_path: Path):
    """Two transcripts of an episode, over two updates, also with values of states; and greedy answers of held-out
    rows, where a program may ask for the run's temperature."""
    train(
        write(
            tmp_path,
            "forks",
            algorithm=algorithm,
            data__max_length=64,
            data__eval="held.jsonl",
            eval__rows=2,
            rollout__temperature=0.7,
        )
    )
    rows = steps("run")
    assert len(rows) == 3
    for row in rows:
        assert row["mismatch/max"] < 1e-4
        assert row["rollout/turns"] == 2
        assert row["reward/std"] > 0


@pytest.mark.slow
def test_a_policy_learns_what_its_program_rewards(tmp_path: Path):
    """The share of letters and digits in two turns, from a quarter to nine tenths."""
    train(write(tmp_path, "two turns", steps=60, optimizer__learning_rate=1e-2, data__eval="held.jsonl", eval__rows=4))
    rewards = [row["reward/mean"] for row in steps("run")]
    assert rewards[0] < 0.4, rewards
    assert max(rewards) >= 0.9, rewards


@pytest.mark.slow
def test_killed_it_goes_on_with_the_next_episodes(tmp_path: Path):
    """What a program asks is on no clock here, so that a run that is killed learns from the same answers again."""
    changes = {"steps": 6, "checkpoint__every": 2, "data__eval": "held.jsonl", "eval__every": 3, "eval__rows": 2}
    folders = tmp_path / "whole", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
        write(folder, "two turns", {"concurrency": 1}, batch_size=2, **changes)
        run = Run(folder)
        if folder.name == "killed":
            while run.steps < 3:
                assert run.process.poll() is None, run.log
                time.sleep(0.05)
            run.process.kill()
            run.process.wait()
            run = Run(folder)
        assert run.process.wait() == 0, run.log
    whole, killed = ([row for row in lines(folder / "run/samples.jsonl") if "rewards" in row] for folder in folders)
    assert (
        [row["step"] for row in whole] == [row["step"] for row in killed] == [i for i in range(1, 7) for _ in range(8)]
    )
    assert [row["completion"] for row in whole] == [row["completion"] for row in killed]
    assert [row["rewards"] for row in whole] == [row["rewards"] for row in killed]
