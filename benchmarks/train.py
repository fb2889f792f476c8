"""`python -m benchmarks.train`: the training step of both shapes, full and LoRA, against a plain step and the peak.

All contenders of a shape take turns within one run, because the machine may be shared: medians and their ratios say
more than any one time. What a start costs (compiling, memory) is measured in processes of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.plain import plain_work
from benchmarks.shapes import LORA, SHAPES, Shape
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.data.packing import pack
from tunix.models.token_logprobs import CHUNK_LOGITS, token_logprobs
from tunix.trainer.perf import peak_memory
from tunix.trainer.trainer import Trainer
from tunix.types import Sequence

LOSS = SFT(SFTConfig()).objective
SIDE = 2048
"""Side of the square float32 products whose best time, as `A B` or `A B.T`, gives the machine's peak."""


def contenders(shape: Shape) -> dict[str, Callable[[], Any]]:
    """The pieces of work that take turns; each call finishes one, compiled before."""
    batch = shape.batch()
    full, lora = shape.trainer(), shape.trainer(LORA)
    square = jnp.ones((SIDE, SIDE))
    product, turned = jax.jit(lambda a, b: a @ b), jax.jit(lambda a, b: a @ b.T)

    def ours(trainer: Trainer) -> None:
        metrics = trainer.step(batch, LOSS)
        jax.block_until_ready((metrics, trainer.state))

    return {
        "full": partial(ours, full),
        "lora": partial(ours, lora),
        "plain": plain_work(shape),
        "product": lambda: product(square, square).block_until_ready(),
        "turned": lambda: turned(square, square).block_until_ready(),
    }


def interleaved(work: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each piece of work, in turns, after one round that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def start_of(shape: Shape, kind: str, cache: str) -> dict[str, float]:
    """Seconds to the first finished step, and peak memory after three, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.train", "--start", shape.name, kind, cache]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure_start(shape: Shape, kind: str, cache: str) -> None:
    """What the process that `start_of` starts runs: prints its measurements as JSON."""
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    trainer, batch = shape.trainer(LORA if kind == "lora" else None), shape.batch()
    before, start = peak_memory(), time.perf_counter()
    jax.block_until_ready((trainer.step(batch, LOSS), trainer.state))
    first = time.perf_counter() - start
    for _ in range(2):
        jax.block_until_ready((trainer.step(batch, LOSS), trainer.state))
    print(json.dumps({"first": first, "peak": peak_memory(), "before": before}))


COLUMNS = ("", "step, ms", "min, ms", "tokens/s", "share of peak", "of plain", "first, s", "cached, s", "memory, MB")


def table(shape: Shape, seconds: dict[str, list[float]], starts: dict[str, tuple[dict, dict]]) -> Table:
    """The table of one shape's measurements."""
    peak = 2 * SIDE**3 / min(seconds["product"] + seconds["turned"])
    tokens, vocab = shape.rows * shape.length, shape.config.vocab_size
    batch = f"{shape.rows} x {shape.length} tokens, vocabulary {vocab}"
    found = Table(*COLUMNS, title=f"{shape.name}: {batch}; peak {peak / 1e9:.0f} GFLOP/s")
    for name in ("full", "lora", "plain"):
        own = seconds[name]
        median = float(np.median(own))
        ratio = float(np.median(np.array(own) / np.array(seconds["plain"])))
        share = shape.flops(LORA if name == "lora" else None) / median / peak
        row = [name, f"{median * 1e3:.0f}", f"{min(own) * 1e3:.0f}", f"{tokens / median:.0f}"]
        row += [f"{share:.1%}", f"{ratio:.2f}"]
        if name in starts:
            cold, warm = starts[name]
            row += [f"{cold['first']:.1f}", f"{warm['first']:.1f}", f"{warm['peak'] / 1e6:.0f}"]
        found.add_row(*row)
    return found


def head_memory(vocab: int = 262_144, width: int = 64, rows: int = 4, length: int = 512) -> str:
    """The memory that the head takes for Gemma 3's vocabulary, from the compiled program's memory analysis."""

    def loss(hidden: jax.Array, weights: jax.Array, targets: jax.Array) -> jax.Array:
        return token_logprobs(hidden, weights, targets, targets >= 0, softcap=None, entropy=False)[0].sum()

    arrays = (
        jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
    )
    account = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile().memory_analysis()
    assert account is not None
    held = account.temp_size_in_bytes
    chunk, everything = 4 * CHUNK_LOGITS, 4 * rows * length * vocab
    return (
        f"head, vocabulary {vocab}, {rows} x {length} tokens: {held / 1e6:.0f} MB of temporaries, the table's gradient "
        f"({4 * vocab * width / 1e6:.0f} MB) among them; one chunk of logits is {chunk / 1e6:.0f} MB, all logits would "
        f"be {everything / 1e6:.0f} MB"
    )


def packing_waste(size: int = 256, longest: int = 1024) -> str:
    """Padding in packed rows of ragged data (log-normal lengths, as chat data has)."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.3, 0.8, size), 8, longest).astype(int)
    rows = [Sequence(np.zeros(n, np.int32), np.ones(n, bool)) for n in lengths]
    ids = [pack(rows, size, longest, packing=packing).segment_ids for packing in (True, False)]
    packed, padded = (float(np.mean(x == 0)) for x in ids)
    return f"packing {size} ragged sequences into rows of {longest}: {packed:.1%} padding, {padded:.1%} unpacked"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="which models")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender")
    parser.add_argument("--start", nargs=3, metavar=("SHAPE", "KIND", "CACHE"), help="used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.start:
        name, kind, cache = arguments.start
        return measure_start(SHAPES[name], kind, cache)
    console = Console(width=150)
    for shape in (SHAPES[name] for name in arguments.shapes):
        starts = {}
        for kind in ("full", "lora"):
            with tempfile.TemporaryDirectory() as cache:
                starts[kind] = (start_of(shape, kind, cache), start_of(shape, kind, cache))
        console.print(table(shape, interleaved(contenders(shape), arguments.rounds), starts))
    console.print(head_memory())
    console.print(packing_waste())
    console.print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
