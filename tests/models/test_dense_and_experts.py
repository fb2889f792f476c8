"""A dense ffn beside experts against its formula, on several devices, and as it is counted and named."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix.config import MeshConfig
from tunix.mesh import build_mesh
from tunix.models.config import DENSE_AND_EXPERTS, Experts
from tunix.models.families.table import preset, small, with_sizes
from tunix.models.model import Model
from tunix.models.moe import DenseAndExperts
from tunix.models.quantization.modules import projections_of
from tunix.trainer.mesh_choice import state_bytes
from tunix.trainer.optimizer import decays
from tunix.trainer.perf import idle_weights, matmul_weights

pytestmark = pytest.mark.models

B, T, D, F = 2, 6, 16, 8
CONFIG = replace(
    small("gemma4"), d_model=D, ffn=F, experts=Experts(4, 2, shared=24), feed_forward=DENSE_AND_EXPERTS, norm_eps=1e-3
)


def module(seed: int = 0) -> DenseAndExperts:
    """With random norms and factors, which would be all 1."""
    made = DenseAndExperts(CONFIG, nnx.Rngs(seed))
    vectors = [made.router.factor, made.router.norm.w, made.pre_mlp_norm.w, made.dense_norm.w]
    for number, vector in enumerate((*vectors, made.pre_experts_norm.w, made.experts_norm.w)):
        vector[...] = jax.random.uniform(jax.random.key(number), vector.shape, minval=0.5, maxval=2.0)
    return made


def inputs() -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(1), (B, T, D))


def by_the_formula(ffn: DenseAndExperts, x: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """The sum of both, expert by expert, in float64.

    Args:
        x: the residual stream of one token `[D]`.
        tops: the numbers of its experts.
    """

    def norm(x: np.ndarray, w: object = 1.0) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + 1e-3) * np.asarray(w, np.float64)

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def gated(x: np.ndarray, gate: object, up: object, down: object) -> np.ndarray:
        gate, up, down = (np.asarray(w, np.float64) for w in (gate, up, down))
        return (gelu(x @ gate) * (x @ up)) @ down

    x = np.asarray(x, np.float64)
    dense = gated(norm(x, ffn.pre_mlp_norm.w[...]), ffn.gate.w[...], ffn.up.w[...], ffn.down.w[...])
    scores = np.exp(norm(x, ffn.router.norm.w[...]) / np.sqrt(D) @ np.asarray(ffn.router.w[...], np.float64))
    inside, mixed = norm(x, ffn.pre_experts_norm.w[...]), np.zeros(D)
    for one in tops:
        weight = scores[one] / scores[tops].sum() * float(ffn.router.factor[one])
        mixed += weight * gated(inside, ffn.gates.w[one], ffn.ups.w[one], ffn.downs.w[one])
    return norm(dense, ffn.dense_norm.w[...]) + norm(mixed, ffn.experts_norm.w[...])


def test_the_output_is_that_of_the_formula():
    ffn, x = module(), inputs()
    found, terms = jax.jit(lambda x: ffn(x))(x)
    experts = ffn.chosen(ffn.router(x)).experts
    for row in range(B):
        for at in range(T):
            tops = np.asarray(experts[row, at])
            expected = by_the_formula(ffn, np.asarray(x[row, at]), tops)
            np.testing.assert_allclose(found[row, at], expected, atol=1e-5)
    assert terms["rows"].sum() == 2 * B * T


def test_the_router_sees_the_residual_stream_whatever_the_other_norms_are():
    ffn, x = module(), inputs()
    before = ffn.chosen(ffn.router(x))
    # D^-1/2 of a normed stream: the logits of a router whose columns are the axes are of unit scale / sqrt(D).
    logits = np.log(np.asarray(ffn.router(x)))
    normed = np.asarray(x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3) * ffn.router.norm.w[...]) / 4
    expected = normed @ np.asarray(ffn.router.w[...])
    np.testing.assert_allclose(logits - logits[..., :1], expected - expected[..., :1], atol=1e-5)
    ffn.pre_experts_norm.w[...] = ffn.pre_experts_norm.w[...][::-1]
    np.testing.assert_array_equal(ffn.chosen(ffn.router(x)).experts, before.experts)


def test_of_equal_scores_the_lower_numbers_are_chosen_and_their_factors_count():
    ffn = module()
    ffn.router.w[...] = jnp.zeros_like(ffn.router.w[...])
    ffn.router.factor[...] = jnp.asarray([2.0, 3.0, 5.0, 7.0])
    choice = ffn.chosen(ffn.router(inputs()))
    np.testing.assert_array_equal(choice.experts, np.broadcast_to([0, 1], (B, T, 2)))
    # Both have half of the weight of what is chosen, times 2 and 3.
    np.testing.assert_allclose(choice.weights, np.broadcast_to([1.0, 1.5], (B, T, 2)), rtol=1e-6)


def test_padding_has_no_part_of_the_experts():
    ffn, x = module(), inputs()
    real = jnp.arange(T) < jnp.asarray([T, 5])[:, None]
    y, terms = ffn(x, None, real)
    np.testing.assert_allclose(y[0], ffn(x)[0][0], atol=1e-6)
    assert terms["rows"].sum() == 2 * (T + 5)


@pytest.mark.slow
def test_a_mesh_computes_the_same():
    graph, state = nnx.split(module())
    x = inputs()

    def loss(state, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)[0]))

    expected = jax.jit(jax.value_and_grad(loss))(state, x)
    with jax.set_mesh(build_mesh(MeshConfig(data=1, fsdp=2, expert=2, tensor=2))):
        found = jax.jit(jax.value_and_grad(loss))(state, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * max(float(jnp.abs(other).max()), 1.0))


def test_gemma_4_26b_a4b_has_the_published_number_of_weights():
    """25.2B parameters, 3.8B of them active, as its model card counts (https://ai.google.dev/gemma/docs/core)."""
    config = preset("gemma4-26b-a4b")
    assert state_bytes(config, "bfloat16", None) / 2 == pytest.approx(25.2e9, rel=0.005)
    assert matmul_weights(config) == pytest.approx(3.8e9, rel=0.01)
    # Each of 30 layers: 120 experts of three matrices 2816 x 704.
    assert idle_weights(config) == 30 * 120 * 3 * 2816 * 704


def test_a_real_shape_is_built_and_both_ffns_have_matrices():
    config = with_sizes(preset("gemma4-26b-a4b"), {"num_layers": 6})
    shapes = Model(config).shapes
    assert shapes["layers/gates/w"] == (6, 128, 2816, 704)
    assert shapes["layers/gate/w"] == (6, 2816, 2112)
    assert set(projections_of(config)) == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
        *("experts.gate_up_proj", "experts.down_proj"),
    }
    assert decays("layers/router/w")
    assert not decays("layers/router/norm/w")
    assert not decays("layers/router/factor")
