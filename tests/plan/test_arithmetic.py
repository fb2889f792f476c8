"""The least that programs do, by hand, and beside what a card took."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.device.rows import Setting
from benchmarks.device.speeds import STEPS
from tests.trainers import PLAIN
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.mesh import build_mesh
from tunix.models.config import EXPERTS, DecoderConfig, Experts
from tunix.models.families.table import preset
from tunix.models.model import Model
from tunix.plan import arithmetic
from tunix.plan.arithmetic import Sent, Work, exchanged, sampling, scoring, training
from tunix.trainer.perf import matmul_weights
from tunix.types import Batch, Sequence
from tunix.util.chips import CHIPS

LAYER = 32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64
"""Weights of a layer's matrices of PLAIN."""
HEAD, LAYERS = 96 * 32, PLAIN.num_layers


def batch(*lengths: int) -> Batch:
    """One row of 16 tokens that holds documents of these lengths."""
    documents = [Sequence(np.ones(length, np.int32), np.ones(length, bool)) for length in lengths]
    return pack(documents, len(documents), 16, packing=True)


def test_an_update_costs_its_products_and_the_pairs_that_its_documents_have():
    found = training(PLAIN, batch(8, 4), None, "none", weights=100, state=10, devices=1)
    # 12 tokens; of 8 the pairs are 1 + ... + 8, of 4 they are 1 + ... + 4; 4 heads of 8 in each layer.
    attention = 4 * 4 * 8 * LAYERS * (36 + 10)
    assert found.flops == 12 * (6 * LAYERS * LAYER + 8 * HEAD) + 3.5 * attention
    # Weights are read forward and backward; what trains and its moments are read and written.
    assert found.bytes == 200
    # Two bytes each: two norms of 32, rope of 4 and 2 heads of 8, gate and up and their product of 64; backward twice.
    assert found.between == 3 * 2 * 12 * LAYERS * (4 * 32 + 2 * 6 * 8 + 3 * 64) + 20
    halved = training(PLAIN, batch(8, 4), None, "none", weights=100, state=0, devices=2)
    assert halved.flops == found.flops / 2
    # In a window of 2 the first token of each document sees one, the others two.
    windowed = replace(PLAIN, window=2, local_layers=(True,) * LAYERS)
    near = training(windowed, batch(8, 4), None, "none", weights=100, state=10, devices=1)
    assert found.flops - near.flops == 3.5 * 4 * 4 * 8 * LAYERS * (36 + 10 - 15 - 7)


def test_what_is_not_kept_is_multiplied_again():
    """All matrices but `down`, whose result no gradient needs."""
    kept, again = (training(PLAIN, batch(8, 4), None, x, weights=0, state=0, devices=1) for x in ("none", "block"))
    assert again.flops - kept.flops == 2 * 12 * LAYERS * (LAYER - 32 * 64)


def test_a_forward_pass_is_a_third_of_the_products_and_a_token_of_the_sampler_sees_its_slot():
    forward = scoring(PLAIN, batch(8, 4), weights=7, devices=1)
    assert forward.flops == 2 * 12 * (LAYERS * LAYER + HEAD) + 4 * 4 * 8 * LAYERS * (36 + 10)
    assert forward.bytes == 7
    token = sampling(PLAIN, 3, 10, weights=7, devices=1, item=2)
    assert token.flops == 3 * (2 * (LAYERS * LAYER + HEAD) + 4 * 4 * 8 * LAYERS * 10)
    assert token.bytes == 7 + 3 * 10 * 2 * LAYERS * (2 * 2 * 8)


def test_what_stands_between_products_adds_to_the_longer_of_the_rest():
    chip = CHIPS["h100"]
    assert Work(989e12, 3.35e12, 0.0).seconds(chip) == (pytest.approx(1), "memory")
    assert Work(989e12, 0.0, 1.675e12).seconds(chip) == (pytest.approx(1.5), "compute")


def sent_on(mesh: MeshConfig, config: DecoderConfig = PLAIN, number: int = 1, *, trains: bool = True) -> Sent:
    """What eight devices send for 256 tokens in float32."""
    devices, model = build_mesh(mesh), Model(config)
    weights = model.abstract(dict.fromkeys(model.shapes, "float32"), devices)
    trained = weights if trains else ()
    return exchanged(config, devices, 256, 4, weights=weights, trained=trained, microbatches=number)


WHOLE = sum(math.prod(shape) for shape in Model(PLAIN).shapes.values())


def test_weights_that_are_split_are_gathered_and_their_gradients_summed():
    """A ring of 8 sends 7/8 of what it gathers or scatters. The table of the head is gathered once; in that of the
    embedding each device looks 32 tokens up for all others, in 4 of 32 columns, and gets as many gradients."""
    lookups = 7 / 8 * 4 * 32 * 32
    for number in (1, 3):
        assert sent_on(MeshConfig(fsdp=8), number=number).kinds == {
            "all-gather": pytest.approx(7 / 8 * 4 * (2 * number * (WHOLE - 2 * HEAD) + HEAD)),
            "reduce-scatter": pytest.approx(7 / 8 * 4 * number * (WHOLE - HEAD)),
            "all-to-all": pytest.approx(2 * lookups),
        }
    forward = {"all-gather": pytest.approx(7 / 8 * 4 * (WHOLE - HEAD)), "all-to-all": pytest.approx(lookups)}
    assert sent_on(MeshConfig(fsdp=8), trains=False).kinds == forward
    assert sent_on(MeshConfig(data=8, fsdp=1)).kinds == {"all-reduce": pytest.approx(2 * 7 / 8 * 4 * WHOLE)}


def test_layers_that_are_split_sum_their_activations():
    """Tensor 2: twice in each layer and once at its end, forwards and backwards; a ring of 2 sends a sum once."""
    rows = 256 * 4 * 32
    config = replace(PLAIN, num_layers=3)
    sums = sent_on(MeshConfig(fsdp=1, data=4, tensor=2), config, trains=False)
    assert sums.kinds == {"all-reduce": pytest.approx((2 * 3 + 1) * rows / 4)}
    # Four parts of a row: keys and values of 2 heads of 8 are gathered twice, their gradients scattered.
    parts = sent_on(MeshConfig(fsdp=2, context=4))
    alone = sent_on(MeshConfig(fsdp=2, data=4))
    heads = LAYERS * 2 * 2 * 8 * 256 * 4 / 2
    assert parts.kinds["all-gather"] - alone.kinds["all-gather"] == pytest.approx(2 * 3 / 4 * heads)
    assert parts.kinds["reduce-scatter"] - alone.kinds["reduce-scatter"] == pytest.approx(3 / 4 * heads)


def test_tokens_go_to_the_devices_of_their_experts_and_back():
    """With two of eight experts on four devices a token meets 4 (1 - (3/4)^2) = 1.75 of these, itself home in a
    quarter of them."""
    config = replace(PLAIN, family="qwen3_moe", experts=Experts(8, 2), feed_forward=EXPERTS)
    found = sent_on(MeshConfig(fsdp=1, data=2, expert=4), config, trains=False)
    assert found.kinds == {"all-to-all": pytest.approx(2 * LAYERS * 32 * 4 * 32 * 1.75 * 3 / 4)}


def test_what_leaves_a_host_is_told_from_what_stays(monkeypatch: pytest.MonkeyPatch):
    """Of two hosts of four devices `data` crosses the network between them, and `fsdp` where it is longer."""
    monkeypatch.setattr(arithmetic, "groups_of", lambda devices: [devices[:4], devices[4:]])
    halves = sent_on(MeshConfig(data=2, fsdp=4))
    assert halves.far == pytest.approx(halves.kinds["all-reduce"])
    whole = sent_on(MeshConfig(fsdp=8))
    assert whole.far == pytest.approx(sum(whole.kinds.values()))
    assert Sent({"all-gather": 45e9, "all-reduce": 45e9}, 25e9).seconds(CHIPS["h100"]) == {"links": 0.2, "network": 0.5}


WEIGHTS = {name: matmul_weights(preset(name)) for name in ("qwen3-0.6b", "qwen3-4b")}
"""Both are tied: no embedding beside them."""
MEASURED = {"packed-16k": 0.213, "16k": 0.399, "4b-16k": 1.45}
"""Seconds of a step on one NVIDIA H200, the last one's on 2026-11-26, the others' a day later: jax 0.11.2, CUDA 13,
bfloat16, medians of 5."""


@pytest.mark.parametrize("name", MEASURED)
def test_a_step_took_no_less_than_this_and_no_more_than_twice(name: str):
    step = STEPS[name]
    shape = step.shape(Setting(False, "gpu"))
    number = WEIGHTS[step.preset]
    # float32 weights with two moments; a base in bfloat16 under an adapter, which is small.
    weights, state = (4 * number, 12 * number) if step.adapter is None else (2 * number, 0)
    work = training(shape.config, shape.batch(), step.adapter, step.remat, weights=weights, state=state, devices=1)
    seconds, bound = work.seconds(CHIPS["h200"].fastest)
    assert bound == "compute"
    assert MEASURED[name] / 2 < seconds < MEASURED[name]


def test_a_token_in_256_slots_took_no_less_than_this_and_no_more_than_twice():
    """4.43 ms on the same card: Qwen3-0.6B, slots of 448 to 512 tokens."""
    work = sampling(preset("qwen3-0.6b"), 256, 480, weights=2 * WEIGHTS["qwen3-0.6b"], devices=1, item=2)
    seconds, bound = work.seconds(CHIPS["h200"].fastest)
    assert bound == "memory"
    assert 4.43e-3 / 2 < seconds < 4.43e-3


@pytest.mark.parametrize(
    ("work", "measured"), [(Work(flops=20 * 2 * 8192**3), 0.0322), (Work(bytes=4 * 2**30), 1.59e-3)]
)
def test_products_and_copies_took_no_less_than_this_and_no_more_than_twice(work: Work, measured: float):
    seconds, _ = work.seconds(CHIPS["h200"].fastest)
    assert measured / 2 < seconds < measured
    assert math.isclose(CHIPS["h200"].fastest.flops, 790e12)
