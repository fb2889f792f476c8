"""The loops in the open learn: both scripts are run as a user starts them, one after the other, on one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
NUMBER = r"(-?\d+\.\d+)"


def printed(name: str, folder: Path, *settings: str) -> str:
    """What an example prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, str(ROOT / f"examples/{name}.py"), *settings]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def sft(folder: Path) -> str:
    return printed("sft_loop", folder)


def test_the_sft_loop_learns(sft: str):
    losses = [float(loss) for loss in re.findall(rf"^step +\d+  loss {NUMBER}", sft, re.M)]
    held_out = float(re.findall(rf"^held out   loss {NUMBER}", sft, re.M)[0])
    print(losses, held_out)
    assert len(losses) == 8


def test_the_grpo_loop_learns_from_there(sft: str, folder: Path):
    steps = re.findall(rf"reward/mean {NUMBER}  mismatch/max {NUMBER}", printed("grpo_loop", folder))
    rewards, mismatches = np.array(steps, float).T
    print(rewards, mismatches)
    assert len(rewards) == 20


def test_an_unknown_setting_is_refused(folder: Path): ...
