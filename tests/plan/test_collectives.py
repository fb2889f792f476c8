"""What eight devices send each other in a training step: read from the program compiled for them."""

from dataclasses import replace

import numpy as np
import optax
import pytest

from benchmarks.programs import Account, account
from benchmarks.shapes import Shape
from tests.marks import slow
from tests.trainers import PLAIN, RICH
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig
from tunix.mesh import build_mesh
from tunix.models import token_logprobs as blocks
from tunix.models.config import DecoderConfig
from tunix.models.model import Model
from tunix.plan import programs
from tunix.plan.arithmetic import exchanged
from tunix.trainer.microbatches import Microbatcher, TrainerSpec

pytestmark = pytest.mark.models

ROWS, LENGTH = 8, 32


def step_on(mesh: MeshConfig, config: DecoderConfig, attention: str = "auto", micro: int = 1) -> Account:
    devices = build_mesh(mesh)
    model = Model(config, attention=attention)
    spec = TrainerSpec(
        model=model,
        mesh=devices,
        optimizer=optax.sgd(0.1),
        schedule=optax.constant_schedule(0.1),
        microbatcher=Microbatcher(ROWS, devices),
        length=LENGTH,
        seed=0,
    )
    params = model.abstract(dict.fromkeys(model.shapes, "float32"), devices)
    batch = programs.microbatches_of(Shape("", config, micro * ROWS, LENGTH).batch(), spec.microbatcher)
    return account(programs.step(spec, params, {}, batch, SFT(SFTConfig()).objective).compile().as_text())


@pytest.fixture(autouse=True)
def several_blocks_and_chunks(monkeypatch: pytest.MonkeyPatch):
    """Eight blocks of four tokens, and a chunk for every 128 ids."""
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(blocks, "CHUNK_LOGITS", 4 * 128)


MESHES = [MeshConfig(fsdp=8), *slow([MeshConfig(fsdp=4, tensor=2), MeshConfig(data=2, fsdp=2, tensor=2)])]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.data}-{mesh.fsdp}-{mesh.tensor}")
def test_the_head_sends_nothing_within_its_loop_over_the_vocabulary(mesh: MeshConfig):
    wide = replace(PLAIN, vocab_size=512)
    found = step_on(mesh, wide)
    head = [one for one in found.collectives if "usually_" in one.scope]
    assert [one for one in head if one.loops > 1] == []
    if mesh.tensor == 1:
        assert head == []
    # Weights and gradients, gathered and reduced once each; a ring sends an all-reduce twice.
    model = Model(wide)
    weights = sum(4 * np.prod(shape) for shape in model.shapes.values())
    assert found.sent() < 2 * 3 * weights


def test_each_micro_batch_gathers_the_weights_twice_and_sums_their_gradients_once():
    """Of the weights each of eight devices has an eighth: a gather sends seven eighths of them, a sum twice that.

    The table, an eighth of these weights, is gathered once.
    """
    weights = sum(4 * np.prod(shape) for shape in Model(PLAIN).shapes.values())
    one, two = (step_on(MeshConfig(fsdp=8), PLAIN, micro=micro) for micro in (1, 2))
    for kind in ("all-gather", "all-reduce"):
        assert one.sent(kind) == pytest.approx(2 * weights * 7 / 8, rel=0.2)
        assert two.sent(kind) == pytest.approx(2 * one.sent(kind), rel=0.1)


@pytest.mark.slow
def test_attention_by_chunks_sends_what_the_einsums_send():
    """Each device computes its own rows and heads; the mesh divides the kv heads."""
    config = replace(RICH, num_kv_heads=2)
    whole, cut = (step_on(MeshConfig(fsdp=4, tensor=2), config, name) for name in ("einsum", "chunked"))
    assert cut.sent() <= 1.01 * whole.sent()


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.data}-{mesh.fsdp}-{mesh.tensor}")
def test_arithmetic_is_what_the_compiled_step_sends(mesh: MeshConfig):
    """A CPU's compiler sums where a GPU's scatters the sum, which sends half as much. Where layers are split over
    `tensor` it moves some activations and weights once more: arithmetic is the least."""
    found, devices, model = step_on(mesh, PLAIN), build_mesh(mesh), Model(PLAIN)
    weights = model.abstract(dict.fromkeys(model.shapes, "float32"), devices)
    least = exchanged(PLAIN, devices, ROWS * LENGTH, 4, weights=weights, trained=weights)
    sums = 2 * least.kinds["reduce-scatter"] + least.kinds.get("all-reduce", 0.0)
    most = 1.2 if mesh.tensor == 1 else 1.5
    assert 0.8 < found.sent("all-gather") / least.kinds["all-gather"] < most
    assert 0.8 < found.sent("all-reduce", "reduce-scatter") / sums < most
    assert found.sent() > 0.9 * sum(least.kinds.values())
