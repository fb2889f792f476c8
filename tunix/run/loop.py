"""The loop of a run: updates from batches or rollouts, evaluations, checkpoints and signals.

The device never waits for the host: a step's metrics are read only after the next step has been dispatched
(`recorder.py`), batches are prepared ahead in a thread, and checkpoints are written in the background.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunix.algorithms.base import Algorithm
from tunix.distributed import processes
from tunix.errors import Doubtful, Interrupted, NonFinite, UserError
from tunix.protocols import Client
from tunix.rollout.collect import Collector
from tunix.rollout.types import SPANS
from tunix.run.evaluation import Evaluation, HarnessEvaluation, Samples, TaskEvaluation
from tunix.run.profiler import Profiler
from tunix.run.recorder import Recorder
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.config import MOST_ROLLBACKS, CheckpointConfig
from tunix.trainer.perf import Work
from tunix.types import Workload
from tunix.util.atomic_io import SAMPLES, append_rows, forget_after, reading

NOT_AWAITED = object()
"""Stands for an input that is not there when the run is to stop."""


@runtime_checkable
class Stream(Protocol):
    """The iterator over the inputs of steps, with a position that can be saved: `Batches` or `RolloutStream`, say."""

    def __next__(self) -> Any:
        """The input of the next step's `update`.

        Raises:
            processes.Stopped: the run is to stop, and this input would have to be waited for.
        """
        ...

    def mark(self) -> Callable[[], dict[str, Any]]:
        """What returns the position after the last returned input, also when others have been returned since."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned."""
        ...

    def close(self) -> None:
        """Ends the stream and its threads."""
        ...


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, built by `assemble`."""

    folder: Path
    client: Client
    work: Work
    """What an update computes, for the counts of FLOPs and padding."""
    algorithm: Algorithm
    stream: Stream
    total: int
    """Maximum steps of the whole run; there are fewer if the last epoch is exhausted before."""
    evaluation: Evaluation
    eval_every: int
    saving: CheckpointConfig
    samples: Samples
    exports_adapter: bool
    """Whether the adapter is exported alone, since its base can be found again; else it is merged."""
    tasks: Sequence[TaskEvaluation | HarnessEvaluation] = ()
    """Those of `eval.tasks`."""
    collector: Collector | None = None
    """Holds the worker processes of reward functions and environments; None without any."""
    workload: Workload | None = None
    """Largest workload of the sampler at a step or an evaluation; None where neither samples."""
    compile_update: Callable[[], None] = lambda: None
    """Compiles the programs of the first update, as far as their shapes are known before it is sampled."""
    profiler: Profiler | None = None
    """Traces the steps of `logging.profile`; None without any."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Happens where the run is to stop after the present update, such as by a signal."""

    def close(self) -> None:
        """Ends the threads, processes and the profile of the run."""
        if self.profiler is not None:
            self.profiler.close()
        self.stream.close()
        played = (task.collector for task in self.tasks if isinstance(task, TaskEvaluation))
        for collector in (self.collector, *played):
            if collector is not None:
                collector.close()


class Loop:
    """Trains one run from its beginning or a checkpoint to its end."""

    def __init__(self, job: Job, checkpoints: Checkpoints, recorder: Recorder, start: int | None):
        """Restores the checkpoint of step `start`, if any, and fetches the first input, so that `finished` is known."""
        self.job, self.checkpoints, self.recorder = job, checkpoints, recorder
        self.step = 0
        """Number of updates done."""
        self._saved, self._saved_at = 0, time.monotonic()
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._position = job.stream.mark()
        self._reached: str | None = None
        self._rollbacks = 0
        """How often the run has gone back to a checkpoint."""
        if start is not None:
            place = job.saving.folder or job.folder / "checkpoints"
            with reading(f"{place}/{start}", ". Delete that folder to go on from the one before"):
                record = self._restore(start)
                job.stream.set_state(record["data"])
                recorder.resume(float(record["seconds"]), tuple(record.get("skipped", (0, 0))))
                self._rollbacks = int(record.get("rollbacks", 0))
            # Before the fetch, which may have to sample.
            self._warm()
        self._next = self._fetch()

    @property
    def finished(self) -> bool:
        """Whether training is over: all steps are done, the data is exhausted, or `eval.until` is reached."""
        return self._next is None

    def run(self) -> None:
        """Trains to the last step, then evaluates and saves it.

        Raises:
            Interrupted: the job is to stop; a checkpoint was written.
            UserError: a row is invalid, the disk cannot be written, or the loss is not finite.
        """
        if self.step == 0:
            self._warm()
            self._evaluate()
            self.job.samples.take(0)
        while True:
            try:
                while self._next is not None and not processes.any_of("stop", self.job.stop.is_set()):
                    self._update(self._next)
                self._save()
                break
            except NonFinite as error:
                self._go_back(error)
        self.checkpoints.wait()
        if not self.finished:
            place = self.job.saving.folder or self.job.folder
            state = f"with a checkpoint in {place}" if self.step else "before the first update"
            raise Interrupted(
                f"stopped at step {self.step} of {self.job.total}, {state}. The same command goes on from there."
            )

    def _restore(self, step: int) -> dict[str, Any]:
        """Takes weights and the algorithm's state from a checkpoint; returns its record."""
        record = self.checkpoints.restore(step, self.job.client.load)
        self.job.algorithm.set_state(record["algorithm"])
        self._reached = record["reached"] if self.job.evaluation.until else None
        self.step = self._saved = step
        return record

    def _go_back(self, error: NonFinite) -> None:
        """Goes back to the last checkpoint that was due, and on from there with the rows after the step that failed.

        Raises:
            NonFinite: the recipe does not ask for it, it was done too often, or there is no checkpoint yet.
        """
        if self.recorder.on_nonfinite != "rollback":
            raise error
        # The step that failed is the last one before this position, noticed a step late or not.
        position, said = self._position(), str(error).partition(". ")[0]
        self._rollbacks += 1
        if self._rollbacks > MOST_ROLLBACKS:
            raise NonFinite(f"{error} The run has gone back {MOST_ROLLBACKS} times already.") from error
        start = self.checkpoints.back(self.job.saving.every)
        if start is None:
            raise NonFinite(f"{error} There is no checkpoint yet to go back to.") from error
        self._restore(start)
        self.recorder.forget()
        self.job.samples.wait()
        self._evaluated = (-1, {})
        if processes.lead():
            for name in ("metrics.jsonl", SAMPLES, SPANS):
                forget_after(self.job.folder / name, start)
        self.recorder.display.say(
            f"{said}: back to the checkpoint of step {start}, and on with the rows that follow "
            f"({self._rollbacks} of at most {MOST_ROLLBACKS} times)"
        )
        self.job.stream.set_state(position)
        self._next = self._fetch()

    def _warm(self) -> None:
        """Has the sampler prepare, where there are further steps, and compiles the update meanwhile."""
        if self.job.workload is None or self.step >= self.job.total or self._reached:
            return
        with self.recorder.compiling("the sampler and the update"), ThreadPoolExecutor(1) as beside:
            update = beside.submit(self.job.compile_update)
            self.job.client.warm(self.job.workload)
            update.result()

    def _update(self, item: Any) -> None:
        """One update, and the evaluation, samples and checkpoint that are due after it."""
        job = self.job
        profiler = job.profiler
        with nullcontext() if profiler is None else profiler.step(self.step + 1, self.recorder.aside):
            with self._saving_on_error(), self.recorder.first("update"):
                update = job.algorithm.update(job.client, item)
            self.step += 1
            self.recorder.push(self.step, update, item.accounting)
        job.samples.record(self.step, update.samples)
        if update.spans:
            append_rows(job.folder / SPANS, [{"step": self.step, "spans": list(map(astuple, update.spans))}])
        # Fetched now, so that the last step is known to be the last, and is evaluated before it is saved.
        self._next = self._fetch()
        self.recorder.check()
        if self.finished or self.step % job.eval_every == 0:
            self._evaluate()
        if self.finished:
            self.recorder.flush()
            job.samples.take(self.step)
        if self.finished or self._save_is_due:
            self._save()

    @property
    def _save_is_due(self) -> bool:
        """Whether a checkpoint is due, by steps or by time."""
        saving = self.job.saving
        if saving.every is not None and self.step % saving.every == 0:
            return True
        if (minutes := saving.every_minutes) is None:
            return False
        return processes.broadcast("save", lambda: time.monotonic() - self._saved_at >= 60 * minutes)

    def _fetch(self) -> Any:
        """Fetches the input of the next step, None after the last. The saved position stays before it."""
        self._position = self.job.stream.mark()
        with self._saving_on_error():
            try:
                return next(self.job.stream, None) if self.step < self.job.total and not self._reached else None
            except processes.Stopped:
                return NOT_AWAITED

    @contextmanager
    def _saving_on_error(self) -> Iterator[None]:
        """Saves what was trained before an error of the user (a bad row, a broken reward), then re-raises it."""
        try:
            yield
        except UserError as error:
            if not isinstance(error, Doubtful):
                self._save()
            raise

    def _evaluate(self) -> None:
        """Evaluates the held-out rows; ends the run if `eval.until` is reached."""
        if self.job.evaluation or self.job.tasks:
            with self.recorder.aside(), self._saving_on_error(), self.recorder.first("evaluation"):
                values = self.job.evaluation.values(self.job.client)
                if self.job.tasks:
                    self.job.client.publish()
                for task in self.job.tasks:
                    metrics, answers = task.measure(self.job.client)
                    values |= metrics
                    self.job.samples.add(self.step, answers)
            self._evaluated = (self.step, values)
            self.recorder.add(self.step, values)
            if name := self.job.evaluation.reached(values):
                self._reached, self._next = name, None
                self.recorder.display.say(
                    f"step {self.step}: {name} is {values[name]:.4f}: the run has reached eval.until"
                )

    def _save(self) -> None:
        """Starts to write a checkpoint of this step, unless it has one; its metrics and samples are written before."""
        self.recorder.flush()
        self.job.samples.wait()
        if self.step > self._saved:
            step, metrics = self._evaluated
            record = {"data": self._position(), "algorithm": self.job.algorithm.get_state(), "reached": self._reached}
            record |= {"skipped": list(self.recorder.skipped), "rollbacks": self._rollbacks}
            record["seconds"] = self.recorder.seconds
            self.checkpoints.save(self.step, self.job.client, record, metrics if step == self.step else {})
            self._saved, self._saved_at = self.step, time.monotonic()


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handles signals meanwhile; in another than the main thread, which gets none, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
