"""Progress display of a run: a live line on a terminal and in a notebook, plain lines elsewhere, and a log in a file.

The live line shows step, total and remaining time, which are never cut, and as much as has room of: loss, reward or
accuracy, tokens per second, the curve so far, a bar. Without a terminal a line is printed every ten seconds, so that a
log file stays readable. Everything goes to stderr, in a notebook to the cell's standard output.
"""

import logging
import math
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tunix.distributed import processes
from tunix.errors import UserError
from tunix.util.atomic_io import append

LEVELS = "▁▂▃▄▅▆▇█"
LINES_EVERY = 10.0
"""Seconds between plain lines."""
RISING = ("reward/mean", "rewards/accuracy")
"""Metrics that should rise; the first that a run reports is shown as a curve."""
DETAILS = ("eval/logprobs/", "eval/rewards/chosen", "eval/rewards/rejected", "eval/kl/")
"""Prefixes of metrics that are written to metrics.jsonl but not displayed."""
CURVE, BAR, NAME = 4, 10, 8
"""Fewest characters of the curve, the bar and a shortened title in a live line: they go where they have less."""
LONGEST_CURVE, LONGEST_BAR, LONGEST_NAME = 16, 40, 24
NOTEBOOK_WIDTH, NOTEBOOK_EVERY = 100, 0.5
"""Characters of the live line in a notebook, and seconds between two of its states."""
LIVE = {"tunix": "live"}
"""Metadata of the notebook output that is the live line."""


class Display:
    """Progress display of one run over `total` steps."""

    def __init__(self, title: str, total: int, start: int, *, log: Path | None = None, verbose: bool = False):
        """Shows the live line, on a terminal.

        Args:
            title: name of the run.
            total: number of steps; 0 where it is not known yet, and set later.
            start: steps that were done before.
            log: the file to which everything that is said is appended; None without one.
            verbose: whether `detail` is displayed too.
        """
        lead = processes.lead()
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not lead)
        self._title, self.total, self._step = title, total, start
        self._log, self._verbose = log, verbose
        self._notebook = lead and self.console.is_jupyter
        self._printed = 0.0
        self._first: tuple[int, float] | None = None
        self._stepped = 0.0
        self.step_seconds: float | None = None
        """Mean seconds of a step; None before the second one."""
        self.shown = 0
        """Number of steps and lines that were displayed so far."""
        self._numbers: list[str] = []
        self._rising: list[float] = []
        self._cell: Any = None
        """The output of a notebook's cell that is the live line."""
        self._live: Live | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            # The terminal is asked for its width at each refresh, since a window may be made smaller.
            self._live = Live(get_renderable=self._line, console=self.console, refresh_per_second=4)
            self._live.start()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Displays the metrics of a finished step."""
        now = time.monotonic()
        self.shown += 1
        # Counted from the first step's end on, which may have compiled for minutes.
        self._first = self._first or (step, now)
        if step > self._first[0]:
            self.step_seconds = (now - self._first[1]) / (step - self._first[0])
        self._rising += [values[name] for name in RISING if name in values][:1]
        speed = [f"{readable(values['perf/tokens_per_second'])} tokens/s"] if "perf/tokens_per_second" in values else []
        # The speed of the last row that has one stays.
        self._numbers = [*summary(values), *(speed or [part for part in self._numbers if part.endswith(" tokens/s")])]
        self._step, self._stepped = step, now
        if self._live is not None:
            return
        if self._notebook:
            if now - self._printed > NOTEBOOK_EVERY or self._step == self.total:
                self._printed = now
                self._show(self._state(NOTEBOOK_WIDTH))
        elif step == self.total or now - self._printed > LINES_EVERY:
            self._printed = now
            curve = sparkline(self._rising) if self._unicode else ""
            self._print("  ".join(part for part in (f"step {step}/{self.total}", curve, *self._numbers) if part))

    def say(self, text: str) -> None:
        """Prints a line above the live line, and appends it to the log."""
        self.shown += 1
        self._print(text)
        self._record(text)

    def detail(self, text: str) -> None:
        """Appends a line to the log; prints it too where the display is verbose."""
        if self._verbose:
            self._print(text)
        self._record(text)

    def picture(self, path: Path) -> None:
        """Shows a picture (SVG) in a notebook; does nothing elsewhere."""
        if self._notebook:
            from IPython.display import SVG, display

            display(SVG(filename=str(path)))

    @contextmanager
    def during(self, what: Callable[[], str]) -> Iterator[None]:
        """Prints `what()` and the seconds so far, again and again while the enclosed work goes on."""
        began, done = time.monotonic(), threading.Event()

        def tell() -> None:
            while not done.wait(LINES_EVERY):
                with suppress(UserError):  # of a log that cannot be written: the main thread finds that out, too
                    self.say(f"{what()}, {time.monotonic() - began:.0f} s")

        teller = threading.Thread(target=tell, name="progress", daemon=True)
        teller.start()
        try:
            yield
        finally:
            done.set()
            teller.join()

    @contextmanager
    def collecting_warnings(self) -> Iterator[None]:
        """Collects what libraries say by `logging` and `warnings`: details, but for messages of tunix itself.

        A warning about code of the user's is shown as always.
        """
        handler, shown = _Collector(self), warnings.showwarning
        # Of installed libraries, Python's own and tunix, and not of the user.
        roots = (Path(__file__).parents[1], Path(sysconfig.get_paths()["stdlib"]))

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: object) -> None:
            path = Path(filename)
            if "site-packages" in path.parts or any(path.is_relative_to(root) for root in roots):
                with suppress(UserError):
                    self.detail(f"{category.__name__}: {message} ({filename}:{lineno})")
            else:
                shown(message, category, filename, lineno)

        logging.getLogger().addHandler(handler)
        warnings.showwarning = show
        try:
            yield
        finally:
            warnings.showwarning = shown
            logging.getLogger().removeHandler(handler)

    def stop(self) -> None:
        """Ends the live line: it becomes a plain line, without the remaining time."""
        if self._cell is not None:
            self._show(self._state(NOTEBOOK_WIDTH, over=True))
            self._cell = None
        if self._live is not None:
            live, self._live = self._live, None
            live.transient = True
            live.stop()
            if self._first is not None:
                self.console.print(self._state(self.console.width, over=True), markup=False)

    close = stop

    @property
    def _unicode(self) -> bool:
        return self._notebook or self.console.encoding.startswith("utf")

    def _print(self, text: str) -> None:
        if self._notebook:
            print(text, flush=True)
        else:
            self.console.print(text, markup=False)

    def _show(self, line: str) -> None:
        """Shows the live line of a notebook in place of the one before."""
        from IPython.display import display

        data: dict[str, str] = {"text/plain": line}
        if self._cell is None:
            self._cell = display(data, raw=True, metadata=LIVE, display_id=True)
        else:
            self._cell.update(data, raw=True, metadata=LIVE)

    def _record(self, text: str) -> None:
        if self._log is not None:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            append(self._log, "".join(f"{now}  {line}\n" for line in text.splitlines()).encode())

    def _line(self) -> Text:
        """The live line at the present width of the terminal."""
        text = Text(self._state(self.console.width), no_wrap=True, overflow="crop")
        text.stylize("bold", 0, len(self._title))
        return text

    def _state(self, width: int, over: bool = False) -> str:
        """The live line; where it is over, without remaining time and bar."""
        left = None
        if self.step_seconds is not None:
            left = max((self.total - self._step) * self.step_seconds - (time.monotonic() - self._stepped), 0.0)
        count, rising = f"{self._step}/{self.total or '?'}", self._rising if self._unicode else []
        share = self._step / self.total if self._unicode and self.total and not over else None
        fixed = [count] if over else [count, f"{duration(left)} left"]
        return live_line(width, self._title, fixed, self._numbers, rising, share)


class _Collector(logging.Handler):
    """Hands what is logged to a display: warnings and errors of tunix are said, those of libraries are details."""

    def __init__(self, display: Display):
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Whoever logs must not fail because the log cannot be written: the run's other files tell that."""
        with suppress(UserError):
            if record.name.partition(".")[0] == "tunix":
                self._display.say(record.getMessage())
            else:
                self._display.detail(f"{record.name}: {record.getMessage()}")


def live_line(
    width: int, title: str, fixed: Sequence[str], numbers: Sequence[str], rising: Sequence[float], share: float | None
) -> str:
    """One line about a run that is no wider than `width`: what has no room is left out, the least important first.

    >>> live_line(73, "grpo", ["36/90", "0:02:10 left"], ["reward 0.5742", "loss 0.0069"], [0.1, 0.2, 0.4, 0.6], 0.4)
    'grpo  ━━━━━───────  36/90  0:02:10 left  reward 0.5742  loss 0.0069  ▁▂▅█'

    Args:
        width: columns of the terminal.
        title: of the run; shortened to `LONGEST_NAME`, and further where it has no room.
        fixed: step and total, and the remaining time: never left out, never shortened.
        numbers: the most important first.
        rising: values of a curve, which takes what remains.
        share: the part of the steps that is done, for a bar, which takes what the curve leaves; None for no bar.
    """
    parts = [*fixed]
    room = width - len("  ".join(fixed))
    if room - 2 >= min(cell_len(title), NAME):
        parts.insert(0, set_cell_size(title, min(cell_len(title), LONGEST_NAME, room - 2)))
        room -= cell_len(parts[0]) + 2
    for number in numbers:
        # After one that has no room nothing follows: a curve without its number would say little.
        room -= len(number) + 2
        if room < 0:
            break
        parts.append(number)
    if room - 2 >= CURVE and (curve := sparkline(rising, min(room - 2, LONGEST_CURVE))):
        parts.append(curve)
        room -= len(curve) + 2
    if share is not None and room - 2 >= BAR:
        length = min(room - 2, LONGEST_BAR)
        done = int(length * share)
        parts.insert(1, "━" * done + "─" * (length - done))
    return "  ".join(parts)


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, `0:02:10`; `-:--:--` where they are not known."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def summary(values: Mapping[str, float]) -> list[str]:
    """The most important numbers of a step: `["reward 0.5000", "loss 1.2345"]`."""
    labels = {"reward": "reward/mean", "accuracy": "rewards/accuracy", "loss": "train/loss"}
    return [f"{label} {values[name]:.4f}" for label, name in labels.items() if name in values]


def evaluated(values: Mapping[str, float]) -> str:
    """The numbers of an evaluation, the loss first and without `DETAILS`, and with standard errors where there are
    some: `eval/loss 0.5482  eval/arith/reward 0.2500 ± 0.0545`; `eval/.../failed` where something has."""
    shown = [name for name in values if not name.startswith(DETAILS) and not name.endswith("_se")]
    shown = [name for name in shown if values[name] or not name.endswith("/failed")]
    errors = {name: f" ± {values[f'{name}_se']:.4f}" for name in shown if f"{name}_se" in values}
    shown.sort(key=lambda name: name != "eval/loss")
    return "  ".join(f"{name} {values[name]:.4f}{errors.get(name, '')}" for name in shown)


def sparkline(values: Sequence[float], width: int = LONGEST_CURVE) -> str:
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
