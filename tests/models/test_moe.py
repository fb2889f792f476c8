"""Mixtures of experts against the sum over all experts, written down as it is in the papers."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.programs import account
from tests.marks import slow
from tests.tiny_models import one_device, row_logprobs
from tunix.config import MeshConfig
from tunix.errors import UserError
from tunix.mesh import build_mesh
from tunix.models import expert_products
from tunix.models.config import EXPERTS, Clamp, Experts
from tunix.models.expert_products import from_experts, routes, to_experts
from tunix.models.families.table import preset, small
from tunix.models.model import Model
from tunix.models.moe import MixtureOfExperts
from tunix.trainer.mesh_choice import Demand, require, state_bytes
from tunix.trainer.perf import matmul_weights

pytestmark = pytest.mark.models

CONFIG = replace(small("qwen3_moe"), d_model=16, ffn=8, experts=Experts(4, 2))
B, T = 4, 24


def module(config=CONFIG) -> MixtureOfExperts:
    return MixtureOfExperts(config, nnx.Rngs(0))


def inputs(dtype="float32") -> jax.Array:
    return jax.random.normal(jax.random.key(1), (B, T, CONFIG.d_model), dtype)


def by_the_papers(moe: MixtureOfExperts, x: jax.Array) -> jax.Array:
    """Every expert computes every token, and those that are not chosen weigh 0."""
    bias = 0.0 if moe.router.b is None else moe.router.b[...]
    scores = jax.nn.softmax(x @ moe.router.w[...] + bias)
    least = jnp.sort(scores)[..., -moe.experts.active, None]
    weights = jnp.where(scores >= least, scores, 0)
    if moe.experts.renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    gate = jnp.einsum("btd,edf->btef", x, moe.gates.w[...])
    up = jnp.einsum("btd,edf->btef", x, moe.ups.w[...])
    if moe.experts.clamp is None:
        return jnp.einsum("btef,efd,bte->btd", jax.nn.silu(gate) * up, moe.downs.w[...], weights)
    gate = jnp.minimum(gate + moe.gates.b[...], moe.experts.clamp.limit)
    up = jnp.clip(up + moe.ups.b[...], -moe.experts.clamp.limit, moe.experts.clamp.limit)
    joined = (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))
    return jnp.einsum("btef,efd,bte->btd", joined, moe.downs.w[...], weights) + weights @ moe.downs.b[...]


def loss_of(graph, call):
    """The gradients of a fixed projection of the output by inputs and weights, as a compiled function."""
    aim = jax.random.normal(jax.random.key(2), (B, T, CONFIG.d_model))
    return jax.jit(jax.value_and_grad(lambda state, x: jnp.sum(aim * call(nnx.merge(graph, state), x)), (0, 1)))


def assert_near(found, expected, share=2e-5):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=max(share * float(np.abs(other).max()), 2e-6))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("number", "active"), [(4, 2), (7, 3), (3, 1), (5, 5)])
def test_outputs_and_gradients_are_those_of_the_sum(number, active, renormalise):
    graph, state = nnx.split(module(replace(CONFIG, experts=Experts(number, active, renormalise))))
    x = inputs()
    found = loss_of(graph, lambda moe, x: moe(x)[0])(state, x)
    assert_near(found, loss_of(graph, by_the_papers)(state, x))


def biased() -> tuple[nnx.GraphDef, nnx.State]:
    """Experts as gpt-oss's, with random biases, of which some factors are clamped."""
    graph, state = nnx.split(module(replace(CONFIG, experts=Experts(4, 2, biases=True, clamp=Clamp(limit=0.75)))))
    return graph, jax.tree.map(lambda w: w if jnp.any(w) else jax.random.normal(jax.random.key(3), w.shape), state)


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_biases_and_clamped_factors_are_those_of_the_sum(monkeypatch, where):
    monkeypatch.setattr(expert_products, "platform", lambda: where)
    jax.clear_caches()
    graph, state = biased()
    found = loss_of(graph, lambda moe, x: moe(x)[0])(state, inputs())
    assert_near(found, loss_of(graph, by_the_papers)(state, inputs()))


def test_padding_has_no_bias():
    graph, state = biased()
    real = jnp.arange(T) < jnp.asarray([T, 11, 0, 5])[:, None]
    y, _ = jax.jit(lambda state, x: nnx.merge(graph, state)(x, None, real))(state, inputs())
    np.testing.assert_array_equal(np.any(y, axis=-1), real)


def test_one_expert_can_have_all_tokens_and_others_none():
    moe = module()
    moe.router.w[...] = jnp.zeros_like(moe.router.w[...]).at[:, 2].set(5.0).at[:, 3].set(4.0)
    x = jnp.abs(inputs())
    np.testing.assert_allclose(moe(x)[0], by_the_papers(moe, x), atol=1e-5)
    terms = moe(x)[1]
    np.testing.assert_array_equal(terms["rows"], [0, 0, B * T, B * T])
    # Nearly all of the probability is 2's or 3's, and two rows are expected of each token.
    np.testing.assert_allclose(terms["expected"][2:].sum(), 2 * B * T, rtol=1e-2)


def test_of_equal_scores_the_lower_number_is_chosen():
    moe = module()
    moe.router.w[...] = jnp.zeros_like(moe.router.w[...])
    choice = moe.chosen(moe.router(inputs()))
    np.testing.assert_array_equal(choice.experts, np.broadcast_to([0, 1], (B, T, 2)))
    np.testing.assert_allclose(choice.weights, 0.5)
    terms = moe(inputs())[1]
    np.testing.assert_array_equal(terms["rows"], [B * T, B * T, 0, 0])
    np.testing.assert_allclose(terms["expected"], B * T / 2, rtol=1e-6)  # two rows a token, alike over four


def test_padding_is_zero_has_no_gradient_and_changes_nothing():
    moe, x = module(), inputs()
    real = jnp.arange(T) < jnp.asarray([T, 11, 0, 5])[:, None]
    padded = jax.jit(lambda x: moe(x, None, real))
    y, terms = padded(x)
    whole, _ = jax.jit(moe)(x)
    np.testing.assert_array_equal(y, jnp.where(real[..., None], whole, 0))
    other = jnp.where(real[..., None], x, 7.0)
    np.testing.assert_array_equal(padded(other)[0], y)
    assert terms["rows"].sum() == 2 * real.sum()
    np.testing.assert_allclose(terms["expected"].sum(), 2 * real.sum(), rtol=1e-6)
    np.testing.assert_allclose(padded(other)[1]["expected"], terms["expected"], rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(padded(x)[0] ** 2))(x)
    assert np.all(np.asarray(gradient)[~np.asarray(real)] == 0)


def test_bfloat16_stays_near_float32():
    moe, x = module(), inputs()
    exact = moe(x)[0]
    graph, state = nnx.split(moe)
    narrow = nnx.merge(graph, jax.tree.map(lambda w: w.astype(jnp.bfloat16), state))
    found = narrow(x.astype(jnp.bfloat16))[0]
    assert found.dtype == jnp.bfloat16
    # A token whose second and third expert are close may choose the other; most do not.
    errors = np.linalg.norm(found.astype(jnp.float32) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert np.median(errors) < 0.02


@pytest.mark.parametrize("dtype", ["float32", *slow(["bfloat16"])])
@pytest.mark.parametrize("product", [to_experts, from_experts])
def test_experts_in_turns_are_the_products_of_ragged_dot(monkeypatch, dtype, product):
    """Experts with no row, with less than a step, with more than the largest number of rows at once, and pairs that
    are not computed."""
    monkeypatch.setattr(expert_products, "STEPS", 16)  # fewer elsewhere: tests/conftest.py
    few = np.repeat([1, 2, 4, 5, 9], [5, 8, 275, 33, 79])  # 9 stands for pairs of other devices
    experts = jnp.asarray(np.random.default_rng(0).permutation(few).reshape(200, 2), jnp.int32)
    here = experts < 7

    def gradients(x, matrices):
        where = routes(experts, 7, here)
        computed = jnp.arange(len(where.pairs)) < where.sizes.sum()

        def loss(x, matrices):
            by_row = product is to_experts
            y = product(x if by_row else jnp.pad(x, ((0, len(where.pairs) - len(x)), (0, 0))), matrices, where)
            y = jnp.where(computed[:, None], y, 0)[:400] if by_row else y
            return jnp.sum(jax.random.normal(jax.random.key(2), y.shape, dtype) * y).astype(jnp.float32)

        return jax.value_and_grad(loss, (0, 1))(x, matrices)

    assert routes(experts, 7, here).blocks[-1] < 275
    x = jax.random.normal(jax.random.key(0), (200 if product is to_experts else 321, 12), dtype)
    matrices = jax.random.normal(jax.random.key(1), (7, 12, 6), dtype)
    found = jax.jit(gradients)(x, matrices)
    monkeypatch.setattr(expert_products, "platform", lambda: "gpu")
    jax.clear_caches()  # else the same program, of the same function, would run again
    expected = jax.jit(gradients)(x, matrices)
    as_float = partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    assert_near(as_float(found), as_float(expected), 1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize(("tokens", "blocks"), [(5, (8,)), (17, (8, 16, 24)), (200, (8, 16, 24, 32))])
def test_a_cpu_multiplies_no_more_rows_at_once_than_there_are_tokens(monkeypatch, tokens, blocks):
    """An expert has one row of each token at most; in steps of 8, and four of them here."""
    monkeypatch.setattr(expert_products, "STEPS", 4)
    assert routes(jnp.zeros((tokens, 2), jnp.int32), 7, jnp.ones((tokens, 2), bool)).blocks == blocks


def test_experts_of_a_single_token_have_their_turn_and_those_of_none_do_not():
    """Experts 6, 0 and 3 have one row, 2 has two, the others none."""
    x = jax.random.normal(jax.random.key(0), (3, 12))
    matrices = jax.random.normal(jax.random.key(1), (7, 12, 5))
    experts = jnp.asarray([[6, 2], [2, 0], [3, 0]]).at[2, 1].set(5)
    here = jnp.ones(experts.shape, bool).at[2, 1].set(False)
    where = routes(experts, 7, here)
    found, gradients = jax.jit(jax.value_and_grad(lambda w: jnp.sum(to_experts(x, w, where)[:5] ** 2)))(matrices)
    pairs = [(0, 6), (0, 2), (1, 2), (1, 0), (2, 3)]
    products = {pair: x[pair[0]] @ matrices[pair[1]] for pair in pairs}
    np.testing.assert_allclose(found, sum(float(jnp.sum(y**2)) for y in products.values()), rtol=1e-5)
    expected = jnp.zeros_like(matrices)
    for (token, expert), y in products.items():
        expected = expected.at[expert].add(2 * jnp.outer(x[token], y))
    np.testing.assert_allclose(gradients, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "sizes", "made"),
    [
        (8, MeshConfig(data=2, fsdp=1, expert=4), lambda: nnx.split(module())),
        *slow(
            [
                (4, MeshConfig(data=2, fsdp=1, expert=4), lambda: nnx.split(module())),
                (8, MeshConfig(data=2, fsdp=1, expert=2, tensor=2), biased),
            ]
        ),
    ],
)
def test_rows_over_the_axis_of_experts_change_nothing(rows, sizes, made):
    """Each device has rows of its own where 8 are split by data 2 x expert 4, and all of them where they are fewer."""
    graph, state = made()
    x = jax.random.normal(jax.random.key(1), (rows, 5, CONFIG.d_model))
    aim = jax.random.normal(jax.random.key(2), x.shape)
    real = jnp.arange(5) < 1 + jnp.arange(rows)[:, None]

    def loss(state, x):
        return jnp.sum(aim * nnx.merge(graph, state)(x, None, real)[0])

    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(state, x)
    with jax.set_mesh(build_mesh(sizes)):
        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(state, x).compile()
    assert_near(jax.device_get(program(state, x)), jax.device_get(expected))
    # Tokens go to the devices of their experts where they are on different devices, and to no others.
    sent = account(program.as_text() or "").collectives
    assert any(one.kind == "all-to-all" for one in sent) == (rows == 8)
    assert not [one for one in sent if one.kind == "all-gather" and "top_k" not in one.scope]


MESHES = [
    MeshConfig(data=1, fsdp=1, expert=4, tensor=2),
    MeshConfig(data=2, fsdp=1, expert=2, tensor=2),
    MeshConfig(data=1, fsdp=2, context=2, expert=2),
]


@cache
def on_one_device(family: str) -> tuple[Any, ...]:
    """A model, its weights, rows of four documents, the loss of them, and its value and gradients on one device."""
    own = small(family)
    config = replace(own, vocab_size=96, experts=replace(own.experts, number=4, active=2))
    model = Model(config)
    params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), one_device())
    params = {n: x if jnp.any(x) else jax.random.normal(jax.random.key(3), x.shape) for n, x in params.items()}
    tokens = np.random.default_rng(0).integers(0, 96, (4, 32)).astype(np.int32)
    segments = np.where(np.arange(32) < np.asarray([[32], [20], [7], [31]]), 1, 0).astype(np.int32)
    rows = (tokens, np.broadcast_to(np.arange(32, dtype=np.int32), tokens.shape), segments, segments > 0)

    def loss(params, *rows):
        return -row_logprobs(model, params, *rows).sum()

    return model, params, rows, loss, jax.device_get(jax.jit(jax.value_and_grad(loss))(params, *rows))


@pytest.mark.parametrize(
    ("sizes", "family"),
    [*((sizes, "qwen3_moe") for sizes in MESHES[1:]), *slow([(MESHES[0], "qwen3_moe"), (MESHES[0], "gpt_oss")])],
)
def test_a_mesh_computes_the_same_and_gathers_no_experts(sizes, family):
    model, params, rows, loss, expected = on_one_device(family)
    mesh = build_mesh(sizes)
    placed = jax.device_put(params, model.shardings(mesh))
    bank = placed["layers/gates/w"]
    assert bank.sharding.shard_shape(bank.shape)[1] == 4 // sizes.expert
    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(loss)).lower(placed, *rows).compile()
        found = program(placed, *rows)
    assert_near(jax.device_get(found), expected, 1e-4)
    # All experts' matrices of a layer would be gathered along their first axis, 4 long.
    d, f = model.config.d_model, model.config.ffn
    whole = [f"f32[{lead}{a},{b}]" for lead in ("4,", "1,4,", "2,4,") for a, b in ((d, f), (f, d))]
    gathers = [line for line in (program.as_text() or "").splitlines() if "all-gather" in line]
    assert not [line for line in gathers if any(shape in line for shape in whole)]


def test_experts_that_a_mesh_does_not_divide_are_refused():
    demand = Demand(replace(small("qwen3_moe"), experts=Experts(6, 2)))
    mesh = build_mesh(MeshConfig(data=2, fsdp=1, expert=4))
    with pytest.raises(UserError, match=r"mesh: expert 4 does not divide 6 experts; expert 3 or 6 would"):
        require(mesh, demand)
    require(build_mesh(MeshConfig(data=4, fsdp=1, expert=2)), demand)
    with pytest.raises(UserError, match=r"mesh: expert 4: llama has no experts to split; leave it at 1"):
        require(mesh, Demand(small("llama")))


def test_a_token_is_counted_with_the_experts_that_it_uses():
    """Qwen3-30B-A3B: 30.5B parameters, 3.3B of them active, as its model card counts."""
    config = preset("qwen3-30b-a3b")
    assert config.feed_forward == EXPERTS
    embedding = config.vocab_size * config.d_model
    assert matmul_weights(config) + embedding == pytest.approx(3.3e9, rel=0.02)
    assert state_bytes(config, "bfloat16", None) / 2 == pytest.approx(30.5e9, rel=0.005)
    assert state_bytes(preset("mixtral-8x7b"), "bfloat16", None) / 2 == pytest.approx(46.7e9, rel=0.005)
