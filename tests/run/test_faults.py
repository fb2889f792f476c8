"""What a run does when something around it fails, with the fault planned by `TUNIX_FAULTS`.

Others are made to happen elsewhere: servers that die (`test_servers_run.py`), trackers that are not reached
(`test_trackers.py`), judges (`test_judge_run.py`), full disks and rows that are no rows (`test_bad_input.py`), a
gradient that is no number (`test_nonfinite.py`), and kills.
"""

import os
import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from tests.marks import slow
from tests.run.test_bad_input import assert_says, refused
from tests.run.test_kill import Run, assert_same_end, no_process_left
from tests.run.test_nonfinite import write
from tests.run.test_servers_run import Servers
from tests.tiny_rl import write_policy
from tests.tiny_runs import EVAL, files, lines, losses, metrics, train, write_recipe
from tests.trainer.test_trackers import board_values
from tunix.cli import main
from tunix.errors import UserError
from tunix.trainer import checkpoint, trackers
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["down", "hang", "refuse"])
def test_a_tracker(kind: str, here: Path):
    """From step 2 of 4 on it is not reached, or does not answer, or it refuses that step for good. The run is the one
    without a tracker, and ends within the seconds that a tracker gets. The next start sends what was missed; what is
    refused is set aside."""
    whole, disturbed = here / "whole", here / "disturbed"
    for folder in (whole, disturbed):
        folder.mkdir()
        logging = {"tensorboard": True} if folder is disturbed else {}
        write_recipe(folder / "r.yaml", {**EVAL, "steps": 4, "eval.every": 4, "logging": logging})
    with no_process_left() as runs:
        runs += [Run(whole), Run(disturbed, settings={faults.VARIABLE: f"tracker:{kind}@2"})]
        run = runs[1]
        run.until(lambda: run.steps >= 4)
        began = time.monotonic()
        assert run.wait() == 0, run.log
        seconds, before = time.monotonic() - began, {step for step, _ in board_values(run.run)}
        runs.append(Run(disturbed))
        assert [runs[0].wait(), runs[2].wait()] == [0, 0], run.log
    assert_same_end(run.run, whole / "run")
    assert seconds < trackers.SECONDS + 30  # of a crowded machine
    handed = [step for step, value in board_values(run.run) if value.tag == "train/loss"]
    if kind == "refuse":
        assert handed == [1, 3, 4]
        kept = lines(run.run / "trackers/tensorboard.refused.jsonl")
        assert {row["step"] for row in kept} == {2}
        assert {name: x for row in kept for name, x in row["values"].items()} == {
            name: x for name, x in metrics(run.run)[2].items() if name != "step" and x is not None
        }
        assert "logging.tensorboard: step 2: " in run.log
    else:
        assert before == {0, 1}
        # What was handed over in the second before the end may be handed over again, which TensorBoard hides.
        assert list(dict.fromkeys(handed)) == [1, 2, 3, 4]
        assert "logging.tensorboard: not everything was sent within 30 s of the run's end" in run.log


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["break", "hang"])
def test_a_rollout_server(kind: str, here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """A request whose connection breaks is asked again. A server that does not answer one in time is asked no more; a
    later step finds that it is well. Numbers and weights are those of the undisturbed run."""
    with ExitStack() as stack:
        servers = Servers(here, 2, stack)
        servers.recipe(rollout__timeout=20)
        train("r.yaml", "output=whole")
        for fake in servers.fakes:
            fake.restart(servers.model)
        monkeypatch.setenv(faults.VARIABLE, f"server:{kind}@12")
        faults._passed.clear()
        began = time.monotonic()
        train("r.yaml")
    assert time.monotonic() - began < 200
    assert faults._passed["server"] > 3 * 16
    assert losses("run") == pytest.approx(losses("whole"), abs=1e-6)
    assert caplog.text.count("did not answer /v1/completions in 20 s; 1 of 2 are left") == (kind == "hang")
    assert caplog.text.count("is asked again") == (kind == "hang")


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
