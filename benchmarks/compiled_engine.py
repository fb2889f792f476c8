"""`python -m benchmarks.compiled --engine`: the sampler's decode program, compiled for accelerators that are not here.

All slots are full. What the program holds beside weights and cache, what it copies, and what devices exchange within
the loop is read from it. A step is counted with what a dispatch does around its loop.
"""

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.programs import account
from tunix.config import CacheType, MeshConfig
from tunix.mesh import build_mesh, bytes_of
from tunix.models.families.table import preset
from tunix.models.model import Model
from tunix.plan import programs
from tunix.rollout.config import RolloutMeshConfig
from tunix.rollout.engine.engine import Engine
from tunix.trainer.sampler_mesh import sampler_mesh
from tunix.util import chips
from tunix.util.chips import chip_of

GIGA = 2**30
LARGE = 2**20
"""Bytes from which copies count, and all-gathers within the loop."""


@dataclass(frozen=True)
class EngineCase:
    """A sampler with full slots."""

    preset: str
    topology: str
    slots: int
    length: int
    mesh: MeshConfig
    """Of training; the sampler has `tensor` devices to each copy of the weights."""
    devices: int | None = None
    """How many of the topology's devices; None for all."""
    cache: CacheType | None = None
    before: str = ""
    """The same when a dispatch gathered pages or copied caches, as far as it was compiled."""


ONE = MeshConfig()


def _qwen(name: str, devices: int | None = None, cache: CacheType | None = None, before: str = "") -> EngineCase:
    return EngineCase("qwen3-0.6b", name, 64, 4096, ONE, devices, cache, before)


def _llama(name: str, mesh: MeshConfig) -> EngineCase:
    return EngineCase("llama3.1-8b", name, 256, 1024, mesh)


CASES: dict[str, EngineCase] = {
    "qwen-h100": _qwen("h100:1", before="29.3 GiB, 35.1 GB"),
    "qwen-int8-h100": _qwen("h100:1", cache="int8"),
    "qwen-fp8-h100": _qwen("h100:1", cache="fp8"),
    "qwen-v5p": _qwen("v5p:1x1x1", before="57.3 GiB, 120 GB of copies"),
    "qwen-v5e": EngineCase("qwen3-0.6b", "v5e:1x1", 16, 4096, ONE),
    "qwen-v6e": EngineCase("qwen3-0.6b", "v6e:1x1", 32, 4096, ONE),
    "llama-data-h100": _llama("h100:8", MeshConfig(data=8, fsdp=1)),
    "llama-tensor-h100": _llama("h100:8", MeshConfig(data=1, fsdp=1, tensor=8)),
    "llama-both-h100": _llama("h100:8", MeshConfig(data=2, fsdp=1, tensor=4)),
    "llama-tensor-v5p": _llama("v5p:2x2x2", MeshConfig(data=1, fsdp=1, tensor=8)),
}


def measured(case: EngineCase, model: Model | None = None) -> dict[str, Any]:
    """Compiles a case's decode program and reads it; `model` is another one than its preset's."""
    chips.prepare()
    chips.hasten(chip_of(case.topology).platform)
    mesh = build_mesh(case.mesh, chips.devices_of(case.topology)[: case.devices])
    model = model or Model(preset(case.preset), dtype="bfloat16")
    mesh, _ = sampler_mesh(mesh, RolloutMeshConfig(tensor=case.mesh.tensor), model, None)
    engine = Engine(model, mesh, slots=case.slots, max_length=case.length, cache_dtype=case.cache)
    weights = programs.views(model, mesh, model.abstract(dict.fromkeys(model.shapes, model.dtype), mesh))
    state = programs.state_of(model, mesh, engine.sizes)
    start = time.perf_counter()
    lowered = programs.decoding(model, mesh, weights, state, engine.sizes)
    traced = time.perf_counter() - start
    compiled = lowered.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None, "this compiler shows its program"
    assert memory is not None, "this compiler knows its memory"
    found = account(text)
    cache, own = bytes_of(state.caches), bytes_of(weights)
    inside = [one for one in found.collectives if one.loops]
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {
        "reader": engine.sizes.reader,
        "traced": traced,
        "compiled": time.perf_counter() - start - traced,
        "cache": cache,
        "weights": own,
        "peak": getattr(memory, "peak_memory_in_bytes", 0) or held,
        "temporary": memory.temp_size_in_bytes,
        "copies": found.copied(LARGE),
        "largest copy": max(found.copies, default=0),
        "sent": sum(one.bytes * one.times for one in inside),
        "large": sorted({one.bytes for one in inside if one.kind == "all-gather" and one.bytes > LARGE}),
    }


COLUMNS = ("decode", "before", "reader", "trace + compile, s", "peak GiB", "temporaries / cache")
MORE = ("copies above 1 MB", "MB sent a step", "all-gathers above 1 MB")


def row(name: str, found: dict[str, Any]) -> list[str]:
    """A case's row of the table."""
    return [
        name,
        CASES[name].before,
        found["reader"],
        f"{found['traced']:.0f} + {found['compiled']:.0f}",
        f"{found['peak'] / GIGA:.1f}",
        f"{found['temporary'] / found['cache']:.1%}",
        f"{found['copies']:.0f}",
        f"{found['sent'] / 1e6:.1f}",
        f"{len(found['large'])}",
    ]
