"""`python -m benchmarks.mixers`: a Gated DeltaNet in chunks, beside its plain recurrence and beside attention.

One row of T tokens, forward and backward, of one layer's mixing alone (no projections). All take turns; medians, ratios
to the chunks, and the memory that each program takes besides its arguments. With `--cycles TOPOLOGY`, what a TPU's
compiler (`pip install '.[plan-tpu]'`) expects of them on a device that is not here: nothing is run.

Axes: T time, N query heads, K kv heads, H head dim, Hk key heads, Jv value heads of a key head, Dk width of a key, Dv
width of a value.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from benchmarks import experts
from benchmarks.programs import account
from benchmarks.train import interleaved
from tunix.models.attention.attend import attend
from tunix.models.attention.inputs import Segments
from tunix.models.deltanet import CHUNKS, Chunks, Gates, chunked, recurrent
from tunix.util import chips
from tunix.util.exact import jit

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HK, JV, WIDTH = 2, 2, 64
"""Key heads, value heads of each, and the width of keys and values: a quarter of Qwen3.5 0.8B's heads, half as wide."""
HEADS, KV_HEADS, DIM = 4, 1, 64
"""Of attention: as many heads as the DeltaNet's values have, of the same width."""


def in_chunks(size: int, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array) -> jax.Array:
    """The gated delta rule of one document, in chunks of `size` tokens."""
    chunks = Chunks.packed(jnp.ones(q.shape[:2], jnp.int32), None, size)
    return chunked(q, k, v, Gates(decay, beta), chunks)[0]


def by_steps(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array) -> jax.Array:
    """The gated delta rule, token by token."""

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, beta = token
        found, state = recurrent(q, k, v, decay, beta, state)
        return state, found

    start = jnp.zeros((len(q), HK, JV, WIDTH, WIDTH))
    _, found = jax.lax.scan(step, start, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta)))
    return jnp.moveaxis(found, 0, 1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention within one document, as a CPU computes it."""
    here = jnp.arange(q.shape[1])[None]
    return attend(q, k, v, Segments(jnp.ones_like(here), here), scale=DIM**-0.5)


def inputs_of(length: int) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Random inputs of the delta rule and of attention."""
    keys = jax.random.split(jax.random.key(0), 8)
    shapes = [(HK, WIDTH), (HK, WIDTH), (HK, JV, WIDTH), (HK, JV), (HK, JV)]
    q, k, v, decay, beta = (jax.random.normal(key, (1, length, *x)) for key, x in zip(keys, shapes, strict=False))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    heads = (HEADS, KV_HEADS, KV_HEADS)
    others = tuple(jax.random.normal(key, (1, length, n, DIM)) for key, n in zip(keys[5:], heads, strict=True))
    return (q, k, v, -jnp.exp(decay), jax.nn.sigmoid(beta)), others


def step_of(mixer: Callable[..., jax.Array], inputs: tuple[Any, ...]) -> jax.stages.Compiled:
    """The compiled gradient of a mixer by all of its inputs."""

    def loss(*inputs: jax.Array) -> jax.Array:
        return jnp.sum(mixer(*inputs).astype(jnp.float32) ** 2)

    return jit(jax.grad(loss, tuple(range(len(inputs))))).lower(*inputs).compile()


def measured(length: int, sizes: list[int], rounds: int, most: float) -> tuple[str, ...]:
    """A row of the table: milliseconds of each, ratios to the first size of chunks, and MB of memory.

    Args:
        most: gigabytes beyond which a program is compiled but not run.
    """
    own, others = inputs_of(length)
    mixers: dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]] = {
        **{f"chunks of {size}": (partial(in_chunks, size), own) for size in sizes},
        "steps": (by_steps, own),
        "attention": (attention, others),
    }
    steps = {name: step_of(*each) for name, each in mixers.items()}
    memory = {name: _memory(step) / 1e6 for name, step in steps.items()}
    work: dict[str, Callable[[], Any]] = {
        name: partial(_run, step, mixers[name][1]) for name, step in steps.items() if memory[name] < most * 1e3
    }
    seconds = interleaved(work, rounds)
    first = np.array(seconds[next(iter(mixers))])
    times = [f"{np.median(seconds[name]) * 1e3:.1f}" if name in seconds else "" for name in mixers]
    ratios = [f"{np.median(np.array(seconds[name]) / first):.2f}" if name in seconds else "" for name in mixers]
    cells = [f"{time} ({ratio})" if time else "" for time, ratio in zip(times, ratios, strict=True)]
    return f"{length}", *cells, *(f"{memory[name]:.0f}" for name in mixers)


def expected(topology: str, lengths: list[int], sizes: list[int]) -> Table:
    """Cycles that a TPU's compiler expects, in float32 as the model has it; our own kernel of attention is in none.

    Args:
        topology: one device, e.g. `v6e:1x1`.
    """
    chips.prepare()
    chips.hasten("tpu")
    place = SingleDeviceSharding(chips.devices_of(topology)[0])
    mixers = {**{f"chunks of {size}": partial(in_chunks, size) for size in sizes}, "steps": by_steps}
    heads = [f"{name} {what}" for name in mixers for what in ("cycles", "MB")]
    table = Table("tokens", *heads, title=f"{HK * JV} heads of {WIDTH}, forward and backward, compiled for {topology}")
    for length in lengths:
        shapes, _ = jax.eval_shape(partial(inputs_of, length))
        own = tuple(x.update(sharding=place) for x in shapes)
        steps = [step_of(mixer, own) for mixer in mixers.values()]
        cells = [(f"{account(step.as_text() or '').cycles:,.0f}", f"{_memory(step) / 1e6:.0f}") for step in steps]
        table.add_row(f"{length}", *(cell for pair in cells for cell in pair))
    return table


def _run(step: jax.stages.Compiled, inputs: tuple[jax.Array, ...]) -> None:
    jax.block_until_ready(step(*inputs))


def _memory(step: jax.stages.Compiled) -> float:
    account = step.memory_analysis()
    assert account is not None, "the compiler gives no account of memory"
    return account.temp_size_in_bytes


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[CHUNKS["cpu"]], help="tokens of a chunk")
    parser.add_argument("--most", type=float, default=6.0, help="GB beyond which nothing is run")
    parser.add_argument("--experts", action="store_true", help="the products of experts in their place")
    parser.add_argument("--decode", action="store_true", help="a mixture's engine beside a dense model's")
    parser.add_argument("--cycles", metavar="TOPOLOGY", help="what a TPU's compiler expects of each, e.g. on v6e:1x1")
    arguments = parser.parse_args()
    if arguments.cycles:
        Console(width=200).print(expected(arguments.cycles, arguments.lengths, arguments.sizes))
        return
    if arguments.experts or arguments.decode:
        measure = experts.measured if arguments.experts else experts.decoded
        Console(width=200).print(measure(arguments.rounds))
        return
    names = [*(f"chunks of {size}" for size in arguments.sizes), "steps", "attention"]
    heads = [*(f"{name} ms (ratio)" for name in names), *(f"{name} MB" for name in names)]
    table = Table("tokens", *heads, title=f"{HK * JV} heads of {WIDTH}, forward and backward, {jax.devices()[0]}")
    for length in arguments.lengths:
        table.add_row(*measured(length, arguments.sizes, arguments.rounds, arguments.most))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
