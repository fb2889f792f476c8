"""Rows whose tokens are split over the mesh's `context`: loss and gradients of the whole model are one device's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.marks import slow
from tests.trainers import PLAIN, RICH, sequences, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.mesh import build_mesh
from tunix.models import token_logprobs as blocks
from tunix.models.attention import chunked
from tunix.models.attention.attend import attend, implementation, spec_of
from tunix.models.attention.inputs import Segments
from tunix.models.config import DecoderConfig
from tunix.types import Batch, Sequence

pytestmark = pytest.mark.models

LENGTH = 48
SOFT = replace(RICH, num_kv_heads=2)
"""Windows, a soft cap, two kinds of layers and a tied table."""
MIXED = MeshConfig(fsdp=2, context=2, tensor=2)
MESHES = [MIXED, *slow([MeshConfig(fsdp=4, context=2), MeshConfig(fsdp=1, context=8)])]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 queries and of 6 tokens of the head."""
    monkeypatch.setattr(chunked, "BLOCK", 4)
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 6)


def packed() -> Batch:
    """Ragged documents of up to 40 tokens in four rows: some are in two or more parts of a row."""
    return pack(sequences(9, longest=40), 9, LENGTH, multiple=4)


def pairs() -> Batch:
    """Pairs whose sides share a prompt of ten tokens in a row."""
    rng = np.random.default_rng(0)

    def side(prompt: np.ndarray, length: int) -> Sequence:
        tokens = np.concatenate([prompt, rng.integers(0, 96, length)]).astype(np.int32)
        return Sequence(tokens, np.arange(len(tokens)) >= len(prompt))

    prompts = [rng.integers(0, 96, 10) for _ in range(4)]
    lengths = (8, 17, 3, 9, 12, 5, 9, 9)
    sides = [side(prompts[i // 2], length) for i, length in enumerate(lengths)]
    return pack(sides, 8, LENGTH, together=2, multiple=4)


def gradients(config: DecoderConfig, batch: Batch, mesh: MeshConfig, devices: int) -> tuple[dict, dict]:
    client = trainer(config, devices=devices, mesh=mesh, length=LENGTH)
    metrics = client.forward_backward(batch, SFT(SFTConfig()).objective)
    return jax.device_get(client.learner.gradients), jax.device_get(dict(metrics))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.fsdp}-{mesh.context}-{mesh.tensor}")
@pytest.mark.parametrize(
    ("config", "batch"),
    [(SOFT, packed), *slow([(SOFT, pairs), (PLAIN, packed)])],
    ids=["windows and soft cap", "shared prompts", "plain"],
)
def test_loss_and_gradients_are_those_of_one_device(config: DecoderConfig, batch, mesh: MeshConfig):
    expected, metrics = gradients(config, batch(), MeshConfig(), 1)
    found, others = gradients(config, batch(), mesh, 8)
    assert others["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-5)
    for name, right in expected.items():
        np.testing.assert_allclose(found[name], right, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_step_trains():
    one, eight = trainer(SOFT, length=LENGTH), trainer(SOFT, devices=8, mesh=MIXED, length=LENGTH)
    for client in (one, eight):
        for _ in range(2):
            client.step(packed(), SFT(SFTConfig()).objective)
    for name, right in one.learner.params.items():
        np.testing.assert_allclose(eight.learner.params[name], right, atol=1e-4, err_msg=name)


def test_each_device_keeps_its_part_of_the_queries():
    """Read from the compiled program: chunks are taken, and no device holds the queries of whole rows."""
    mesh = build_mesh(MeshConfig(fsdp=1, context=8))
    q, k = (np.ones((1, 64, heads, 8), np.float32) for heads in (4, 2))
    view = Segments(jnp.ones((1, 64), jnp.int32), jnp.arange(64)[None])
    with jax.set_mesh(mesh):
        spec = spec_of(jnp.asarray(q), jnp.asarray(k), view, None)
        assert (spec.queries, spec.keys, implementation(spec).name) == (8, 64, "chunked")
        place = NamedSharding(mesh, PartitionSpec(None, "context"))
        compiled = jax.jit(lambda q, k, v: attend(q, k, v, view, scale=1.0), in_shardings=place, out_shardings=place)
        text = compiled.lower(q, k, k).compile().as_text()
    assert "f32[1,64,4,8]" not in text
    assert "f32[1,64,2,8]" in text
