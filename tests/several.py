"""`tunix run` in several real processes on this machine, which meet on loopback."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.servers import free_port

DEVICES = 4
"""Virtual devices of all processes together."""


class Several:
    """The processes of one run, in the folder that holds its recipe; `with` leaves none of them behind."""

    def __init__(
        self,
        folder: Path,
        number: int,
        words: Sequence[str] = ("r.yaml",),
        settings: Mapping[str, str] | None = None,
        devices: int = DEVICES,
        port: int | None = None,
    ):
        """Starts them.

        Args:
            folder: where they run.
            number: of processes; one is given no coordinator.
            words: the arguments of `tunix run`.
            settings: further variables of their environment.
            devices: of all of them.
            port: of the coordinator; None for a free one.
        """
        self.folder, self.port = folder, port or free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        for process in range(number):
            place = ["--coordinator", f"127.0.0.1:{self.port}", "--processes", str(number), "--process", str(process)]
            self.start(process, [*words, *(place if number > 1 else [])], devices // number, settings)

    def start(self, process: int, words: Sequence[str], devices: int, settings: Mapping[str, str] | None) -> None:
        """Starts one process."""
        env = {
            **os.environ,
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            **(settings or {}),
        }
        with (self.folder / f"log.{process}").open("ab") as log:
            words = [sys.executable, "-m", "tunix.cli", "run", *words]
            self.processes.append(subprocess.Popen(words, cwd=self.folder, env=env, stdout=log, stderr=log))

    def log(self, process: int) -> str:
        """What one of them has said."""
        return (self.folder / f"log.{process}").read_text()

    def wait(self, deadline: float = 600.0) -> list[int]:
        """Their exit codes."""
        return [process.wait(deadline) for process in self.processes]

    def end_well(self) -> None:
        """All of them have to end with 0."""
        codes = self.wait()
        assert not any(codes), "\n".join([str(codes), *(self.log(i)[-2000:] for i in range(len(codes)))])


@contextmanager
def several(folder: Path, number: int, *words: str, **settings: str) -> Iterator[Several]:
    """A run in several processes; those that still go on at the end are killed."""
    run = Several(folder, number, words or ("r.yaml",), settings)
    try:
        yield run
    finally:
        for process in run.processes:
            process.kill()
            process.wait()
