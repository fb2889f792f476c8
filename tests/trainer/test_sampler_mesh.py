"""The mesh that samples: which one is chosen, what is refused, and what its devices send for each token."""

from dataclasses import replace
from functools import partial
from itertools import chain

import jax
import numpy as np
import pytest

from benchmarks.programs import account
from tests.marks import slow
from tests.rollout.engine.test_engine_parity import prompts, random_params, small_engine
from tests.tiny_models import one_device
from tests.trainers import PLAIN
from tunix.config import MeshConfig
from tunix.errors import UserError
from tunix.mesh import build_mesh
from tunix.models.model import Model
from tunix.plan import programs
from tunix.rollout.config import RolloutMeshConfig
from tunix.rollout.engine.engine import Engine
from tunix.trainer.sampler_mesh import copy_bytes, room_of, sampler_mesh
from tunix.types import Sampling

MODEL = Model(PLAIN)
EIGHT = MeshConfig(fsdp=8)
BYTES = 4 * (2 * (9216 // 2 * 2) + 2 * 96 * 32)
"""Of MODEL's matrices; the norms are small."""


@pytest.mark.parametrize(
    ("given", "memory", "shape"),
    [
        (EIGHT, None, (8, 1, 1, 1, 1)),
        (EIGHT, 4.1 * BYTES, (8, 1, 1, 1, 1)),
        (EIGHT, 3.9 * BYTES, (4, 1, 1, 1, 2)),
        # Two kv heads: no more than two devices can share a copy.
        (EIGHT, BYTES / 100, (4, 1, 1, 1, 2)),
        (MeshConfig(fsdp=4, tensor=2), None, (8, 1, 1, 1, 1)),
    ],
)
def test_a_copy_is_on_as_few_devices_as_have_room_for_it(given, memory, shape):
    mesh, line = sampler_mesh(build_mesh(given), None, MODEL, memory)
    assert mesh.devices.shape == shape
    assert line is not None
    assert line.startswith(f"sampling: a copy of the weights on each{' 2' if shape[4] == 2 else ''} of 8 device(s)")
    assert mesh.devices.flatten().tolist() == build_mesh(given).devices.flatten().tolist()


@pytest.mark.parametrize("tensor", [1, 2])
def test_weights_that_arrive_meanwhile_need_room_beside_those_before_them(tensor: int):
    """Of a device of 10 copies 8 may be taken: a copy (or half of one) goes to the weights, and one to newer ones."""
    mesh, copy = build_mesh(MeshConfig(fsdp=1, tensor=tensor), jax.devices()[:tensor]), copy_bytes(MODEL, MODEL.shapes)
    room = partial(room_of, 0.8, 10.0 * copy, mesh, MODEL, [], references=0)
    assert room() == pytest.approx((8 - 1 / tensor) * copy)
    assert room(newer=MODEL.shapes) == pytest.approx((8 - 2 / tensor) * copy)
    assert room(newer=["embed/w"]) == pytest.approx((8 - 1 / tensor) * copy - 4 * 96 * 32 / tensor)


def test_devices_that_need_no_other_mesh_keep_theirs():
    for mesh in (one_device(), build_mesh(MeshConfig(data=8, fsdp=1))):
        assert sampler_mesh(mesh, None, MODEL, None) == (mesh, None)


def test_what_does_not_divide_is_refused():
    mesh = build_mesh(EIGHT)
    chosen, _ = sampler_mesh(mesh, RolloutMeshConfig(tensor=2), MODEL, None)
    assert chosen.devices.shape == (4, 1, 1, 1, 2)
    with pytest.raises(UserError, match=r"rollout.mesh: tensor 4 does not divide 2 kv heads; tensor 2 would"):
        sampler_mesh(mesh, RolloutMeshConfig(tensor=4), MODEL, None)
    with pytest.raises(UserError, match=r"tensor 3 does not divide 8 devices, 4 query heads"):
        sampler_mesh(mesh, RolloutMeshConfig(tensor=3), MODEL, None)
    sampler_mesh(mesh, None, MODEL, None, 16)
    with pytest.raises(UserError, match=r"100 slots are not split evenly over 8 copies of the weights; 96 or 104"):
        sampler_mesh(mesh, None, MODEL, None, 100)
    with pytest.raises(UserError, match=r"3 slots are not split evenly over 8 copies of the weights; 8 would"):
        sampler_mesh(mesh, None, MODEL, None, 3)


@pytest.mark.parametrize("tensor", [*slow([1]), 2])
@pytest.mark.models
def test_weights_of_another_mesh_are_sampled_alike(tensor: int):
    trained = build_mesh(EIGHT)
    params = random_params(MODEL, trained)
    mesh, _ = sampler_mesh(trained, RolloutMeshConfig(tensor=tensor), MODEL, None)
    there = small_engine(MODEL, params, mesh=mesh, slots=8)
    assert there.hold().weights.layers[0]["gate/w"].sharding.shard_shape((32, 64)) == (32, 64 // tensor)
    here = small_engine(MODEL, {name: jax.device_put(np.asarray(x)) for name, x in params.items()}, slots=8)
    ours, theirs = (one.sample(prompts(96), 2, Sampling(max_tokens=12), seed=3) for one in (there, here))
    for one, other in zip(chain(*ours), chain(*theirs), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("given", [EIGHT, MeshConfig(data=8, fsdp=1), MeshConfig(fsdp=2, tensor=4)], ids=repr)
@pytest.mark.models
def test_no_weights_are_sent_for_a_token(given: MeshConfig):
    """Nothing but whether a slot is left to run; where a request wants alternatives, their scores (`top_k`)."""
    model = Model(replace(PLAIN, num_heads=8, num_kv_heads=4))
    trained = build_mesh(given)
    params = model.abstract(dict.fromkeys(model.shapes, "float32"), trained)

    def sent(mesh: jax.sharding.Mesh) -> list[int]:
        weights = programs.views(model, mesh, params)
        sizes = Engine(model, mesh, slots=16, max_length=128, page=32, steps=8).sizes
        state = programs.state_of(model, mesh, sizes)
        found = account(programs.decoding(model, mesh, weights, state, sizes).compile().as_text()).collectives
        return [one.bytes for one in found if one.loops and not one.scope.endswith("top_k")]

    ours = sent(sampler_mesh(trained, None, model, None)[0])
    assert len(ours) == 1
    assert ours[0] <= 8
    if given.fsdp > 1:
        # Of the weights, or of the slots' activations where those are smaller, as here.
        assert sum(sent(trained)) > 50 * sum(ours)


def test_a_layer_is_lowered_once_for_all_of_its_kind():
    """A kernel's lowering takes half a second, and layers are unrolled."""
    mesh = one_device()
    sizes = Engine(MODEL, mesh, slots=4, max_length=64, piece=64, page=16).sizes
    weights = programs.views(MODEL, mesh, MODEL.abstract(dict.fromkeys(MODEL.shapes, "float32"), mesh))
    text = programs.prefilling(MODEL, mesh, weights, programs.state_of(MODEL, mesh, sizes), sizes).as_text()
    assert text.count("func.func private @_layer") == 1
    assert text.count("call @_layer") == MODEL.config.num_layers > 1
