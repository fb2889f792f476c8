"""The same tiny runs on more virtual devices, and in more processes that meet on loopback: losses, seconds, bytes.

Each run is `tunix run` in processes of its own, of a recipe of `tiny.py` with all devices along `fsdp`. The bytes are
read from what XLA compiled: it writes the text of each program to a folder, of which process 0's are read. Virtual
devices and processes share the cores that there are, so seconds say what a split costs, and never what it gains.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.programs import account
from benchmarks.scale.tiny import RECIPES
from benchmarks.servers import free_port
from tunix.util.yaml_io import write_yaml

ROOT = Path(__file__).parents[2]
WARM = 2
"""First steps, which compile, that are left out of the seconds."""
DEADLINE = 600.0
"""Seconds that a run may take."""


class Place(NamedTuple):
    """Where a run goes."""

    processes: int
    """Processes of the run, e.g. 2."""
    devices: int
    """Virtual devices of all of them together, e.g. 8."""

    def __str__(self) -> str:
        return f"{self.processes} x {self.devices // self.processes}"


PLACES = (*(Place(1, number) for number in (1, 2, 4, 8)), *(Place(number, number) for number in (2, 4)))
"""The first one is what the others are compared with."""


class Run(NamedTuple):
    """What a run has left."""

    losses: list[float]
    """Loss of each step."""
    seconds: list[float]
    """Seconds of each step after the first ones."""
    sent: dict[str, float]
    """Bytes that a device sends in one execution of each kind of program, by the function it was compiled from; of an
    update, where its rows fill as many micro-batches as they can."""


def place_words(place: Place, process: int, port: int) -> list[str]:
    """What `tunix run` is told of the other processes."""
    words = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(place.processes), "--process", str(process)]
    return words if place.processes > 1 else []


def start(folder: Path, place: Place, process: int, port: int) -> subprocess.Popen[bytes]:
    """One process of a run, which writes its programs to `programs.PROCESS` and its words to `log.PROCESS`."""
    dump = folder / f"programs.{process}"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(place.devices // place.processes),
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is found there is not compiled, and not written
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_.*",
        "NPROC": "32",  # threads for collectives that wait for each other on more devices than cores
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, "-m", "tunix.cli", "run", "recipe.yaml", *place_words(place, process, port)]
    with (folder / f"log.{process}").open("wb") as log:
        return subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log)


def run(recipe: dict[str, Any], place: Place) -> Run:
    """Runs a recipe at a place.

    Raises:
        RuntimeError: a process failed, with the last of what it said.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        (folder / "recipe.yaml").write_text(write_yaml({**recipe, "mesh": {"fsdp": place.devices}}))
        processes = [start(folder, place, process, port) for process in range(place.processes)]
        try:
            codes = [process.wait(DEADLINE) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            failed = next(number for number, code in enumerate(codes) if code)
            raise RuntimeError(f"{place}: {codes}\n{(folder / f'log.{failed}').read_text()[-2000:]}")
        rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "train/loss" in row]
        seconds = [row["perf/step_seconds"] for row in steps]
        return Run([row["train/loss"] for row in steps], seconds[WARM:], sent(folder / "programs.0"))


def sent(folder: Path) -> dict[str, float]:
    """Bytes that a device sends in one execution of each program in a folder, added up by their functions' names."""
    found: dict[str, float] = {}
    for file in sorted(folder.glob("*after_optimizations.txt")):
        if number := account(file.read_text()).sent():
            name = file.name.split(".")[1].removeprefix("jit_")
            found[name] = found.get(name, 0.0) + number
    return found


def differences(one: Run, other: Run) -> float:
    """The largest difference between the losses of two runs, in nats."""
    return max(abs(ours - theirs) for ours, theirs in zip(one.losses, other.losses, strict=True))


def show(console: Console, names: Sequence[str] = tuple(RECIPES), places: Sequence[Place] = PLACES) -> None:
    """Runs and prints; the first place is what the others are compared with."""
    columns = ("recipe", "processes x devices", "largest difference of a loss", "step, ms", "min to max")
    table = Table(
        *columns, "update sends at most, kB", "others, kB", title="devices along fsdp, float32, bytes of a device"
    )
    for name in names:
        first: Run | None = None
        for place in places:
            found = run(RECIPES[name], place)
            first = first or found
            milliseconds = [1e3 * one for one in found.seconds]
            others = ", ".join(f"{key} {number / 1e3:.0f}" for key, number in found.sent.items() if key != "step")
            table.add_row(
                name,
                str(place),
                f"{differences(first, found):.1e}",
                f"{statistics.median(milliseconds):.0f}",
                f"{min(milliseconds):.0f} to {max(milliseconds):.0f}",
                f"{found.sent.get('step', 0.0) / 1e3:.0f}",
                others,
            )
    console.print(table)
