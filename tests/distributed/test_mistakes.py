"""Processes that do not belong together say so in one line each, within a deadline; so do those that lose another."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers import free_port
from tests.distributed.test_runs import SFT, assert_same_export, assert_same_numbers, write_judged
from tests.several import Several, several
from tests.tiny_rl import write_policy
from tests.tiny_runs import metrics, write_recipe, write_rows
from tunix.distributed import processes
from tunix.distributed.meeting import LOST, Place, join, place_of
from tunix.errors import UserError


@pytest.fixture(autouse=True)
def _no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def test_a_place_is_given_or_in_the_environment_or_there_is_none(monkeypatch: pytest.MonkeyPatch):
    assert place_of(None, None, None) is None
    assert place_of("10.0.0.1:8476", 2, 1) == Place("10.0.0.1:8476", 2, 1)
    assert place_of("10.0.0.1:8476", 1, 0) is None
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.2:8476")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    assert place_of(None, None, None) == Place("10.0.0.2:8476", 4, 0)
    assert place_of(None, None, 3) == Place("10.0.0.2:8476", 4, 3)


def test_slurm_says_the_place(monkeypatch: pytest.MonkeyPatch):
    about = {
        "SLURM_JOB_ID": "65535",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
    }
    for name, value in about.items():
        monkeypatch.setenv(name, value)
    place = place_of(None, None, None)
    assert place is not None
    assert (place.coordinator.split(":")[0], place.processes, place.process) == ("node3", 2, 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("10.0.0.1:8476", None, None), "needs --processes (JAX_NUM_PROCESSES), --process (JAX_PROCESS_ID) too"),
        (("10.0.0.1:8476", 2, 2), "--process 2: they are counted from 0 to 1"),
        (("10.0.0.1", 2, 0), "--coordinator 10.0.0.1: has to be an address with a port"),
    ],
)
def test_half_a_place_is_refused(given: tuple[str, int | None, int | None], says: str):
    with pytest.raises(UserError) as error:
        place_of(*given)
    assert says in str(error.value)


@pytest.mark.slow
def test_a_coordinator_that_is_not_there_is_named_within_the_deadline():
    address, began = f"127.0.0.1:{free_port()}", time.monotonic()
    with pytest.raises(UserError, match=f"process 1 of 2: no coordinator answers at {address} .* Start process 0"):
        join(Place(address, 2, 1), deadline=2.0)
    assert time.monotonic() - began < 60
    assert processes.number() == 1


@pytest.mark.slow
def test_processes_that_never_come_are_waited_for_no_longer_than_the_deadline():
    with pytest.raises(UserError, match=r"process 0 of 2: not all processes came to .* Start them with the same"):
        join(Place(f"127.0.0.1:{free_port()}", 2, 0), deadline=3.0)


@pytest.mark.slow
def test_another_recipe_is_named(tmp_path: Path):
    write_recipe(tmp_path / "r.yaml", SFT)
    with several(tmp_path, 0) as run:
        place = ["--coordinator", f"127.0.0.1:{run.port}", "--processes", "2"]
        for process in range(2):
            run.start(process, ["r.yaml", f"steps={4 + process}", *place, "--process", str(process)], 2, None)
        codes = run.wait()
    assert 0 not in codes
    said = run.log(0) + run.log(1)
    assert "process 1 has another recipe, steps than process 0: 5, not 4" in said
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_other_rows_are_named(tmp_path: Path):
    """The same recipe and number of rows in two folders, of which one has another row."""
    folders = [tmp_path / name for name in ("one", "two")]
    run = Several(tmp_path, 0)
    try:
        for process, folder in enumerate(folders):
            folder.mkdir()
            write_recipe(folder / "r.yaml", SFT)
            if process:
                given = (folder / "train.jsonl").read_text().replace("AAA", "AAB", 1)
                (folder / "train.jsonl").write_text(given)
            place = ["--coordinator", f"127.0.0.1:{run.port}", "--processes", "2", "--process", str(process)]
            run.folder = folder
            run.start(process, ["r.yaml", *place], 2, None)
        assert 0 not in run.wait()
        said = (folders[0] / "log.0").read_text() + (folders[1] / "log.1").read_text()
        assert "process 1 has another data.train than process 0: 32 rows (digest" in said
    finally:
        for process in run.processes:
            process.kill()


@pytest.mark.slow
def test_a_mistake_of_one_process_ends_all(tmp_path: Path):
    """A row that cannot be rendered, which one of them reads: both name it, and what was trained is saved."""
    write_recipe(tmp_path / "r.yaml", {"mesh": {"fsdp": 4}, "data.shuffle": False, "steps": 40})
    rows = [{"prompt": f"{i}>", "completion": "A"} for i in range(64)] + [{"prompt": 7}]
    write_rows(tmp_path / "train.jsonl", rows)
    with several(tmp_path, 2) as run:
        assert run.wait() == [2, 2]
        for process in range(2):
            assert "row 65 of train.jsonl" in run.log(process)
    # A batch looks at the row after its last one.
    assert (tmp_path / "run/checkpoints/7").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_where_one_is_killed_the_others_stop_and_the_same_command_goes_on_exactly(tmp_path: Path, victim: int):
    changes = {**SFT, "steps": 12, "checkpoint": {"every": 4, "keep": 2}}
    write_recipe(tmp_path / "r.yaml", changes)
    with several(tmp_path, 2, "r.yaml", "output=whole") as whole:
        whole.end_well()
    with several(tmp_path, 2) as run:
        until_step(run, tmp_path / "run", 5)
        run.processes[victim].kill()
        began = time.monotonic()
        assert run.processes[1 - victim].wait(90) == LOST
        assert time.monotonic() - began < 60
        last = run.log(1 - victim).splitlines()[-1]
        assert last.startswith(f"process {victim} of 2 is gone (no sign of life for 30 s): process {1 - victim} stops.")
    with several(tmp_path, 2) as again:
        again.end_well()
    assert_same_numbers(tmp_path / "whole", tmp_path / "run", tolerance=0.0)
    assert_same_export(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4])
def test_told_to_stop_all_save_one_step_and_another_number_goes_on(tmp_path: Path, number: int):
    write_recipe(tmp_path / "r.yaml", {**SFT, "steps": 12})
    with several(tmp_path, 1, "r.yaml", "output=whole") as whole:
        whole.end_well()
    with several(tmp_path, 2) as run:
        until_step(run, tmp_path / "run", 3)
        run.processes[1].send_signal(signal.SIGTERM)
        assert run.wait() == [130, 130]
        assert "stopped at step" in run.log(0)
    with several(tmp_path, number) as again:
        again.end_well()
    assert_same_numbers(tmp_path / "whole", tmp_path / "run", tolerance=1e-4)


@pytest.mark.slow
def test_a_policy_whose_lead_is_killed_goes_on_exactly(tmp_path: Path):
    write_judged(tmp_path, steps=8, checkpoint={"every": 2, "keep": 2})
    with several(tmp_path, 2, "r.yaml", "output=whole") as whole:
        whole.end_well()
    with several(tmp_path, 2) as run:
        until_step(run, tmp_path / "run", 3)
        run.processes[0].kill()
        assert run.processes[1].wait(90) == LOST
    with several(tmp_path, 2) as again:
        again.end_well()
    assert_same_numbers(tmp_path / "whole", tmp_path / "run", tolerance=0.0)
    assert_same_export(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_killed_on_eight_devices_it_goes_on_with_four(tmp_path: Path):
    write_recipe(tmp_path / "r.yaml", {"steps": 12, "checkpoint": {"every": 4}})
    for output, devices in (("whole", 8), ("run", 8), ("run", 4)):
        run = Several(tmp_path, 1, ["r.yaml", f"output={output}"], devices=devices)
        if (output, devices) == ("run", 8):
            until_step(run, tmp_path / "run", 6)
            while not any(path.name.isdigit() for path in (tmp_path / "run/checkpoints").glob("*")):
                time.sleep(0.01)  # it is written while steps go on
            run.processes[0].kill()
            run.wait()
        else:
            run.end_well()
    assert "going on from step 4" in run.log(0)
    assert_same_numbers(tmp_path / "whole", tmp_path / "run", tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rollout__max_staleness": 1},
            "rollout.max_staleness: 1 needs one process or servers (rollout.engine: vllm), and there are 2 processes",
        ),
        ({"rollout__mesh": {"devices": 1}}, "rollout.mesh: devices 1 are not as many for each of 2 processes; 2 would"),
        ({"mesh": {"fsdp": 3}}, "does not fit 4 device(s) (cpu) of 2 processes: the sizes must multiply to 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_several_processes_cannot_do_yet_is_refused(tmp_path: Path, changes: dict[str, Any], says: str):
    write_policy(tmp_path, **changes)
    with several(tmp_path, 2) as run:
        assert run.wait() == [2, 2]
        assert says in run.log(0)


def until_step(run: Several, folder: Path, step: int) -> None:
    """Waits until the lead has logged a step."""
    while not ((folder / "metrics.jsonl").exists() and metrics(folder) and metrics(folder)[-1]["step"] >= step):
        assert all(process.poll() is None for process in run.processes), run.log(0) + run.log(1)
        time.sleep(0.01)
