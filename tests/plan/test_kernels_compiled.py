"""Training steps compiled for accelerators that are not here: their kernels, and no array with the square of a row.

Needs the compilers, `pip install 'tunix[plan-tpu,plan-gpu]'`, and tokamax; each is set up in a process of its own.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from tests.trainers import PLAIN
from tunix.plan.chips import chip_of
from tunix.plan.topology import COMPILERS

LENGTH, LAYERS = 8192, 2
TPUS = ("v5e:1x1", "v5p:1x1x1", "v6e:1x1")
CODE = "import sys; from tests.plan.test_kernels_compiled import compile_for; compile_for(*sys.argv[1:])"
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
    from tunix.algorithms.sft.algorithm import SFT
    from tunix.algorithms.sft.config import SFTConfig
    from tunix.config import MeshConfig
    from tunix.mesh import build_mesh
    from tunix.models.model import Model
    from tunix.plan import programs
    from tunix.plan import topology as topologies
    from tunix.plan.account import account
    from tunix.plan.hlo import arrays, parsed
    from tunix.trainer.config import OptimizerConfig
    from tunix.trainer.microbatches import Microbatcher
    from tunix.trainer.optimizer import build_optimizer, build_schedule
    from tunix.trainer.spec import TrainerSpec

    topologies.prepare()
    topologies.hasten(chip_of(topology).platform)
    mesh = build_mesh(MeshConfig(), topologies.devices_of(topology))
    sizes: Mapping[str, Any] = {"d_model": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "ffn": 512}
    config = replace(PLAIN, vocab_size=1024, num_layers=LAYERS, **sizes)
    if kinds == "windows":
        config = replace(config, window=512, local_layers=(True, False))
    model, settings = Model(config, dtype="bfloat16", remat="block"), OptimizerConfig()
    spec = TrainerSpec(
        model=model,
        mesh=mesh,
        optimizer=build_optimizer(settings, 10, model.axes),
        schedule=build_schedule(settings, 10),
        microbatcher=Microbatcher(1, mesh),
        length=LENGTH,
        seed=0,
    )
    params = model.abstract(dict.fromkeys(model.shapes, "float32"), mesh)
    batch = programs.BatchShape(1, 1, LENGTH, 8)
    compiled = programs.step(spec, params, {}, batch, SFT(SFTConfig()).objective).compile()
    program = parsed(compiled.as_text())
    every = (one.kind for home in program.computations.values() for one in home.values())
    largest = max(math.prod(shape) for kind in every for _, shape in arrays(kind))
    peak = compiled.memory_analysis().peak_memory_in_bytes
    print(json.dumps({"kernels": account(compiled.as_text()).kernels, "largest": largest, "peak": peak}))


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "kinds"), CASES)
def test_a_step_has_its_kernels_and_no_square_of_a_row(topology: str, kinds: str):
    if not installed(topology):
        pytest.skip(f"the compiler of {topology} is not installed")
    mine = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    # A compile cache does not look at the scopes from which loops are counted.
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, topology, kinds], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    mine = {name: times for name, times in found["kernels"].items() if "tpu_custom_call" in name or "mosaic" in name}
    # The forward pass, the gradient by queries, and that by keys and values: of each layer once.
    assert sum(mine.values()) == 3 * LAYERS, found["kernels"]
    # The largest array: a row's vectors of the MLP, not LENGTH x LENGTH scores.
    assert found["largest"] < LENGTH**2 / 4
    assert found["peak"] < 2**30
