"""The loops in the open learn: both scripts run as a user starts them, the second on what the first leaves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.models

ROOT = Path(__file__).parents[1]
NUMBER = r"(\d+\.\d+)"


def run(name: str, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Runs an example on one device, with the compiler that users have: its loops are long enough."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""}
    command = [sys.executable, str(ROOT / f"examples/{name}.py"), *settings]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def sft(folder: Path) -> str:
    """What the SFT loop prints."""
    done = run("sft_loop", folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sft_loop_learns(sft: str):
    losses = [float(loss) for loss in re.findall(rf"^step +\d+  loss {NUMBER}", sft, re.MULTILINE)]
    (held_out,) = re.findall(rf"^held out   loss {NUMBER}", sft, re.MULTILINE)
    assert losses == sorted(losses, reverse=True)
    # Of 512 equally likely ids the loss is ln 512 = 6.2. Nobody knows the three letters of a prompt: with them trained
    # too, the mean over 8 tokens (3 letters, `>`, 3 letters, EOS) is at least (ln 10 + ln 9 + ln 8) / 8 = 0.82.
    assert float(held_out) < 0.75


def test_the_grpo_loop_learns_from_there(sft: str, folder: Path):
    done = run("grpo_loop", folder)
    assert done.returncode == 0, done.stderr
    steps = re.findall(rf"reward/mean {NUMBER}  mismatch/max {NUMBER}", done.stdout)
    rewards, mismatches = np.array(steps, float).T
    assert rewards[-5:].mean() > rewards[:5].mean() + 0.15
    assert mismatches.max() < 1e-3  # sampler and trainer are one model, in float32


def test_a_folder_that_is_there_is_not_trained_for(sft: str, folder: Path):
    done = run("sft_loop", folder)
    assert done.returncode == 1
    assert done.stderr == "runs/sft_loop is there already: give another output=FOLDER, or move it away\n"
