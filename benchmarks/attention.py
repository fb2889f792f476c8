"""`python -m benchmarks.attention`: attention by einsums beside attention by chunks, forward and backward.

One row of T tokens, as one document, packed with documents of an eighth of it, and with a window. Both take turns;
medians, and the memory that each program takes besides its arguments.

Axes: B rows, T time, N query heads, K kv heads, H head dim.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.train import interleaved
from tunix.models.attention.attend import attend
from tunix.models.attention.inputs import Segments
from tunix.util.exact import jit

HEADS, KV_HEADS, DIM = 4, 2, 64
"""Those of the small Llama of the other benchmarks."""
WINDOW = 512
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
NAMES = ("einsum", "chunked")
KINDS = {"one document": (1, None), "8 documents": (8, None), f"window {WINDOW}": (1, WINDOW)}
"""How a row is filled: number of documents, and the window."""


def step_of(name: str, length: int, documents: int, window: int | None) -> jax.stages.Compiled:
    """The compiled gradient of attention by q, k and v."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        columns = jnp.arange(length)[None]
        size = -(-length // documents)
        view = Segments(columns // size + 1, columns % size, window=window, attention=name)
        return jnp.sum(attend(q, k, v, view, scale=DIM**-0.5))

    shapes = [jax.ShapeDtypeStruct((1, length, heads, DIM), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile()


def run(step: jax.stages.Compiled, inputs: tuple[jax.Array, ...]) -> None:
    """One gradient, to its end."""
    jax.block_until_ready(step(*inputs))


def measured(length: int, kind: str, rounds: int, most: float) -> tuple[str, ...]:
    """A row of the table.

    Args:
        most: gigabytes beyond which the einsums are compiled but not run.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    inputs = tuple(jax.random.normal(key, (1, length, n, DIM)) for key, n in zip(keys, heads, strict=True))
    steps = {name: step_of(name, length, *KINDS[kind]) for name in NAMES}
    memory = {name: _memory(step) / 1e6 for name, step in steps.items()}
    work: dict[str, Callable[[], Any]] = {
        name: partial(run, step, inputs) for name, step in steps.items() if memory[name] < most * 1e3
    }
    seconds = interleaved(work, rounds)
    times = [f"{np.median(seconds[name]) * 1e3:.1f}" if name in seconds else "" for name in NAMES]
    both = [np.array(seconds[name]) for name in NAMES if name in seconds]
    ratio = f"{np.median(both[1] / both[0]):.2f}" if len(both) == len(NAMES) else ""
    return f"{length}", kind, *times, ratio, *(f"{memory[name]:.1f}" for name in NAMES)


def _memory(step: jax.stages.Compiled) -> float:
    account = step.memory_analysis()
    assert account is not None, "the compiler gives no account of memory"
    return account.temp_size_in_bytes


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--most", type=float, default=8.0, help="gigabytes that a program may take to be run")
    arguments = parser.parse_args()
    title = f"gradient of attention, {HEADS} heads of {DIM}, {KV_HEADS} of keys; {jax.devices()[0].device_kind}"
    columns = ("tokens", "row", "einsum, ms", "chunked, ms", "ratio", "einsum, MB", "chunked, MB")
    found = Table(*columns, title=f"{title}; jax {jax.__version__}")
    for length in arguments.lengths:
        for kind in KINDS:
            found.add_row(*measured(length, kind, arguments.rounds, arguments.most))
    Console(width=150).print(found)


if __name__ == "__main__":
    main()
