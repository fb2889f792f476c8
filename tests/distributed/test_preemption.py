"""SIGTERM as schedulers send it: to every process of a job, the coordinator's included."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.distributed.test_mistakes import until_step
from tests.distributed.test_runs import SFT
from tests.several import several
from tests.tiny_runs import write_recipe


def coordinator_of(process: int) -> int:
    """The process that serves the coordinator, which process 0 has started."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    (found,) = (int(pid) for pid, parent, args in rows if int(parent) == process and "coordinator" in args)
    return found


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_all_save_and_part_and_leave_nothing_behind(tmp_path: Path):
    write_recipe(tmp_path / "r.yaml", {**SFT, "steps": 200})
    with several(tmp_path, 2) as run:
        until_step(run, tmp_path / "run", 3)
        coordinator = coordinator_of(run.processes[0].pid)
        for process in (coordinator, *(one.pid for one in run.processes)):
            os.kill(process, signal.SIGTERM)
        began = time.monotonic()
        assert run.wait(60) == [130, 130]
        assert "stopped at step" in run.log(0)
        assert any((tmp_path / "run/checkpoints").iterdir())
        # A scheduler counts the job as running until the last of its processes is gone.
        while alive(coordinator) and time.monotonic() - began < 60:
            time.sleep(0.1)
        assert time.monotonic() - began < 30
