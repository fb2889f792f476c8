"""Weights on their way from the devices that train to a sampler's own: seconds, and memory beside both copies.

Eight virtual devices: four train with the weights split over them (fsdp), four sample, each with a copy of the weights
or all four with one. Measured is `Engine.publish` through `tunix.trainer.sampler_mesh`: one parameter at a time, with a
checksum on both sides. Virtual devices keep everything in the host's memory, so that all of it is seen: the highest
resident set while weights are handed over, less what was resident before and the copies that have arrived.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import LORA, llama
from tunix.config import DType, MeshConfig
from tunix.lora.adapt import adapt
from tunix.mesh import build_mesh, partition
from tunix.models.config import is_adapter
from tunix.models.model import Model
from tunix.rollout.config import RolloutMeshConfig
from tunix.rollout.engine.engine import Engine
from tunix.trainer.sampler_mesh import bring_of, sampler_mesh

ROOT = Path(__file__).parents[2]
D_MODEL, FFN, VOCAB = 1024, 4096, 8192
LAYER = 3 * D_MODEL * D_MODEL + 3 * D_MODEL * FFN
"""Weights of a layer, with half as many heads of keys and values as of queries."""
GIGA = 1e9
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Lets glibc return what is freed at once, where memory is measured: otherwise it keeps blocks of up to 32 MB."""


class Case(NamedTuple):
    """What is handed over."""

    what: str
    """`all weights`, `adapter`, or `device_put`: all weights by one call of JAX, without a checksum."""
    dtype: DType
    """Of the computation; weights that train are float32."""
    tensor: int
    """Sampling devices to a copy of the weights, e.g. 1."""


CASES = (
    Case("device_put", "float32", 1),
    Case("all weights", "float32", 1),
    Case("all weights", "float32", 4),
    Case("all weights", "bfloat16", 1),
    Case("adapter", "bfloat16", 1),
)


class HandOver(NamedTuple):
    """One publication of weights."""

    seconds: float
    """Until all have arrived."""
    weights: int
    """Bytes of the parameters that moved, once each, as they arrived."""
    copies: int
    """Bytes of their copies on the sampler's devices."""
    extra: int
    """Bytes of the highest resident set beyond what was resident before, with the copies."""


class Setting(NamedTuple):
    """A model with random weights on the devices that train, and the devices that sample."""

    model: Model
    params: dict[str, jax.Array]
    """All weights by name; those that train are float32."""
    training: Mesh
    sampling: Mesh


def resident(name: str) -> int:
    """Bytes of a line of Linux's /proc/self/status, e.g. of `VmHWM`, the highest resident set."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def setting(case: Case, gigabytes: float) -> Setting:
    """A model of about so many GB of float32 weights."""
    devices = jax.devices()
    training = build_mesh(MeshConfig(fsdp=4), devices[:4])
    layers = max(1, round((gigabytes * GIGA / 4 - 2 * VOCAB * D_MODEL) / LAYER))
    config = replace(llama(VOCAB, D_MODEL, 8, 4, FFN), num_layers=layers)
    adapted = adapt(LORA, config) if case.what == "adapter" else None
    model = Model(config, dtype=case.dtype, adapt=adapted)
    trains = {name: adapted is None or is_adapter(name) for name in model.shapes}
    dtypes: dict[str, DType] = {name: "float32" if own else case.dtype for name, own in trains.items()}
    free = Mesh(np.asarray(devices[4:]).reshape(1, -1, 1, 1), training.axis_names, axis_types=training.axis_types)
    sampling, _ = sampler_mesh(free, RolloutMeshConfig(tensor=case.tensor), model, None)
    return Setting(model, model.init(jax.random.key(0), dtypes, training), training, sampling)


def publisher(case: Case, made: Setting, moved: Callable[[jax.Array], jax.Array]) -> Callable[[int], object]:
    """What publishes the weights as a version, and calls `moved` with each array that has arrived."""
    model = made.model
    if case.what == "device_put":
        axes = {name: partition(model.axes[name], x.shape, made.sampling) for name, x in made.params.items()}
        where = {name: NamedSharding(made.sampling, one) for name, one in axes.items()}
        there: dict[str, jax.Array] = {}

        def put(version: int) -> None:
            there.clear()
            there.update(jax.block_until_ready(jax.device_put(made.params, where)))
            for x in there.values():
                moved(x)

        return put
    bring = bring_of(model, made.training, made.sampling)
    assert bring is not None, "the sampler's devices are others"
    moving = tuple(filter(is_adapter, model.shapes))
    engine = Engine(
        model, made.sampling, slots=8, max_length=64, moving=moving, bring=lambda name, x: moved(bring(name, x))
    )

    def publish(version: int) -> None:
        engine.publish(made.params, version)
        jax.block_until_ready((engine.hold().weights.top, engine.hold().weights.layers))

    return publish


def measure(case: Case, gigabytes: float, turns: int) -> list[HandOver]:
    """Publications of the same weights in this process: the first one compiles, the others replace the one before."""
    made, sizes, found, arrived = setting(case, gigabytes), [], [], 0

    def moved(x: jax.Array) -> jax.Array:
        sizes.append((x.nbytes, sum(shard.data.nbytes for shard in x.addressable_shards)))
        return x

    publish = publisher(case, made, moved)
    jax.block_until_ready(made.params)
    for version in range(turns + 1):
        sizes.clear()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before, start = resident("VmRSS"), time.perf_counter()
        publish(version)
        seconds = time.perf_counter() - start
        weights, copies = (sum(each) for each in zip(*sizes, strict=True))
        # What arrives takes the place of what had arrived before.
        new, arrived = max(copies - arrived, 0), max(copies, arrived)
        found.append(HandOver(seconds, weights, copies, resident("VmHWM") - before - new))
    return found


def measured(case: Case, gigabytes: float, turns: int, cache: str, settings: Mapping[str, str]) -> list[HandOver]:
    """The same in a process of its own, on eight virtual devices.

    Args:
        case: what is handed over.
        gigabytes: of float32 weights.
        turns: publications after the first.
        cache: a folder for compiled programs.
        settings: further variables of its environment.
    """
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "NPROC": "32",
        "PYTHONPATH": str(ROOT),
        **settings,
    }
    words = [sys.executable, "-m", "benchmarks.scale.handover", "--case", str(CASES.index(case))]
    words += ["--gigabytes", str(gigabytes), "--turns", str(turns)]
    output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    return [HandOver(*one) for one in json.loads(output.splitlines()[-1])]


def show(console: Console, gigabytes: float = 0.25, turns: int = 3) -> None:
    """Measures memory and seconds of each case in processes of their own, and prints."""
    columns = ("handed over", "sampler", "MB", "MB there", "first, s", "s", "min to max", "s per GB")
    table = Table(
        *columns, "extra, MB per GB", title=f"four devices train (fsdp 4), four sample; {turns} times after the first"
    )
    for case in CASES:
        with tempfile.TemporaryDirectory() as cache:
            cold, *again = measured(case, gigabytes, 1, cache, RETURNING)
            _, *others = measured(case, gigabytes, turns, cache, {})
        seconds = [one.seconds for one in others]
        table.add_row(
            f"{case.what}, {case.dtype}",
            "four copies" if case.tensor == 1 else "one copy",
            f"{cold.weights / 1e6:.0f}, then {others[0].weights / 1e6:.0f}",
            f"{others[0].copies / 1e6:.0f}",
            f"{cold.seconds:.2f}",
            f"{statistics.median(seconds):.3f}",
            f"{min(seconds):.3f} to {max(seconds):.3f}",
            f"{statistics.median(seconds) / others[0].weights * GIGA:.2f}",
            ", then ".join(f"{one.extra / one.weights * 1e3:.0f}" for one in (cold, *again)),
        )
    console.print(table)


def main() -> None:
    """Measures one case, and prints what it found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=int, choices=range(len(CASES)), required=True)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--turns", type=int, required=True)
    arguments = parser.parse_args()
    print(json.dumps(measure(CASES[arguments.case], arguments.gigabytes, arguments.turns)))


if __name__ == "__main__":
    main()
