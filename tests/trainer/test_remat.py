"""What `remat: auto` takes: the least recomputation that fits by an estimate, whose arithmetic is done again here."""

from dataclasses import replace

import jax
import pytest

import tunix
from tests.marks import slow
from tests.trainers import PLAIN, trainer
from tunix.mesh import bytes_of
from tunix.models.config import Experts, Gemma4
from tunix.models.token_logprobs import CHUNK_LOGITS_ELSEWHERE
from tunix.trainer.microbatches import TrainerSpec
from tunix.trainer.remat import LAYER, LOGITS, SHARE, TABLES, Held, chosen, held_by, step_bytes

GIB = 2**30
LONG = replace(PLAIN, d_model=1024, num_heads=16, num_kv_heads=8, head_dim=128, ffn=3072, num_layers=28)


def spec_of(rows: int = 1, length: int = 16_384) -> TrainerSpec:
    spec = trainer(rows=rows).learner.spec
    return replace(spec, model=replace(spec.model, config=LONG, dtype="bfloat16"), length=length)


def test_a_step_is_what_it_holds_what_layers_keep_and_its_fullest_moment():
    spec = spec_of()
    # Numbers of 2 bytes for a token: input and x 1024 each, q and attention's result 2048 each, k and v 1024 each,
    # gate and up 3072 each, and 16 of 4 bytes.
    block, mlp, attention = 1024 + 2048 + 32, 1024 + 2048 + 2 * 1024, 1024 + 2 * 3072
    whole = block + mlp + 2 * 3072
    layer, head = (
        LAYER * 2 * 16_384 * whole,
        4 * 96 * 1024 + TABLES * 2 * 96 * 1024 + LOGITS * 4 * CHUNK_LOGITS_ELSEWHERE,
    )
    assert layer > head
    for remat, numbers in {"none": whole, "attention": block + attention, "mlp": block + mlp, "block": block}.items():
        assert step_bytes(spec, Held(1000, 10), remat) == 1000 + 28 * 2 * 16_384 * numbers + 10 + layer
    # Inputs of each layer's own, 64 numbers and their gradients, are there whatever is recomputed.
    inputs = replace(
        spec,
        model=replace(
            spec.model, config=replace(LONG, gemma4=Gemma4(LONG.num_kv_heads, LONG.head_dim, layer_inputs=64))
        ),
    )
    more = (28 + LAYER) * 2 * 16_384 * 2 * 64
    assert step_bytes(inputs, Held(0, 0), "block") == step_bytes(spec, Held(0, 0), "block") + more
    # Of experts, a token's gate and up are those of the experts that it uses, and of the shared one.
    mixture = replace(LONG, experts=Experts(16, 2, shared=512), ffn=768)
    held = step_bytes(replace(spec, model=replace(spec.model, config=mixture)), Held(0, 0), "none")
    dense = step_bytes(spec, Held(0, 0), "none")
    assert held == dense - (28 + LAYER) * 2 * 16_384 * 2 * (3072 - (2 * 768 + 512))
    # Few tokens: the head is the fullest.
    assert step_bytes(spec_of(length=8), Held(0, 0), "block") == 28 * 2 * 8 * block + head


def test_the_first_that_fits_is_taken_and_block_where_none_does_or_nothing_is_known():
    spec, held = spec_of(), Held(6 * GIB, 2 * GIB)
    for remat in ("none", "attention", "mlp", "block"):
        size = step_bytes(spec, held, remat)
        assert chosen(spec, held, size / SHARE + 1)[0] == remat
        assert chosen(spec, held, size / SHARE + 1)[1].startswith(f"{size / GIB:.1f} of ")
    assert chosen(spec, held, float(GIB))[0] == "block"
    assert chosen(spec, held, None) == ("block", "the device does not say how much memory it has")


@pytest.mark.parametrize("devices", [1, *slow([8])])
def test_weights_moments_and_copies_are_counted_by_what_each_device_holds(devices):
    client = trainer(devices=devices, rows=8, dtype="bfloat16")
    spec, params = client.learner.spec, client.state.params
    mine = sum(x.addressable_shards[0].data.size for x in params.values())
    assert bytes_of(params) == 4 * mine
    found = held_by(spec, params, {}, copies=2)
    # Two moments as the weights.
    counters = sum(x.nbytes for x in jax.tree.leaves(client.state.moments) if x.ndim == 0)
    assert found.weights == 3 * 4 * mine + counters + 2 * 2 * mine
    assert found.gradients == (4 + 2) * mine


def test_a_client_chooses_and_says_why():
    sizes = {"vocab_size": 64, "d_model": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    model = {"init": "random", "family": "llama", "sizes": {**sizes, "ffn": 32}, "dtype": "float32", "remat": "auto"}
    spec = tunix.client(model, length=32, batch_size=8).learner.spec
    assert (spec.model.remat, spec.remat_reason) == ("block", "the device does not say how much memory it has")
