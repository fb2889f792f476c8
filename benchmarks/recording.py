"""What recording samples costs a step: medians in turns, with and without.

    python -m benchmarks.recording [GROUPS]

A step is a product of matrices on the device, for about as long as `SECONDS`, which is short for a step that samples.
Every second one is recorded: groups of 8 completions of 512 tokens, each with four values, by the code of a run.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from tunix.data.tokenizer import bytes_tokenizer
from tunix.protocols import Client
from tunix.run.evaluation import Samples
from tunix.trainer.config import SamplesConfig
from tunix.trainer.progress import Display
from tunix.util.atomic_io import PACKED

SECONDS, STEPS, GROUP, LENGTH = 1.0, 40, 8, 512


def rows(groups: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The samples of a step as an algorithm makes them."""
    for number in range(groups * GROUP):
        tokens = rng.integers(97, 123, LENGTH)
        values = {name: rng.normal(size=LENGTH).round(4).tolist() for name in ("advantages", "logprobs", "mismatch")}
        per_token = {"tokens": tokens.tolist(), "trained": [1] * LENGTH, **values}
        text = "".join(map(chr, tokens))
        yield {"group": number // GROUP, "prompt": "2 + 2?", "completion": text, "rewards": {}, "per_token": per_token}


def main(groups: int) -> None:
    """Prints the median seconds of a step of each kind, what the call takes, and the bytes of a step."""
    x = jnp.ones((512, 512))
    multiply = jax.jit(lambda x, times: jax.lax.fori_loop(0, times, lambda _, y: y @ x / 512, x))
    multiply(x, 8).block_until_ready()
    began = time.perf_counter()
    multiply(x, 64).block_until_ready()
    times = max(1, int(64 * SECONDS / (time.perf_counter() - began)))
    taken: dict[bool, list[float]] = {True: [], False: []}
    calls: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path, display = Path(folder) / PACKED, Display("benchmark", STEPS, 0)
        client = cast(Client, None)  # asked for nothing here
        samples = Samples([], [], client, bytes_tokenizer("llama3"), path, display, SamplesConfig(groups="all"))
        with closing(samples):
            for step in range(STEPS):
                recorded = step % 2 == 1
                began = time.perf_counter()
                result = multiply(x, times)
                if recorded:
                    before = time.perf_counter()
                    samples.record(step, rows(groups, np.random.default_rng(step)))
                    calls.append(time.perf_counter() - before)
                result.block_until_ready()
                taken[recorded].append(time.perf_counter() - began)
        size = path.stat().st_size / (STEPS // 2)
    with_it, without = (statistics.median(taken[kind]) for kind in (True, False))
    print(
        f"{groups} groups: a step {with_it:.4f} s with and {without:.4f} s without recording "
        f"({100 * (with_it / without - 1):+.2f} %); the call {1e6 * statistics.median(calls):.0f} us; "
        f"{size / 1e3:.0f} kB a step"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
