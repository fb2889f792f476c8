"""How a worker takes its turns: one line of JSON for each piece of work, which begins at a line from the parent.

Nothing but the standard library, because every library's own environment runs it.
"""

import json
import os
import sys
import time
from typing import Any

CORES = 2


def start() -> "tuple[dict[str, Any], Turns]":
    """The case that the command line names, and the turns; before any library counts the cores."""
    os.environ.setdefault("OMP_NUM_THREADS", str(CORES))
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with open(sys.argv[1], encoding="utf-8") as file:
        return json.load(file), Turns()


class Turns:
    """Called between pieces of work: reports the one that has ended, and waits until the next may begin."""

    def __init__(self) -> None:
        # Libraries print what they like; only this channel is read.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began: float | None = None

    def __call__(self, **more: Any) -> None:
        """Reports the piece of work that has ended, and waits for the next.

        Args:
            more: values to report along with the seconds.
        """
        now = time.perf_counter()
        found = more if self._began is None else {"seconds": now - self._began, **more}
        self._out.write(json.dumps(found) + "\n")
        self._out.flush()
        if sys.stdin.readline().strip() != "run":
            os._exit(0)
        self._began = time.perf_counter()


def words(ids: "list[int]") -> str:
    """The text of ids for the benchmark's tokenizer."""
    return " ".join(f"w{i}" for i in ids)


def reward(completions: "list[str]", **_: Any) -> "list[float]":
    """The share of even ids in each completion."""
    return [sum(1 for w in text.split() if w[-1] in "02468") / max(1, len(text.split())) for text in completions]
