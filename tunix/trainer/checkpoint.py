"""Checkpoints: train state and run record as one atomic unit on disk, written in the background during training.

`<step>.tmp/` holds an unfinished checkpoint: `state/`, written by the client, `record/metadata` (data position,
counters) and `metrics/metrics` (the evaluation at that step). Once it is complete it is renamed to `<step>/`; a process
that dies before that leaves the previous step intact.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunix.errors import UserError
from tunix.protocols import Client, Saving
from tunix.trainer.config import CheckpointConfig
from tunix.trainer.state_files import Unreadable, first_line
from tunix.util.atomic_io import sync, sync_folder

BEST = "eval/loss"
"""The metric that is lowest at the best checkpoint."""
UNFINISHED = re.compile(r"\d+\.(tmp|orbax-checkpoint-tmp.*)")
"""Names of unfinished folders that a dead process left: ours, and Orbax's from runs of earlier versions."""


@runtime_checkable
class Loading(Protocol):
    """Whatever restores a client's state, or a part of it."""

    def load(self, path: Path) -> None:
        """Restores what `Client.save` wrote there."""
        ...


class Checkpoints:
    """The checkpoints of one run, in `folder/<step>/`."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, read_only: bool = False):
        """Opens the folder and deletes unfinished checkpoints of a dead process.

        Args:
            read_only: deletes and creates nothing, since the run that owns the folder may be writing to it.
        """
        self.folder, self._config = folder.absolute(), config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None
        if not read_only:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.iterdir():
                if UNFINISHED.fullmatch(path.name):
                    shutil.rmtree(path)

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, step: int, client: Client, record: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Starts to write a checkpoint; returns once training may continue.

        Args:
            record: JSON values: whatever else the run needs to resume.
            metrics: of the evaluation at this step, empty without one; decide which checkpoint is best.

        Raises:
            UserError: an earlier save failed, for instance on a full disk.
        """
        self.wait()
        part = self.folder / f"{step}.tmp"
        with self._write_errors():
            part.mkdir()
            saving = client.save(part / "state")
            _write_json(part / "record/metadata", record)
            _write_json(part / "metrics/metrics", {BEST: metrics.get(BEST)})
        self._writing = self._thread.submit(self._finish, step, part, saving)

    def restore(self, step: int, client: Loading) -> dict[str, Any]:
        """Restores a client, or a part of its state, to a step and returns the record that was saved with it.

        Raises:
            UserError: the checkpoint does not hold this client's state (another model, optimizer or adapter), would
                lose digits in it, or is damaged.
        """
        folder = self.folder / str(step)
        try:
            record = _read_json(folder / "record/metadata")
            client.load(folder / "state")
        except (Unreadable, OSError, ValueError) as error:
            raise UserError(
                f"{folder}: the checkpoint cannot be read: {first_line(error)}. Delete that folder to go on from the "
                "one before, or start again with --fresh."
            ) from error
        return record

    def wait(self) -> None:
        """Waits until the checkpoint being written is on disk.

        Raises:
            UserError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._write_errors():
                writing.result()

    def close(self) -> None:
        """Waits for the last write and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _finish(self, step: int, part: Path, saving: Saving) -> None:
        """Runs in the thread: waits for the state, renames the folder to its final name, deletes older ones."""
        saving.result()
        sync_folder(part)
        part.rename(self.folder / str(step))
        sync(self.folder)
        for old in set(self.steps()) - self._retained():
            # Under another name first: half a checkpoint must not look like one.
            shutil.rmtree((self.folder / str(old)).rename(self.folder / f"{old}.tmp"))

    def _retained(self) -> set[int]:
        """Steps to keep: the last ones, and the one with the lowest evaluated loss (the newest of equal ones)."""
        steps = self.steps()
        losses = {step: _loss(self.folder / str(step)) for step in steps} if self._config.best else {}
        measured = [(loss, -step) for step, loss in losses.items() if loss is not None]
        return {*steps[-self._config.keep :], *(-step for _, step in sorted(measured)[:1])}

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turns any error while writing into one message; the last complete checkpoint is intact."""
        try:
            yield
        except Exception as error:
            raise UserError(
                f"{self.folder}: a checkpoint could not be written ({first_line(error)}). Earlier checkpoints are "
                "intact: make room and run the same command to go on from the last one."
            ) from error


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir()
    file.write_text(json.dumps(dict(content)), encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _loss(folder: Path) -> float | None:
    """The evaluated loss that is stored with a checkpoint; None without an evaluation."""
    file = folder / "metrics/metrics"
    return _read_json(file).get(BEST) if file.is_file() else None
