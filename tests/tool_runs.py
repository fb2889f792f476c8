"""Runs on the games of tool_games.py: a first stage of SFT, GRPO to a stated reward, and a kill in its middle."""

from pathlib import Path
from typing import Any

import yaml

from tests.run.test_kill import assert_killed_it_ends_alike
from tests.run.test_learning import SMALL, run

SFT: dict[str, Any] = {
    "model": SMALL,
    "data": {"train": "tests.tool_games:demonstrations", "max_length": 96},
    "optimizer": {"learning_rate": 2e-3, "b2": 0.98, "warmup": 20},
    "batch_size": 64,
    "steps": 200,
}
GRPO: dict[str, Any] = {
    "data": {"train": "tests.tool_games:rows", "eval": "tests.tool_games:rows", "max_length": 112},
    "algorithm": {"name": "grpo", "group_size": 8, "updates": 2},
    "optimizer": {"learning_rate": 1e-3, "b2": 0.95, "schedule": "constant", "warmup": 5},
    "batch_size": 32,
    "steps": 60,
    "eval": {"every": 5, "rows": 64, "until": {"eval/reward": 0.9}},
}


def first_stage(folder: Path) -> dict[str, Any]:
    """The `model` section of a model that knows how to call, and not yet with what."""
    run(folder, SFT)
    return {"model": {"path": str(folder), "dtype": "float32"}}


def assert_learns(folder: Path, start: dict[str, Any], environment: dict[str, Any], **sections: Any) -> None:
    """A run of GRPO in an environment opens nine vaults in ten."""
    rewards = run(folder, GRPO, start, {"rollout": {"environment": environment}, **sections})
    assert rewards[0] < 0.4, rewards
    assert rewards[-1] >= 0.9, rewards


def assert_resumes(folder: Path, start: dict[str, Any], environment: dict[str, Any], **sections: Any) -> None:
    """A run in an environment that is killed ends like one that nobody disturbs, to the bit.

    So few episodes that their answers are quick: those that the sampler does not wait for come when the clock says.
    """
    recipe = {**GRPO, **start, "rollout": {"environment": environment}, **sections, "output": "run", "steps": 6}
    recipe |= {"checkpoint": {"every": 2, "keep": 2}, "eval": {"every": 3, "rows": 4}}
    recipe |= {"batch_size": 2, "algorithm": {"name": "grpo", "group_size": 4, "updates": 2}}

    def write(place: Path) -> None:
        (place / "r.yaml").write_text(yaml.safe_dump(recipe))

    folder.mkdir()
    assert_killed_it_ends_alike(folder, write, at=3)
