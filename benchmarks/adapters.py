"""`python -m benchmarks.adapters`: full training, LoRA, and QLoRA on nf4 and int8: memory, step, sampling speed.

Memory is measured in a process of its own for each kind, next to what follows from the shapes alone: of the weights
with what trains of them (gradients aside, AdamW's two moments), and of a frozen base's matrices. Steps take turns
within one run, since the machine may be shared. `--large` measures Llama 3.2 1B's shape in bfloat16, all trained
weights too, one kind after the other, by one step and one call of the sampler; `--kinds` leaves some out.
"""

import argparse
import ctypes
import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import LORA, SHAPES, Shape
from benchmarks.train import LOSS, interleaved
from tunix.lora.config import AdapterConfig
from tunix.models.config import is_adapter
from tunix.models.families.table import preset
from tunix.models.quantization.formats import tile_of
from tunix.trainer.perf import peak_memory
from tunix.trainer.trainer import Trainer
from tunix.types import Sampling

KINDS: dict[str, AdapterConfig | None] = {
    "full": None,
    "lora": LORA,
    "nf4": AdapterConfig(kind="qlora", base="nf4", rank=LORA.rank),
    "int8": AdapterConfig(kind="qlora", base="int8", rank=LORA.rank),
}
LARGE = Shape("llama3.2-1b", preset("llama3.2-1b"), rows=1, length=256, dtype="bfloat16", whole="bfloat16")
BYTES = {"nf4": 0.5, "int4": 0.5, "int8": 1.0, "fp8": 1.0, "float32": 4.0, "bfloat16": 2.0}
SLOTS, PROMPT, NEW = 16, 16, 64
COPIED = 1 << 30
"""Bytes that are copied to measure their memory: so many that other allocations of the process do not matter."""


def matrices(shape: Shape) -> dict[tuple[int, int], int]:
    """(inputs, outputs) of the layers' matrices -> how many there are."""
    c = shape.config
    wide, narrow = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    listed = [(c.d_model, wide), (c.d_model, narrow), (c.d_model, narrow), (wide, c.d_model)]
    listed += [(c.d_model, c.ffn), (c.d_model, c.ffn), (c.ffn, c.d_model)]
    return {size: listed.count(size) * c.num_layers for size in listed}


def base_bytes(shape: Shape, kind: str) -> float:
    """Bytes of the layers' matrices, by arithmetic."""
    adapter = KINDS[kind]
    total = 0.0
    for (inputs, outputs), number in matrices(shape).items():
        if adapter is None or adapter.base is None or adapter.tile is None:
            each = inputs * outputs * BYTES[shape.whole if adapter is None else shape.dtype]
        else:
            each = inputs * outputs * (BYTES[adapter.base] + 4 / tile_of(inputs, adapter.tile))
        total += number * each
    return total


def state_bytes(shape: Shape, kind: str) -> float:
    """Bytes of all weights and the moments, by arithmetic.

    Each weight that trains has two moments, in float32 or, where all weights train in bfloat16, in that type.
    """
    c, adapter = shape.config, KINDS[kind]
    rest = c.vocab_size * c.d_model * (1 if c.tied else 2) + (2 * c.num_layers + 1) * c.d_model
    if adapter is None:
        return 3 * (base_bytes(shape, kind) + rest * BYTES[shape.whole])
    trained = sum(number * adapter.rank * sum(size) for size, number in matrices(shape).items())
    return base_bytes(shape, kind) + rest * BYTES[shape.dtype] + 12 * trained


def in_use() -> int:
    """Bytes in use: of the first device where it reports them, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_in_use" in stats:
        return int(stats["bytes_in_use"])
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def trimmed() -> None:
    """Returns freed memory to the system, where the C library keeps it: copies made in it would not be measured."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def held(arrays: Any) -> float:
    """Bytes that arrays take, by how memory grows when they are copied: jax itself counts a 4-bit number as a byte."""
    number = max(COPIED // sum(x.nbytes for x in jax.tree.leaves(arrays)), 1)
    copy = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))
    first = jax.block_until_ready(copy(arrays))
    trimmed()
    before = in_use()
    copies = [jax.block_until_ready(copy(first)) for _ in range(number)]
    return (in_use() - before) / len(copies)


def step(trainer: Trainer, shape: Shape) -> None:
    """One finished step."""
    jax.block_until_ready((trainer.step(shape.batch(), LOSS), trainer.state))


def measure(shape: Shape, kind: str) -> None:
    """What the process that `measured` starts runs: prints its measurements as JSON."""
    trainer = shape.trainer(KINDS[kind])
    seconds = interleaved({"step": lambda: step(trainer, shape)}, 1 if shape is LARGE else 3)["step"]
    inner = {
        name: x for name, x in trainer.learner.params.items() if name.startswith("layers/") and not is_adapter(name)
    }
    matrices = [x for x in inner.values() if x.ndim > 2]  # with their scales; norms are [L D]
    found = {"peak": peak_memory(), "step": float(np.median(seconds))}
    print(json.dumps(found | {"base": held(matrices), "state": held((trainer.learner.params, trainer.state.moments))}))


def measured(shape: Shape, kind: str) -> dict[str, float]:
    """Memory of one kind, and seconds of its step, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.adapters", "--one", shape.name, kind]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def drawn_per_second(shape: Shape, kind: str) -> float:
    """Tokens that the engine samples in a second, with unmerged adapters, after compiling."""
    trainer = shape.trainer(KINDS[kind], length=PROMPT + NEW)
    prompts = [row[:PROMPT] for row in np.resize(shape.tokens(), (SLOTS, PROMPT))]
    trainer.publish()

    def draw() -> float:
        start = time.perf_counter()
        trainer.sample(prompts, 1, Sampling(max_tokens=NEW), seed=0)
        return SLOTS * NEW / (time.perf_counter() - start)

    if shape is not LARGE:  # there sampling takes far longer than compiling
        draw()
    return max(draw() for _ in range(1 if shape is LARGE else 3))


COLUMNS = ("", "base, MB", "by arithmetic", "state, MB", "by arithmetic", "peak, MB", "step, ms", "of LoRA", "tokens/s")


def table(shape: Shape, found: dict[str, dict[str, float]], seconds: dict[str, list[float]]) -> Table:
    """The table of one shape's measurements."""
    batch = f"{shape.rows} x {shape.length} tokens, {shape.dtype}, vocabulary {shape.config.vocab_size}"
    rows = Table(*COLUMNS, title=f"{shape.name}: {batch}; {jax.devices()[0].device_kind}")
    for kind, own in found.items():
        ratio = float(np.median(np.array(seconds[kind]) / np.array(seconds.get("lora", np.nan))))
        numbers = (own["base"], base_bytes(shape, kind), own["state"], state_bytes(shape, kind), own["peak"])
        cells = [f"{number / 1e6:.1f}" for number in numbers]
        cells += [f"{np.median(seconds[kind]) * 1e3:.0f}", f"{ratio:.2f}", f"{drawn_per_second(shape, kind):.0f}"]
        rows.add_row(kind, *cells)
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="which models")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="which ways to train")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--large", action="store_true", help="Llama 3.2 1B, where there is the memory")
    parser.add_argument("--one", nargs=2, metavar=("SHAPE", "KIND"), help="used by the benchmark itself")
    arguments = parser.parse_args()
    shapes = {**SHAPES, LARGE.name: LARGE}
    if arguments.one:
        return measure(shapes[arguments.one[0]], arguments.one[1])
    console = Console(width=150)
    for shape in [LARGE] if arguments.large else [SHAPES[name] for name in arguments.shapes]:
        found = {kind: measured(shape, kind) for kind in arguments.kinds}
        if arguments.large:  # four models at once would not fit
            seconds = {kind: [own["step"]] for kind, own in found.items()}
        else:
            trainers = {kind: shape.trainer(KINDS[kind]) for kind in arguments.kinds}
            turns = {kind: partial(step, trainer, shape) for kind, trainer in trainers.items()}
            seconds = interleaved(turns, arguments.rounds)
        console.print(table(shape, found, seconds))


if __name__ == "__main__":
    main()
