"""Killed while it samples, scores, updates or saves, a run on rewards ends like one that nobody disturbs.

Real processes on one device. The algorithms and the reward of `marked.py` say in files what is going on, so that a run
is stopped in the middle of it by what it does, and not by the clock.
"""

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run.test_kill import Run, assert_same_end, no_process_left
from tests.tiny_rl import write_policy
from tests.tiny_runs import RECIPE, metrics

STEPS = 8
MARKED = '''
import os
from contextlib import contextmanager
from pathlib import Path

import jax

from tunix.algorithms.grpo.algorithm import GRPO
from tunix.algorithms.ppo.algorithm import PPO


@contextmanager
def phase(name):
    """`name` is a file as long as it goes on."""
    Path(name).touch()
    yield
    Path(name).unlink(missing_ok=True)


class Marked:
    def gather(self, client, data):
        with phase("rollout"):
            return super().gather(client, data)

    def step(self, client, batch):
        with phase("update"):
            return jax.block_until_ready(super().step(client, batch))


class MarkedGRPO(Marked, GRPO):
    pass


class MarkedPPO(Marked, PPO):
    pass
'''
REWARD = '''
import os, time
from pathlib import Path


def odd(completion):
    """Whether the number of letters is odd: half of the pairs have no signal."""
    mark = Path(f"reward.{os.getpid()}")
    mark.touch()
    time.sleep(0.005)
    mark.unlink()
    return float(sum(c.isascii() and c.isalpha() for c in completion) % 2)
'''
WIDE = {**RECIPE["model"]["sizes"], "ffn": 2048}
"""A checkpoint of some MB takes long enough to be caught."""
COMMON: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint": {"every": 2, "keep": 2},
    "data__eval": "held.jsonl",
    "eval": {"every": 4, "rows": 4},
    "model__sizes": WIDE,
}
GRPO: dict[str, Any] = {
    "algorithm": {"name": "marked.py:MarkedGRPO", "group_size": 2, "dynamic_sampling": True, "updates": 2, "kl": 0.01},
    "reward__functions": ["reward.py:odd"],
    "rollout__temperature": 0.8,
}
GAME: dict[str, Any] = {
    "algorithm": {"name": "marked.py:MarkedPPO", "critic_warmup": 1, "kl": 0.05, "kl_target": 2.0, "updates": 2},
    "reward": None,
    "rollout__environment": {"name": "guessing"},
    "data__train": "tunix.rollout.environments.guessing:secrets",
    "data__eval": "tunix.rollout.environments.guessing:secrets",
    "batch_size": 8,
}


def write(folder: Path, changes: dict[str, Any]) -> None:
    (folder / "marked.py").write_text(MARKED)
    (folder / "reward.py").write_text(REWARD)
    write_policy(folder, **{**COMMON, **changes})


@pytest.fixture
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Run]]:
    """Starts the run of a folder; leaves no process behind."""
    with no_process_left() as runs:

        def start(folder: Path) -> Run:
            for mark in ("rollout", "update", *(path.name for path in folder.glob("reward.[0-9]*"))):
                (folder / mark).unlink(missing_ok=True)
            runs.append(Run(folder))
            return runs[-1]

        yield start


def uninterrupted(folder: Path, changes: dict[str, Any], started: Callable[[Path], Run]) -> Path:
    """The run folder of a run that nobody disturbs."""
    folder.mkdir()
    write(folder, changes)
    run = started(folder)
    assert run.wait() == 0, run.log
    return run.run


@pytest.mark.slow
def test_grpo_that_refills_its_groups(tmp_path: Path, started: Callable[[Path], Run]):
    whole = uninterrupted(tmp_path / "whole", GRPO, started)
    folder = tmp_path / "killed"
    folder.mkdir()
    write(folder, GRPO)
    draw = random.Random(1)

    run = started(folder)  # while it samples, before there is a checkpoint
    assert run.caught_while(lambda: (folder / "rollout").exists() and run.steps >= 1), run.log
    run.kill()

    run = started(folder)  # while rewards are at work
    assert run.caught_while(lambda: run.steps >= 2 and any(folder.glob("reward.[0-9]*"))), run.log
    run.kill()

    run = started(folder)  # asked to stop: the step in flight ends, and is saved
    run.until(lambda: run.steps >= 3)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130, run.log
    assert "The same command goes on from there." in run.log

    run = started(folder)  # between the two updates of a step, or in one
    assert run.caught_while(lambda: (folder / "update").exists() and run.steps >= 4), run.log
    run.kill()

    run = started(folder)  # while a checkpoint is written
    assert run.caught_while(lambda: bool(run.unfinished) and run.steps >= 5), run.log
    run.kill()

    run = started(folder)  # anywhere
    said = len(run.log)
    run.until(lambda: len(run.log) > said)
    time.sleep(draw.uniform(0, 1))
    run.kill()

    run = started(folder)
    assert run.wait() == 0, run.log
    assert_same_end(run.run, whole)
    # What would not be noticed: no group was ever refilled, or nothing ever moved.
    rows = [row for row in metrics(whole) if row["step"]]
    taken = [after["data/kept"] - before["data/kept"] for before, after in itertools.pairwise(rows)]
    assert max(taken) > 4
    assert rows[-1]["kl/reference"] > 1e-4


@pytest.mark.slow
def test_ppo_in_a_game(tmp_path: Path, started: Callable[[Path], Run]):
    """A critic of its own, its warm-up, a coefficient that adapts, an environment."""
    whole = uninterrupted(tmp_path / "whole", GAME, started)
    folder = tmp_path / "killed"
    folder.mkdir()
    write(folder, GAME)

    run = started(folder)  # while the game is played
    assert run.caught_while(lambda: (folder / "rollout").exists() and run.steps >= 3), run.log
    run.kill()

    run = started(folder)
    assert run.caught_while(lambda: (folder / "update").exists() and run.steps >= 6), run.log
    run.kill()

    run = started(folder)
    assert run.wait() == 0, run.log
    assert_same_end(run.run, whole)
    coefficients = [row["kl/coefficient"] for row in metrics(whole) if row["step"]]
    assert len(set(coefficients)) > 4
