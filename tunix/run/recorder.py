"""The numbers of a run: read one step late, completed with speed and accounting, sent to the sinks and the screen."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
import numpy as np

from tunix.algorithms.base import Update
from tunix.data.accounting import Accounting
from tunix.errors import UserError
from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.trainer.config import LoggingConfig
from tunix.trainer.metrics import Sink
from tunix.trainer.perf import Compilations, peak_flops, peak_memory, training_flops
from tunix.trainer.progress import Display, evaluated


class Recorder:
    """Makes one row per step. `push` hands over a step; `add` gives it more values; `flush` completes it.

    Args of the constructor:
        adapter: what trains on a frozen base, if that is so: it has other FLOPs.
    """

    def __init__(
        self,
        sinks: list[Sink],
        display: Display,
        config: LoggingConfig,
        decoder: DecoderConfig,
        adapter: AdapterConfig | None,
    ):
        self._sinks, self._display, self._every = sinks, display, config.every
        self._decoder, self._adapter = decoder, adapter
        self._compilations = Compilations()
        self._pending: tuple[int, Update, Accounting, dict[str, float]] | None = None
        self._extra: dict[str, float] = {}
        self._started = time.monotonic()
        self._before = 0.0
        self._last_row = self._started
        self._tokens, self._flops, self._steps = 0, 0.0, 0
        self._warm: set[str] = set()
        self._told: dict[str, int] = {}

    @property
    def seconds(self) -> float:
        """Time spent on this run, earlier starts included."""
        return self._before + time.monotonic() - self._started

    def resume(self, seconds: float) -> None:
        """Goes on with a run on which `seconds` were spent before."""
        self._before = seconds

    def push(self, step: int, update: Update, accounting: Accounting) -> None:
        """A step that the device has been given; the one before it is completed, which waits for that one only.

        Args:
            accounting: of the rows read up to this step.
        """
        self._settle("update")
        self.flush()
        self._count(update)
        waited = not any(isinstance(value, jax.Array) for value in update.metrics.values())
        # An update that has waited for the device itself (it sampled) is over: its time must not grow any more.
        speed = self._speed() if waited and step % self._every == 0 else {}
        self._pending = (step, update, accounting, speed)
        self._tell(step, update.notes)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """More values for a step's row: an evaluation's. A step that was no update gets a row of its own."""
        self._settle("evaluation")
        _check(step, values)
        self._extra |= values
        self._display.say(f"step {step}: {evaluated(values)}")
        if self._pending is None:
            self._write(step, {})

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        self._display.say(text)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work whose time is not the steps': waits for the step last pushed, and stops the clock meanwhile."""
        if self._pending is not None:
            jax.block_until_ready(dict(self._pending[1].metrics))
        began = time.monotonic()
        yield
        self._last_row += time.monotonic() - began

    def flush(self) -> None:
        """Completes the row of the step last pushed; waits for the device."""
        if self._pending is None:
            return
        (step, update, accounting, speed), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(dict(update.metrics)).items()}
        _check(step, values)
        values |= _accounting(update, accounting)
        if step % self._every == 0 or self._extra:
            values |= speed or self._speed()
            self._write(step, values)
        self._display.update(step, values)

    def _settle(self, kind: str) -> None:
        """The first update and the first evaluation compile; what compiles after them should not."""
        if kind not in self._warm:
            self._warm.add(kind)
            self._compilations.settled()

    def _tell(self, step: int, notes: tuple[str, ...]) -> None:
        """Says each kind of note when it first comes up, and then ever more rarely."""
        for note in notes:
            kind = note.translate(_DIGITS)
            self._told[kind] = count = self._told.get(kind, 0) + 1
            if count & (count - 1) == 0:
                self._display.say(f"step {step}: {note}" + (f" ({count} times so far)" if count > 1 else ""))

    def _count(self, update: Update) -> None:
        for batch in update.batches:
            self._tokens += int(np.count_nonzero(batch.segment_ids))
            self._flops += training_flops(self._decoder, batch, self._adapter)
        self._steps += 1

    def _speed(self) -> dict[str, float]:
        """Tokens (without padding), time per step and share of the peak since the last row."""
        now = time.monotonic()
        elapsed, self._last_row = max(now - self._last_row, 1e-9), now
        speed = {
            "perf/tokens_per_second": self._tokens / elapsed,
            "perf/step_seconds": elapsed / self._steps,
            "perf/peak_memory": float(peak_memory()),
            "compile/count": float(self._compilations.since_warmup),
        }
        if peak := peak_flops(jax.devices()[0]):
            speed["perf/mfu"] = self._flops / elapsed / (peak * jax.device_count())
        self._tokens, self._flops, self._steps = 0, 0.0, 0
        return speed

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        row = {"time/seconds": round(self.seconds, 3), **values, **self._extra}
        self._extra = {}
        for sink in self._sinks:
            sink.write(step, row)

    def close(self) -> None:
        """Lets the sinks finish."""
        for sink in self._sinks:
            sink.close()


def _check(step: int, values: Mapping[str, float]) -> None:
    """Stops a run whose weights are lost, before a checkpoint of them is written.

    Raises:
        UserError: a loss or the gradient's norm is no number.
    """
    for name in ("train/loss", "train/grad_norm", "critic/loss", "critic/grad_norm", "eval/loss"):
        if name in values and not math.isfinite(values[name]):
            raise UserError(
                f"step {step}: {name} is {values[name]}. The checkpoints before it are intact. Start again with a "
                "lower optimizer.learning_rate and another output (or --fresh), or look at the rows with tunix inspect."
            )


def _accounting(update: Update, counted: Accounting) -> dict[str, float]:
    """What has become of the rows read so far, and how many tokens were trained."""
    return {
        "data/kept": float(counted.kept),
        "data/truncated": float(counted.truncated),
        "data/dropped": float(sum(counted.dropped.values())),
        **({"data/pieces": float(counted.pieces)} if counted.pieces else {}),
        "train/tokens": float(sum(np.count_nonzero(batch.loss_mask) for batch in update.batches)),
    }


_DIGITS = str.maketrans("", "", "0123456789.")
"""Notes that differ in their numbers only are of one kind."""
