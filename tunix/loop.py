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

from tunix.algorithms.base import Algorithm
from tunix.data.pipeline import Batches, Packed
from tunix.errors import Interrupted
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


class Loop:
    """One run; `restore`, then `run`."""

    def __init__(self, job: Job, checkpoints: Checkpoints, recorder: Recorder):
        self.job, self.checkpoints, self.recorder = job, checkpoints, recorder
        self.step = 0
        """Updates done."""
        self._saved = 0
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})

    def restore(self, step: int) -> None:
        """Goes back to a checkpoint of this run."""
        trainer = self.job.trainer
        trainer.state, record = self.checkpoints.restore(step, trainer.state)
        self.job.batches.set_state(record["data"])
        self.recorder.resume(step, record["seconds"])
        self.step = self._saved = step

    def run(self) -> None:
        """Trains to the last step, which is evaluated and saved.

        Raises:
            Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
            UserError: a row or the disk is bad, or the loss is no number.
        """
        if self.step == 0:
            self._evaluate()
            self.job.samples.take(0)
        with stop_signals() as stop:
            batches = iter(self.job.batches)
            # Asked before the next batch is taken: the data position must be that of the last update.
            while not stop.is_set() and self.step < self.job.total and (packed := next(batches, None)):
                self._update(packed)
            if not stop.is_set():
                self._evaluate()
                self.job.samples.take(self.step)
            self._save()
        self.checkpoints.wait()
        if stop.is_set():
            raise Interrupted(
                f"stopped at step {self.step} of {self.job.total}, with a checkpoint in {self.job.folder}. "
                "The same command goes on from there."
            )

    def _update(self, packed: Packed) -> None:
        """One update and what is due after it."""
        job = self.job
        metrics = job.algorithm.update(job.trainer, packed.batch)
        self.step += 1
        self.recorder.push(self.step, metrics, packed)
        if self.step < job.total:
            if self.step % job.eval_every == 0:
                self._evaluate()
            if self.step % job.save_every == 0:
                self._save()

    def _evaluate(self) -> None:
        """The held-out loss at this step, once."""
        if self.job.evaluation and self._evaluated[0] != self.step:
            values = self.job.trainer.evaluate(self.job.evaluation, self.job.algorithm.objective)
            self._evaluated = (self.step, values)
            self.recorder.add(self.step, values)

    def _save(self) -> None:
        """Starts writing a checkpoint of this step, once; its rows of metrics are on file before."""
        self.recorder.flush()
        if self.step > self._saved:
            step, metrics = self._evaluated
            record = {"data": self.job.batches.get_state(), "seconds": self.recorder.seconds}
            self.checkpoints.save(self.step, self.job.trainer.state, record, metrics if step == self.step else {})
            self._saved = self.step


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, so that the step in flight ends first; a second one acts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals reach the main thread only
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

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
