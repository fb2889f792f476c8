"""Products of 8-bit floats compiled for an H100 that is not here: they are in its programs, and a step writes weights
in 8 bits, of a layer at a time, and never in 16 or 32.

Needs the compiler, `pip install '.[plan-gpu]'`; it is set up in a process of its own.
"""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.test_decoding_compiled import told
from tests.trainers import PLAIN
from tunix.models.families.table import small

D, F, LAYERS = 256, 1536, 3
CONFIG = replace(PLAIN, vocab_size=1024, num_layers=LAYERS, d_model=D, num_heads=4, num_kv_heads=2, head_dim=128, ffn=F)


EXPERTS = replace(
    small("qwen3_moe"),
    vocab_size=1024,
    num_layers=LAYERS,
    d_model=D,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    ffn=512,
)
CONFIGS = {"dense": CONFIG, "mixture": EXPERTS}


def compile_step_for(topology: str, compute: str, shape: str = "dense") -> None:
    """Compiles a step of training and prints its products and what it writes."""
    from benchmarks.shapes import Shape
    from tunix.algorithms.sft.algorithm import SFT
    from tunix.algorithms.sft.config import SFTConfig
    from tunix.config import MeshConfig
    from tunix.mesh import build_mesh
    from tunix.models.model import Model
    from tunix.plan import programs
    from tunix.trainer.config import OptimizerConfig
    from tunix.trainer.microbatches import Microbatcher, TrainerSpec
    from tunix.trainer.optimizer import build_optimizer, build_schedule
    from tunix.util import chips

    chips.prepare()
    mesh, settings = build_mesh(MeshConfig(), chips.devices_of(topology)), OptimizerConfig()
    config = CONFIGS[shape]
    model = Model(config, dtype="bfloat16", remat="block", compute="fp8" if compute == "fp8" else None)
    spec = TrainerSpec(
        model=model,
        mesh=mesh,
        optimizer=build_optimizer(settings, 10, model.axes),
        schedule=build_schedule(settings, 10),
        microbatcher=Microbatcher(1, mesh),
        length=2048,
        seed=0,
    )
    params = model.abstract(dict.fromkeys(model.shapes, "float32"), mesh)
    batch = programs.microbatches_of(Shape("", config, 1, 2048).batch(), spec.microbatcher)
    tell(programs.step(spec, params, {}, batch, SFT(SFTConfig()).objective))


def compile_decoding_for(topology: str, compute: str, shape: str = "dense") -> None:
    """Compiles the decoding of a sampler and prints its products and what it writes."""
    from tunix.config import MeshConfig
    from tunix.mesh import build_mesh
    from tunix.models.model import Model
    from tunix.plan import programs
    from tunix.rollout.engine.engine import Engine
    from tunix.util import chips

    chips.prepare()
    mesh = build_mesh(MeshConfig(), chips.devices_of(topology))
    model = Model(CONFIGS[shape], dtype="bfloat16", compute="fp8" if compute == "fp8" else None)
    sizes = Engine(model, mesh, slots=64, max_length=512).sizes
    weights = programs.views(model, mesh, model.abstract(dict.fromkeys(model.shapes, "float32"), mesh))
    tell(programs.decoding(model, mesh, weights, programs.state_of(model, mesh, sizes), sizes))


def tell(lowered: Any) -> None:
    """Prints what the compiled program multiplies and writes."""
    from benchmarks.programs import dtype, largest, parsed

    text = lowered.compile().as_text()
    homes = parsed(text).computations.values()
    dots = [(dot.operands[:2], home) for home in homes for dot in home.values() if dot.opcode == "dot"]
    # Kernels for experts have the rows and the matrices last.
    calls = [(call.operands[-2:], home) for home in homes for call in home.values() if call.opcode == "custom-call"]
    kinds = [[dtype(home[name].kind) for name in operands] for operands, home in dots + calls]
    types = [" x ".join(x) for x in kinds[: len(dots)]] + [" x ".join(x) for x in kinds[len(dots) :] if "f8" in x[-1]]
    print(json.dumps({"products": types, "written": [kind for _, kind, _ in largest(text, 10_000)]}))


def matrices(written: list[str]) -> set[str]:
    """The dtypes in which matrices of the ffn are written: of a layer, and of all layers at once."""
    sizes = {"layer": (D, F), "layers": (LAYERS, D, F)}
    by_size = {tuple(sorted(size)): name for name, size in sizes.items()}
    kinds = [(kind.split("[")[0], tuple(map(int, re.findall(r"\d+", kind.split("[")[1])))) for kind in written]
    found = [(dtype, by_size.get(tuple(sorted(n for n in shape if n > 1)))) for dtype, shape in kinds]
    return {f"{dtype} of the {name}" for dtype, name in found if name}


@pytest.mark.slow
def test_a_step_multiplies_8_bits_and_writes_no_wide_weights():
    step, plain = (told(compile_step_for, "h100:1", compute) for compute in ("fp8", "none"))
    # XLA joins q, k and v, and gate and up: four products of a layer forward, and three that are recomputed, all but
    # the last. Then the gradients of the inputs of seven matrices.
    assert step["products"].count("f8e4m3fn x f8e4m3fn") == 4 + 3
    assert step["products"].count("f8e5m2 x f8e4m3fn") == 7
    assert not [x for x in plain["products"] if "f8" in x]
    # bfloat16 of all layers: the gradients, as the products return them. In bfloat16 a layer's cast weights too.
    assert matrices(step["written"]) == {"f8e4m3fn of the layer", "bf16 of the layers"}
    assert matrices(plain["written"]) == {"bf16 of the layer", "bf16 of the layers"}


@pytest.mark.slow
def test_a_step_multiplies_experts_in_8_bits():
    step, plain = (told(compile_step_for, "h100:1", compute, "mixture") for compute in ("fp8", "none"))
    # Forward three products of experts and two of attention, q, k and v being joined; recomputed are all but the last
    # of both. Then the gradients of the inputs of seven matrices.
    assert step["products"].count("f8e4m3fn x f8e4m3fn") == (3 + 2) + (2 + 2)
    assert step["products"].count("f8e5m2 x f8e4m3fn") == 3 + 4
    copies = {"[1,8,256,512]", "[1,8,512,256]"}
    assert {kind.split("[")[0] for kind in step["written"] if kind.removeprefix("f8e4m3fn") in copies} == {"f8e4m3fn"}
    assert not [kind for kind in step["written"] if kind.removeprefix("bf16") in copies]
    assert [kind for kind in plain["written"] if kind.removeprefix("bf16") in copies]


@pytest.mark.slow
def test_decoding_reads_weights_in_8_bits():
    decoding = told(compile_decoding_for, "h100:1", "fp8")
    assert decoding["products"].count("f8e4m3fn x f8e4m3fn") == 4 * LAYERS
    assert [x for x in decoding["products"] if "f8" not in x] == ["bf16 x bf16"]  # the head
    # They are read as they are stored: nothing is transposed for the kernels.
    assert matrices(decoding["written"]) == set()
    decoding = told(compile_decoding_for, "h100:1", "fp8", "mixture")
    assert decoding["products"].count("f8e4m3fn x f8e4m3fn") == 5 * LAYERS
    assert not [kind for kind in decoding["written"] if "512,256]" in kind or "256,512]" in kind]
