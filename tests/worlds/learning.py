"""A tiny model that learns in a world of another package, killed in the middle and started again."""

import copy
from pathlib import Path
from typing import Any

import yaml

from tests.run.test_kill import Run
from tests.tiny_runs import RECIPE, metrics

LEARNER: dict[str, Any] = {
    "data": {"max_length": 64, "completion_length": 6},
    "batch_size": 8,
    "optimizer": {"learning_rate": 5e-3, "schedule": "constant"},
    "algorithm": {"name": "grpo", "group_size": 8},
    "checkpoint": {"every": 5, "keep": 2},
}


def write_learner(folder: Path, environment: dict[str, Any], steps: int = 24, **changes: Any) -> None:
    """The recipe of a random model of bytes that learns in an environment; `a__b` sets the key `a.b`."""
    sections = {**copy.deepcopy(RECIPE), **copy.deepcopy(LEARNER), "steps": steps}
    sections["rollout"] = {"environment": environment}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    (folder / "r.yaml").write_text(yaml.safe_dump(sections))


def rewards(folder: Path) -> list[float]:
    """`reward/mean` of each step."""
    return [row["reward/mean"] for row in metrics(folder / "run") if "train/loss" in row]


def assert_learns_though_killed(
    folder: Path, environment: dict[str, Any], runs: list[Run], exact: bool, least: float = 0.6, **changes: Any
) -> None:
    """The mean reward of the last steps is above a number that the first step is far below.

    Args:
        runs: receives the processes.
        exact: whether the killed run has to be the one that nobody killed, to the bit; else it has every step once.
        least: the number; the first step has less than half of it.
    """
    folders = [folder / name for name in (("whole", "killed") if exact else ("killed",))]
    for place in folders:
        place.mkdir()
        for file in folder.glob("*.py"):
            (place / file.name).write_bytes(file.read_bytes())
        write_learner(place, environment, **changes)
        runs.append(Run(place))
        if place.name == "killed":
            runs[-1].until(lambda: runs[-1].steps >= 12)
            runs[-1].kill()
            runs.append(Run(place))
        assert runs[-1].wait() == 0, runs[-1].log
        reached = rewards(place)
        assert len(reached) == 24
        assert reached[0] < least / 2, reached
        assert sum(reached[-5:]) / 5 >= least, reached
    if exact:
        assert rewards(folders[0]) == rewards(folders[1])
