"""Progress display of a run on stderr: a live bar on a terminal, plain lines elsewhere.

The bar shows step, loss, reward or accuracy (with its curve so far), tokens per second and remaining time. Without a
terminal a line is printed every ten seconds, so that a log file stays readable.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tunix.distributed import processes

LEVELS = "▁▂▃▄▅▆▇█"
LINES_EVERY = 10.0
"""Seconds between plain lines."""
RISING = ("reward/mean", "rewards/accuracy")
"""Metrics that should rise; the first that a run reports is shown as a curve."""
DETAILS = ("eval/logprobs/", "eval/rewards/chosen", "eval/rewards/rejected", "eval/kl/")
"""Prefixes of metrics that are written to metrics.jsonl but not displayed."""


class Display:
    """Progress display of one run over `total` steps."""

    def __init__(self, title: str, total: int, start: int):
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not processes.lead())
        self._total = total
        self._printed = 0.0
        self._speed = ""
        self._rising: list[float] = []
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task(title, total=total, completed=start, numbers="")
        if self.console.is_terminal:
            self._bar.start()

    def total(self, total: int) -> None:
        """Sets the total number of steps, once it is known."""
        self._total = total
        self._bar.update(self._task, total=total)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Displays the metrics of a finished step."""
        if "perf/tokens_per_second" in values:
            self._speed = f"{readable(values['perf/tokens_per_second'])} tokens/s"
        self._rising += [values[name] for name in RISING if name in values][:1]
        curve = sparkline(self._rising) if self.console.encoding.startswith("utf") else ""
        numbers = "  ".join(part for part in (curve, summary(values), self._speed) if part)
        if self.console.is_terminal:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif step == self._total or time.monotonic() - self._printed > LINES_EVERY:
            self._printed = time.monotonic()
            self.say(f"step {step}/{self._total}  {numbers}")

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(text, markup=False)

    @contextmanager
    def during(self, what: Callable[[], str]) -> Iterator[None]:
        """Prints `what()` and the seconds so far, again and again while the enclosed work goes on."""
        began, done = time.monotonic(), threading.Event()

        def tell() -> None:
            while not done.wait(LINES_EVERY):
                self.say(f"{what()}, {time.monotonic() - began:.0f} s")

        teller = threading.Thread(target=tell, name="progress", daemon=True)
        teller.start()
        try:
            yield
        finally:
            done.set()
            teller.join()

    def close(self) -> None:
        """Stops the bar and restores the terminal."""
        if self.console.is_terminal:
            self._bar.stop()
        sys.stderr.flush()


def summary(values: Mapping[str, float]) -> str:
    """The most important numbers of a step: `reward 0.5000  loss 1.2345`."""
    shown = []
    for label, name in (("reward", "reward/mean"), ("accuracy", "rewards/accuracy"), ("loss", "train/loss")):
        if name in values:
            shown.append(f"{label} {values[name]:.4f}")
    return "  ".join(shown)


def evaluated(values: Mapping[str, float]) -> str:
    """The numbers of an evaluation, the loss first and without `DETAILS`: `eval/loss 0.5482  eval/...`."""
    shown = [name for name in values if not name.startswith(DETAILS)]
    return "  ".join(f"{name} {values[name]:.4f}" for name in sorted(shown, key=lambda name: name != "eval/loss"))


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """A curve in one line of text, scaled from lowest to highest value: `▁▁▂▃▅▆▇█`; empty while all are equal.

    Args:
        values: all values so far; each character is the mean of several where there are more than `width`.
        width: maximum number of characters.
    """
    known = [value for value in values if math.isfinite(value)]
    size = -(-len(known) // width)
    means = [sum(known[i : i + size]) / len(known[i : i + size]) for i in range(0, len(known), max(size, 1))]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(LEVELS[round((mean - low) / (high - low) * (len(LEVELS) - 1))] for mean in means if high > low)


def readable(number: float | int) -> str:
    """A number with a unit prefix: `12_345` -> `12.3k`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
