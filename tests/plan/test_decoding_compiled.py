"""The sampler's programs compiled for accelerators that are not here: no second cache, no gathered weights.

Needs the compilers, `pip install '.[plan-tpu,plan-gpu]'`; each is set up in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.test_kernels_compiled import installed, unknown_loops
from tests.trainers import PLAIN
from tunix.util.chips import chip_of

CODE = "import sys; from importlib import import_module as read; getattr(read(sys.argv[1]), sys.argv[2])(*sys.argv[3:])"
SIZES: Mapping[str, Any] = {"d_model": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "ffn": 2048}
CONFIG = replace(PLAIN, vocab_size=4096, num_layers=2, **SIZES)
WEIGHTS = 2 * (1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 2048)
"""Of CONFIG's layers' matrices."""
READERS = {"v5e:1x1": "ragged", "v5p:1x1x1": "ragged", "v6e:1x1": "ragged", "h100:1": "triton"}
MESHES = [{"data": 8, "fsdp": 1}, {"fsdp": 8}, {"fsdp": 1, "tensor": 8}, {"fsdp": 2, "tensor": 4}]


def compile_for(topology: str, mesh: str, kinds: str, cache: str) -> None:
    """Compiles decoding and a piece and prints what the programs hold; called in a process of its own."""
    from benchmarks.compiled_engine import EngineCase, measured
    from tunix.config import MeshConfig
    from tunix.models.model import Model

    config = CONFIG
    if kinds == "windows":
        config = replace(config, window=512, local_layers=(True, False), attention_softcap=50.0)
    case = EngineCase("", topology, 64, 2048, MeshConfig(**json.loads(mesh)), cache=cache or None)  # pyright: ignore
    print(json.dumps(measured(case, Model(config, dtype="bfloat16"))))


def compile_pieces_for(topology: str) -> None:
    """Compiles a long piece on each device and prints its tokens and what its instructions make, a layer's once; in a
    process of its own."""
    from benchmarks.programs import account, parsed
    from tunix.config import MeshConfig
    from tunix.mesh import build_mesh
    from tunix.models.model import Model
    from tunix.plan import programs
    from tunix.rollout.engine.engine import Engine
    from tunix.util import chips

    chips.prepare()
    devices = chips.devices_of(topology)
    model, mesh = Model(CONFIG, dtype="bfloat16"), build_mesh(MeshConfig(data=len(devices), fsdp=1), devices)
    sizes = Engine(model, mesh, slots=8 * len(devices), max_length=2048).sizes
    weights = programs.views(model, mesh, model.abstract(dict.fromkeys(model.shapes, model.dtype), mesh))
    lowered = programs.prefilling(model, mesh, weights, programs.state_of(model, mesh, sizes), sizes)
    text = lowered.compile().as_text()
    assert text is not None
    sent = sum(one.bytes * one.times for one in account(text).collectives)
    made = sum(instruction.size for home in parsed(text).computations.values() for instruction in home.values())
    print(json.dumps({"tokens": sizes.piece * sizes.shards, "made": made, "sent": sent}))


def compile_sampler_for(topology: str, kinds: str, layers: str, *names: str) -> None:
    """Compiles programs of a sampler, all where no name is told, and prints what they hold; called in a process of its
    own. Kinds: `windows` in one of two layers, `experts`, `deltanet` in three of four."""
    import jax

    from tunix.config import MeshConfig
    from tunix.mesh import build_mesh, bytes_of
    from tunix.models.config import EXPERTS, Experts
    from tunix.models.families.table import FAMILIES
    from tunix.models.model import Model
    from tunix.plan import programs
    from tunix.rollout.engine.engine import Engine, warmup_calls
    from tunix.util import chips

    chips.prepare()
    mesh = build_mesh(MeshConfig(), chips.devices_of(topology))
    number = int(layers)
    configs = {
        # The other of two layers has a kind of pages of its own.
        "windows": replace(CONFIG, num_layers=number, window=512, local_layers=(True, False) * (number // 2)),
        "experts": replace(CONFIG, num_layers=number, ffn=512, experts=Experts(8, 2), feed_forward=EXPERTS),
        "deltanet": replace(FAMILIES["qwen3_5"].small, vocab_size=4096),
    }
    model = Model(configs[kinds], dtype="bfloat16")
    sizes = Engine(model, mesh, slots=64, max_length=2048).sizes
    weights = programs.views(model, mesh, model.abstract(dict.fromkeys(model.shapes, model.dtype), mesh))
    state, answer = programs.state_of(model, mesh, sizes), []
    with jax.set_mesh(mesh):
        for call in warmup_calls(model, weights, sizes):
            name = call.program.__name__
            if not names or name in names:
                compiled = call.lowered(state).compile()
                memory, text = compiled.memory_analysis(), compiled.as_text()
                assert memory is not None, "this compiler knows its memory"
                assert text is not None, "this compiler shows its program"
                sizes_of = {"temporary": memory.temp_size_in_bytes, "aliased": memory.alias_size_in_bytes}
                answer.append({"name": name, "loops": unknown_loops(text), **sizes_of})
    print(json.dumps({"programs": answer, "cache": bytes_of(state.caches)}))


def found(
    topology: str, mesh: Mapping[str, int] | None = None, kinds: str = "whole", cache: str = ""
) -> dict[str, Any]:
    """What the programs hold, or the test is left out."""
    return told(compile_for, topology, json.dumps(mesh or {}), kinds, cache)


def told(function: Callable[..., None], topology: str, *words: str) -> dict[str, Any]:
    """What a function prints in a process of its own, or the test is left out."""
    if not installed(topology):
        pytest.skip(f"the compiler of {topology} is not installed")
    mine = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", CODE, function.__module__, function.__name__, topology, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_copies(topology: str, program: dict[str, Any]) -> None:
    """No pages are copied. A TPU lays out the weights of q, k and v anew once a dispatch, and what sampling sorts."""
    assert program["largest copy"] < 0.1 * program["cache"]
    if chip_of(topology).platform == "gpu":
        assert program["copies"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["whole", "windows"])
@pytest.mark.parametrize("topology", READERS)
def test_a_dispatch_reads_pages_in_their_places(topology: str, kinds: str):
    """Two layers' pages are 1 GiB, those of a window a third: copied once they would be half of the cache at least."""
    program = found(topology, kinds=kinds)
    assert program["reader"] == READERS[topology]
    assert program["temporary"] < 0.1 * program["cache"]
    check_copies(topology, program)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "cache"), [("h100:1", "int8"), ("h100:1", "fp8"), ("v5p:1x1x1", "fp8")])
def test_numbers_of_8_bits_are_read_in_their_places(topology: str, cache: str):
    program = found(topology, cache=cache)
    assert program["reader"] == READERS[topology]
    assert program["temporary"] < 0.1 * program["cache"]
    check_copies(topology, program)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_step_gathers_weights(mesh: dict[str, int]):
    """A layer has 17 MB of weights; what is gathered of a step are the last states or logits, below a megabyte."""
    program = found("h100:8", mesh)
    assert program["large"] == []
    assert program["temporary"] < 0.1 * program["cache"]


def check_loops(programs: list[dict[str, Any]]) -> None:
    """A loop of unknown length costs a GPU a round trip to the host per turn: there is none but that over tokens."""
    for program in programs:
        assert program["loops"] == (["jit(decode)/while"] if program["name"] == "decode" else []), program


def test_pages_are_copied_in_their_places_without_a_loop():
    """32 pages of a layer at a time, however many layers there are: 128 tokens of 8 heads, keys and values."""
    copying = told(compile_sampler_for, "h100:1", "windows", "8", "copy_pages")
    check_loops(copying["programs"])
    (program,) = copying["programs"]
    assert program["aliased"] >= copying["cache"]
    assert program["temporary"] < 1.01 * 32 * 128 * 8 * 2 * 128 * 2


@pytest.mark.slow
def test_pieces_write_and_read_pages_where_they_are():
    """Nothing as large as a layer's pages is there beside them, and no program loops over data but over tokens."""
    sampler = told(compile_sampler_for, "h100:1", "windows", "2")
    check_loops(sampler["programs"])
    assert {program["name"] for program in sampler["programs"]} == {"prefill", "copy_pages", "decode"}
    assert all(program["aliased"] >= sampler["cache"] for program in sampler["programs"])
    assert all(program["temporary"] < 0.1 * sampler["cache"] for program in sampler["programs"])


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["experts", "deltanet"])
def test_no_program_of_a_sampler_loops_over_data_but_over_tokens(kinds: str):
    check_loops(told(compile_sampler_for, "h100:1", kinds, "2")["programs"])


@pytest.mark.slow
def test_64_devices_compute_8_times_the_prompts_of_8():
    """Each computes a piece of its own, and exchanges nothing."""
    few, many = (told(compile_pieces_for, f"h100:{number}") for number in (8, 64))
    assert many["tokens"] == 8 * few["tokens"] == 64 * 2048
    assert few["made"] > 0
    assert many["made"] == pytest.approx(few["made"], rel=0.02)
    assert many["sent"] == few["sent"] == 0
