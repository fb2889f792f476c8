"""The sampling transform against hand-made numbers, and draws against the distribution that it names."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from tunix.errors import UserError
from tunix.models.token_logprobs import token_logprobs
from tunix.rollout.engine.sampling import MOST_STOPS, Transform, check, draw, pick, transformed
from tunix.types import Sampling

PROBS = np.array([0.10, 0.50, 0.05, 0.20, 0.15])
"""Of five ids; from the most likely one: 1 (.5), 3 (.2), 4 (.15), 0 (.1), 2 (.05)."""

EXPECTED = {
    # All ids, as they are.
    Sampling(): PROBS,
    # p^(1/2) / sum: .3162 .7071 .2236 .4472 .3873, sum 2.0814.
    Sampling(temperature=2.0): np.sqrt(PROBS) / np.sqrt(PROBS).sum(),
    # Greedy reports the distribution at temperature 1.
    Sampling(temperature=0.0): PROBS,
    # .5 + .2 + .15 = .85.
    Sampling(top_k=3): np.array([0, 0.50, 0, 0.20, 0.15]) / 0.85,
    # .5 + .2 = .7 does not reach .75, with .15 it does.
    Sampling(top_p=0.75): np.array([0, 0.50, 0, 0.20, 0.15]) / 0.85,
    # At least .3 of .5 = .15: ids 1, 3 and 4.
    Sampling(min_p=0.29): np.array([0, 0.50, 0, 0.20, 0.15]) / 0.85,
    # The three most likely have .588 .235 .176; the first two reach .8 of THAT mass (.823), as they would not of all.
    Sampling(top_k=3, top_p=0.8): np.array([0, 0.50, 0, 0.20, 0]) / 0.70,
    # Of those two the second has .2 / .5 = .4 of the first's mass.
    Sampling(top_k=3, top_p=0.8, min_p=0.45): np.array([0, 1.0, 0, 0, 0]),
    # Temperature first: squares .01 .25 .0025 .04 .0225 of .325; .769 + .123 = .892 reaches .85.
    Sampling(temperature=0.5, top_p=0.85): np.array([0, 0.25, 0, 0.04, 0]) / 0.29,
}


def many(logits: np.ndarray, settings: list[Sampling], seed: int = 0):
    """Draws of each row's setting."""
    keys = jax.random.split(jax.random.key(seed), len(settings))
    live = jnp.ones(len(settings), bool)
    return jax.jit(draw)(jnp.asarray(logits, jnp.float32), keys, Transform.of(settings), live)


@pytest.mark.parametrize("sampling", EXPECTED, ids=repr)
def test_the_transform_by_hand(sampling):
    logits = jnp.log(jnp.asarray(PROBS, jnp.float32))[None] + 3.0
    scores = transformed(logits, Transform.of([sampling]), jnp.ones(1, bool))
    np.testing.assert_allclose(jax.nn.softmax(scores[0]), EXPECTED[sampling], atol=1e-6)


def test_each_row_has_its_own_settings():
    logits = np.tile(np.log(PROBS), (len(EXPECTED), 1))
    scores = transformed(jnp.asarray(logits, jnp.float32), Transform.of(list(EXPECTED)), jnp.ones(len(EXPECTED), bool))
    np.testing.assert_allclose(jax.nn.softmax(scores), np.stack(list(EXPECTED.values())), atol=1e-6)


def test_among_equals_the_lower_id_is_the_more_likely_one():
    logits = jnp.zeros((2, 4))
    settings = Transform.of([Sampling(top_k=2), Sampling(top_p=0.5)])
    kept = transformed(logits, settings, jnp.ones(2, bool)) > -jnp.inf
    np.testing.assert_array_equal(kept, [[True, True, False, False]] * 2)


def reference_distribution(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """The definition, id by id, in float64."""
    p = np.exp((logits - logits.max()) / s.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = order[: s.top_k or len(p)]
    mass, kept = 0.0, []
    for i in order:
        if mass / p[order].sum() < s.top_p:
            kept.append(i)
        mass += p[i]
    kept = [i for i in kept if p[i] >= s.min_p * p[order[0]]]
    out = np.zeros(len(p))
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(temperature=1.7, top_k=11),
        Sampling(top_p=0.8),
        Sampling(min_p=0.2),
        Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.1),
    ],
    ids=repr,
)
def test_frequencies_pass_a_chi_square_test(sampling):
    """Forty ids: the blocks of the two-level draw are 8 wide."""
    number = 20_000
    logits = np.random.default_rng(1).normal(size=40)
    found = many(np.tile(logits, (number, 1)), [sampling] * number)
    expected = reference_distribution(logits, sampling)
    counts = np.bincount(found.tokens, minlength=40)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    assert chisquare(counts[possible], number * expected[possible]).pvalue > 0.01
    np.testing.assert_allclose(found.logprobs, np.log(expected[found.tokens]), atol=1e-5)


def test_greedy_takes_the_first_of_the_most_likely():
    logits = np.array([[0.0, 2.0, 2.0, 1.0]])
    found = many(logits, [Sampling(temperature=0.0)])
    assert found.tokens[0] == 1
    np.testing.assert_allclose(found.logprobs[0], 2 - np.log(1 + 2 * np.e**2 + np.e), atol=1e-6)


def test_an_offset_that_all_logits_share_takes_no_digit_away():
    """Logits are numbers of 1/1024, exact in float32 beside 1e4, where float32 keeps 5e-4 of a log-sum-exp."""
    own = np.random.default_rng(0).integers(-5 * 1024, 5 * 1024, 40) / 1024
    expected = own - np.log(np.exp(own).sum())
    logits, settings = np.stack([own + offset for offset in (1e4, -1e4)]), [Sampling(top_logprobs=20)] * 2
    found = many(logits, settings)
    np.testing.assert_allclose(found.logprobs, expected[found.tokens], atol=3e-6)
    np.testing.assert_allclose(found.top_logprobs, expected[found.top_ids], atol=3e-6)


def test_what_has_no_mass_is_never_picked():
    """Alone in a large vocabulary, at the ends of blocks and at the ends of the uniform range."""
    rng = np.random.default_rng(0)
    places = np.array([0, 127, 128, 4999, *rng.integers(0, 5000, 12)])
    mass = jax.nn.one_hot(places, 5000)
    edge = np.float32(1 - 2**-24)
    for first, second in ((0.0, 0.0), (edge, edge), (0.0, edge), (0.5, 0.3)):
        uniform = jnp.tile(jnp.array([first, second], jnp.float32), (len(places), 1))
        np.testing.assert_array_equal(pick(mass, uniform), places)


def test_the_most_likely_ids_are_reported_where_a_row_asks():
    found = many(np.tile(np.log(PROBS), (2, 1)), [Sampling(top_logprobs=3), Sampling(top_k=2)])
    np.testing.assert_array_equal(found.top_ids[0, :3], [1, 3, 4])
    np.testing.assert_allclose(found.top_logprobs[0, :3], np.log([0.50, 0.20, 0.15]), atol=1e-6)


def test_the_trainers_head_gives_the_same_logprobs():
    """The loss sees hidden states and a table; the sampler sees logits."""
    rng = np.random.default_rng(2)
    hidden, table = rng.normal(size=(1, 30, 16)), rng.normal(size=(50, 16))
    hidden, table = jnp.asarray(hidden, jnp.float32), jnp.asarray(table, jnp.float32)
    targets = jnp.asarray(rng.integers(0, 50, (1, 30)), jnp.int32)
    needed = jnp.ones((1, 30), bool)
    trainers = jax.jit(partial(token_logprobs, softcap=None, entropy=False), static_argnames="temperature")
    for temperature in (1.0, 0.7, 2.5):
        trained, *_ = trainers(hidden, table, targets, needed, temperature=temperature)
        settings = Transform.of([Sampling(temperature=temperature)] * 30)
        scores = transformed(hidden[0] @ table.T, settings, jnp.ones(30, bool))
        sampled = jnp.take_along_axis(jax.nn.log_softmax(scores), targets[0][:, None], axis=1)[:, 0]
        np.testing.assert_allclose(sampled, trained[0], atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("top_logprobs", 65),
        ("stop_ids", (96,)),
        ("stop_ids", tuple(range(MOST_STOPS + 1))),
        ("stop_strings", ("",)),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(field, value):
    with pytest.raises(UserError, match=field):
        check(replace(Sampling(), **{field: value}), vocab=96)
    check(Sampling(), vocab=96)
