"""Divergences of two heads: numbers by hand on three ids, a dense reference with its gradients, finite differences."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tunix.models import token_logprobs as blocks
from tunix.models.divergence import Side, compared
from tunix.types import Compared, Divergence

pytestmark = pytest.mark.models

LN2 = math.log(2)
# Teacher q = (1/2, 1/4, 1/4), student p = (1/4, 1/4, 1/2).
Q, P = (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)
HOWS = [
    Divergence(kind, beta, top_k, temperature)
    for kind, beta in (("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1))
    for top_k, temperature in ((0, 1.0), (7, 1.0), (0, 1.7))
]


def side(probabilities: tuple[float, ...], softcap: float | None = None) -> Side:
    """A model whose next-token distribution is given: a state of one number, 1, meets a table of log-probs."""
    return Side(jnp.ones((1, 1, 1)), jnp.log(jnp.asarray(probabilities))[:, None], softcap)


class Numbers(NamedTuple):
    divergence: float
    teacher_logprobs: float
    agreement: float


def at_one_token(p: tuple[float, ...], q: tuple[float, ...], how: Divergence, target: int = 0) -> Numbers:
    found = compared(side(p), side(q), jnp.array([[target]]), jnp.array([[True]]), how)
    return Numbers(*(x.item() for x in jax.tree.leaves(found)))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        # 1/2 log((1/2)/(1/4)) + 1/4 log 1 + 1/4 log((1/4)/(1/2)) = (1/2 - 1/4) ln 2
        (Divergence("forward_kl"), LN2 / 4),
        # p and q are each other's mirror image, so the other direction is the same number
        (Divergence("reverse_kl"), LN2 / 4),
        # m = (3/8, 1/4, 3/8): KL(q || m) = 1/2 log(4/3) + 1/4 log(2/3), and KL(p || m) equals it
        (Divergence("jsd", 0.5), math.log(4 / 3) / 2 + math.log(2 / 3) / 4),
        # beta 1/4: m = q/4 + 3p/4 = (5/16, 1/4, 7/16);
        # KL(q || m) = 1/2 log(8/5) + 1/4 log(4/7), KL(p || m) = 1/4 log(4/5) + 1/2 log(8/7)
        (
            Divergence("jsd", 0.25),
            (math.log(8 / 5) / 2 + math.log(4 / 7) / 4) / 4 + 3 * (math.log(4 / 5) / 4 + math.log(8 / 7) / 2) / 4,
        ),
        # The teacher's likeliest id and a bucket of the rest: q = (1/2, 1/2), p = (1/4, 3/4)
        (Divergence("forward_kl", top_k=1), math.log(2) / 2 + math.log(2 / 3) / 2),
        (Divergence("reverse_kl", top_k=1), math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4),
        # Ids 1 and 2 tie for the second place: both count, and nothing is left for the bucket
        (Divergence("forward_kl", top_k=2), LN2 / 4),
        # Temperature 1/2 squares what is softmaxed: q = (4, 1, 1)/6, p = (1, 1, 4)/6, (4/6 - 1/6) log 4
        (Divergence("forward_kl", temperature=0.5), LN2),
    ],
)
def test_numbers_by_hand(how, expected):
    assert at_one_token(P, Q, how).divergence == pytest.approx(expected, abs=1e-6)


def test_each_direction_by_hand_where_they_differ():
    # q = (3/4, 1/4), p = (1/2, 1/2): KL(q || p) = 3/4 log(3/2) + 1/4 log(1/2); KL(p || q) = 1/2 log(2/3) + 1/2 log 2
    p, q = (0.5, 0.5), (0.75, 0.25)
    forward = at_one_token(p, q, Divergence("forward_kl"), target=1)
    assert forward.divergence == pytest.approx(0.75 * math.log(1.5) - 0.25 * LN2, abs=1e-6)
    reverse = at_one_token(p, q, Divergence("reverse_kl"))
    assert reverse.divergence == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * LN2, abs=1e-6)
    assert forward.teacher_logprobs == pytest.approx(math.log(0.25), abs=1e-6)
    assert reverse.teacher_logprobs == pytest.approx(math.log(0.75), abs=1e-6)


@pytest.mark.parametrize(("beta", "kind"), [(1e-3, "forward_kl"), (1 - 1e-3, "reverse_kl")])
def test_the_ends_of_jsd_are_the_two_kls(beta, kind):
    p, q = (0.5, 0.5), (0.75, 0.25)
    end = at_one_token(p, q, Divergence("jsd", beta)).divergence / min(beta, 1 - beta)
    assert end == pytest.approx(at_one_token(p, q, Divergence(kind)).divergence, rel=5e-3)


def test_agreement_is_of_the_likeliest_ids():
    assert at_one_token(P, Q, Divergence()).agreement == 0
    assert at_one_token((0.6, 0.2, 0.2), Q, Divergence()).agreement == 1


# A dense reference, which holds all logits.
B, T, V, D, E = 3, 9, 300, 8, 12  # 300: three chunks of 128 are more than the vocabulary


@pytest.fixture(scope="module")
def arrays() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 6)
    student, table = jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (V, D))
    # The teacher is wider, and its table is padded to more ids than the student's.
    teacher, other = jax.random.normal(keys[2], (B, T, E)), jax.random.normal(keys[3], (V + 20, E))
    targets, needed = jax.random.randint(keys[4], (B, T), 0, V), jax.random.bernoulli(keys[5], 0.6, (B, T))
    return student, table, teacher, other, targets, needed.at[1].set(False)


def dense(hidden, table, softcap, temperature) -> jax.Array:
    logits = jnp.einsum("BTD,VD->BTV", hidden, table[:V])
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return jax.nn.log_softmax(logits / temperature)


def reference(log_p, log_q, how: Divergence) -> jax.Array:
    """`[B T]` from all log-probs `[B T V]`."""
    if how.top_k:
        ids = jnp.argsort(-log_q, -1)[..., : how.top_k]

        def bucketed(x: jax.Array) -> jax.Array:
            kept = jnp.take_along_axis(x, ids, -1)
            return jnp.concatenate([kept, jnp.log1p(-jnp.exp(kept).sum(-1, keepdims=True))], -1)

        log_p, log_q = bucketed(log_p), bucketed(log_q)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if how.kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    if how.kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    log_m = jnp.log(how.beta * q + (1 - how.beta) * p)
    return how.beta * (q * (log_q - log_m)).sum(-1) + (1 - how.beta) * (p * (log_p - log_m)).sum(-1)


@pytest.mark.parametrize(("tokens", "logits"), [(2048, 1 << 24), (4 * B, 1500)], ids=["whole", "chunked"])
@pytest.mark.parametrize(
    "how", [*HOWS[::2], *slow(HOWS[1::2])], ids=lambda how: f"{how.kind}-{how.beta}-{how.top_k}-{how.temperature}"
)
def test_values_and_gradients_equal_the_dense_ones(arrays, monkeypatch, how, tokens, logits):
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", tokens)
    monkeypatch.setattr(blocks, "CHUNK_LOGITS", logits)
    student, table, teacher, other, targets, needed = arrays
    pull = jax.random.normal(jax.random.key(5), (B, T))

    def ours(student, table):
        found = compared(Side(student, table, 5.0), Side(teacher, other, 3.0), targets, needed, how)
        return jnp.sum(pull * found.divergence), found

    def theirs(student, table):
        log_p, log_q = dense(student, table, 5.0, how.temperature), dense(teacher, other, 3.0, how.temperature)
        taken = jnp.take_along_axis(log_q, targets[..., None], -1)[..., 0]
        agree = (log_p.argmax(-1) == log_q.argmax(-1)).astype(jnp.float32)
        values = Compared(reference(log_p, log_q, how), taken, agree)
        values = jax.tree.map(lambda x: jnp.where(needed, x, 0), values)
        return jnp.sum(pull * values.divergence), values

    (_, found), gradients = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(student, table)
    (_, values), wanted = jax.jit(jax.value_and_grad(theirs, (0, 1), has_aux=True))(student, table)
    for one, other_ in zip(jax.tree.leaves((found, gradients)), jax.tree.leaves((values, wanted)), strict=True):
        np.testing.assert_allclose(one, other_, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("how", [Divergence("jsd", 0.3), Divergence("reverse_kl", top_k=5)], ids=["jsd", "top_k"])
def test_finite_differences(arrays, how):
    student, table, teacher, other, targets, needed = arrays

    def loss(student, table):
        return compared(Side(student, table, 5.0), Side(teacher, other, None), targets, needed, how).divergence.sum()

    gradients = jax.grad(loss, (0, 1))(student, table)
    for place, (x, gradient) in enumerate(zip((student, table), gradients, strict=True)):
        way = jax.random.normal(jax.random.key(place), x.shape)
        # Central differences in float32: of 1e-2, their error is about 1e-4 of the third derivative.
        steps = [
            loss(*((x + h * way if i == place else y) for i, y in enumerate((student, table)))) for h in (1e-2, -1e-2)
        ]
        assert float(steps[0] - steps[1]) / 2e-2 == pytest.approx(float(jnp.vdot(gradient, way)), rel=2e-3)


@pytest.mark.parametrize("how", HOWS[::3] + HOWS[1::3], ids=lambda how: f"{how.kind}-{how.beta}-{how.top_k}")
def test_equal_models_are_at_distance_zero_with_gradient_zero(arrays, how):
    student, table, *_, targets, needed = arrays

    def loss(student, table):
        found = compared(Side(student, table, None), Side(arrays[0], arrays[1], None), targets, needed, how)
        return found.divergence.sum(), found

    (value, found), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(student, table)
    assert abs(float(value)) < 1e-5
    assert max(float(jnp.abs(x).max()) for x in gradients) < 1e-5
    assert bool(jnp.all(found.agreement == needed))


def test_a_frozen_table_gets_no_gradient_and_the_state_the_same(arrays):
    student, table, teacher, other, targets, needed = arrays

    def loss(student, table):
        return compared(
            Side(student, table, None), Side(teacher, other, None), targets, needed, Divergence()
        ).divergence.sum()

    both, alone = jax.jit(jax.grad(loss, (0, 1))), jax.jit(jax.grad(loss))
    np.testing.assert_allclose(alone(student, table), both(student, table)[0], rtol=2e-5, atol=2e-5)
    products = [
        jax.make_jaxpr(f)(student, table).pretty_print(use_color=False).count("dot_general") for f in (both, alone)
    ]
    assert products == [8, 7]  # two models in three sweeps, and the gradients by state and by table


def test_the_teacher_gets_no_gradient_and_extreme_logits_are_finite(arrays):
    student, table, teacher, other, targets, needed = arrays
    for how in HOWS:

        def loss(student, teacher, how=how):
            found = compared(Side(student, table, None), Side(teacher, other, None), targets, needed, how)
            return found.divergence.sum() + found.teacher_logprobs.sum()

        value, (own, theirs) = jax.jit(jax.value_and_grad(loss, (0, 1)))(200 * student, 200 * teacher)
        assert np.isfinite(value)
        assert np.all(np.isfinite(own))
        assert not np.any(theirs)


@pytest.mark.parametrize("how", HOWS[::3], ids=repr)
def test_an_offset_that_all_logits_share_takes_no_digit_away(how):
    """Logits are numbers of 1/1024, exact in float32 beside 1e4; a divergence does not know their offset."""
    rng = np.random.default_rng(0)
    logits = rng.integers(-5 * 1024, 5 * 1024, (2, 40)) / 1024
    targets, needed = jnp.array([[3]]), jnp.array([[True]])

    def found(offset: float) -> tuple[Compared, jax.Array]:
        tables = [jnp.asarray(np.stack([x, np.full(40, offset)], 1), jnp.float32) for x in logits]

        def divergence(state: jax.Array) -> tuple[jax.Array, Compared]:
            sides = Side(state, tables[0], None), Side(jnp.ones((1, 1, 2)), tables[1], None)
            both = compared(*sides, targets, needed, how)
            return both.divergence.sum(), both

        gradient, both = jax.grad(divergence, has_aux=True)(jnp.ones((1, 1, 2)))
        return both, gradient[0, 0, 0]

    q = logits[1] - np.log(np.exp(logits[1]).sum())
    np.testing.assert_allclose(found(1e4)[0].teacher_logprobs, [[q[3]]], atol=3e-6)
    for shifted, right in zip(jax.tree.leaves(found(1e4)), jax.tree.leaves(found(0.0)), strict=True):
        np.testing.assert_allclose(shifted, right, atol=1e-5)


def test_all_logits_are_never_held():
    rows, length, vocab, width = 2, 512, 32_768, 16
    shape = jax.ShapeDtypeStruct

    def loss(hidden, table, teacher, other, targets, needed):
        return compared(
            Side(hidden, table, None), Side(teacher, other, None), targets, needed, Divergence()
        ).divergence.sum()

    states, table = shape((rows, length, width), jnp.float32), shape((vocab, width), jnp.float32)
    tokens, mask = shape((rows, length), jnp.int32), shape((rows, length), jnp.bool_)
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(states, table, states, table, tokens, mask).compile()
    all_logits = rows * length * vocab * 4
    # A chunk of each model's logits and what is made of them; all of one model's would be 128 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 0.8 * all_logits
