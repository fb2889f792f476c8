"""How often kernels, and copies above 1 MB, run in programs of training and sampling that are compiled for an H100.

Needs the compiler, `pip install '.[plan-gpu]'`, and tokamax. Which kernels a compiler clones, and what it copies, is
another thing in each version of jax: the numbers here are arithmetic, and hold for all of them.
"""

import json

import pytest

from tests.plan.test_decoding_compiled import CONFIG, told

LENGTH = 2048
LAYERS = CONFIG.num_layers
MATRICES = 7
"""q, k, v, o, gate, up and down of a layer."""
STACKED = 7
"""What a layer keeps for its backward pass above 1 MB: its input, what attention mixed, q, k, v, gate and up. The
compiler multiplies k and v at once, and cuts one off: a copy more."""
EXPECTED = {
    # Attention forwards, backwards for the queries, backwards for keys and values. What is kept is written once; of it
    # q, k and v are read by kernels, which want them in one piece; each matrix has a gradient. jax 0.12 transposes what
    # attention mixed, of all layers at once.
    "step": (3 * LAYERS, LAYERS * (STACKED + 1 + 3 + MATRICES) + 1),
    # Weights in the dtype of the computation are cut from their stack.
    "scoring": (LAYERS, LAYERS * (MATRICES + 1)),
    # Attention within the piece, and to the pages before it. The engine's weights are in no stack.
    "prefill": (2 * LAYERS, LAYERS),
    # A token's step: pages are read in their places.
    "decode": (LAYERS, 0),
}
"""Program -> how often kernels of attention run, and the most copies."""


def compile_for(topology: str, name: str) -> None:
    """Compiles a program and prints how often kernels and copies run; called in a process of its own."""
    from benchmarks.programs import account
    from benchmarks.shapes import Shape
    from tunix.algorithms.sft.algorithm import SFT
    from tunix.algorithms.sft.config import SFTConfig
    from tunix.config import MeshConfig
    from tunix.mesh import build_mesh
    from tunix.models.model import Model
    from tunix.plan import programs
    from tunix.rollout.engine.engine import Engine
    from tunix.trainer.config import OptimizerConfig
    from tunix.trainer.logprobs import Scorer
    from tunix.trainer.microbatches import Microbatcher, TrainerSpec
    from tunix.trainer.optimizer import build_optimizer, build_schedule
    from tunix.util import chips

    chips.prepare()
    mesh = build_mesh(MeshConfig(fsdp=1), chips.devices_of(topology))
    model, microbatcher = Model(CONFIG, dtype="bfloat16"), Microbatcher(1, mesh)
    batch = programs.microbatches_of(Shape("", CONFIG, 1, LENGTH).batch(), microbatcher)
    exact, rounded = (model.abstract(dict.fromkeys(model.shapes, dtype), mesh) for dtype in ("float32", "bfloat16"))
    if name == "step":
        settings = OptimizerConfig()
        spec = TrainerSpec(
            model=model,
            mesh=mesh,
            optimizer=build_optimizer(settings, 10, model.axes),
            schedule=build_schedule(settings, 10),
            microbatcher=microbatcher,
            length=LENGTH,
            seed=0,
        )
        lowered = programs.step(spec, exact, {}, batch, SFT(SFTConfig()).objective)
    elif name == "scoring":
        lowered = programs.scoring(Scorer(model, microbatcher, LENGTH), rounded, batch, "logprobs")
    else:
        sizes = Engine(model, mesh, slots=16, max_length=1024).sizes
        weights, state = programs.views(model, mesh, rounded), programs.state_of(model, mesh, sizes)
        lower = {"prefill": programs.prefilling, "decode": programs.decoding}[name]
        lowered = lower(model, mesh, weights, state, sizes)
    text = lowered.compile().as_text()
    assert text is not None
    found = account(text)
    ours = ("mosaic_gpu", "triton")
    kernels = sum(times for kernel, times in found.kernels.items() if any(word in kernel for word in ours))
    print(json.dumps({"kernels": kernels, "copies": found.copied(2**20), "all": found.kernels}))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_kernels_and_copies_run_as_often_as_arithmetic_says(name: str):
    found = told(compile_for, "h100:1", name)
    kernels, most = EXPECTED[name]
    assert found["kernels"] == kernels, found
    assert found["copies"] <= most, found
