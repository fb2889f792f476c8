"""Records the metrics of a run: reads them one step late, adds speed and accounting, logs and displays them."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax
import numpy as np

from tunix.algorithms.base import Update
from tunix.data.types import Accounting
from tunix.errors import NonFinite
from tunix.run.sequences import sequences_of
from tunix.trainer.config import MOST_SKIPS, LoggingConfig, OnNonfinite
from tunix.trainer.metrics import Sink
from tunix.trainer.perf import Compilations, Work, peak_memory, training_flops
from tunix.trainer.progress import Display, evaluated
from tunix.util.atomic_io import write_text_atomic
from tunix.util.chips import chip_named

CHECKED = ("train/loss", "train/grad_norm", "critic/loss", "critic/grad_norm", "eval/loss")
"""Metrics that a run does not go on without."""


class Recorder:
    """Logs one row per step. `push` registers a step, `add` adds values to it, `flush` completes it."""

    def __init__(
        self,
        sinks: list[Sink],
        display: Display,
        config: LoggingConfig,
        work: Work,
        on_nonfinite: OnNonfinite = "stop",
        folder: Path | None = None,
    ):
        """`work`: what an update computes, for the counts of FLOPs and padding. `folder`: the run folder, to which the
        sequences of a step that is not finite are written; None for nowhere."""
        self._sinks, self.display, self._every = sinks, display, config.every
        self._work = work
        self.on_nonfinite, self._folder = on_nonfinite, folder
        self.skipped = (0, 0)
        """The last step in which an update was skipped, and how many such steps there were in a row."""
        self._compilations = Compilations()
        self._pending: tuple[int, Update, Accounting, dict[str, float]] | None = None
        self._extra: dict[str, float] = {}
        self._started = time.monotonic()
        self._before = 0.0
        self._last_row = self._started
        self._counted = defaultdict[str, float](float)
        """Steps, tokens, padded tokens, FLOPs, an update's FLOPs and seconds since the last row."""
        self._warmed_up: set[str] = set()
        self._note_counts: dict[str, int] = {}
        self._row_rules: set[str] = set()

    @property
    def seconds(self) -> float:
        """Seconds spent on this run, earlier starts included."""
        return self._before + time.monotonic() - self._started

    def resume(self, seconds: float, skipped: tuple[int, int] = (0, 0)) -> None:
        """Continues a run on which `seconds` were spent before, and whose updates were `skipped` as this says."""
        self._before, self.skipped = seconds, skipped

    def forget(self) -> None:
        """Drops the step last pushed: the run has gone back to before it."""
        self._pending, self._extra = None, {}

    def push(self, step: int, update: Update, accounting: Accounting) -> None:
        """Registers a dispatched step; completes the one before it, and waits for that one only.

        The device may still be computing the update's metrics; `accounting` is of the rows read up to this step.
        """
        self._count_warmup("update")
        self.flush()
        counted, work = self._counted, self._work
        for batch in update.batches:
            counted["tokens"] += int(np.count_nonzero(batch.segment_ids))
            counted["padded"] += work.padded(batch)
            counted["flops"] += training_flops(work.decoder, batch, work.adapter)
            counted["update_flops"] += work.update_flops(batch)
        counted["steps"] += 1
        counted["update_seconds"] += float(update.metrics.get("perf/update_seconds", 0.0))
        waited = not any(isinstance(value, jax.Array) for value in update.metrics.values())
        # An update that has waited for the device itself (it sampled) is over: later time must not be added to it.
        speed = self._speed() if waited and step % self._every == 0 else {}
        self._pending = (step, update, accounting, speed)
        # Each kind of note at its 1st, 2nd, 4th, 8th, ... occurrence.
        for note in update.notes:
            kind = note.translate(_DIGITS)
            self._note_counts[kind] = count = self._note_counts.get(kind, 0) + 1
            if count & (count - 1) == 0:
                self.display.say(f"step {step}: {note}" + (f" ({count} times so far)" if count > 1 else ""))
        # Each rule by which rows are dropped or shortened when it first applies.
        dropped = {f"dropped, {reason}": count for reason, count in accounting.dropped.items()}
        for rule, count in {**dropped, "cut off": accounting.truncated, **accounting.notes}.items():
            if count and rule not in self._row_rules:
                self._row_rules.add(rule)
                self.display.say(f"rows: {count} of the first {accounting.rows}: {rule} (tunix inspect shows which)")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of an evaluation to a step's row, or logs a new row where no step is pending."""
        self._count_warmup("evaluation")
        self._check(step, values)
        self._extra |= values
        self.display.say(f"step {step}: {evaluated(values)}")
        if self._pending is None:
            self._write(step, {})

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Excludes the enclosed work from the time of steps, after waiting for the step last pushed."""
        if self._pending is not None:
            jax.block_until_ready(dict(self._pending[1].metrics))
        began = time.monotonic()
        yield
        self._last_row += time.monotonic() - began

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Excludes the enclosed work as `aside` does, and tells every few seconds how many programs it has compiled."""
        self.display.say(f"compiling {what}")
        before = self._compilations.total
        with self.aside(), self.display.during(lambda: f"compiling {what}: {self._compilations.total - before} done"):
            yield

    @contextmanager
    def first(self, kind: str) -> Iterator[None]:
        """Tells every few seconds of the first update or evaluation how many programs it has compiled."""
        before = self._compilations.total
        progress = self.display.during(
            lambda: f"the first {kind}: {self._compilations.total - before} programs compiled"
        )
        with nullcontext() if kind in self._warmed_up else progress:
            yield

    def check(self) -> None:
        """As `flush` refuses the step last pushed, where its metrics have arrived: nothing is sampled after it."""
        if self._pending is not None and self.on_nonfinite != "skip":
            step, update, *_ = self._pending
            if not any(isinstance(value, jax.Array) for value in update.metrics.values()):
                self._check(step, {name: float(value) for name, value in update.metrics.items()}, update)

    def flush(self) -> None:
        """Completes and logs the row of the step last pushed; waits for the device."""
        if self._pending is None:
            return
        (step, update, accounting, speed), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(dict(update.metrics)).items()}
        self._check(step, values, update)
        # Counts of the rows read so far by outcome, and of the tokens trained by this update.
        values |= {
            "data/kept": float(accounting.kept),
            "data/truncated": float(accounting.truncated),
            "data/dropped": float(sum(accounting.dropped.values())),
            **({"data/pieces": float(accounting.pieces)} if accounting.pieces else {}),
            **{f"data/kept/{name}": float(count) for name, count in accounting.kept_of.items()},
            **({"data/noted": float(sum(accounting.notes.values()))} if accounting.notes else {}),
            "train/tokens": float(sum(np.count_nonzero(batch.loss_mask) for batch in update.batches)),
        }
        read, chip = values.get("perf/rollout_bytes_per_second"), chip_named(jax.devices()[0].device_kind)
        if read is not None and chip is not None:
            # The share of the memory's bandwidth that the sampler's reads took at least.
            values["perf/rollout_roofline"] = read / chip.bandwidth
        if step % self._every == 0 or self._extra:
            values |= speed or self._speed()
            self._write(step, values)
        self.display.update(step, values)

    def _count_warmup(self, kind: str) -> None:
        """Marks compilations of the first update and the first evaluation as warm-up; later ones are reported."""
        if kind not in self._warmed_up:
            self._warmed_up.add(kind)
            self._compilations.settled()

    def _speed(self) -> dict[str, float]:
        """Tokens per second (without padding), seconds per step, and shares of rows and peak since the last row."""
        now = time.monotonic()
        elapsed, self._last_row = max(now - self._last_row, 1e-9), now
        counted, self._counted = self._counted, defaultdict[str, float](float)
        speed = {
            "perf/tokens_per_second": counted["tokens"] / elapsed,
            "perf/step_seconds": elapsed / counted["steps"],
            "perf/peak_memory": float(peak_memory()),
            "compile/count": float(self._compilations.since_warmup),
        }
        if chip := chip_named(jax.devices()[0].device_kind):
            peak = chip.flops * jax.device_count()
            speed["perf/mfu"] = counted["flops"] / elapsed / peak
            # Where nothing but the update takes time, a step's time is its time.
            speed["perf/update_mfu"] = counted["update_flops"] / (counted["update_seconds"] or elapsed) / peak
        if counted["padded"]:
            speed["perf/fill"] = counted["tokens"] / counted["padded"]
        return speed

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        row = {"time/seconds": round(self.seconds, 3), **values, **self._extra}
        self._extra = {}
        for sink in self._sinks:
            sink.write(step, row)

    def _check(self, step: int, values: Mapping[str, float], update: Update | None = None) -> None:
        """Stops a run that has diverged before a checkpoint of its weights is written; says what was skipped.

        Raises:
            NonFinite: a loss or the gradient norm is not finite, and the update was not skipped; or too many were.
        """
        wrong = next((name for name in CHECKED if not math.isfinite(values.get(name, 0.0))), None)
        skipped = any(values.get(name, 0.0) > 0 for name in ("train/skipped", "critic/skipped"))
        if wrong is None and not skipped:
            return
        said, sequences = f"step {step}: {wrong or 'a gradient'} is {values.get(wrong or '', 'not finite')}", ""
        room = self._folder is not None and (not skipped or len([*self._folder.glob("nonfinite-*")]) < MOST_SKIPS)
        if update is not None and self._folder is not None and room and update.batches:
            rows = (json.dumps({"step": step, **row}) + "\n" for row in sequences_of(update))
            write_text_atomic(self._folder / f"nonfinite-{step}.jsonl", rows)
            sequences = f" The step's sequences are in nonfinite-{step}.jsonl of the run folder."
        if skipped and wrong != "eval/loss":
            last, number = self.skipped
            self.skipped = step, number + 1 if last == step - 1 else 1
            if self.skipped[1] < MOST_SKIPS:
                self.display.say(f"{said}: the update was skipped.{sequences}")
                return
            said += f", and so in {MOST_SKIPS} steps in a row, which were skipped"
        raise NonFinite(
            f"{said}. The checkpoints before it are intact. Start again with a lower optimizer.learning_rate and "
            "another output (or --fresh), or look at the rows with tunix inspect; "
            f"optimizer.on_nonfinite says what else can be done.{sequences}"
        )

    def close(self) -> None:
        """Closes the sinks."""
        for sink in self._sinks:
            sink.close()


_DIGITS = str.maketrans("", "", "0123456789.")
"""Removes numbers from notes: those that differ only in numbers are of one kind."""
