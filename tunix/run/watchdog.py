"""Says what a run waits for, where it has shown nothing for long.

Nothing is measured and no part of the run reports to it: the stacks of the run's threads are read when it is silent,
and the innermost file of each that `STAGES` knows says what its thread is at.
"""

import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tunix.errors import UserError
from tunix.trainer.progress import Display, duration

SILENCE, TIMES, LOOK = 120.0, 10, 1.0
"""Seconds, and typical steps, of silence after which a run says what it waits for: the longer of both, doubled each
time; and the seconds between two looks."""
STAGES = {
    "data": "rows",
    "distributed": "the other processes",
    "rollout/rewards": "rewards",
    "rollout/judging": "judges",
    "rollout/environments": "environments",
    "rollout/servers": "servers that sample",
    "rollout/engine": "the sampler",
    "rollout": "completions",
    "run/evaluation": "an evaluation",
    "run/recorder": "the update on its device",
    "trainer/checkpoint": "a checkpoint on its disk",
    "trainer/state_files": "a checkpoint on its disk",
    "trainer/trackers": "",
    "trainer": "the update",
    "algorithms": "the update",
}
"""Folders and files of tunix -> what a thread in them is at, empty where no run waits for it; the first that fits, from
the innermost file outwards."""
IDLE = ("watch", "progress", "silence")
"""Names of threads that wait all the time."""
ROOT = Path(__file__).parents[1]


def stage(frame: FrameType | None) -> str:
    """What a thread with this innermost frame is at: `rewards (rollout/rewards/scorer.py:210)`; else empty."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            name = path.relative_to(ROOT).with_suffix("").as_posix()
            for place, words in STAGES.items():
                if name == place or name.startswith(f"{place}/"):
                    return words and f"{words} ({name}.py:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def waiting() -> list[str]:
    """What the threads of this process are at, the main thread first; several at the same are counted."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    stages = (stage(frames.get(thread.ident or 0)) for thread in threads if thread.name not in IDLE)
    counted = Counter(text for text in stages if text)
    return [f"{text} in {number} threads" if number > 1 else text for text, number in counted.items()]


class Watchdog:
    """A thread that looks whether a display is silent for long, and then has it say what the run waits for."""

    def __init__(self, display: Display):
        """Begins to look."""
        self._display = display
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="silence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        shown, since, patience = self._display.shown, time.monotonic(), 1
        while not self._closed.wait(LOOK):
            now, mean = time.monotonic(), self._display.step_seconds
            if self._display.shown != shown:
                shown, since, patience = self._display.shown, now, 1
            elif now - since > patience * max(SILENCE, TIMES * (mean or 0.0)):
                usual = "" if mean is None else f", where a step takes {duration(mean)}"
                with suppress(UserError):  # of a log that cannot be written: the main thread finds that out, too
                    stages = ", ".join(waiting()) or "what is no stage of a run"
                    self._display.say(f"nothing for {duration(now - since)}{usual}. Waiting for {stages}")
                shown, patience = self._display.shown, 2 * patience  # its own line is no sign of life

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()
