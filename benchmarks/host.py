"""`python -m benchmarks.host`: what Python does between two dispatches of the sampler, which the device may wait for.

A batch of requests is answered by programs that compute nothing: their sizes are real, and what they sample is one
letter over and over. Every eight requests share a prompt. Milliseconds of this thread's processor time, since other
processes of a busy machine are not meant; the best of some rounds.

Axes: Sl slots, St decode steps.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from tunix.data.tokenizer import bytes_tokenizer
from tunix.models.families.table import preset
from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.rollout.engine import batch
from tunix.rollout.engine.batch import Batch, Published
from tunix.rollout.engine.programs import Steps
from tunix.rollout.engine.sampling import MOST_TOP, Draw
from tunix.rollout.engine.shapes import PAGE, Sizes
from tunix.types import Request, Sampling

LENGTH, PROMPT, GROUP, DISPATCHES = 1024, 200, 8, 8
CASES = {
    "256 slots": (256, 32, ()),
    "1,024 slots": (1024, 32, ()),
    "256 slots, a stop string": (256, 8, ("</answer>",)),
}
"""Slots, steps of a dispatch, and stop strings."""


def _prefill(model: Model, weights: Any, state: Any, inputs: Any) -> tuple[Any, Any]:
    return state, None


def _decode(model: Model, steps: int, weights: Any, state: Any, flow: Any, *rest: Any) -> tuple[Any, Steps]:
    shape = (steps, len(flow.slots))
    likely = np.zeros((*shape, MOST_TOP), np.float32)
    host: tuple[Any, ...] = (np.full(shape, 97, np.int32), np.zeros(shape, np.float32), likely.astype(np.int32), likely)
    counts: Any = np.minimum(steps, flow.progress.left)
    return state, Steps(Draw(*host), counts, counts, None)


def milliseconds(slots: int, steps: int, strings: tuple[str, ...]) -> dict[str, float]:
    """What admission of a request for each slot takes, and a dispatch: sending it and reading it."""
    model, sampling = Model(preset("qwen3-0.6b")), Sampling(max_tokens=LENGTH - PROMPT, stop_strings=strings)
    pages = slots * LENGTH // PAGE
    sizes = Sizes(slots, LENGTH, 2048, PAGE, steps, 1, 0, (None,), (pages,), 1, "bfloat16", reader="triton")
    prompts = [np.full(PROMPT, number // GROUP, np.int32) for number in range(slots)]
    requests = [Request(prompt, sampling, 0, number) for number, prompt in enumerate(prompts)]
    answered = Batch(Published(model, Weights({}, ()), 0, {}), sizes, bytes_tokenizer().decode, requests)

    def timed(call: Callable[[], Any]) -> float:
        start = time.thread_time()
        call()
        return 1000 * (time.thread_time() - start)

    def admitted() -> None:
        answered._admit()
        while any(answered.jobs):
            answered._compute()

    took = {"admission": timed(admitted)}
    # All slots want a page at once, every fourth dispatch: the mean counts, not the median.
    both = [
        (timed(answered._dispatch), timed(lambda: answered._retire(answered.in_flight.popleft())))
        for _ in range(DISPATCHES)
    ]
    sent, read = np.mean(both, axis=0).tolist()
    return took | {"sending": sent, "reading": read}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\nAxes")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10, help="of each case")
    rounds = parser.parse_args().rounds
    table = Table("milliseconds", "admission of all", "sending a dispatch", "reading it")
    idle: Any = {"prefill": _prefill, "decode": _decode, "copy_pages": lambda model, state, copies: (state, None)}
    with mock.patch.multiple(batch, **idle, initial_state=lambda model, sizes: None, Meter=mock.MagicMock()):
        for name, case in CASES.items():
            took = [milliseconds(*case) for _ in range(rounds)]
            table.add_row(name, *(f"{min(x[part] for x in took):.2f}" for part in took[0]))
    Console().print(table)


if __name__ == "__main__":
    main()
