"""Checkpoints: train state and run record as one atomic unit, written in the background during training.

A checkpoint holds `state/`, written by the client, `record/metadata` (data position, counters) and `metrics/metrics`
(the evaluation at that step). It appears as `<step>/` once all of it is there (`checkpoint_folder`); a process that
dies before that leaves the previous step intact.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunix.distributed import processes
from tunix.errors import UserError
from tunix.protocols import Client, Saving
from tunix.trainer.checkpoint_folder import folder_of
from tunix.trainer.config import CheckpointConfig
from tunix.trainer.state_files import Unreadable
from tunix.util.atomic_io import ROOM, is_full
from tunix.util.faults import SLOW, planned

BEST = "eval/loss"
"""The metric that is lowest at the best checkpoint."""
WRITER = "writer"
"""The file that names the process which writes to a folder that other machines see."""


class TakenOver(UserError):
    """The error where another process has begun to write to the same folder."""


class Checkpoints:
    """The checkpoints of one run, in `folder/<step>/`."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, read_only: bool = False):
        """Opens the folder and deletes unfinished checkpoints of a dead process.

        Args:
            folder: may stand for an address on an object store, e.g. `gs://bucket/runs/x`.
            read_only: deletes and creates nothing, since the run that owns the folder may be writing to it.

        Raises:
            UserError: the object store cannot be reached, or refuses.
        """
        self._folder, self._config = folder_of(folder), config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None
        self._writer = secrets.token_hex(8)
        if not read_only and processes.lead():
            self._folder.delete_unfinished()
            if config.folder is not None:
                # Other machines see this folder too, and not the lock of the run folder.
                self._folder.write(WRITER, self._writer)

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        return self._folder.steps()

    def save(self, step: int, client: Client, record: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Starts to write a checkpoint; returns once training may continue.

        Args:
            record: JSON values: whatever else the run needs to resume.
            metrics: of the evaluation at this step, empty without one; decide which checkpoint is best.

        Raises:
            UserError: an earlier save failed, for instance on a full disk.
        """
        self.wait()
        contents = {"record/metadata": dict(record), "metrics/metrics": {BEST: metrics.get(BEST)}}
        texts = {name: json.dumps(content) for name, content in contents.items()}
        with self._write_errors():
            place = processes.broadcast("checkpoint", lambda: str(self._folder.begin(step)))
            saving = client.save(Path(place) / "state")
        self._writing = self._thread.submit(self._finish, step, saving, texts)

    def restore(self, step: int, load: Callable[[Path], None]) -> dict[str, Any]:
        """Restores a client, or a part of its state, to a step and returns the record that was saved with it.

        Args:
            load: restores what `Client.save` wrote in a folder, such as `Client.load`.

        Raises:
            UserError: the checkpoint does not hold this client's state (another model, optimizer or adapter), would
                lose digits in it, or is damaged.
        """
        try:
            record = json.loads(self._folder.find(f"{step}/record/metadata") or "")
            if not isinstance(record, dict):
                raise ValueError("its record/metadata is no JSON object")
            load(self._folder.place(step) / "state")
        except (Unreadable, OSError, ValueError, RecursionError) as error:
            again = "start again with --fresh." if self._config.folder is None else "set another checkpoint.folder."
            raise UserError(
                f"{self._folder.name}/{step}: the checkpoint cannot be read: {processes.first_line(error)}. "
                f"{self._folder.remedies[1]}Delete that folder to go on from the one before, or {again}"
            ) from error
        return record

    def back(self, every: int | None) -> int | None:
        """The newest step that is due every so many steps, or the newest of all; deletes those after it."""
        self.wait()
        steps = processes.broadcast("back", self.steps)
        due = [step for step in steps if every and step % every == 0] or steps
        for later in (step for step in steps if step > due[-1]) if processes.lead() else ():
            self._folder.delete(later)
        return due[-1] if due else None

    def wait(self) -> None:
        """Waits until the checkpoint being written is on disk.

        Raises:
            UserError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._write_errors():
                writing.result()
            processes.barrier("saved")

    def close(self) -> None:
        """Waits for the last write and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _finish(self, step: int, saving: Saving, texts: dict[str, str]) -> None:
        """Runs in the thread: waits for the state, completes the checkpoint, deletes older ones."""
        saving.result()
        if planned("disk", step):
            time.sleep(SLOW)
        if not processes.lead():
            return
        if self._config.folder is not None and self._folder.find(WRITER) != self._writer:
            raise TakenOver(
                f"checkpoint.folder: another process has begun to write to {self._folder.name}, and this one stops "
                f"before step {step} is saved there: let one of them go on, or give each its own checkpoint.folder"
            )
        self._folder.finish(step, texts)
        if planned("checkpoint", step):
            files = [file for file in self._folder.place(step).rglob("*") if file.is_file()]
            os.truncate(max(files, key=lambda file: file.stat().st_size), 1)
        steps = self.steps()
        # The last ones stay, and the one with the lowest evaluated loss (the newest of equal ones).
        texts_by_step = {step: self._folder.find(f"{step}/metrics/metrics") for step in steps if self._config.best}
        losses = {step: json.loads(text).get(BEST) for step, text in texts_by_step.items() if text is not None}
        measured = [(loss, -step) for step, loss in losses.items() if loss is not None]
        retained = {*steps[-self._config.keep :], *(-step for _, step in sorted(measured)[:1])}
        for old in set(steps) - retained:
            self._folder.delete(old)

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turns any error while writing into one message; the last complete checkpoint is intact."""
        try:
            yield
        except TakenOver:
            raise
        except Exception as error:
            if is_full(error):
                said = f"{self._folder.name}: a checkpoint could not be written: the disk is full. {ROOM}."
                raise UserError(said) from error
            raise UserError(
                f"{self._folder.name}: a checkpoint could not be written ({processes.first_line(error)}). Earlier "
                f"checkpoints are intact: {self._folder.remedies[0]} the same command to go on from the last one."
            ) from error
