"""The chunked head against the plain one: `log_softmax` over all logits, which is what it must never hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tunix.models import token_logprobs as blocks
from tunix.models.token_logprobs import block_length, chunk_width, token_logprobs, visit_of

pytestmark = pytest.mark.models

B, T, V, D = 3, 13, 300, 8  # 300: three chunks of 128 are more than the vocabulary


@pytest.fixture
def arrays() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, table = jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (V, D))
    targets, needed = jax.random.randint(keys[2], (B, T), 0, V), jax.random.bernoulli(keys[3], 0.6, (B, T))
    return hidden, table, targets, needed.at[1].set(False)  # a row where nothing counts


def plain(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    needed: jax.Array,
    softcap: float | None,
    temperature: float,
    possible: jax.Array | bool = True,
):
    logits = jnp.einsum("BTD,VD->BTV", hidden, table)
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    log_p = jax.nn.log_softmax(logits / temperature, where=jnp.broadcast_to(possible, logits.shape))
    taken = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    own = jnp.where(possible, jnp.exp(log_p) * jnp.where(possible, log_p, 0), 0)
    return jnp.where(needed, taken, 0), jnp.where(needed, -own.sum(-1), 0)


SPLITS = pytest.mark.parametrize(("tokens", "logits"), [(2048, 1 << 24), (4 * B, 1 << 24), (5 * B, 1500), (B, 1)])
BENT = pytest.mark.parametrize(("softcap", "temperature"), [(None, 1.0), (3.0, 1.7), *slow([(3.0, 1.0), (None, 0.6)])])


@BENT
@SPLITS
def test_values_and_gradients_equal_the_plain_head(arrays, monkeypatch, softcap, temperature, tokens, logits):
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", tokens)
    monkeypatch.setattr(blocks, "CHUNK_LOGITS", logits)
    hidden, table, targets, needed = arrays
    pull = jax.random.normal(jax.random.key(5), (2, B, T))

    def ours(hidden, table):
        values = token_logprobs(hidden, table, targets, needed, softcap=softcap, entropy=True, temperature=temperature)
        values = values[:2]
        return sum(jnp.sum(p * v) for p, v in zip(pull, values, strict=True)), values

    def theirs(hidden, table):
        values = plain(hidden, table, targets, needed, softcap, temperature)
        return sum(jnp.sum(p * v) for p, v in zip(pull, values, strict=True)), values

    (_, values), gradients = jax.value_and_grad(ours, (0, 1), has_aux=True)(hidden, table)
    (_, expected), wanted = jax.value_and_grad(theirs, (0, 1), has_aux=True)(hidden, table)
    for found, right in zip((*values, *gradients), (*expected, *wanted), strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5)


@BENT
@SPLITS
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("entropy", "whole"), [(True, False), (False, False), (True, True), *slow([(False, True)])])
def test_over_candidates_alone(arrays, monkeypatch, softcap, temperature, tokens, logits, trained, entropy, whole):
    """The distribution over the ids that a token was sampled from: up to five, of the last one's chunk or of others,
    or all where none is listed. With `whole` the entropy, and log-prob and mass together, are those over all ids."""
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", tokens)
    monkeypatch.setattr(blocks, "CHUNK_LOGITS", logits)
    hidden, table, targets, needed = arrays
    keys = jax.random.split(jax.random.key(7), 3)
    others = jax.random.randint(keys[0], (B, T, 4), 0, V)
    candidates = jnp.where(jnp.arange(4) < jax.random.randint(keys[1], (B, T, 1), 0, 5), others, -1)
    candidates = jnp.concatenate([targets[..., None], candidates], -1).at[:, ::4].set(-1)
    listed = jnp.any(candidates[..., None] == jnp.arange(V), -2)
    possible = listed | (candidates[..., :1] < 0)
    pull = jax.random.normal(keys[2], (3, B, T)) * jnp.array([1, entropy, whole])[:, None, None]

    def total(values):
        return sum(jnp.sum(p * v) for p, v in zip(pull, values, strict=True)), values

    def ours(hidden, table):
        return total(
            token_logprobs(
                hidden,
                table if trained else jax.lax.stop_gradient(table),
                targets,
                needed,
                softcap=softcap,
                entropy=entropy,
                temperature=temperature,
                candidates=candidates,
                whole=whole,
            )
        )

    def theirs(hidden, table):
        table = table if trained else jax.lax.stop_gradient(table)
        among, spread = plain(hidden, table, targets, needed, softcap, temperature, possible)
        of_all, spread_of_all = plain(hidden, table, targets, needed, softcap, temperature)
        spread = spread_of_all if whole else spread
        return total((among, spread * entropy, (of_all - among) * whole))

    (_, values), gradients = jax.value_and_grad(ours, (0, 1), has_aux=True)(hidden, table)
    (_, expected), wanted = jax.value_and_grad(theirs, (0, 1), has_aux=True)(hidden, table)
    for found, right in zip((*values, *gradients), (*expected, *wanted), strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5)


def test_of_four_ids_two_could_be_sampled():
    """By hand: probabilities of 1/2, 1/4, 1/8 and 1/8, and the first two are the set. Among it the second has 1/3; the
    set has 3/4; and the entropy of all is (1/2 + 2/4 + 3/8 + 3/8) log 2, that of the set log 3 - 2/3 log 2."""
    table, one = jnp.log(jnp.array([[4.0], [2.0], [1.0], [1.0]])), jnp.ones((1, 1), int)
    given = jnp.ones((1, 1, 1)), table, one, one > 0
    drawn = {"softcap": None, "entropy": True, "candidates": jnp.array([[[0, 1]]])}
    for whole, entropy, mass in (True, 1.75 * np.log(2), np.log(3 / 4)), (False, np.log(3) - 2 / 3 * np.log(2), 0):
        found = token_logprobs(*given, **drawn, whole=whole)
        np.testing.assert_allclose(np.ravel(found), [np.log(1 / 3), entropy, mass], rtol=1e-6)


def test_a_set_that_has_become_impossible_gives_numbers():
    """The ids that a token was drawn from are 200 nats below another by now: float32 has no exp(-200)."""
    hidden, one = jnp.array([[[200.0]]]), jnp.ones((1, 1), int)

    def total(hidden):
        candidates = jnp.array([[[1, 2]]])
        values = token_logprobs(
            hidden, jnp.eye(3, 1), one, one > 0, softcap=None, entropy=True, candidates=candidates, whole=True
        )
        return sum(map(jnp.sum, values)), values

    (_, values), gradient = jax.value_and_grad(total, has_aux=True)(hidden)
    assert values[0] + values[2] == -200
    assert np.isfinite(np.concatenate([*map(np.ravel, values), np.ravel(gradient)])).all()


def test_nothing_needed_gives_zeros(arrays):
    hidden, table, targets, needed = arrays
    gradient = jax.grad(
        lambda h: token_logprobs(h, table, targets, needed & False, softcap=None, entropy=False)[0].sum()
    )
    assert not np.any(gradient(hidden))


def test_a_prompt_of_half_a_row_meets_no_table():
    # 64 + 64 tokens: 127 places predict a token, the last 64 of them one that counts.
    needed = jnp.broadcast_to(jnp.arange(127) >= 63, (16, 127))
    assert block_length(16, 127) * visit_of(needed).number == 64


@pytest.mark.parametrize("trained", [True, False])
def test_an_offset_that_all_logits_share_takes_no_digit_away(monkeypatch, trained):
    """Logits are numbers of 1/1024 beside 0 and +-1e4: exact in float32, whose step is 1/1024 there, so that float64
    says what is right. Of a log-sum-exp of 1e4 float32 keeps 5e-4."""
    monkeypatch.setattr(blocks, "CHUNK_LOGITS", 3 * 128)
    rng = np.random.default_rng(0)
    own = rng.integers(-5 * 1024, 5 * 1024, V) / 1024
    table, offsets = np.stack([own, np.ones(V)], 1), np.array([0.0, 1e4, -1e4])
    hidden, targets = np.stack([np.ones(3), offsets], 1)[None], rng.integers(0, V, (1, 3))
    logits = hidden[0] @ table.T
    log_p = logits - offsets[:, None] - np.log(np.exp(own).sum())
    p = np.exp(log_p[0])
    # By the logits: onehot - p of a log-prob, -p (log p + entropy) of the entropy. By the state's first: times own.
    by_logprob, by_entropy = own[targets[0]] - p @ own, -(p * (log_p[0] - p @ log_p[0])) @ own

    def ours(hidden, table, entropy=True):
        needed = jnp.ones((1, 3), bool)
        values = token_logprobs(hidden, table, jnp.asarray(targets), needed, softcap=None, entropy=entropy)[:2]
        return values[0].sum() + 2 * values[1].sum(), values

    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(table, jnp.float32)
    if trained:
        d_hidden, (logprobs, entropy) = jax.grad(lambda *x: ours(*x), (0, 1), has_aux=True)(*arrays)
        np.testing.assert_allclose(entropy[0], np.full(3, -p @ log_p[0]), atol=3e-6)
        np.testing.assert_allclose(d_hidden[0][0, :, 0], by_logprob + 2 * by_entropy, atol=3e-5)
    else:
        d_hidden, (logprobs, _) = jax.grad(lambda h: ours(h, arrays[1], entropy=False), has_aux=True)(arrays[0])
        np.testing.assert_allclose(d_hidden[0, :, 0], by_logprob, atol=3e-5)
    np.testing.assert_allclose(logprobs[0], log_p[np.arange(3), targets[0]], atol=3e-6)


# What stands below the largest logit is held beside it for the entropy.
@pytest.mark.parametrize(("entropy", "chunks"), [(False, 2), (True, 3)])
def test_the_logits_of_a_large_vocabulary_are_never_held(entropy, chunks):
    rows, length, vocab, width = 2, 512, 32_768, 16
    shape = jax.ShapeDtypeStruct

    def loss(hidden, table, targets, needed):
        return token_logprobs(hidden, table, targets, needed, softcap=None, entropy=entropy)[0].sum()

    compiled = (
        jax.jit(jax.grad(loss, (0, 1)))
        .lower(
            shape((rows, length, width), jnp.float32),
            shape((vocab, width), jnp.float32),
            shape((rows, length), jnp.int32),
            shape((rows, length), jnp.bool_),
        )
        .compile()
    )
    all_logits = rows * length * vocab * 4
    tokens = rows * block_length(rows, length)
    chunk = tokens * chunk_width(rows, length, vocab) * 4
    assert chunk <= all_logits / 2
    # A chunk's logits and their gradient, and the gradient of the table; all logits alone would be eight chunks.
    assert compiled.memory_analysis().temp_size_in_bytes < chunks * chunk + 1.1 * 2 * vocab * width * 4


@BENT
@SPLITS
def test_under_a_frozen_table_the_gradient_is_the_plain_one(arrays, monkeypatch, softcap, temperature, tokens, logits):
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", tokens)
    monkeypatch.setattr(blocks, "CHUNK_LOGITS", logits)
    hidden, table, targets, needed = arrays
    pull = jax.random.normal(jax.random.key(5), (B, T))
    bent = {"softcap": softcap, "temperature": temperature}

    def ours(hidden: jax.Array) -> jax.Array:
        return jnp.sum(pull * token_logprobs(hidden, table, targets, needed, entropy=False, **bent)[0])

    def theirs(hidden: jax.Array) -> jax.Array:
        return jnp.sum(pull * plain(hidden, table, targets, needed, **bent)[0])

    for found, right in zip(jax.value_and_grad(ours)(hidden), jax.value_and_grad(theirs)(hidden), strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("entropy", "saved"), [(False, 2), (True, 1)])
def test_a_frozen_table_saves_products(arrays, entropy, saved):
    """Of four, that of its own gradient always; and that of the logits' second making, unless the entropy needs it."""
    hidden, table, targets, needed = arrays

    def loss(hidden: jax.Array, table: jax.Array) -> jax.Array:
        return token_logprobs(hidden, table, targets, needed, softcap=None, entropy=entropy)[0].sum()

    both = jax.jit(jax.grad(loss, (0, 1)))
    alone = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(alone(hidden, table), both(hidden, table)[0], rtol=2e-5, atol=2e-5)
    products = [
        jax.make_jaxpr(f)(hidden, table).pretty_print(use_color=False).count("dot_general") for f in (both, alone)
    ]
    assert products == [4, 4 - saved]
