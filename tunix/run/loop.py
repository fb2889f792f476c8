"""The loop of a run: batches in, updates, and around them evaluation, checkpoints and signals.

The device never waits for the host: a step's numbers are read only after the next step has been handed over
(`recorder.py`), batches are made ahead in a thread, and checkpoints are written in the background.
"""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunix.algorithms.base import Algorithm
from tunix.errors import Doubtful, Interrupted, UserError
from tunix.rollout.engine.warmup import Workload
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.evaluation import Evaluation
from tunix.run.recorder import Recorder
from tunix.run.samples import Samples
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.trainer import Trainer


@runtime_checkable
class Stream(Protocol):
    """What the steps are made of, with a position that can be saved: `Batches`, or `RolloutStream`."""

    def __next__(self) -> Any:
        """What the next step's `update` is given."""
        ...

    def get_state(self) -> dict[str, Any]:
        """The position after the last step handed out."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position."""
        ...

    def close(self) -> None:
        """The stream ends here."""
        ...


@dataclass(frozen=True)
class Job:
    """Everything that a run works with, put together by `assemble`."""

    folder: Path
    trainer: Trainer
    algorithm: Algorithm
    stream: Stream
    total: int
    """Steps of the whole run; fewer where the last epoch gives out before."""
    evaluation: Evaluation
    eval_every: int
    save_every: int
    samples: Samples
    exports_adapter: bool
    """An adapter is exported alone where its base can be found again; else it is merged."""
    scorer: Scorer | None = None
    """The rewards' workers."""
    workload: Workload | None = None
    """What the sampler will be asked, where it is asked something at every step or evaluation."""

    def close(self) -> None:
        """Ends the threads and processes that work for the run."""
        self.stream.close()
        if self.scorer is not None:
            self.scorer.close()


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
        self._reached: str | None = None
        if start is not None:
            self._restore(start)
        self._next = self._take()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train: all steps are done, the data has given out, or `eval.until` is reached."""
        return self._next is None

    def run(self) -> None:
        """Trains to the last step, which is evaluated and saved.

        Raises:
            Interrupted: after SIGINT or SIGTERM, with a checkpoint written.
            UserError: a row or the disk is bad, or the loss is no number.
        """
        with stop_signals() as stop:
            if self.job.workload is not None:
                self.recorder.say("compiling the sampler")
                with self.recorder.aside():
                    self.job.trainer.warm(self.job.workload)
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
        self.job.stream.set_state(record["data"])
        self.recorder.resume(record["seconds"])
        self.job.algorithm.set_state(record["algorithm"])
        self._reached = record["reached"] if self.job.evaluation.until else None
        self.step = self._saved = step

    def _update(self, item: Any) -> None:
        """One step and what is due after it."""
        job = self.job
        with self._kept():
            update = job.algorithm.update(job.trainer, item)
        self.step += 1
        self.recorder.push(self.step, update, item.accounting)
        job.samples.add(self.step, update.samples)
        # Taken now, so that the last step is known to be the last, and is evaluated before it is saved.
        self._next = self._take()
        if self.finished or self.step % job.eval_every == 0:
            self._evaluate()
        if self.finished:
            self.recorder.flush()
            job.samples.take(self.step)
        if self.finished or self.step % job.save_every == 0:
            self._save()

    def _take(self) -> Any:
        """What the next step is given, None after the last. The position that is saved stays before it."""
        self._position = self.job.stream.get_state()
        with self._kept():
            return next(self.job.stream, None) if self.step < self.job.total and not self._reached else None

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """A bad row, a broken reward: what was trained before is saved, then the error rises."""
        try:
            yield
        except Doubtful:
            raise
        except UserError:
            self._save()
            raise

    def _evaluate(self) -> None:
        """What the held-out rows say at this step; the run may have reached what it is for."""
        if self.job.evaluation:
            with self.recorder.aside(), self._kept():
                values = self.job.evaluation.values(self.job.trainer)
            self._evaluated = (self.step, values)
            self.recorder.add(self.step, values)
            if name := self.job.evaluation.reached(values):
                self._reached, self._next = name, None
                self.recorder.say(f"step {self.step}: {name} is {values[name]:.4f}: the run has reached eval.until")

    def _save(self) -> None:
        """Starts writing a checkpoint of this step, once; its rows of metrics are on file before."""
        self.recorder.flush()
        if self.step > self._saved:
            step, metrics = self._evaluated
            record = {"data": self._position, "algorithm": self.job.algorithm.get_state(), "reached": self._reached}
            record["seconds"] = self.recorder.seconds
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
