"""Gradients of matrices summed over devices: in float32 where a recipe asks for it, and split as the weights are."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.shapes import Shape
from tests.trainers import PLAIN, sequences, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import GradientSums, MeshConfig
from tunix.data.packing import pack
from tunix.mesh import build_mesh, sharding
from tunix.models.layers import project
from tunix.models.model import Model
from tunix.plan import programs
from tunix.trainer.microbatches import Microbatcher, TrainerSpec
from tunix.trainer.step import StepInputs, TrainState, gradients_of

SFT_LOSS = SFT(SFTConfig()).objective
EIGHT = MeshConfig(fsdp=8)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 259.5), ("bfloat16", 260.0)])
def test_a_matrix_has_gradients_of_its_own_dtype(dtype, expected):
    """Of eight rows, one to a device: 256 + 7 * 0.5 is 259.5, and bfloat16 has only even numbers from 256 on."""
    mesh = build_mesh(EIGHT)
    x, w = jnp.ones((8, 1, 1), jnp.bfloat16), jnp.ones((1, 1), dtype)
    pull = jnp.full((8, 1, 1), 0.5, jnp.bfloat16).at[0].set(256)

    def gradient(x, w, pull):
        return jax.vjp(lambda w: project("BTD,DF->BTF", x, w), w)[1](pull)[0]

    with jax.set_mesh(mesh):
        rows = sharding(("rows", None, None), x.shape, mesh)
        found = jax.jit(gradient, in_shardings=(rows, None, rows))(x, w, pull)
    assert found.dtype == dtype
    assert float(found[0, 0]) == expected


def difference(gradient_sums: GradientSums) -> float:
    """The largest difference of a matrix's gradient on one and on eight devices, relative to its size."""
    batch = pack(sequences(8), 8, 24, packing=False)
    kinds = {"dtype": "bfloat16", "gradient_sums": gradient_sums, "rows": 8}
    found = []
    for more in ({}, {"devices": 8, "mesh": EIGHT}):
        client = trainer(**kinds, **more)
        client.forward_backward(batch, SFT_LOSS)
        found.append(jax.device_get(client.learner.gradients))
    one, eight = found
    names = [name for name in one if name.startswith("layers/") and not name.endswith("norm/w")]
    assert all(one[name].dtype == np.float32 for name in names)
    return max(np.abs(one[name] - eight[name]).max() / np.abs(one[name]).max() for name in names)


@pytest.mark.slow
def test_float32_sums_do_not_depend_on_the_number_of_devices():
    """A sum in bfloat16 is off by up to 2^-9 of itself; one in float32 by 2^-24 for each of its 192 terms."""
    assert difference("float32") < 192 * 2**-24
    assert difference("compute") > 2**-11


@pytest.mark.slow
def test_gradients_and_their_sums_over_microbatches_are_split_as_the_weights():
    mesh, model = build_mesh(EIGHT), Model(replace(PLAIN, ffn=80), dtype="bfloat16")
    params = model.abstract(dict.fromkeys(model.shapes, "float32"), mesh)
    rule = optax.sgd(0.1), optax.constant_schedule(0.1)
    spec = TrainerSpec(model, mesh, *rule, Microbatcher(8, mesh), length=24, seed=0)
    batch = programs.microbatches_of(Shape("", PLAIN, 16, 24).batch(), spec.microbatcher)

    def run(params, batch):
        state = TrainState(params, (), jnp.int32(0))
        return gradients_of(spec, state, StepInputs({}, None, (), batch), jax.random.key(0), SFT_LOSS)[0]

    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(params, batch).compile()
    for name, place in compiled.output_shardings.items():
        assert place.is_equivalent_to(params[name].sharding, len(params[name].shape)), name
    # [L D F] of gate and up, split over D; whole D is that of one layer at a time.
    text = compiled.as_text()
    assert "f32[2,4,80]" in text
    assert "bf16[2,4,80]" in text
    assert "[2,32,80]" not in text
