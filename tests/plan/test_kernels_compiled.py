"""Training steps compiled for accelerators that are not here: their kernels, no array with the square of a row, no
second copy of frozen experts, and tokens that go to their experts' devices alone.

Needs the compilers, `pip install '.[plan-tpu,plan-gpu]'`, and tokamax; each is set up in a process of its own.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from tests.trainers import PLAIN
from tunix.util.chips import COMPILERS, chip_of
from tunix.util.loops import SCOPE

LENGTH, LAYERS = 8192, 2
TPUS = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1")
CODE = "import sys; from tests.plan.test_kernels_compiled import compile_for; compile_for(*sys.argv[1:])"
BACKWARD = "import sys; from tests.plan.test_kernels_compiled import compile_backward; compile_backward(*sys.argv[1:])"
CASES = [(topology, kinds) for topology in (*TPUS, "h100:1") for kinds in ("whole", "windows")]


def installed(topology: str) -> bool:
    def there(module: str) -> bool:
        try:
            return find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    platform = chip_of(topology).platform
    return any(map(there, COMPILERS[platform])) and (platform == "tpu" or there("tokamax"))


def compile_for(topology: str, kinds: str) -> None:
    """Compiles a step over one packed row and prints what the program holds; called in a process of its own."""
    from benchmarks.programs import account, arrays, bits, largest, parsed
    from benchmarks.shapes import Shape
    from tunix.algorithms.sft.algorithm import SFT
    from tunix.algorithms.sft.config import SFTConfig
    from tunix.config import MeshConfig
    from tunix.mesh import build_mesh
    from tunix.models.config import EXPERTS, Experts
    from tunix.models.model import Model
    from tunix.plan import programs
    from tunix.trainer.config import OptimizerConfig
    from tunix.trainer.microbatches import Microbatcher, TrainerSpec
    from tunix.trainer.optimizer import build_optimizer, build_schedule
    from tunix.util import chips

    chips.prepare()
    chips.hasten(chip_of(topology).platform)
    devices = chips.devices_of(topology)
    mesh = build_mesh(MeshConfig(fsdp=1, expert=len(devices)), devices)
    sizes: Mapping[str, Any] = {"d_model": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "ffn": 512}
    config = replace(PLAIN, vocab_size=1024, num_layers=LAYERS, **sizes)
    if kinds == "windows":
        config = replace(config, window=512, local_layers=(True, False))
    if kinds == "experts":  # 192 numbers wide: for Triton's kernels
        config = replace(config, d_model=192, experts=Experts(8, 2), feed_forward=EXPERTS)
    model, settings = Model(config, dtype="bfloat16", remat="block"), OptimizerConfig()
    spec = TrainerSpec(
        model=model,
        mesh=mesh,
        optimizer=build_optimizer(settings, 10, model.axes),
        schedule=build_schedule(settings, 10),
        microbatcher=Microbatcher(len(devices), mesh),
        length=LENGTH,
        seed=0,
    )
    params = model.abstract(dict.fromkeys(model.shapes, "float32"), mesh)
    trained = {name: x for name, x in params.items() if kinds != "experts" or "norm" in name}
    frozen = {name: x.update(dtype="bfloat16") for name, x in params.items() if name not in trained}
    batch = programs.microbatches_of(Shape("", config, len(devices), LENGTH).batch(), spec.microbatcher)
    compiled = programs.step(spec, trained, frozen, batch, SFT(SFTConfig()).objective).compile()
    program = parsed(compiled.as_text())
    every = (one.kind for home in program.computations.values() for one in home.values())
    most = max(math.prod(shape) * bits(dtype) // 8 for kind in every for dtype, shape in arrays(kind))
    peak, written = compiled.memory_analysis().peak_memory_in_bytes, largest(compiled.as_text(), 1000)
    found = account(compiled.as_text())
    loops = unknown_loops(compiled.as_text())
    answer = {
        "kernels": found.kernels,
        "loops": loops,
        "largest": most,
        "peak": peak,
        "written": [kind for _, kind, _ in written],
    }
    print(json.dumps(answer | {"sent": {one.kind: one.bytes for one in sorted(found.collectives, key=_bytes)}}))


def unknown_loops(text: str) -> list[str]:
    """Where the loops of a compiled program come from whose trip count XLA does not know."""
    loops = [line for line in text.splitlines() if " while(" in line and "known_trip_count" not in line]
    return [re.findall(r'op_name="([^"]*)"', line)[-1] for line in loops]


def compile_backward(head_dim: str) -> None:
    """Compiles Hopper's backward kernels over a row that shares prompts, with a window and a soft cap."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tunix.models.attention import mosaic
    from tunix.models.attention.inputs import Segments
    from tunix.util import chips

    chips.prepare()
    mesh = Mesh(chips.devices_of("h100:1"), ("alone",))

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 1024, *shape), dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def backward(q, k, v, lse, pull, ids, positions, parents):
        view = Segments(ids, positions, parents, window=300)
        return mosaic.backward(q, k, v, view, (q, lse), pull, scale=0.1, softcap=20.0)

    q, k = (array(heads, int(head_dim)) for heads in (4, 2))
    with jax.set_mesh(mesh):
        inputs = (q, k, k, array(4, dtype=jnp.float32), q, *(array(dtype=jnp.int32),) * 3)
        print(json.dumps({"calls": jax.jit(backward).lower(*inputs).compile().as_text().count(" custom-call(")}))


def _bytes(one: Any) -> int:
    return one.bytes


def compiled_for(topology: str, *settings: str, code: str = CODE) -> dict[str, Any]:
    """What the code prints, e.g. `compile_for`; skips the test where the compiler is not installed."""
    if not installed(topology):
        pytest.skip(f"the compiler of {topology} is not installed")
    mine = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    # A compile cache does not look at the scopes from which loops are counted.
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code, *settings], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "kinds"), CASES)
def test_a_step_has_its_kernels_and_no_square_of_a_row(topology: str, kinds: str):
    found = compiled_for(topology, topology, kinds)
    mine = {name: times for name, times in found["kernels"].items() if "tpu_custom_call" in name or "mosaic" in name}
    # The forward pass, the gradient by queries, and that by keys and values: of each layer once.
    assert sum(mine.values()) == 3 * LAYERS, found["kernels"]
    # The largest array, in bytes: a row's vectors of the MLP, not LENGTH x LENGTH scores.
    assert found["largest"] < LENGTH**2
    assert found["peak"] < 2**30
    # Each turn of such a loop costs a GPU a round trip to the host: they are of few turns, which multiply by the whole
    # vocabulary. The text of a TPU's program has no trip counts.
    if chip_of(topology).platform == "gpu":
        assert all(re.search(f"{SCOPE}([0-9]+)", loop) for loop in found["loops"]), found["loops"]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["h100:1", "v5p:1x1x1"])
def test_frozen_experts_are_not_copied_for_all_layers_at_once(topology: str):
    compiled = compiled_for(topology, topology, "experts")
    layer = {"bf16[8,192,512]", "bf16[8,512,192]"}
    stacks = {f"bf16[{LAYERS}," + kind.removeprefix("bf16[") for kind in layer}
    written = set(compiled["written"])
    assert not stacks & written, written
    if topology == "h100:1":
        # Triton's kernels read a layer's matrices where they are, transposed ones too.
        assert any("xla.gpu.triton" in kernel for kernel in compiled["kernels"]), compiled["kernels"]
        assert not layer & written, written


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "width"), [("h100:8", 192), ("v6e:2x4", 256)])
def test_tokens_are_sent_to_the_devices_of_their_experts_and_gathered_nowhere(topology: str, width: int):
    """A TPU sends rows of whole 128 numbers."""
    sent = compiled_for(topology, topology, "experts")["sent"]
    # A block of a device's tokens for each of the others.
    assert sent["ragged-all-to-all"] == 7 * LENGTH * width * 2
    assert sent.get("all-gather", 0) < LENGTH * 192, sent


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", ["64", "96", "256"])
def test_backward_kernels_of_hopper_compile(head_dim: str):
    """Two for a row's own segments, two for the prompts that they share."""
    assert compiled_for("h100:1", head_dim, code=BACKWARD)["calls"] == 4
