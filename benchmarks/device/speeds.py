"""How fast this device is: its peaks, training steps, a GRPO step, and decoding.

Each training step is compiled first, for its account; the step that is timed then finds the program in a cache of this
process. Small shapes (`Setting.small`) are for a CPU.

Axes: B rows, T time.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import rl, rollout
from benchmarks.device.rows import Machine, Profile, Row, Setting, Work
from benchmarks.shapes import LORA, Shape
from benchmarks.train import LOSS, interleaved
from tunix.config import DType
from tunix.lora.config import AdapterConfig
from tunix.mesh import bytes_of, platform
from tunix.models.attention.attend import described, spec_of
from tunix.models.attention.inputs import Segments
from tunix.models.config import DecoderConfig
from tunix.models.families.table import preset, small, with_sizes
from tunix.models.scan import Remat
from tunix.plan import arithmetic
from tunix.trainer.perf import matmul_weights, peak_memory
from tunix.types import Request
from tunix.util.chips import chip_named

TURNS, LONGEST = 5, 25.0
"""Turns of a measurement at most, and the seconds after which no other one is begun."""
SIZES = {"d_model": 128, "ffn": 384, "num_layers": 4}
"""Of the small models."""
TOP = 20
"""Kernels of a profile."""
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "flax", "optax", "numpy", "tokamax")


@dataclass(frozen=True)
class Step:
    """A training step that is timed: one row of tokens."""

    preset: str
    length: int
    short: int
    """T where shapes are small."""
    documents: int = 1
    """Texts of equal length that fill the row."""
    layers: int | None = None
    """So many of the model's layers; None for all."""
    adapter: AdapterConfig | None = None
    remat: Remat = "none"

    def shape(self, setting: Setting) -> Shape:
        """The model and the batch."""
        config, name = preset(self.preset), self.preset
        if setting.small:
            name = f"small {config.family}"
            config = with_sizes(small(config.family), SIZES)
        elif self.layers is not None:
            config, name = with_sizes(config, {"num_layers": self.layers}), f"{name} of {self.layers} layers"
        length = self.short if setting.small else self.length
        return Shape(
            name, config, rows=1, length=length, documents=self.documents, dtype=setting.dtype, remat=self.remat
        )


EXPERTS = LORA.model_copy(
    update={"targets": ["q_proj", "k_proj", "v_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"]}
)
"""An adapter of a mixture."""
STEPS = {
    "packed-16k": Step("qwen3-0.6b", 16_384, 512, documents=8),
    "16k": Step("qwen3-0.6b", 16_384, 512),
    "4b-16k": Step("qwen3-4b", 16_384, 512, adapter=LORA, remat="block"),
    "64k": Step("qwen3-0.6b", 65_536, 2048, remat="block"),
    "mixture-16k": Step("qwen3-30b-a3b", 16_384, 512, documents=8, layers=12, adapter=EXPERTS, remat="block"),
}


def machine() -> Machine:
    """The first device, and what is published of it."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    chip = chip_named(device.device_kind)
    return Machine(
        kind=device.device_kind,
        platform=platform(),
        number=len(jax.devices()),
        memory=stats.get("bytes_limit"),
        flops=None if chip is None else chip.flops,
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


@contextmanager
def cache() -> Iterator[None]:
    """What is compiled here ahead is found when it is called."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        yield


def profile(work: Callable[[], Any]) -> Profile | None:
    """Where the device's time goes in a turn of some work; None on a CPU, which has no kernels."""
    if platform() == "cpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(work())
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        lines = [line for plane in planes if plane.name.startswith("/device:") for line in plane.lines]
        return summary((line.name, line.events) for line in lines)


def summary(lines: Iterable[tuple[str, Iterable[Any]]]) -> Profile | None:
    """The kernels of a profile; None where it has none.

    Args:
        lines: name and events of each line of a device: a GPU's streams, a TPU's operations.
    """
    events = [event for name, events in lines if name.startswith(("Stream", "XLA Ops")) for event in events]
    if not events:
        return None
    seconds, launches = Counter[str](), Counter[str]()
    for event in events:
        seconds[event.name] += event.duration_ns / 1e9
        launches[event.name] += 1
    begin = min(event.start_ns for event in events)
    span = (max(event.start_ns + event.duration_ns for event in events) - begin) / 1e9
    kernels = tuple((name, taken, float(launches[name])) for name, taken in seconds.most_common(TOP))
    return Profile(float(len(events)), sum(seconds.values()) / span, kernels)


def measured(name: str, seconds: list[float], **more: Any) -> Row:
    """A row of timed turns."""
    return Row(name, seconds=float(np.median(seconds)), turns=len(seconds), memory=peak_memory(), **more)


def peaks(case: DType, setting: Setting) -> Iterator[Row]:
    """Large products and large copies, long enough for the clock to settle: what this device does at its best."""
    side, times, copies, numbers = (1024, 1, 1, 1 << 24) if setting.small else (8192, 300, 100, 1 << 30)
    dtype = setting.dtype if setting.small else case
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (side, side), dtype) for key in keys)
    b *= side**-0.5  # so that products of products keep their size

    @jax.jit
    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: x @ b, a)

    flops = 2.0 * times * side**3
    name = f"a product of {side} x {side}, {times} times, {dtype}"
    yield measured(name, timed(lambda: products(a, b)), flops=flops, work=(Work(flops, 0.0),))
    long = jnp.ones(numbers, jnp.bfloat16)

    @jax.jit
    def copied(long: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, copies, lambda _, x: x + 1, long)

    moved = 4.0 * copies * numbers
    name = f"reading and writing {2 * numbers / 1e9:.2f} GB each, {copies} times"
    yield measured(name, timed(lambda: copied(long)), work=(Work(0.0, moved),))


def step(case: str, setting: Setting) -> Iterator[Row]:
    """The row of a training step of `STEPS`."""
    settings = STEPS[case]
    shape = settings.shape(setting)
    trainer, batch = shape.trainer(settings.adapter), shape.batch()

    def turn() -> Any:
        return trainer.step(batch, LOSS), trainer.state

    with cache():
        start = time.perf_counter()
        compiled = trainer.learner.lowered(batch, LOSS).compile()
        took, flops = time.perf_counter() - start, shape.flops(settings.adapter)
        planned, state = planned_memory(compiled), trainer.learner.state
        del compiled
        held = (trainer.learner.params, (state.params, state.moments))
        weights, updated = map(bytes_of, held)
        least = arithmetic.training(
            shape.config, batch, settings.adapter, settings.remat, weights=weights, state=updated, devices=1
        )
        del held, state  # the step takes their memory
        seconds = timed(turn)
    said = f"{shape.dtype}, remat {settings.remat}, attention {attention_of(shape)}, compiled in {took:.0f} s"
    packed = f", {shape.documents} documents" if shape.documents > 1 else ""
    row = measured(
        f"{'SFT' if settings.adapter is None else 'LoRA'} {shape.name}, 1 x {shape.length}{packed}",
        seconds,
        message=said,
        tokens=shape.length,
        flops=flops,
        planned_memory=planned,
        work=(Work(least.flops, least.bytes), Work(0.0, least.between)),
    )
    yield replace(row, profile=profile(turn))


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


def grpo(case: str, setting: Setting) -> Iterator[Row]:
    """The row of a whole GRPO step: rollout, reward and update.

    Args:
        case: prompts x completions of each, e.g. `8x8`.
        setting: how it runs.
    """
    name, config = _policy(setting)
    prompts, group = map(int, case.split("x"))
    sizes = rl.Sizes() if setting.small else rl.Sizes(prompts=prompts, group=group, length=256, new=256)
    longest, answers = sizes.length + sizes.new, sizes.prompts * sizes.group
    shape = Shape(name, config, rows=answers, length=longest, dtype=setting.dtype)
    profiles: list[Profile | None] = []
    with cache():
        found = rl.measure(
            3, lora=False, kl=0.0, shape=shape, sizes=sizes, after=lambda work: profiles.append(profile(work))
        )
    parts = ", ".join(f"{part} {np.median(found[part]):.3f} s" for part in rl.PARTS)
    flops, numbers = rollout.decoding(config, sizes.length, sizes.new, answers)
    size, update = jnp.dtype(setting.dtype).itemsize, shape.flops()
    prefill = 2.0 * matmul_weights(config) * sizes.prompts * sizes.length
    yield measured(
        f"GRPO {name}, {sizes.prompts} x {sizes.group} of {sizes.length} + {sizes.new}",
        found["step"],
        message=f"{setting.dtype}; {parts}; predicted by arithmetic",
        tokens=answers * sizes.new,
        flops=update + prefill + float(flops.sum()),
        work=(Work(prefill, 0.0), Work(float(flops.sum()), size * float(numbers.sum())), Work(update, 0.0)),
        profile=profiles[0],
    )


def decode(case: str, setting: Setting) -> Iterator[Row]:
    """Rows of sampling one token in every slot, which reads all weights and what is filled of the cache: the second
    half of the tokens, what two rollouts differ by, so that the prompts of both cost the same.

    Args:
        case: slots, e.g. `256`.
        setting: how it runs.
    """
    name, config = _policy(setting)
    slots, prompt, new = (int(case) // 16, 64, 64) if setting.small else (int(case), 448, 64)
    engine = rollout.engines((slots,), config, setting.dtype, prompt + new)[slots]
    half = new // 2
    flops, numbers = (x[half:] for x in rollout.decoding(config, prompt, new, slots))
    size = jnp.dtype(setting.dtype).itemsize
    for shared in (True, False):
        many, few = (_requests(slots, prompt, number, config.vocab_size, shared) for number in (new, half))
        both = interleaved({"many": partial(engine.run, many), "few": partial(engine.run, few)}, TURNS)
        seconds = [(a - b) / len(flops) for a, b in zip(both["many"], both["few"], strict=True)]
        whole = float(np.median(both["many"]))
        row = measured(
            f"decoding {name}, {slots} slots of {prompt + half} to {prompt + new} tokens, "
            f"{'a shared prompt' if shared else 'a prompt each'}",
            seconds,
            message=f"{setting.dtype}; the whole rollout of {new} tokens {whole:.3f} s, {slots * new / whole:,.0f} "
            "tokens/s; predicted by arithmetic: weights and the filled cache are read once",
            tokens=slots,
            flops=float(flops.mean()),
            work=(Work(float(flops.mean()), size * float(numbers.mean())),),
        )
        yield replace(row, profile=profile(partial(engine.run, many)))


def _policy(setting: Setting) -> tuple[str, DecoderConfig]:
    """Name and config of the model that samples."""
    shape = STEPS["16k"].shape(setting)
    return shape.name, shape.config


def _requests(number: int, prompt: int, new: int, vocab: int, shared: bool) -> list[Request]:
    """Requests with a prompt each, or with one prompt, which is computed once."""
    asked = rollout.requests(np.full(number, new), prompt=prompt, vocab=vocab)
    return [replace(asked[0], index=index) for index in range(number)] if shared else asked
