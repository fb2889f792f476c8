"""Killed at any moment and started again, a run ends bit for bit where the uninterrupted run ends.

Real processes on one device. They are watched through the files that they write, never by the clock alone, so that the
tests mean the same on a slow machine.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from benchmarks.servers import free_port
from tests.marks import slow
from tests.tiny_runs import EVAL, RECIPE, files, lines, metrics, write_recipe, write_rows
from tests.trainer.test_step import SFT_LOSS
from tests.trainers import sequences, trainer
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.util.atomic_io import PACKED, SAMPLES

STEPS = 30
# Everything that a resumed run could lose is in use: order, packing, noise, moments, schedule, samples. The vocabulary
# makes a checkpoint of 12 MB, which takes long enough to be caught. Token ids spare each start the tokenizer's imports.
CHANGES = {
    "model.tokenizer": None,
    "model.sizes": {**RECIPE["model"]["sizes"], "vocab_size": 8192, "d_model": 64},
    "algorithm": {"name": "sft", "neftune_alpha": 5},
    "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup": 5},
    "steps": STEPS,
    "checkpoint": {"every": 5, "keep": 2},
    **EVAL,
    "eval.every": 10,
}


def write_run(folder: Path) -> None:
    """The recipe and its rows: ids of many lengths, of which all but the first three are trained."""
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, 8192, 5 + (7 * i) % 40).tolist() for i in range(70)]
    given = [{"input_ids": one, "labels": [-100] * 3 + one[3:]} for one in ids]
    write_rows(folder / "train.jsonl", given[:64])
    write_rows(folder / "held.jsonl", given[64:])
    write_recipe(folder / "r.yaml", CHANGES)


class Run:
    """`tunix run` in a process of its own, or in several that meet on loopback, in the folder that holds `r.yaml`."""

    def __init__(
        self,
        folder: Path,
        program: Sequence[str] = ("tunix.cli",),
        settings: Mapping[str, str] | None = None,
        number: int = 1,
    ):
        self.folder = folder
        self.run = folder / "run"
        words = [sys.executable, "-m", *program, "run", "r.yaml"]
        if number > 1:
            words += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(number)]
        env = {
            **os.environ,
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **(settings or {}),
        }
        with (folder / "log").open("ab") as log:
            self._begin = log.tell()
            self.processes = [
                subprocess.Popen(
                    [*words, *(["--process", str(i)] if number > 1 else [])],
                    cwd=folder,
                    env=env,
                    stdout=log,
                    stderr=log,
                )
                for i in range(number)
            ]
        self.process = self.processes[0]

    @property
    def log(self) -> str:
        """What all processes in this folder have said."""
        return (self.folder / "log").read_text()

    @property
    def said(self) -> str:
        """What its processes have said."""
        return (self.folder / "log").read_bytes()[self._begin :].decode(errors="replace")

    @property
    def steps(self) -> int:
        """Steps that the metrics tell of."""
        path = self.run / "metrics.jsonl"
        return json.loads(whole[-1])["step"] if (whole := _whole_lines(path)) else -1

    @property
    def unfinished(self) -> list[str]:
        """Checkpoints that are being written."""
        folder = self.run / "checkpoints"
        return [name for name in os.listdir(folder) if not name.isdigit()] if folder.is_dir() else []

    @property
    def saved(self) -> list[str]:
        """Checkpoints that have been written."""
        folder = self.run / "checkpoints"
        return [name for name in os.listdir(folder) if name.isdigit()] if folder.is_dir() else []

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait()

    def codes(self, deadline: float = 600.0) -> list[int]:
        """The exit codes of all processes."""
        return [process.wait(deadline) for process in self.processes]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all processes."""
        for process in self.processes:
            process.send_signal(number)

    def until(self, happened: Callable[[], bool]) -> None:
        """Waits, while the process goes on."""
        while not happened():
            assert self.process.poll() is None, self.log
            time.sleep(0.001)

    def caught_while(self, happens: Callable[[], bool]) -> bool:
        """Stops the process in the middle of something; False where it ended before it was seen at that."""
        while self.process.poll() is None:
            if happens():
                self.send(signal.SIGSTOP)
                if happens():
                    return True
                self.send(signal.SIGCONT)
            time.sleep(0.001)
        return False

    def kill(self) -> None:
        self.process.kill()
        assert self.wait() == -signal.SIGKILL, self.log


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    write_run(folder)
    run = Run(folder)
    assert run.wait() == 0, run.log
    return folder


@contextmanager
def no_process_left() -> Iterator[list[Run]]:
    """A list for runs; those that still go on at the end are killed."""
    runs: list[Run] = []
    try:
        yield runs
    finally:
        for process in (process for run in runs for process in run.processes):
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[], Run]]:
    """Starts the same run in this test's folder, again and again; leaves no process behind."""
    write_run(tmp_path)
    with no_process_left() as runs:

        def start() -> Run:
            runs.append(Run(tmp_path))
            return runs[-1]

        yield start


def lasting(run: Path) -> list[dict[str, Any]]:
    """The metrics apart from time and speed, and from what each process compiled for itself."""
    return [{k: v for k, v in one.items() if not k.startswith(("time/", "perf/", "compile/"))} for one in metrics(run)]


def state(run: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The arrays of the last checkpoint, bit for bit, and its record apart from time."""
    place = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    with ocp.PyTreeCheckpointer() as reader:  # as arrays of NumPy: the devices that had saved them may be elsewhere
        tree = reader.metadata(place / "state").item_metadata.tree
        wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        leaves, _ = jax.tree_util.tree_flatten_with_path(reader.restore(place / "state", restore_args=wanted))
    record = json.loads((place / "record/metadata").read_text())
    del record["seconds"]
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}, record


def assert_same_end(one: Path, other: Path) -> None:
    """Weights, optimizer, data position, numbers and samples of two runs are equal to the last bit."""
    assert lasting(one) == lasting(other)
    assert lines(one / SAMPLES) == lines(other / SAMPLES)
    packed = [path.read_bytes() for path in (one / PACKED, other / PACKED) if path.exists()]
    assert packed[:1] == packed[1:]
    assert files(one / "export") == files(other / "export")
    assert state(one) == state(other)
    assert sorted(os.listdir(one / "checkpoints")) == sorted(os.listdir(other / "checkpoints"))


def assert_killed_it_ends_alike(folder: Path, write: Callable[[Path], object], at: int) -> None:
    """Two runs: one that nobody interrupts, and one that is killed after a step and started again.

    Args:
        folder: where each of them gets a folder of its own.
        write: writes `r.yaml`, and what it reads, into a folder.
        at: the step; the first checkpoint has to lie before it.
    """
    whole, killed = folder / "whole", folder / "killed"
    with no_process_left() as runs:
        for place in (whole, killed):
            place.mkdir()
            write(place)
        runs.append(Run(whole))
        assert runs[-1].wait() == 0, runs[-1].log
        runs.append(Run(killed))
        # A step may be done, and the checkpoint before it still on its way to the disk.
        runs[-1].until(lambda: runs[-1].steps >= at and bool(runs[-1].saved))
        runs[-1].kill()
        runs.append(Run(killed))
        assert runs[-1].wait() == 0, runs[-1].log
        assert "going on from step" in runs[-1].log
    assert_same_end(killed / "run", whole / "run")


@pytest.mark.slow
def test_killed_while_it_saves_it_ends_like_the_uninterrupted_run(whole: Path, started: Callable[[], Run]):
    """While one of the last checkpoints is written, so that there are others to go on from."""
    run = started()
    assert run.caught_while(lambda: bool(run.unfinished) and run.steps >= 20), run.log
    run.kill()
    assert run.unfinished, "the save was not caught"

    run = started()
    assert run.wait() == 0, run.log
    assert run.unfinished == []
    assert_same_end(run.run, whole / "run")


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_like_the_uninterrupted_run(whole: Path, started: Callable[[], Run]):
    draw = random.Random(0)

    run = started()  # before there is a checkpoint
    first = draw.randint(1, 4)
    run.until(lambda: run.steps >= first)
    run.kill()

    run = started()  # while the first checkpoint is written
    assert run.caught_while(lambda: bool(run.unfinished)), run.log
    run.kill()
    assert run.unfinished, "the save was not caught"

    run = started()  # while it restores, compiles, or takes its first steps
    said = len(run.log)
    run.until(lambda: len(run.log) > said)
    time.sleep(draw.uniform(0, 0.2))
    run.kill()

    run = started()  # in the middle of training
    middle = draw.randint(11, 19)
    run.until(lambda: run.steps >= middle)
    time.sleep(draw.uniform(0, 0.05))
    run.kill()

    run = started()  # while one of the last checkpoints is written, and older ones are deleted
    assert run.caught_while(lambda: bool(run.unfinished) and run.steps >= 20), run.log
    run.kill()

    run = started()  # while the weights are exported, if that can be caught
    if run.caught_while(lambda: any(run.run.glob("export.tmp-*"))):
        run.kill()

    run = started()
    assert run.wait() == 0, run.log
    assert run.unfinished == []
    assert not list(run.run.glob("*.tmp-*"))
    assert_same_end(run.run, whole / "run")


@pytest.mark.parametrize("number", slow([signal.SIGTERM, signal.SIGINT]), ids=lambda number: number.name)
def test_asked_to_stop_it_saves_and_says_how_to_go_on(whole: Path, started: Callable[[], Run], number: signal.Signals):
    run = started()
    run.until(lambda: run.steps >= 7)
    run.process.send_signal(number)
    assert run.wait() == 130, run.log
    step = run.steps
    last = run.log.splitlines()[-1]
    assert last == f"stopped at step {step} of {STEPS}, with a checkpoint in run. The same command goes on from there."
    assert (run.run / "checkpoints" / str(step)).is_dir()
    run = started()
    assert run.wait() == 0, run.log
    assert f"going on from step {step}" in run.log
    assert_same_end(run.run, whole / "run")


@pytest.mark.slow
def test_the_clients_state_is_saved_and_loaded_bit_for_bit_on_another_mesh(tmp_path: Path):
    batch = pack(sequences(8), 8, 24, packing=True)
    first = trainer(mesh=MeshConfig(fsdp=4, tensor=2), devices=8)
    for _ in range(3):
        first.step(batch, SFT_LOSS)
    first.save(tmp_path / "state").result()
    second = trainer(mesh=MeshConfig(fsdp=1, tensor=2), devices=2, seed=1)
    second.forward_backward(batch, SFT_LOSS)
    places = [x.sharding for x in jax.tree.leaves(second.state)]
    second.load(tmp_path / "state")
    assert [x.sharding for x in jax.tree.leaves(second.state)] == places
    assert jax.tree.structure(second.state) == jax.tree.structure(first.state)
    for ours, theirs in zip(jax.tree.leaves(second.state), jax.tree.leaves(first.state), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    with pytest.raises(ValueError, match="optim_step without gradients"):
        second.optim_step()  # what was gathered before belongs to other weights
    losses = [float(one.step(batch, SFT_LOSS)["train/loss"]) for one in (first, second)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    with pytest.raises(ValueError, match="already exists"):
        first.save(tmp_path / "state")
