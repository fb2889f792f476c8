"""Quantization-aware training: rounding and its gradient by hand, one model in trainer and sampler, on a mesh."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from tests.lora.test_qlora import SHAPES, assert_same_as_full_forward
from tests.marks import slow
from tests.models.quantization.test_formats import BASES, BY_HAND, MATRIX
from tests.tiny_models import row_logprobs
from tests.trainers import PLAIN, RICH, sequences, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.models.model import Model, rounded
from tunix.models.quantization.formats import LARGEST, Quantization, Simulated, dequantize, quantize, simulated
from tunix.models.quantization.rules import Rules
from tunix.types import Sampling

pytestmark = pytest.mark.models

LOSS = SFT(SFTConfig()).objective
# o stays as it is, whatever the last rule says.
MIXED = Rules.model_validate(
    {
        "rules": [
            {"module": "o_proj"},
            {"module": "self_attn.*", "weights": "int8"},
            {"module": "down_proj", "weights": "nf4", "tile": 16},
            {"module": ".*", "weights": "int4", "tile": 16},
        ]
    }
)
INTEGERS = Rules.model_validate({"rules": [{"module": ".*", "weights": "int8", "activations": "int8"}]})


def batch(seed=0):
    return pack(sequences(6, seed), 6, 24)


@pytest.mark.parametrize("base", BASES)
def test_a_matrix_is_rounded_and_its_gradient_is_not(base):
    how = Simulated(Quantization(base, 2), None)
    weights = jnp.asarray(MATRIX)
    np.testing.assert_allclose(how.weight(weights, 1), np.array(BY_HAND[base], np.float32), rtol=1e-6)
    # y = x w for one token: dy_k / dw_ck = x_c, for every k, as without rounding; and dy / dx is the rounded matrix.
    x = jnp.array([2.0, -3.0])
    gradient = jax.grad(lambda w: jnp.sum(x @ how.weight(w, 1)))(weights)
    np.testing.assert_array_equal(gradient, [[2.0] * 4, [-3.0] * 4])
    gradient = jax.grad(lambda x: jnp.sum(x @ how.weight(weights, 1)))(x)
    np.testing.assert_allclose(gradient, np.sum(BY_HAND[base], axis=1), rtol=1e-5)


def test_each_token_has_a_scale_of_its_own():
    x = jnp.array([[[1.0, -0.4, 0.3, 0.0], [10.0, 4.0, -10.0, 1.0]]])
    how = Simulated(None, "int8")
    # The first token's step is 1 / 127: 127, -50.8 -> -51, 38.1 -> 38. The second's is 10 / 127: 127, 50.8 -> 51, -127,
    # 12.7 -> 13. No largest value lies between two numbers.
    wanted = [[1, -51 / 127, 38 / 127, 0], [10, 510 / 127, -10, 130 / 127]]
    np.testing.assert_allclose(how.inputs(x)[0], np.array(wanted, np.float32), rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(3 * how.inputs(x)))(x), 3 * jnp.ones_like(x))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_product_is_that_of_integers_or_small_floats(kind):
    """qwix multiplies the few bits themselves: what a device with such products computes."""
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.standard_normal((2, 3, 32), np.float32)),
        jnp.asarray(rng.standard_normal((32, 5), np.float32)),
    )
    how = Simulated(Quantization(kind, 32), kind)
    kinds = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
    theirs = qwix.dot_general(
        qwix.quantize(x, kinds[kind], channelwise_axes=(0, 1), calibration_method=LARGEST[kind]),
        qwix.quantize(w, kinds[kind], channelwise_axes=(1,)),
        (((2,), (0,)), ((), ())),
    )
    np.testing.assert_allclose(how.inputs(x) @ how.weight(w, 1), theirs, rtol=1e-5, atol=1e-5)


def test_the_first_rule_counts():
    how = dict(simulated(MIXED))
    assert {"q", "k", "v", "gate", "up", "down"} <= set(how)
    assert "o" not in how
    assert how["q"].weights == how["v"].weights == simulated(INTEGERS)[0][1].weights  # int8, one scale for all inputs
    assert how["down"].weights == Quantization("nf4", 16)
    assert how["up"].weights == how["gate"].weights == Quantization("int4", 16)


@pytest.mark.slow
def test_a_model_computes_with_its_weights_on_their_grid():
    model = Model(RICH, simulated=simulated(MIXED))
    plain = replace(model, simulated=())
    params = trainer(RICH).learner.params
    on_grid, moved = rounded(model, params)
    assert set(moved) == {f"layers/{name}/w" for name in ("q", "k", "v", "gate", "up", "down")}
    for name, value in params.items():
        if name in moved:
            how = dict(simulated(MIXED))[name.split("/")[1]].weights
            assert how is not None
            values, scales = jax.vmap(partial(quantize, quantization=how, contracted=1))(value)  # o has two, and stays
            np.testing.assert_array_equal(on_grid[name], jax.vmap(dequantize)(values, scales))
            error = np.sqrt(np.mean((on_grid[name] - value) ** 2) / np.mean(value**2))
            assert moved[name] == pytest.approx(error, rel=1e-4)
            assert {"int8": 0.001, "int4": 0.04, "nf4": 0.04}[how.base] < error < 0.15
        else:
            np.testing.assert_array_equal(on_grid[name], value)

    rows = batch()
    read = (rows.tokens, rows.positions, rows.segment_ids, rows.loss_mask)

    def likely(model, params):
        return jnp.sum(row_logprobs(model, params, *map(jnp.asarray, read)))

    # The same value, and the gradient of the rounded weights as that of those behind them.
    ours, mine = jax.jit(jax.value_and_grad(lambda p: likely(model, p)))(params)
    theirs, other = jax.jit(jax.value_and_grad(lambda p: likely(plain, p)))(on_grid)
    assert float(ours) == pytest.approx(float(theirs), abs=1e-4)
    assert abs(float(ours) - float(likely(plain, params))) > 1e-2
    for name, gradient in mine.items():
        np.testing.assert_allclose(gradient, other[name], atol=1e-4)


@pytest.mark.parametrize("name", slow(["rich", "llama", "qwen2"]))
def test_what_is_sampled_is_what_is_trained(name):
    ours = trainer(SHAPES[name], rules=MIXED, length=24)
    before = jax.tree.map(np.asarray, ours.learner.params)
    first = ours.evaluate([batch()], LOSS)
    for _ in range(8):
        ours.step(batch(), LOSS)
    last = ours.evaluate([batch()], LOSS)
    assert last["eval/loss"] < first["eval/loss"] - 0.3
    assert 0 < abs(last["eval/unrounded"] - last["eval/loss"]) < 0.3
    assert all(np.any(before[name] != value) for name, value in ours.learner.params.items())
    assert_same_as_full_forward(ours, *drawn(ours))


@pytest.mark.slow
def test_rounded_inputs_may_fall_either_way():
    """Of two values that differ in their last bit, as the sampler's and the trainer's do, the one may be rounded up."""
    ours = trainer(RICH, rules=INTEGERS, length=24)
    for _ in range(8):
        ours.step(batch(), LOSS)
    # Such a value moves by one of 255 steps; by how much that moves a log-prob was measured, 0.006 here.
    assert_same_as_full_forward(ours, *drawn(ours), atol=0.03)


def drawn(ours):
    """Prompts, and a completion of each from the weights as they are now."""
    ours.publish()
    prompts = [s.tokens[:5] for s in sequences(3, seed=5)]
    return prompts, [found[0] for found in ours.sample(prompts, 1, Sampling(max_tokens=12, temperature=1.0), seed=0)]


@pytest.mark.parametrize("mesh", slow([MeshConfig(fsdp=2, tensor=4), MeshConfig(data=2, fsdp=2, tensor=2)]))
def test_a_mesh_changes_nothing(mesh):
    # Of equal weights. Updates differ in their last bit, by which a weight may later fall to the other side of a step.
    one, many = trainer(rules=MIXED, rows=8), trainer(rules=MIXED, devices=8, mesh=mesh, rows=8)
    for seed in range(3):
        rows = pack(sequences(12, seed), 12, 24)
        ours, theirs = (float(each.forward_backward(rows, LOSS)["train/loss"]) for each in (one, many))
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert one.learner.gradients
    assert many.learner.gradients
    for name, gradient in one.learner.gradients.items():
        np.testing.assert_allclose(gradient, np.asarray(many.learner.gradients[name]), atol=1e-5)


@pytest.mark.slow
def test_training_in_the_rounding_loses_less_than_rounding_afterwards():
    rules = Rules.model_validate({"rules": [{"module": ".*", "weights": "int4", "tile": 16}]})
    through, after = trainer(rules=rules), trainer()
    for _ in range(60):
        through.step(batch(), LOSS)
        after.step(batch(), LOSS)
    model = Model(PLAIN, simulated=simulated(rules))
    after.state = replace(after.state, params=rounded(model, after.learner.params)[0])
    trained, cut = (one.evaluate([batch()], LOSS)["eval/loss"] for one in (through, after))
    assert trained < cut
