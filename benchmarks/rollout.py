"""`python -m benchmarks.rollout`: the engine on the small Llama shape, even and ragged, against a static batch.

Contenders take turns within one run, as in `benchmarks.train`. Useful tokens are those that were asked for: a static
batch samples until its longest request has ended. The roofline of a step is what binds: all weights and the filled part
of the cache over the measured memory bandwidth, or the products over the measured peak; a prompt's is its products.
"""

import argparse
import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import SHAPES
from benchmarks.train import SIDE, interleaved
from tunix.config import DType, MeshConfig
from tunix.mesh import build_mesh
from tunix.models.config import DecoderConfig
from tunix.models.model import Model
from tunix.rollout.engine.engine import Engine
from tunix.trainer.perf import matmul_weights
from tunix.types import Completion, Request, Sampling

CONFIG = SHAPES["small"].config
SLOTS, PROMPT, NEW = 16, 64, 128
SHORTEST, LONGEST, RAGGED = 8, 512, 32
GROUP, LONG_PROMPT = 8, 256
READ = 1 << 26
"""Floats of the array whose reading measures the memory's bandwidth: 256 MiB."""


def engines(
    slots: tuple[int, ...], config: DecoderConfig = CONFIG, dtype: DType = "float32", length: int = PROMPT + LONGEST
) -> dict[int, Engine]:
    """Engines of one random model, by their number of slots."""
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    model = Model(config, dtype=dtype)
    params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, dtype), mesh)
    made = {number: Engine(model, mesh, slots=number, max_length=length) for number in slots}
    for engine in made.values():
        engine.publish(params, 0)
    return made


def requests(
    lengths: np.ndarray, temperature: float = 1.0, prompt: int = PROMPT, vocab: int = CONFIG.vocab_size
) -> list[Request]:
    """One request of random tokens for each number of new tokens."""
    rng = np.random.default_rng(0)
    settings = [Sampling(max_tokens=int(length), temperature=temperature) for length in lengths]
    return [
        Request(rng.integers(0, vocab, prompt).astype(np.int32), sampling, 0, index)
        for index, sampling in enumerate(settings)
    ]


def ragged_lengths() -> dict[str, np.ndarray]:
    """New tokens of each request, of two kinds: uniform, and uniform in the logarithm, where most are short."""
    rng = np.random.default_rng(0)
    evenly = rng.uniform(SHORTEST, LONGEST, RAGGED)
    return {
        "uniform": evenly.astype(int),
        "log-uniform": np.exp(rng.uniform(np.log(8), np.log(512), RAGGED)).astype(int),
    }


def static(engine: Engine, asked: list[Request]) -> list[Completion]:
    """Static batches, one request per slot: all of a batch sample until its longest request has ended."""
    found = []
    for start in range(0, len(asked), engine.slots):
        batch = asked[start : start + engine.slots]
        longest = max(request.sampling.max_tokens for request in batch)
        found += engine.run([replace(x, sampling=replace(x.sampling, max_tokens=longest)) for x in batch])
    return found


def occupancy(lengths: np.ndarray, slots: int) -> float:
    """Mean number of slots at work when free ones are refilled at once."""
    ends = [0] * slots
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + int(length))
    return lengths.sum() / max(ends)


def decoding(config: DecoderConfig, prompt: int, new: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs of each of the `new` steps of `slots` requests, and the numbers that it reads: weights and filled cache."""
    weights = matmul_weights(config)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (prompt + np.arange(new))
    return slots * (2 * weights + 2 * cache * config.num_heads // config.num_kv_heads), weights + slots * cache


def roofline(config: DecoderConfig, prompt: int, new: int, slots: int, peak: float, bandwidth: float) -> float:
    """Least seconds for `slots` requests of one length, in float32."""
    flops, numbers = decoding(config, prompt, new, slots)
    steps = np.maximum(4 * numbers / bandwidth, flops / peak)
    return slots * prompt * 2 * matmul_weights(config) / peak + float(steps.sum())


def contenders(made: dict[int, Engine]) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """The pieces of work that take turns, and the useful tokens of each."""
    even = np.full(SLOTS, NEW)
    work: dict[str, Callable[[], Any]] = {}
    tokens: dict[str, int] = {}
    for name, temperature in (("even, greedy", 0.0), ("even, sampled", 1.0)):
        asked = requests(even, temperature)
        work[name], tokens[name] = (lambda asked=asked: made[SLOTS].run(asked)), int(even.sum())
    for kind, lengths in ragged_lengths().items():
        asked = requests(lengths)
        ways = {f"{kind}, static {SLOTS}": lambda asked=asked: static(made[SLOTS], asked)}
        for slots, engine in made.items():
            ways[f"{kind}, continuous {slots}"] = lambda asked=asked, engine=engine: engine.run(asked)
        for name, run in ways.items():
            work[name], tokens[name] = run, int(lengths.sum())
    return work | shared_prompts(made[SLOTS]) | machine(), tokens


def shared_prompts(engine: Engine) -> dict[str, Callable[[], Any]]:
    """A long prompt's group, the prompt alone, and as many different prompts: one token each."""
    different = requests(np.ones(GROUP), prompt=LONG_PROMPT)
    group = [replace(different[0], index=index) for index in range(GROUP)]
    return {
        f"prompt of {LONG_PROMPT}, group of {GROUP}": lambda: engine.run(group),
        f"prompt of {LONG_PROMPT}, one sample": lambda: engine.run(group[:1]),
        f"prompts of {LONG_PROMPT}, {GROUP} different": lambda: engine.run(different),
    }


def machine() -> dict[str, Callable[[], Any]]:
    """The work that measures the machine's peak and bandwidth, for the roofline."""
    square, long = jnp.ones((SIDE, SIDE)), jnp.ones(READ)
    product, total = jax.jit(lambda a: a @ a), jax.jit(jnp.sum)
    return {"product": lambda: product(square).block_until_ready(), "read": lambda: total(long).block_until_ready()}


def table(seconds: dict[str, list[float]], tokens: dict[str, int]) -> Table:
    """The table of measurements."""
    peak, bandwidth = 2 * SIDE**3 / min(seconds["product"]), 4 * READ / min(seconds["read"])
    least = roofline(CONFIG, PROMPT, NEW, SLOTS, peak, bandwidth)
    title = f"small Llama, float32; peak {peak / 1e9:.0f} GFLOP/s, memory {bandwidth / 1e9:.0f} GB/s"
    found = Table("", "median, s", "min, s", "useful tokens/s", "share of roofline", title=title)
    for name, own in seconds.items():
        median = float(np.median(own))
        rate = f"{tokens[name] / median:.0f}" if name in tokens else ""
        share = f"{least / median:.1%}" if name.startswith("even") else ""
        found.add_row(name, f"{median:.3f}", f"{min(own):.3f}", rate, share)
    return found


def per_slot(seconds: dict[str, list[float]], tokens: dict[str, int], slots: tuple[int, ...]) -> str:
    """The ragged cases' rate per occupied slot, compared with the even case's."""
    rate = {name: tokens[name] / float(np.median(own)) for name, own in seconds.items() if name in tokens}
    even = rate["even, sampled"] / SLOTS
    lines = []
    for kind, lengths in ragged_lengths().items():
        busy = occupancy(lengths, SLOTS)
        own = rate[f"{kind}, continuous {SLOTS}"]
        best = max(rate[f"{kind}, continuous {number}"] for number in slots)
        lines.append(
            f"{kind}: {busy:.1f} of {SLOTS} slots busy on average, {own / busy / even:.0%} of the even case's rate per "
            f"busy slot, {best / rate[f'{kind}, static {SLOTS}']:.2f} x the static batch"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--slots", type=int, nargs="+", default=[SLOTS, RAGGED], help=f"engines; {SLOTS} among them")
    arguments = parser.parse_args()
    slots = tuple(arguments.slots)
    work, tokens = contenders(engines(slots))
    seconds = interleaved(work, arguments.rounds)
    console = Console(width=120)
    console.print(table(seconds, tokens))
    console.print(per_slot(seconds, tokens, slots))
    console.print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
