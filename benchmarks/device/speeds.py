"""How fast this device is: its peaks, training steps, a GRPO step, and decoding.

Each training step is compiled first, for its account; the step that is timed then finds the program in a cache of this
process. Small shapes (`Setting.small`) are for a CPU.

Axes: B rows, T time.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import rl, rollout
from benchmarks.device.rows import Machine, Row, Setting, Work
from benchmarks.shapes import LORA, Shape
from benchmarks.train import LOSS, interleaved
from tunix.lora.config import AdapterConfig
from tunix.mesh import platform
from tunix.models.attention.attend import described, spec_of
from tunix.models.attention.inputs import Segments
from tunix.models.config import DecoderConfig
from tunix.models.families.table import preset, small, with_sizes
from tunix.models.scan import Remat
from tunix.plan import arithmetic
from tunix.plan.chips import CHIPS
from tunix.rollout.engine.request import Request
from tunix.trainer.perf import matmul_weights, peak_flops, peak_memory
from tunix.util.sizes import bytes_of

TURNS, LONGEST = 5, 25.0
"""Turns of a measurement at most, and the seconds after which no other one is begun."""
SMALL = with_sizes(small("qwen3"), {"d_model": 128, "ffn": 384, "num_layers": 4})
SMALL_NAME = "small qwen3"
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "flax", "optax", "numpy", "tokamax")


@dataclass(frozen=True)
class Step:
    """A training step that is timed: one row of tokens, as long as it is hard."""

    preset: str
    length: int
    short: int
    """T where shapes are small."""
    adapter: AdapterConfig | None = None
    remat: Remat = "none"

    def shape(self, setting: Setting) -> Shape:
        """The model and the batch."""
        config, length = (SMALL, self.short) if setting.small else (preset(self.preset), self.length)
        return Shape(
            SMALL_NAME if setting.small else self.preset,
            config,
            rows=1,
            length=length,
            dtype=setting.dtype,
            remat=self.remat,
        )


STEPS = {
    "sft-8k": Step("qwen3-0.6b", 8192, 256),
    "sft-16k": Step("qwen3-0.6b", 16_384, 512),
    "sft-16k-remat": Step("qwen3-0.6b", 16_384, 512, remat="block"),
    "sft-64k": Step("qwen3-0.6b", 65_536, 2048, remat="block"),
    "lora-4b-16k": Step("qwen3-4b", 16_384, 512, LORA, remat="block"),
}


def machine() -> Machine:
    """The first device, and what is published of it."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    named = "v5p" if device.device_kind == "TPU v5" else device.device_kind.lower().replace(" lite", "e")
    chip = next((chip for name, chip in CHIPS.items() if name in named), None)
    return Machine(
        kind=device.device_kind,
        platform=platform(),
        number=len(jax.devices()),
        memory=stats.get("bytes_limit"),
        flops=peak_flops(device),
        bandwidth=None if chip is None else chip.bandwidth,
        versions=dict(_versions()),
    )


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def timed(work: Callable[[], Any]) -> list[float]:
    """Seconds of each turn, after one that compiles."""
    jax.block_until_ready(work())
    seconds: list[float] = []
    while len(seconds) < TURNS and sum(seconds) < LONGEST:
        start = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - start)
    return seconds


def measured(name: str, seconds: list[float], **more: Any) -> Row:
    """A row of timed turns."""
    return Row(name, seconds=float(np.median(seconds)), turns=len(seconds), memory=peak_memory(), **more)


def peaks(setting: Setting) -> Iterator[Row]:
    """A large product and a large copy: what this device does at its best."""
    side, times, numbers = (1024, 1, 1 << 24) if setting.small else (8192, 20, 1 << 30)
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (side, side), setting.dtype) for key in keys)

    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: (x @ b) * side**-0.5, a)

    product, flops = jax.jit(chain), 2.0 * times * side**3
    name = f"a product of {side} x {side}, {times} times, {setting.dtype}"
    yield measured(name, timed(lambda: product(a, b)), flops=flops, work=(Work(flops, 0.0),))
    long = jnp.ones(numbers, jnp.bfloat16)
    copy, moved = jax.jit(lambda x: x + 1), 4.0 * numbers
    name = f"reading and writing {moved / 2e9:.2f} GB each"
    yield measured(name, timed(lambda: copy(long)), work=(Work(0.0, moved),))


def step(name: str, setting: Setting) -> Iterator[Row]:
    """The row of a training step of `STEPS`."""
    one = STEPS[name]
    shape = one.shape(setting)
    trainer, batch = shape.trainer(one.adapter), shape.batch()
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        start = time.perf_counter()
        compiled = trainer.learner.lowered(batch, LOSS).compile()
        took, flops = time.perf_counter() - start, shape.flops(frozen=one.adapter is not None)
        planned, state = planned_memory(compiled), trainer.learner.state
        del compiled
        held = (trainer.learner.params, (state.params, state.moments))
        weights, updated = map(bytes_of, held)
        least = arithmetic.training(
            shape.config, batch, one.adapter, one.remat, weights=weights, state=updated, devices=1
        )
        del held, state  # the step takes their memory
        seconds = timed(lambda: (trainer.step(batch, LOSS), trainer.state))
    attention = attention_of(shape)
    said = f"{shape.dtype}, remat {one.remat}, attention {attention}, compiled in {took:.0f} s"
    yield measured(
        f"{'SFT' if one.adapter is None else 'LoRA'} {shape.name}, 1 x {shape.length}",
        seconds,
        message=said,
        tokens=shape.length,
        flops=flops,
        planned_memory=planned,
        work=(Work(least.flops, least.bytes), Work(0.0, least.between)),
    )


def attention_of(shape: Shape) -> str:
    """Which implementation computes attention in rows of this shape, and why no faster one."""
    config, found = shape.config, list[str]()

    def look(q: jax.Array, k: jax.Array, ids: jax.Array) -> None:
        views = [Segments(ids, ids, window=kind.window) for kind in config.distinct_kinds]
        found.append(described([spec_of(q, k, view, config.attention_softcap) for view in views]))

    heads = (config.num_heads, config.num_kv_heads)
    q, k = (jax.ShapeDtypeStruct((1, shape.length, number, config.head_dim), shape.dtype) for number in heads)
    jax.eval_shape(look, q, k, jax.ShapeDtypeStruct((1, shape.length), "int32"))
    return found[0]


def planned_memory(compiled: jax.stages.Compiled) -> int | None:
    """Peak bytes of a program by its compiler; None where that does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return getattr(memory, "peak_memory_in_bytes", 0) or held


def grpo(setting: Setting) -> Iterator[Row]:
    """The row of a whole GRPO step: rollout, reward and update."""
    name, config = _policy(setting)
    sizes = rl.Sizes() if setting.small else rl.Sizes(prompts=8, group=8, length=256, new=256)
    longest, answers = sizes.length + sizes.new, sizes.prompts * sizes.group
    shape = Shape(name, config, rows=answers, length=longest, dtype=setting.dtype)
    found = rl.measure(3, lora=False, kl=0.0, shape=shape, sizes=sizes)
    parts = ", ".join(f"{part} {np.median(found[part]):.3f} s" for part in rl.PARTS)
    flops, numbers = rollout.decoding(config, sizes.length, sizes.new, answers)
    size, update = jnp.dtype(setting.dtype).itemsize, shape.flops(frozen=False)
    prompts = 2.0 * matmul_weights(config) * sizes.prompts * sizes.length
    yield measured(
        f"GRPO {name}, {sizes.prompts} x {sizes.group} of {sizes.length} + {sizes.new}",
        found["step"],
        message=f"{setting.dtype}; {parts}; predicted by arithmetic",
        tokens=answers * sizes.new,
        flops=update + prompts + float(flops.sum()),
        work=(Work(prompts, 0.0), Work(float(flops.sum()), size * float(numbers.sum())), Work(update, 0.0)),
    )


def decode(setting: Setting) -> Iterator[Row]:
    """The row of sampling one token in every slot, which reads all weights and what is filled of the cache."""
    name, config = _policy(setting)
    slots, prompt, new = (16, 64, 64) if setting.small else (256, 448, 64)
    engine = rollout.engines((slots,), config, setting.dtype, prompt + new)[slots]
    many, few = (_same(slots, prompt, number, config.vocab_size) for number in (new, 1))
    both = interleaved({"many": lambda: engine.run(many), "few": lambda: engine.run(few)}, TURNS)
    flops, numbers = (x[1:] for x in rollout.decoding(config, prompt, new, slots))
    seconds = [(a - b) / len(flops) for a, b in zip(both["many"], both["few"], strict=True)]
    size = jnp.dtype(setting.dtype).itemsize
    yield measured(
        f"decoding {name}, {slots} slots of {prompt} to {prompt + new} tokens",
        seconds,
        message=f"{setting.dtype}; predicted by arithmetic: weights and the filled cache are read once",
        tokens=slots,
        flops=float(flops.mean()),
        work=(Work(float(flops.mean()), size * float(numbers.mean())),),
    )


def _policy(setting: Setting) -> tuple[str, DecoderConfig]:
    """Name and config of the model that samples."""
    return (SMALL_NAME, SMALL) if setting.small else ("qwen3-0.6b", preset("qwen3-0.6b"))


def _same(number: int, prompt: int, new: int, vocab: int) -> list[Request]:
    """Requests with one prompt, which is computed once."""
    first = rollout.requests(np.array([new]), prompt=prompt, vocab=vocab)[0]
    return [replace(first, index=index) for index in range(number)]
