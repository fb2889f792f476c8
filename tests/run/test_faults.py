"""What a run does when something around it fails, with the fault planned by `TUNIX_FAULTS`.

Others are made to happen elsewhere: servers that die (`test_servers_run.py`), judges (`test_judge_run.py`), full disks
and rows that are no rows (`test_bad_input.py`), a gradient that is no number (`test_nonfinite.py`), and kills.
"""

import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from tests.marks import slow
from tests.run.test_bad_input import assert_says, refused
from tests.run.test_nonfinite import write
from tests.tiny_rl import write_policy
from tests.tiny_runs import files, losses, metrics, train
from tunix.cli import main
from tunix.errors import UserError
from tunix.trainer import checkpoint
from tunix.util import faults


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    faults._passed.clear()
    return tmp_path


@pytest.mark.parametrize(("kind", "said"), slow([("die", "signal 9"), ("hang", "longer than 2 s")]))
def test_a_worker(kind: str, said: str, here: Path, monkeypatch: pytest.MonkeyPatch):
    """One of 16 samples is left out, and the run goes on."""
    monkeypatch.setenv(faults.VARIABLE, f"worker:{kind}@3")
    write_policy(here, steps=2, reward__deadline=2)
    train("r.yaml")
    assert [row["reward/failed"] for row in metrics("run")] == [1 / 16, 0]
    assert said in (here / "run/log.txt").read_text()


@pytest.mark.slow
def test_the_disk_and_the_compiler(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Of one run: its first program does not compile, its first checkpoint takes long, its second is cut in half, and
    the last rows of its file are gone. It ends as if nothing had been."""
    write(here, steps=8)
    train("r.yaml", "output=whole")
    monkeypatch.setenv(faults.VARIABLE, "compile:fail@1")
    threads = threading.active_count()
    with pytest.raises(jax.errors.JaxRuntimeError, match="cannot be compiled"):
        main(["run", "r.yaml"])
    assert threading.active_count() <= threads

    def until_step_3(_: float) -> None:
        end = time.monotonic() + 120
        while len(metrics("run")) < 3:
            assert time.monotonic() < end, "training waits for the disk"
            time.sleep(0.01)

    # The disk is done with the checkpoint of step 2 once step 3 is: training does not wait for it.
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(sleep=until_step_3))
    monkeypatch.setenv(faults.VARIABLE, "disk:slow@2,checkpoint:truncate@4")
    train("r.yaml", "steps=4")
    message = refused(["run", "r.yaml"], capsys)
    assert_says(message, ["run/checkpoints/4: the checkpoint cannot be read", "go on from the one before"])
    shutil.rmtree("run/checkpoints/4")

    # After the 40 reads of the digest, and before the 24 rows of the steps that are left are read.
    faults._passed.clear()
    monkeypatch.setenv(faults.VARIABLE, "data:shorten@55")
    message = refused(["run", "r.yaml"], capsys)
    assert_says(message, ["train.jsonl, line ", " is not JSON"])
    assert 2 < metrics("run")[-1]["step"] < 8
    assert os.path.isdir(f"run/checkpoints/{metrics('run')[-1]['step']}")
    monkeypatch.delenv(faults.VARIABLE)
    train("r.yaml")
    assert losses("run") == losses("whole")
    assert files(here / "run/export") == files(here / "whole/export")


@pytest.mark.parametrize("plan", ["gradient", "gradient:nan", "gradient:nan@x", "sun:dark@1", "gradient:dark@1"])
def test_a_plan_that_is_none(plan: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(faults.VARIABLE, plan)
    with pytest.raises(UserError, match=r"TUNIX_FAULTS: '.*' is no fault; there are data:shorten@N, gradient:nan@N"):
        faults.planned("disk")


def test_a_fault_comes_once(monkeypatch: pytest.MonkeyPatch):
    assert faults.planned("worker") is None
    monkeypatch.setenv(faults.VARIABLE, "worker:die@2,gradient:nan@5")
    assert [faults.planned("worker") for _ in range(3)] == [None, "die", None]
    assert [faults.planned("gradient", number) for number in (4, 5, 6)] == [None, "nan", None]
