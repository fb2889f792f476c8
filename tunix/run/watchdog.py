"""Says what a run waits for, where it has shown nothing for long.

Nothing is measured and no part of the run reports to it: the stacks of the run's threads are read when it is silent,
and the innermost file of each that `STAGES` knows says what its thread is at.
"""

import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

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
    "rollout/asynchronous": "completions",
    "rollout/collect": "completions",
    "hf": "weights of a folder",
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
ROOT = Path(__file__).parents[1]


def waiting() -> list[str]:
    """What the threads of this process are at, the main thread first, and where; several at the same are counted."""
    stacks, main = sys._current_frames(), threading.main_thread()
    counted = Counter[str]()
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not main):
        frames = traceback.walk_stack(stacks.get(thread.ident or 0))
        inner = [(Path(frame.f_code.co_filename), number) for frame, number in frames]
        ours = [(path.relative_to(ROOT).as_posix(), number) for path, number in inner if path.is_relative_to(ROOT)]
        if thread is not main and len(ours) < 2:
            continue  # its outermost function waits for work
        stages = (
            (words, name, number)
            for name, number in ours
            for place, words in STAGES.items()
            if name.startswith((f"{place}/", f"{place}.py"))
        )
        no_stage = ("what is no stage of a run", *ours[0]) if thread is main and ours else ("", "", 0)
        words, name, number = next(stages, no_stage)
        if words:
            counted[f"{words} ({name}:{number})"] += 1
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
                    stages = ", ".join(waiting()) or "code that is not of tunix"
                    self._display.say(f"nothing for {duration(now - since)}{usual}. Waiting for {stages}")
                shown, patience = self._display.shown, 2 * patience  # its own line is no sign of life

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()
