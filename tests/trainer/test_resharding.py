"""Weights on their way to a sampler on other devices: every bit arrives, after each update."""

from itertools import chain

import jax
import numpy as np
import pytest

from tests.marks import slow
from tests.trainer.test_step import SFT_LOSS
from tests.trainers import PLAIN, sequences, trainer
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.lora.config import AdapterConfig
from tunix.models.quantization.rules import Rule, Rules
from tunix.rollout.config import RolloutMeshConfig
from tunix.rollout.engine.engine import Engine
from tunix.run.setup import apart
from tunix.trainer.sampler_mesh import bring_of, sampler_mesh
from tunix.trainer.trainer import Trainer
from tunix.types import Sampling

INT4 = Rules(rules=(Rule(module=".*", weights="int4", tile=16),))
PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (2, 5, 9)]


def elsewhere(learning: Trainer, tensor: int) -> Engine:
    """An engine on the last four of eight devices; training has the first four."""
    model, mesh = learning.learner.spec.model, learning.learner.spec.mesh
    _, sampling = apart(RolloutMeshConfig(devices=4), jax.devices())
    assert sampling is not None
    mesh_there, _ = sampler_mesh(sampling, RolloutMeshConfig(tensor=tensor), model, None)
    moving = () if learning.learner.spec.adapter is None else tuple(learning.learner.state.params)
    return Engine(model, mesh_there, slots=8, max_length=64, moving=moving, bring=bring_of(model, mesh, mesh_there))


@pytest.mark.parametrize("tensor", [*slow([1]), 2])
@pytest.mark.models
def test_a_sampler_on_other_devices_samples_alike_after_each_update(tensor: int):
    here = trainer(mesh=MeshConfig(fsdp=4), devices=4)
    there = elsewhere(here, tensor)
    batch = pack(sequences(8), 8, 24, packing=True)
    for version in range(2):
        here.step(batch, SFT_LOSS)
        assert here.publish() == version + 1
        there.publish(here.learner.params, version + 1)
        ours, theirs = (one.sample(PROMPTS, 2, Sampling(max_tokens=12), seed=3) for one in (here, there))
        for one, other in zip(chain(*ours), chain(*theirs), strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.versions, other.versions)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert not set(there.hold().weights.top["embed/w"].devices()) & set(here.learner.spec.mesh.devices.flat)


def same_bits(one: Engine, other: Engine) -> None:
    """All that two engines sample from is equal to the last bit."""
    first, second = one.hold().weights, other.hold().weights
    for ours, theirs in zip((first.top, *first.layers), (second.top, *second.layers), strict=True):
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            assert array.dtype == theirs[name].dtype, name
            np.testing.assert_array_equal(np.asarray(array), np.asarray(theirs[name]), err_msg=name)


@pytest.mark.parametrize("rules", [None, INT4], ids=["plain", "rounded"])
@pytest.mark.models
def test_it_computes_with_the_same_bits_where_the_computation_is_in_bfloat16(rules: Rules | None):
    """The trainer rounds to a grid before it casts, and so has the sampler to."""
    learning = trainer(mesh=MeshConfig(fsdp=4), devices=4, dtype="bfloat16", rules=rules)
    learning.publish()
    there = elsewhere(learning, 1)
    there.publish(learning.learner.params, 0)
    assert isinstance(learning.sampler, Engine)
    same_bits(learning.sampler, there)


@pytest.mark.slow
def test_under_an_adapter_the_base_moves_once(monkeypatch: pytest.MonkeyPatch):
    learning = trainer(mesh=MeshConfig(fsdp=4), devices=4, dtype="bfloat16", adapter=AdapterConfig(rank=4))
    there = elsewhere(learning, 1)
    moved: list[str] = []
    bring = there._bring
    assert bring is not None
    monkeypatch.setattr(there, "_bring", lambda name, x: moved.append(name) or bring(name, x))
    for version in range(2):
        moved.clear()
        learning.step(pack(sequences(8), 8, 24, packing=True), SFT_LOSS)
        learning.publish()
        there.publish(learning.learner.params, version)
        assert isinstance(learning.sampler, Engine)
        same_bits(learning.sampler, there)
        assert len(moved) == len(set(moved))
        assert set(moved) == set(learning.learner.state.params if version else learning.learner.params)


def test_what_arrives_with_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch):
    learning = trainer(mesh=MeshConfig(fsdp=4), devices=4)
    there = elsewhere(learning, 1)
    bring = bring_of(learning.learner.spec.model, learning.learner.spec.mesh, there.mesh)
    assert bring is not None
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, where: put(x, where).at[(0,) * x.ndim].add(1e-3))
    with pytest.raises(RuntimeError, match="embed/w has other bits on the sampler's devices"):
        bring("embed/w", learning.learner.params["embed/w"])


def test_devices_are_shared_out():
    devices = jax.devices()
    training, sampling = apart(RolloutMeshConfig(devices=3), devices)
    assert sampling is not None
    assert (training, sampling.devices.ravel().tolist()) == (devices[:5], devices[5:])
    assert apart(None, devices) == (devices, None)
    assert apart(RolloutMeshConfig(tensor=2), devices) == (devices, None)
    with pytest.raises(UserError, match=r"rollout.mesh: of 8 device\(s\) of a process 8 would only sample"):
        apart(RolloutMeshConfig(devices=8), devices)


def test_an_engine_that_reads_the_trainers_devices_needs_nothing_brought():
    spec = trainer(mesh=MeshConfig(fsdp=4), devices=4).learner.spec
    assert bring_of(spec.model, spec.mesh, spec.mesh) is None
    assert spec.model.config == PLAIN
