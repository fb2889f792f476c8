"""`python -m benchmarks.host`: what Python does between two dispatches of the sampler, which the device may wait for.

Slots take the tokens of a dispatch, and look for stop strings where requests have some. No model is run.

Axes: Sl slots, St decode steps.
"""

import argparse
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tunix.data.tokenizer import bytes_tokenizer
from tunix.rollout.engine.request import Episode, Request, StopText
from tunix.rollout.engine.sampling import MOST_TOP, Draw
from tunix.rollout.engine.slots import Slots
from tunix.types import Sampling

LENGTH = 4096
CASES = {
    "tokens alone": (1024, 32, ()),
    "tokens alone, few slots": (256, 32, ()),
    "a stop string": (256, 8, ("</answer>",)),
}
"""Slots, steps of a dispatch, and stop strings."""


def milliseconds(slots: int, steps: int, strings: tuple[str, ...], dispatches: int) -> list[float]:
    """What each of so many dispatches takes, one after the other."""
    sampling = Sampling(max_tokens=LENGTH, stop_ids=(1,), stop_strings=strings)
    table, decode = Slots(slots, LENGTH + 1), bytes_tokenizer().decode
    for number in range(slots):
        request = Request(np.ones(1, np.int32), sampling, 0, number)
        table.admit(number, Episode(request, number, StopText(strings, decode) if strings else None))
        table.start(number)
    letters = np.random.default_rng(0).integers(97, 120, (steps, slots)).astype(np.int32)
    likely = np.zeros((steps, slots, MOST_TOP))
    host: tuple[Any, ...] = (letters, np.zeros(letters.shape, np.float32), likely.astype(np.int32), likely)
    draws = Draw(*host)
    counts, found = np.full(slots, steps, np.int32), []
    for _ in range(dispatches):
        start = time.perf_counter()
        table.flow(np.arange(slots))
        assert table.take(np.arange(slots), table.turns, draws, counts) == []
        found.append(1000 * (time.perf_counter() - start))
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\nAxes")[0] if __doc__ else None)
    parser.add_argument("--dispatches", type=int, default=100, help="of each case")
    dispatches = parser.parse_args().dispatches
    table = Table("slots take", "slots x tokens", "ms of a dispatch", "of the last tenth")
    for name, (slots, steps, strings) in CASES.items():
        times = milliseconds(slots, steps, strings, dispatches)
        late = times[-max(1, dispatches // 10) :]
        table.add_row(name, f"{slots} x {steps}", f"{np.median(times):.2f}", f"{np.median(late):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
