"""The loop of a run: batches in, updates, and around them evaluation, checkpoints and signals.

The device never waits for the host: a step's numbers are read only after the next step has been handed over
(`recorder.py`), batches are made ahead in a thread, and checkpoints are written in the background.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix.algorithms.base import Algorithm
from tunix.data.pipeline import Batches, Packed
from tunix.errors import Interrupted, UserError
from tunix.recorder import Recorder
from tunix.samples import Samples
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.client import Trainer
from tunix.types import Batch


@dataclass(frozen=True)
class Job:
    """Everything that a run works with, put together by `assemble`."""

    folder: Path
    trainer: Trainer
    algorithm: Algorithm
    batches: Batches
    total: int
    """Updates of the whole run; fewer where the last epoch gives out before."""
    evaluation: list[Batch]
    """Held-out batches; empty where the recipe names none."""
    eval_every: int
    save_every: int
    samples: Samples
    exports_adapter: bool
    """An adapter is exported alone where its base can be found again; else it is merged."""


class Loop:
    """One run, from a checkpoint or from its beginning, to its end."""

    def __init__(self, job: Job, checkpoints: Checkpoints, recorder: Recorder, start: int | None):
        """Takes the first batch, so that `finished` can be asked.

        Args:
            start: the checkpoint to go on from; None for a new run.
        """
        self.job, self.checkpoints, self.recorder = job, checkpoints, recorder
        self.step = 0
        """Updates done."""
        self._saved = 0
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._position: dict[str, Any] = {}
        if start is not None:
            self._restore(start)
        self._next = self._take()

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train: all steps are done, or the last epoch has given out."""
        return self._next is None

    def run(self) -> None:
        """Trains to the last step, which is evaluated and saved.

        Raises:
            Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
            UserError: a row or the disk is bad, or the loss is no number.
        """
        with stop_signals() as stop:
            if self.step == 0:
                self._evaluate()
                self.job.samples.take(0)
            while self._next is not None and not stop.is_set():
                self._update(self._next)
            self._save()
            self.checkpoints.wait()
        if not self.finished:
            kept = f"with a checkpoint in {self.job.folder}" if self.step else "before the first update"
            raise Interrupted(
                f"stopped at step {self.step} of {self.job.total}, {kept}. The same command goes on from there."
            )

    def _restore(self, step: int) -> None:
        """Goes back to a checkpoint of this run."""
        trainer = self.job.trainer
        trainer.state, record = self.checkpoints.restore(step, trainer.state)
        self.job.batches.set_state(record["data"])
        self.recorder.resume(record["seconds"])
        self.step = self._saved = step

    def _update(self, packed: Packed) -> None:
        """One update and what is due after it."""
        job = self.job
        metrics = job.algorithm.update(job.trainer, packed.batch)
        self.step += 1
        self.recorder.push(self.step, metrics, packed)
        # Taken now, so that the last step is known to be the last, and is evaluated before it is saved.
        self._next = self._take()
        if self.finished or self.step % job.eval_every == 0:
            self._evaluate()
        if self.finished:
            self.recorder.flush()
            job.samples.take(self.step)
        if self.finished or self.step % job.save_every == 0:
            self._save()

    def _take(self) -> Packed | None:
        """The batch of the next update, None after the last. The position that is saved stays before it.

        Raises:
            UserError: a bad row; what was trained so far is saved first.
        """
        self._position = self.job.batches.get_state()
        try:
            return next(self.job.batches, None) if self.step < self.job.total else None
        except UserError:
            self._save()
            raise

    def _evaluate(self) -> None:
        """The held-out loss at this step."""
        if self.job.evaluation:
            with self.recorder.aside():
                values = self.job.trainer.evaluate(self.job.evaluation, self.job.algorithm.objective)
            self._evaluated = (self.step, values)
            self.recorder.add(self.step, values)

    def _save(self) -> None:
        """Starts writing a checkpoint of this step, once; its rows of metrics are on file before."""
        self.recorder.flush()
        if self.step > self._saved:
            step, metrics = self._evaluated
            record = {"data": self._position, "seconds": self.recorder.seconds}
            self.checkpoints.save(self.step, self.job.trainer.state, record, metrics if step == self.step else {})
            self._saved = self.step


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, so that the step in flight ends first; a second one acts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals reach the main thread only
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def asked(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, asked)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
