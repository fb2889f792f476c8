"""The GRPO family: each preset against its paper's formula by hand, and what must not change the loss of any."""

from dataclasses import replace
from functools import partial
from math import exp, log, sqrt
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tunix
from tests.policy_batches import PROMPT, Taken, batch_of, gradients, inputs_of, reduced, rows
from tunix.algorithms.config import PolicyConfig
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.algorithms.grpo.config import PRESETS, GRPOConfig
from tunix.algorithms.grpo.loss import grpo_loss
from tunix.algorithms.ops import (
    cispo_surrogate,
    clipped_surrogate,
    importance_weight,
    kl_estimate,
    outside_trust_region,
    soft_surrogate,
)
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.types import Sampling, Sequence

LONGEST = 10  # the constant of `reduction: constant`


def sigmoid(x):
    return 1 / (1 + exp(-x))


def loss_of(**settings):
    return GRPO(GRPOConfig(**settings), Sampling(max_tokens=LONGEST)).gated_loss


# A: two tokens with ratios 1.5 and 0.5, advantage 1, twice as likely and as likely as under the reference.
# B: one token with ratio 1.1, advantage -2, half as likely as under the reference.
A = Taken(
    current=[log(0.5), -1.0],
    old=[log(0.5 / 1.5), -1.0 - log(0.5)],
    advantage=[1.0, 1.0],
    more={"reference_logprobs": [log(0.25), -1.0]},
)
B = Taken(current=[-2.0], old=[-2.0 - log(1.1)], advantage=[-2.0], more={"reference_logprobs": [-2.0 + log(2)]})
K3 = (0.5 - 1 + log(2), 0.0, 2 - 1 - log(2))  # ref/p - 1 - log(ref/p) at A, A, B: .1931, 0, .3069


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # clip .2: min(1.5, 1.2) = 1.2, min(.5, .8) = .5, min(-2.2, -2.2). No preset: mean over three tokens.
        (None, -(1.2 + 0.5 - 2.2) / 3),
        # Mean over sequences of their token means; KL k3 with .04.
        ("grpo", -((1.2 + 0.5) / 2 - 2.2) / 2 + 0.04 * ((K3[0] + K3[1]) / 2 + K3[2]) / 2),
        # Upper clip .28, mean over tokens.
        ("dapo", -(1.28 + 0.5 - 2.2) / 3),
        # Sums over a constant of 10 tokens, mean over two sequences.
        ("dr_grpo", -((1.2 + 0.5) / 10 - 2.2 / 10) / 2),
        # s_A = sqrt(1.5 * .5) = .866 < .9997: the minimum takes it. s_B = 1.1: min(-2.2, -2 * 1.0004) = -2.2.
        ("gspo", -(sqrt(0.75) - 2.2) / 2),
        # Weights 1.5, .5, 1.1 (bounded by 5) times A log p.
        ("cispo", -(1.5 * log(0.5) + 0.5 * -1.0 + 1.1 * -2.0 * -2.0) / 3),
        # A completion is one action: 1.5 x .5 and 1.1, unclipped, over the constant; the KL is in the reward.
        ("rloo", -(0.75 / 10 - 2.2 / 10) / 2),
        # PPO's clip over tokens; the KL is in the reward.
        ("reinforce_pp", -(1.2 + 0.5 - 2.2) / 3),
        # (4 / tau) sigmoid(tau (r - 1)) A, tau 1 and 1.05; mean over sequences of their token means.
        ("sapo", -((4 * sigmoid(0.5) + 4 * sigmoid(-0.5)) / 2 - 2 * 4 / 1.05 * sigmoid(1.05 * 0.1)) / 2),
        # |p - q|: A's first .5 - .333 = .167 > .15, and rising: left out. Its second falls with A > 0; B's rises with
        # A < 0: both go back. The denominator stays 3.
        ("dppo", -(0 + 0.5 - 2.2) / 3),
        # Bound .2: nothing is left out. 2e-3 / 2 times log(1.5)^2, log(.5)^2, log(1.1)^2.
        ("prime_rl", -(1.5 + 0.5 - 2.2) / 3 + 1e-3 * (log(1.5) ** 2 + log(0.5) ** 2 + log(1.1) ** 2) / 3),
        # -A log p, and .05 / 2 of the squares: sums over the constant.
        (
            "dro",
            -((log(0.5) - 1.0) / 10 + -2.0 * -2.0 / 10) / 2
            + 0.025 * (log(1.5) ** 2 + log(0.5) ** 2 + log(1.1) ** 2) / 20,
        ),
        # GSPO's .866 and -2.2 times the lengths 2 and 1, over the constant of 10 tokens.
        ("luspo", -(2 * sqrt(0.75) - 2.2) / 10 / 2),
        # On these advantages: PPO's clip, sums over the constant.
        ("maxrl", -((1.2 + 0.5) / 10 - 2.2 / 10) / 2),
        # The geometric mean of min(1.5, 1.4918) and .5; 1.1 with A < 0 is above .6703.
        ("gmpo", -(sqrt(1.4918 * 0.5) - 2.2) / 2),
        # w = .75 and 1.1. The weights are those of TRL's get_gamma_weights: .75^2 e^(3 x .25) = 1.190813 and
        # 1.1^3 e^(-2 x .1) = 1.089731, times A log p of each token.
        # 1.5 and .5 are outside of .8 and 1.2; the weight 1.1 times A log p.
        ("glm5", -(1.1 * -2.0 * -2.0) / 3),
        # Without a token of high covariance.
        ("clip_cov", -(1.2 + 0.5 - 2.2) / 3),
        ("kl_cov", -(1.5 + 0.5 - 2.2) / 3),
        ("vespo", -(1.190813 * (log(0.5) - 1.0) + 1.089731 * -2.0 * -2.0) / 3),
    ],
)
def test_each_preset_by_hand(preset, expected):
    found = reduced(loss_of(preset=preset), inputs_of(batch_of([A, B])))
    assert found["train/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # d r A / d log p = r A where it is not clipped: A's first token is (1.5 > 1.2).
        ("dapo", [0, -0.5 / 3, 2.2 / 3]),
        ("dr_grpo", [0, -0.5 / 20, 2.2 / 20]),
        # s = exp(mean): each of A's tokens has half of s A; mean over sequences.
        ("gspo", [-sqrt(0.75) / 4, -sqrt(0.75) / 4, 2.2 / 2]),
        # The weight is constant: w A.
        ("cispo", [-1.5 / 3, -0.5 / 3, 2.2 / 3]),
        # d(r1 r2) / d log p is r1 r2 for either token.
        ("rloo", [-0.75 / 20, -0.75 / 20, 2.2 / 20]),
        # 4 p (1 - p) r A with p = sigmoid(tau (r - 1)): mean over tokens of a sequence, then over two.
        (
            "sapo",
            [
                -4 * sigmoid(0.5) * sigmoid(-0.5) * 1.5 / 4,
                -4 * sigmoid(0.5) * sigmoid(-0.5) * 0.5 / 4,
                4 * sigmoid(0.105) * sigmoid(-0.105) * 1.1 * 2 / 2,
            ],
        ),
        ("dppo", [0, -0.5 / 3, 2.2 / 3]),
        # -r A + 2e-3 log r.
        ("prime_rl", [(2e-3 * log(x) - x * a) / 3 for x, a in ((1.5, 1), (0.5, 1), (1.1, -2))]),
        # -A + .05 log r, whatever the ratio.
        ("dro", [(0.05 * log(x) - a) / 20 for x, a in ((1.5, 1), (0.5, 1), (1.1, -2))]),
        # Each of two tokens carries half of s A, twice.
        ("luspo", [-sqrt(0.75) / 20, -sqrt(0.75) / 20, 2.2 / 20]),
        # A's first token is clipped; the second has half of s A at each of two tokens.
        ("gmpo", [0, -sqrt(1.4918 * 0.5) / 4, 2.2 / 2]),
        ("glm5", [0, 0, 2.2 / 3]),
        # The weight is constant.
        ("vespo", [-1.190813 / 3, -1.190813 / 3, 2 * 1.089731 / 3]),
        # Policy: mean over tokens of a sequence, then over two. KL: .04 (1 - ref/p) = .04 of .5, 0, -1.
        ("grpo", [0.04 * 0.5 / 4, -0.5 / 4, 2.2 / 2 - 0.04 * 1 / 2]),
    ],
)
def test_gradients_of_presets_by_hand(preset, expected):
    found = gradients(loss_of(preset=preset), inputs_of(batch_of([A, B])))
    places = [(0, PROMPT), (0, PROMPT + 1), (1, PROMPT)]
    np.testing.assert_allclose([found[place] for place in places], expected, rtol=1e-5, atol=1e-7)
    assert all(value == 0 for place, value in found.items() if place not in places)


def test_metrics_by_hand():
    found = reduced(loss_of(preset="grpo"), inputs_of(batch_of([A, B])))
    assert found["policy/ratio"] == pytest.approx((1.5 + 0.5 + 1.1) / 3, rel=1e-5)
    assert found["policy/clipped"] == pytest.approx(1 / 3)  # .5 with a positive advantage is not held back
    assert found["kl/reference"] == pytest.approx(sum(K3) / 3, rel=1e-5)
    # KL(old || policy) from old's samples: r - 1 - log r.
    assert found["kl/old"] == pytest.approx((0.5 - log(1.5) - 0.5 - log(0.5) + 0.1 - log(1.1)) / 3, rel=1e-4)
    assert found["mismatch/mean"] == pytest.approx((log(1.5) - log(0.5) + log(1.1)) / 3, rel=1e-5)
    assert found["loss/kl"] == pytest.approx(0.04 * ((K3[0] + K3[1]) / 2 + K3[2]) / 2, rel=1e-5)
    assert "policy/entropy" not in found
    assert "policy/clipped" not in reduced(loss_of(preset="rloo"), inputs_of(batch_of([A, B])))


def test_largest_mismatch_is_a_peak():
    inputs = inputs_of(batch_of([A, B]))
    peak = loss_of()(inputs).peaks["mismatch/max"]
    assert float(jnp.max(peak)) == pytest.approx(log(2), rel=1e-6)  # A's second token: log .5


def test_mismatch_is_zero_where_trainer_and_sampler_agree():
    same = [replace(one, old=one.current) for one in (A, B)]
    found = reduced(loss_of(), inputs_of(batch_of(same)))
    assert (found["mismatch/mean"], found["mismatch/k3"], found["kl/old"], found["policy/ratio"]) == (0, 0, 0, 1)


@pytest.mark.parametrize("settings", [{"kl_estimator": "k2"}, {"kl_estimator": "k3"}, {"kl_weighted": True}])
def test_kl_is_zero_where_the_policy_is_the_reference(settings):
    """At step 0: value, metric and gradient, exactly."""
    start = [replace(one, old=one.current, more={"reference_logprobs": one.current}) for one in (A, B)]
    inputs = inputs_of(batch_of(start))
    with_kl, without = loss_of(kl=100.0, **settings), loss_of()
    found = reduced(with_kl, inputs)
    assert found["loss/kl"] == 0
    assert found["kl/reference"] == 0
    assert gradients(with_kl, inputs) == gradients(without, inputs)


def test_the_kl_is_over_the_whole_where_it_is_set():
    """The sets of A's tokens have 3/4 and 1/2, B's has all: the KL is that of .375 to .1875, of .1839 to as much, and
    of .1353 to .2707, as in K3; weighted by .375 and .1839 over the sampler's .3333 and .7358 among the set, and 1.1.
    The surrogate, 1.2 and .5 and -2.2, is that among the set."""
    whole = [log(0.75), log(0.5), 0.0]
    moved = [
        replace(
            one, more={"reference_logprobs": [x + y for x, y in zip(one.more["reference_logprobs"], up, strict=True)]}
        )
        for one, up in ((A, whole[:2]), (B, whole[2:]))
    ]
    inputs = inputs_of(batch_of(moved))
    places = [int(x) for x in np.flatnonzero(inputs.batch.loss_mask)]
    masses = np.zeros(inputs.batch.loss_mask.size, np.float32)
    masses[places] = whole if inputs.batch.sequence_ids.ravel()[places[0]] == 0 else [*whole[2:], *whole[:2]]
    inputs = replace(inputs, whole_logprobs=inputs.logprobs + masses.reshape(inputs.logprobs.shape))
    found = reduced(loss_of(kl=1.0, penalties_over="whole"), inputs)
    assert found["loss/kl"] == found["kl/reference"] == pytest.approx(sum(K3) / 3, rel=1e-5)
    assert found["loss/policy"] == pytest.approx(-(1.2 + 0.5 - 2.2) / 3, rel=1e-5)
    weighted = reduced(loss_of(kl=1.0, kl_weighted=True, penalties_over="whole"), inputs)
    assert weighted["loss/kl"] == pytest.approx((1.125 * K3[0] + 1.1 * K3[2]) / 3, rel=1e-5)


def test_entropy_is_raised():
    taken = [replace(A, more={"entropy": [0.5, 1.0]}), replace(B, more={"entropy": [3.0]})]
    inputs = inputs_of(batch_of(taken), entropy=True)
    found, without = reduced(loss_of(entropy_bonus=0.1), inputs), reduced(loss_of(), inputs)
    assert found["policy/entropy"] == without["policy/entropy"] == pytest.approx(1.5)  # (.5 + 1 + 3) / 3
    assert found["train/loss"] == pytest.approx(without["train/loss"] - 0.15, rel=1e-5)


def test_a_held_entropys_coefficient_comes_with_the_sequences():
    taken = [replace(A, more={"entropy": [0.5, 1.0]}), replace(B, more={"entropy": [3.0]})]
    inputs = inputs_of(batch_of(taken), entropy=True)
    coefficients = {"entropy_coefficient": jnp.array([0.2, 0.1])}
    inputs = replace(inputs, batch=replace(inputs.batch, per_sequence=coefficients))
    found = reduced(loss_of(entropy_target=0.3), inputs)
    assert found["loss/entropy"] == pytest.approx(-(0.2 * 1.5 + 0.1 * 3) / 3)


def test_what_an_environment_wrote_has_a_cross_entropy():
    """A's second token is an observation of log-prob -1, beside B's of weight 2 with -2 and -4: (1 + 2 x 6) / 5. The
    policy's term is that of the others: -1.2 of A's first, of B's -2.2 against A = -2, weight 2, over three."""
    a = replace(A, trained=[True, False], more={"observed": [0.0, 1.0]})
    b = Taken(
        [-2.0, -2.0, -4.0], [-2.0 - log(1.1), 0, 0], [-2.0] * 3, {"observed": [0.0, 1.0, 1.0]}, [True] + [False] * 2
    )
    sequences = [unmasked(x) for x in (a, replace(b, weight=2.0))]
    inputs = inputs_of(pack(sequences, 2, 12, packing=True))
    loss = loss_of(observation_weight=0.1)
    found = reduced(loss, inputs)
    assert found["loss/observations"] == pytest.approx(0.1 * 13 / 5)
    assert found["loss/policy"] == pytest.approx((-1.2 + 2 * 2.2) / 3, rel=1e-5)
    assert found["mismatch/mean"] == pytest.approx((log(1.5) + 2 * log(1.1)) / 3, rel=1e-5)
    slopes = gradients(loss, inputs)
    assert slopes[0, PROMPT + 1] == pytest.approx(-0.1 / 5)
    assert slopes[1, PROMPT + 1] == slopes[1, PROMPT + 2] == pytest.approx(-0.1 * 2 / 5)
    without = gradients(loss_of(), inputs)
    assert {x for x, y in slopes.items() if y != without[x]} == {(0, PROMPT + 1), (1, PROMPT + 1), (1, PROMPT + 2)}


def unmasked(taken: Taken) -> Sequence:
    """The sequence with the log-probs and marks of its untrained tokens too."""
    sequence, names = taken.sequence(), {"current": taken.current, "observed": taken.more["observed"]}
    whole = {name: np.array([0.0] * PROMPT + list(x), np.float32) for name, x in names.items()}
    return replace(sequence, per_token={**sequence.per_token, **whole})


def test_the_entropy_is_averaged_as_the_surrogate_is():
    """.5 and 1 of one completion, 3 of the other: a mean of means."""
    taken = [replace(A, more={"entropy": [0.5, 1.0]}), replace(B, more={"entropy": [3.0]})]
    loss = loss_of(entropy_bonus=0.1, reduction="sequences")
    found = reduced(loss, inputs_of(batch_of(taken), entropy=True))
    assert found["loss/entropy"] == pytest.approx(-0.1 * (0.75 + 3) / 2)


def test_a_completion_is_one_action_under_its_ratio():
    """1.5 x .5 = .75 with A = 1 and 1.1 with A = -2; clipped at .8 and 1.2 the second is what it is."""
    inputs = inputs_of(batch_of([A, B]))
    for surrogate in ("none", "clip"):
        loss = loss_of(ratio="completion", reduction="sequences", surrogate=surrogate)
        assert reduced(loss, inputs)["train/loss"] == pytest.approx(-(0.75 - 2.2) / 2, rel=1e-5)
        found = gradients(loss, inputs)
        slopes = [found[x] for x in ((0, PROMPT), (0, PROMPT + 1), (1, PROMPT))]
        np.testing.assert_allclose(slopes, [-0.75 / 2, -0.75 / 2, 2.2 / 2], rtol=1e-5)


def test_tokens_of_high_covariance_are_left_out_or_held():
    """A's first token of ratio 1.5, clipped to 1.2, and B's of 1.1; -2.2 and .5 stay. Their |log r| is added."""
    taken = [replace(A, more={"covariant": [1.0, 0.0]}), replace(B, more={"covariant": [1.0]})]
    inputs = inputs_of(batch_of(taken))
    clipped = reduced(loss_of(preset="clip_cov"), inputs)
    assert clipped["train/loss"] == pytest.approx(-0.5 / 3, rel=1e-5)
    assert clipped["policy/clipped"] == pytest.approx(2 / 3)
    held = loss_of(preset="kl_cov")
    assert reduced(held, inputs)["train/loss"] == pytest.approx(
        (-(1.5 + 0.5 - 2.2) + log(1.5) + log(1.1)) / 3, rel=1e-5
    )
    found = gradients(held, inputs)
    slopes = [found[x] for x in ((0, PROMPT), (0, PROMPT + 1), (1, PROMPT))]
    np.testing.assert_allclose(slopes, [(-1.5 + 1) / 3, -0.5 / 3, (2.2 + 1) / 3], rtol=1e-5)


# Surrogates, ratio by ratio.


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        # A > 0: the ratio's rise is clipped at 1.2, its fall is not; the dual clip plays no part.
        (0.5, 1.0, -0.5, -1.0, False),
        (1.0, 1.0, -1.0, -1.0, False),
        (1.5, 1.0, -1.2, 0.0, True),
        (4.0, 1.0, -1.2, 0.0, True),
        # A < 0: its fall is clipped at .8; its rise is not, until the dual clip at 3.
        (0.5, -1.0, 0.8, 0.0, True),
        (1.0, -1.0, 1.0, 1.0, False),
        (1.5, -1.0, 1.5, 1.0, False),
        (4.0, -1.0, 3.0, 0.0, True),
    ],
)
def test_dual_clip_in_every_region(ratio, advantage, loss, slope, clipped):
    def of(x):
        return clipped_surrogate(x, jnp.full((1, 1), advantage), 0.2, 0.2, dual=3.0)

    x = jnp.full((1, 1), ratio)
    assert float(of(x).loss[0, 0]) == pytest.approx(loss)
    assert float(jax.grad(lambda x: of(x).loss.sum())(x)[0, 0]) == pytest.approx(slope)
    assert bool(of(x).clipped[0, 0]) is clipped


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    ratio, logprobs = jnp.array([[0.1, 1.0, 7.0]]), jnp.array([[-1.0, -2.0, -3.0]])
    surrogate, slope = (
        cispo_surrogate(logprobs, ratio, jnp.full((1, 3), 2.0), 0.5, 4.0),
        jax.grad(lambda x: cispo_surrogate(x, jnp.exp(x) * ratio, jnp.full((1, 3), 2.0), 1.0, 4.0).loss.sum()),
    )
    # Weights clip(.1, .5, 5) = .5, 1, 5, times -A log p.
    np.testing.assert_allclose(surrogate.loss, [[0.5 * 2 * 1, 1 * 2 * 2, 5 * 2 * 3]], rtol=1e-6)
    assert surrogate.clipped.tolist() == [[True, False, True]]
    # Through exp(x) too, nothing flows: -w A alone.
    np.testing.assert_allclose(slope(jnp.zeros((1, 3))), [[-0.1 * 2, -1 * 2, -5 * 2]], rtol=1e-6)


def test_the_geometric_mean_clips_by_the_advantages_sign():
    """Ratios 1.5 and .5 within .8 and 1.2, the numbers of TRL's GMPOTrainer: sqrt(1.2 x .5) of A = 1, sqrt(1.5 x .8) of
    A = -2, whose second token is clipped. With clip_low 1 nothing is: sqrt(1.5 x .5)."""
    lower = replace(A, advantage=[-2.0, -2.0])
    inputs, without = inputs_of(batch_of([A, lower])), {"surrogate": "geometric", "reduction": "sequences"}
    loss = loss_of(**without)
    found = reduced(loss, inputs)
    assert found["train/loss"] == pytest.approx(-(sqrt(1.2 * 0.5) - 2 * sqrt(1.5 * 0.8)) / 2, rel=1e-5)
    assert found["policy/clipped"] == pytest.approx(2 / 4)
    slopes = gradients(loss, inputs)
    assert slopes[1, PROMPT] == pytest.approx(2 * sqrt(1.5 * 0.8) / 4, rel=1e-5)
    assert slopes[1, PROMPT + 1] == 0
    alone = reduced(loss_of(**without, clip_low=1.0), inputs_of(batch_of([lower])))
    assert alone["train/loss"] == pytest.approx(2 * sqrt(0.75), rel=1e-5)


def test_the_soft_gates_gradient_is_reinforces_on_policy():
    """At r = 1: 4 p (1 - p) A with p = 1/2, whatever tau."""
    for advantage, taus in ((1.0, (0.5, 9.0)), (-2.0, (9.0, 0.5))):
        slope = jax.grad(lambda r, a=advantage, t=taus: soft_surrogate(r, jnp.full((1, 1), a), *t).loss.sum())
        assert float(slope(jnp.ones((1, 1)))[0, 0]) == pytest.approx(-advantage)


def test_luspos_number_is_the_papers_where_the_constant_is_one():
    """LUSPO, eq. 5 of sec. 4.2: the mean over sequences of |y| times GSPO's. The loss takes arrays and numbers."""

    def loss(inputs):
        old, advantages = (inputs.batch.per_token[name] for name in ("old_logprobs", "advantages"))
        numbers = {"over": 1.0, "clip_low": 2e-3, "clip_high": 2.5e-3}
        return grpo_loss(inputs.logprobs, old, advantages, inputs.batch, ratio="sequence", **numbers)

    found = reduced(loss, inputs_of(batch_of([A, B])))
    assert found["train/loss"] == pytest.approx(-(2 * sqrt(0.75) - 1 * 2.2) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "p", "q", "advantage", "bound", "masked"),
    [
        # tv .3 = |.8 - .5|: rising with A > 0; with A < 0 the update leads back; nothing to be done where A = 0.
        ("tv", 0.8, 0.5, 1.0, 0.29, True),
        ("tv", 0.8, 0.5, 1.0, 0.31, False),
        ("tv", 0.8, 0.5, -1.0, 0.29, False),
        ("tv", 0.8, 0.5, 0.0, 0.29, False),
        ("tv", 0.5, 0.8, -1.0, 0.29, True),
        ("tv", 0.5, 0.8, 1.0, 0.29, False),
        # A ratio of ten on a rare token is no distance, of 1.25 on a common one it is .2.
        ("tv", 0.01, 0.001, 1.0, 0.01, False),
        ("tv", 0.999, 0.799, 1.0, 0.19, True),
        # kl: .5 log(.5 / .8) + .5 log(.5 / .2) = .5 log(1.5625) = .2231.
        ("kl", 0.8, 0.5, 1.0, 0.222, True),
        ("kl", 0.8, 0.5, 1.0, 0.224, False),
        # From .9 to .5: .9 log 1.8 + .1 log .2 = .3681.
        ("kl", 0.5, 0.9, -1.0, 0.367, True),
        ("kl", 0.5, 0.9, -1.0, 0.369, False),
        # Certain is no infinity: q = .5, p = 1 is far, and p = q = 1 no distance.
        ("kl", 1.0, 0.5, 1.0, 1.0, True),
        ("kl", 1.0, 1.0, 1.0, 1e-6, False),
    ],
)
def test_the_trust_region_by_hand(kind, p, q, advantage, bound, masked):
    """DPPO, eq. 12."""
    one = partial(jnp.full, (1, 1))
    found = outside_trust_region(one(log(p)), one(log(q)), one(advantage), kind, bound)
    assert bool(found[0, 0]) is masked


def test_tokens_outside_of_the_trust_region_are_reported_and_keep_their_drift():
    found = reduced(loss_of(preset="dppo", drift=2.0), inputs_of(batch_of([A, B])))
    assert found["policy/clipped"] == pytest.approx(1 / 3)
    assert found["loss/policy"] == pytest.approx(-(0.5 - 2.2) / 3, rel=1e-5)
    assert found["loss/drift"] == pytest.approx((log(1.5) ** 2 + log(0.5) ** 2 + log(1.1) ** 2) / 3, rel=1e-5)


@pytest.mark.parametrize(("limit", "left_out"), [(0.6, True), (0.8, False)])
def test_the_off_policy_mask_by_hand(limit, left_out):
    """DeepSeek-V3.2: of completions with A < 0, those that the sampler thought likelier by more than delta per token.

    The first is likelier by .5 and .9, .7 in the mean; the second's advantage is positive; the third has moved up.
    """
    taken = [
        Taken([-1.5, -1.9], [-1.0, -1.0], [-1.0, -1.0]),
        Taken([-3.0], [-1.0], [1.0]),
        Taken([-1.0], [-3.0], [-1.0]),
    ]
    settings = {"surrogate": "none", "off_policy_limit": limit}
    found = reduced(loss_of(**settings), inputs_of(batch_of(taken)))
    first = 0 if left_out else exp(-0.5) + exp(-0.9)
    assert found["train/loss"] == pytest.approx((first - exp(-2) + exp(2)) / 4, rel=1e-5)
    assert found["policy/clipped"] == pytest.approx(0.5 if left_out else 0)


def test_the_off_policy_mask_compares_with_the_sampler_where_old_ones_are_recomputed():
    """The ratio starts at the recomputed log-probs (r = 1), the distance at the sampler's (.7)."""
    far = Taken([-1.7], [-1.7], [-1.0], {"sampler_logprobs": [-1.0]})
    near = Taken([-2.0], [-2.0], [-3.0], {"sampler_logprobs": [-2.0]})
    settings = {"surrogate": "none", "old_logprobs": "recompute", "off_policy_limit": 0.6}
    # Of -r A = 1 and 3, the mean over two tokens.
    assert reduced(loss_of(**settings), inputs_of(batch_of([far, near])))["train/loss"] == pytest.approx(3 / 2)


# KL estimators: values and gradients against the true ones, over all outcomes of a small categorical.

LOGITS, REFERENCE = jnp.array([0.3, -0.7, 1.1]), jax.nn.log_softmax(jnp.array([-0.2, 0.4, 0.1]))


def kl_true(logits, forward=False):
    p = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - p)) if forward else jnp.sum(jnp.exp(p) * (p - REFERENCE))


def expected(logits, estimator, drawn_by=None):
    """The estimator's mean over samples of `drawn_by` (the policy itself, held fixed), weighted where it is another."""
    p = jax.nn.log_softmax(logits)
    q = jax.lax.stop_gradient(p) if drawn_by is None else drawn_by
    weight = 1.0 if drawn_by is None else jnp.exp(p - q)
    return jnp.sum(jnp.exp(q) * weight * kl_estimate(p - REFERENCE, estimator))


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    true = float(kl_true(LOGITS))
    assert float(expected(LOGITS, "k1")) == pytest.approx(true, rel=1e-5)
    assert float(expected(LOGITS, "k3")) == pytest.approx(true, rel=1e-5)
    assert abs(float(expected(LOGITS, "k2")) - true) > 0.01


def test_gradients_of_the_estimators_are_what_their_docstring_says():
    towards, backwards = jax.grad(kl_true)(LOGITS), jax.grad(partial(kl_true, forward=True))(LOGITS)
    assert float(jnp.abs(towards - backwards).max()) > 0.05  # or nothing would be told apart
    slope = jax.grad(expected)
    np.testing.assert_allclose(slope(LOGITS, "k1"), 0, atol=1e-6)
    np.testing.assert_allclose(slope(LOGITS, "k2"), towards, atol=1e-6)
    np.testing.assert_allclose(slope(LOGITS, "k3"), backwards, atol=1e-6)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    p = jax.nn.log_softmax(LOGITS)
    np.testing.assert_allclose(kl_estimate(p - REFERENCE, "k3+"), kl_estimate(p - REFERENCE, "k3"), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(expected)(LOGITS, "k3+"), jax.grad(kl_true)(LOGITS), atol=1e-6)
    found = reduced(loss_of(kl=1.0, kl_estimator="k3+"), inputs_of(batch_of([A, B])))
    assert found["loss/kl"] == pytest.approx(sum(K3) / 3, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_estimators_have_the_true_gradient_whoever_drew(estimator):
    other = jax.nn.log_softmax(jnp.array([1.0, 0.0, -1.0]))
    np.testing.assert_allclose(jax.grad(expected)(LOGITS, estimator, other), jax.grad(kl_true)(LOGITS), atol=1e-6)


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
    """`E[k1 grad log p]`, k1 held fixed as rewards are."""

    def penalty(logits):
        p = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(p) * jax.lax.stop_gradient(kl_estimate(p - REFERENCE, "k1")))

    np.testing.assert_allclose(jax.grad(penalty)(LOGITS), jax.grad(kl_true)(LOGITS), atol=1e-6)


def test_the_weighted_term_multiplies_by_the_ratio():
    found = reduced(loss_of(kl=1.0, kl_weighted=True), inputs_of(batch_of([A, B])))
    assert found["loss/kl"] == pytest.approx((1.5 * K3[0] + 1.1 * K3[2]) / 3, rel=1e-5)
    found = reduced(loss_of(kl=1.0, kl_weighted=True, kl_estimator="k1"), inputs_of(batch_of([A, B])))
    assert found["loss/kl"] == pytest.approx((1.5 * log(2) - 1.1 * log(2)) / 3, rel=1e-4)


@pytest.mark.parametrize(
    ("d", "w", "settings", "value", "slope"),
    [
        # k3 = exp(-d) - 1 + d. Its gradient is 1 - exp(-d); weighted, w (1 - exp(-d)) + w k3 = w d.
        (-2.0, 1.5, {}, 1.5 * (exp(2) - 3), 1.5 * -2),
        # The two summands are 4.4e8 each: as a product in float32 they leave -32.
        (-19.9, 1.0, {}, exp(19.9) - 20.9, -19.9),
        (-19.9, 2.0, {}, 2 * (exp(19.9) - 20.9), -39.8),
        (1e-3, 1.0, {}, 4.9988e-7, 1e-3),  # d^2 / 2 - d^3 / 6, where -1 - d is -1.00100005 in float32
        # Beyond the bound the estimate is that of 20, and nothing moves; the weight's own gradient would be 4.85e8.
        (-25.0, 1.0, {}, exp(20) - 21, 0.0),
        (25.0, 1.5, {}, 1.5 * 19.0, 0.0),
        # The weighted estimate within 10, as NeMo-RL: exp(2) - 3 = 4.39; times 1.5 it is 6.58, times 3 13.17.
        (-2.0, 1.5, {"kl_output_clamp": 10.0}, 1.5 * (exp(2) - 3), -3.0),
        (-2.0, 3.0, {"kl_output_clamp": 10.0}, 10.0, 0.0),
        # k1 = d; weighted its gradient is w d + w.
        (-2.0, 1.5, {"kl_estimator": "k1"}, -3.0, -1.5),
        (-25.0, 1.5, {"kl_estimator": "k1"}, -30.0, 0.0),
        (-12.0, 1.0, {"kl_estimator": "k1", "kl_output_clamp": 10.0}, -10.0, 0.0),
        # Unweighted, as verl: exp(3) - 4 = 16.1 is 10.
        (-2.0, 1.5, {"kl_weighted": False, "kl_output_clamp": 10.0}, exp(2) - 3, 1 - exp(2)),
        (-3.0, 1.5, {"kl_weighted": False, "kl_output_clamp": 10.0}, 10.0, 0.0),
        (-25.0, 1.5, {"kl_weighted": False}, exp(20) - 21, 0.0),
    ],
)
def test_where_the_kl_is_clamped_nothing_moves(d, w, settings, value, slope):
    """One token of log-prob -1, d above the reference and log w above the sampler; advantage 0."""
    one = Taken([-1.0], [-1.0 - log(w)], [0.0], {"reference_logprobs": [-1.0 - d]})
    loss, inputs = loss_of(**{"kl": 1.0, "kl_weighted": True, **settings}), inputs_of(batch_of([one]))
    # Of small d it is a difference of such numbers: a last bit is 2.3e-4 of it; jax 0.10 and 0.12 are one apart.
    assert reduced(loss, inputs)["loss/kl"] == pytest.approx(value, rel=3e-4 if d == 1e-3 else 2e-6)
    assert gradients(loss, inputs)[0, PROMPT] == pytest.approx(slope, rel=2e-4 if d == 1e-3 else 2e-6)


def test_weighted_k1_moves_at_step_0_and_k3_does_not():
    """d = 0 and w = 1: w d + w = 1 for each of three tokens, in expectation 0; k3's is w d = 0."""
    start = [replace(one, old=one.current, more={"reference_logprobs": one.current}) for one in (A, B)]
    inputs = inputs_of(batch_of([replace(one, advantage=[0.0] * len(one.current)) for one in start]))
    k1, k3 = (loss_of(kl=0.06, kl_weighted=True, kl_estimator=kind) for kind in ("k1", "k3"))
    assert reduced(k1, inputs)["loss/kl"] == 0
    found = gradients(k1, inputs)
    assert [found[x] for x in ((0, PROMPT), (0, PROMPT + 1), (1, PROMPT))] == pytest.approx([0.02] * 3)
    assert not any(gradients(k3, inputs).values())


# Corrections for a sampler that is not the trainer.

# Trainer over sampler before the updates: A .4 and 3, product 1.2; B 6. The sampler's log-probs are old - log w.
SAMPLED = [
    replace(A, more={"sampler_logprobs": [A.old[0] - log(0.4), A.old[1] - log(3)]}),
    replace(B, more={"sampler_logprobs": [B.old[0] - log(6)]}),
]


@pytest.mark.parametrize("given", [True, False])
def test_a_weighted_kl_knows_who_sampled(given):
    """Policy over old is 1.5, .5, 1.1, old over sampler .4, 3, 6: policy over sampler .6, 1.5, 6.6. Where the old ones

    are left out they are the current ones, 1, 1, 1 over which say nothing about who sampled.
    """
    taken = [replace(x, more={**x.more, **y.more}) for x, y in zip(SAMPLED, (A, B), strict=True)]
    inputs = inputs_of(batch_of(taken))
    if not given:
        named = {name: x for name, x in inputs.batch.per_token.items() if name != "old_logprobs"}
        inputs = replace(inputs, batch=replace(inputs.batch, per_token=named))
    settings = {"kl": 1.0, "kl_weighted": True, "old_logprobs": "recompute"}
    k1, k3 = (reduced(loss_of(**settings, kl_estimator=kind), inputs)["loss/kl"] for kind in ("k1", "k3"))
    assert k3 == pytest.approx((0.6 * K3[0] + 1.5 * K3[1] + 6.6 * K3[2]) / 3, rel=1e-5)
    assert k1 == pytest.approx((0.6 * log(2) - 6.6 * log(2)) / 3, rel=1e-5)  # d is log 2, 0, -log 2: -2 log 2


def test_nemos_case_of_a_sampler_a_trainer_and_a_reference_that_all_differ():
    """The numbers of NeMo-RL's own test with both of its corrections, worked by hand: its loss is -0.20044.

    r = e^(-.69315), 1, e^.40547 = .5, 1, 1.5, clipped .8, 1, 1.2; -min(r A, clip A) = -.5, 1, -2.4;
    times old over sampler e^-.5, e^.5, e^-.2 = .60653, 1.64872, .81873: -.30327, 1.64872, -1.96495, mean -.20650.
    k3 = .30685, 0, .07213, times policy over sampler e^-1.19315, e^.5, e^.20547 = .30326, 1.64872, 1.22810: .09306, 0,
    .08859, mean .06055, of which .1 counts.
    """
    more = {"sampler_logprobs": [-0.5, -1.5, -0.8], "reference_logprobs": [-1.0] * 3}
    taken = [Taken([-1.69315, -1.0, -0.59453], [-1.0] * 3, [1.0, -1.0, 2.0], more)]
    loss = loss_of(kl=0.1, kl_weighted=True, old_logprobs="recompute", correction="truncate", reduction="tokens")
    assert reduced(loss, inputs_of(batch_of(taken)))["train/loss"] == pytest.approx(-0.20044, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "weights", "changed"),
    [
        ({"correction": "truncate"}, (0.4, 2, 2), 2),  # min(w, 2)
        ({"correction": "mask"}, (0, 3, 0), 2),  # .5 <= w <= 5
    ],
)
def test_corrections_by_hand(settings, weights, changed):
    inputs = inputs_of(batch_of(SAMPLED))
    found = reduced(loss_of(old_logprobs="recompute", **settings), inputs)
    terms = np.array([1.2, 0.5, -2.2]) * weights
    assert found["train/loss"] == pytest.approx(-terms.sum() / 3, rel=1e-5)
    assert found["mismatch/corrected"] == pytest.approx(changed / 3)
    # Measured between the recomputed and the sampler's, so the policy's own updates play no part.
    assert found["mismatch/mean"] == pytest.approx((-log(0.4) + log(3) + log(6)) / 3, rel=1e-5)
    # KL(sampler || trainer): w - 1 - log w.
    assert found["mismatch/k3"] == pytest.approx((0.4 + 3 + 6 - 3 - log(0.4 * 3 * 6)) / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "weights", "masked"),
    [
        ({"geometric_mask": (0.9, 1.1)}, (1, 1, 0), 1),  # 1.0954 is inside, 6 is not
        ({"geometric_mask": (0.9, 1.09)}, (0, 0, 0), 3),
        # seq-mask-tis: tokens' truncated weights where the completion's geometric mean is inside.
        ({"geometric_mask": (0.9, 1.1), "correction": "truncate"}, (0.4, 2, 0), 1),
    ],
)
def test_the_geometric_mask_by_hand(settings, weights, masked):
    found = reduced(loss_of(old_logprobs="recompute", **settings), inputs_of(batch_of(SAMPLED)))
    terms = np.array([1.2, 0.5, -2.2]) * weights
    assert found["train/loss"] == pytest.approx(-terms.sum() / 3, rel=1e-5)
    assert found["mismatch/masked"] == pytest.approx(masked / 3)


@pytest.mark.parametrize(
    ("kind", "low", "high", "weights", "changed"),
    [
        ("truncate", 0.0, 4.0, (0.4, 3, 4), (0, 0, 1)),
        ("truncate", 0.5, 2.0, (0.5, 2, 2), (1, 1, 1)),  # from below too
        ("mask", 0.3, 2.0, (0.4, 0, 0), (0, 1, 1)),
    ],
)
def test_weights_within_other_bounds(kind, low, high, weights, changed):
    found, is_changed = importance_weight(jnp.log(jnp.array([[0.4, 3.0, 6.0]])), kind, low, high)
    np.testing.assert_allclose(found, [weights], rtol=1e-6)
    assert is_changed.tolist() == [list(map(bool, changed))]


def test_weights_are_constants():
    slope = jax.grad(lambda x: importance_weight(x, "truncate", 0.0, 2.0)[0].sum())(jnp.zeros((2, 3)))
    assert not slope.any()


def test_a_single_update_needs_no_recomputed_old_logprobs():
    """Left out, they are the current ones held fixed: what a forward pass before the update would have given."""
    loss = loss_of(old_logprobs="recompute", correction="truncate")
    given = inputs_of(batch_of([replace(one, old=one.current) for one in SAMPLED]))
    named = {name: x for name, x in given.batch.per_token.items() if name != "old_logprobs"}
    without = replace(given, batch=replace(given.batch, per_token=named))
    assert reduced(loss, without) == reduced(loss, given)
    assert gradients(loss, without) == gradients(loss, given)


# What must not change anything, for every member of the family.

FAMILY = {
    **{name: {"preset": name} for name in PRESETS},
    "plain": {},
    "gspo_dual": {"ratio": "sequence", "dual_clip": 3.0, "reduction": "tokens"},
    "cispo_sequence": {"surrogate": "cispo", "ratio": "sequence", "reduction": "sequences"},
    "weighted": {"kl": 0.5, "kl_weighted": True, "entropy_bonus": 0.01, "reduction": "constant"},
    "tis": {"old_logprobs": "recompute", "correction": "truncate"},
    "dppo_kl": {"preset": "dppo", "trust_region": "kl", "old_logprobs": "recompute", "off_policy_limit": 0.1},
    "soft_off_policy": {"preset": "sapo", "off_policy_limit": 0.1, "drift": 0.1},
    "geometric": {
        "old_logprobs": "recompute",
        "correction": "truncate",
        "geometric_mask": (0.2, 5.0),
    },
    "k3_plus": {"kl": 0.1, "kl_estimator": "k3+"},
    "icepop": {"old_logprobs": "recompute", "correction": "mask", "kl": 0.1, "kl_estimator": "k2"},
}


def rollouts(seed: int = 0) -> list[Taken]:
    """Six completions of 1 to 6 tokens, one with an observation between its turns, one that failed (weight 0)."""
    rng = np.random.default_rng(seed)

    def one(index: int) -> Taken:
        number = int(rng.integers(2, 7))
        current = rng.normal(-1.5, 0.7, number)
        names = ("reference_logprobs", "sampler_logprobs", "entropy")
        more = {name: list(np.abs(rng.normal(1, 0.5, number)) * (1 if name == "entropy" else -1)) for name in names}
        more["covariant"] = [float(i % 2) for i in range(number)]
        trained = [True] * number
        if index == 1:
            trained[number // 2] = False
        old, advantage = list(current + rng.normal(0, 0.4, number)), [float(rng.normal())] * number
        return Taken(list(current), old, advantage, more, trained, weight=0.0 if index == 4 else 1.0)

    return [one(index) for index in range(6)]


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert one[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


@pytest.fixture(params=FAMILY, name="member")
def _member(request):
    return loss_of(**FAMILY[request.param])


def test_packed_equals_unpacked(member):
    packed = inputs_of(batch_of(rollouts(), packing=True), entropy=True)
    apart = inputs_of(batch_of(rollouts(), packing=False), entropy=True)
    assert packed.logprobs.shape[0] < apart.logprobs.shape[0]
    assert_same(reduced(member, packed), reduced(member, apart))
    assert_same(gradients(member, packed), gradients(member, apart))


def test_order_of_the_samples_changes_nothing(member):
    order = [3, 5, 0, 4, 1, 2]
    taken = rollouts()
    straight = inputs_of(batch_of(taken), entropy=True)
    shuffled = inputs_of(batch_of([taken[i] for i in order]), entropy=True)
    assert_same(reduced(member, shuffled), reduced(member, straight))
    found, wanted = gradients(member, shuffled), gradients(member, straight)
    assert_same({(order[s], t): value for (s, t), value in found.items()}, wanted)


def test_passes_sum_to_the_whole_batch(member):
    batch = batch_of(rollouts(), packing=True)
    whole = reduced(member, inputs_of(batch, entropy=True))
    parts = [reduced(member, inputs_of(rows(batch, i, i + 1), entropy=True)) for i in range(len(batch.tokens))]
    assert len(parts) > 1
    assert_same({name: sum(part[name] for part in parts) for name in whole}, whole)


def test_masked_tokens_are_inert(member):
    """Whatever stands at prompts, observations and padding, in log-probs and in every value."""
    clean = inputs_of(batch_of(rollouts()), entropy=True)
    value, wanted = reduced(member, clean), gradients(member, clean)
    for fill in (7.0, float("inf"), float("nan")):
        dirty = inputs_of(batch_of(rollouts(), fill=fill), entropy=True)
        assert reduced(member, dirty) == value
        assert gradients(member, dirty) == wanted
    trained = {place for place, value in wanted.items() if value}
    assert trained
    assert not {(s, t) for s, t in trained if t < PROMPT or s == 4}  # neither prompts nor the sample that failed


def test_gradients_are_finite_at_the_edges(member):
    """A token that one side thought impossible."""
    more = {"sampler_logprobs": [-1e4, 0.0], "reference_logprobs": [0.0, -1e4], "entropy": [0.0, 0.0]}
    taken = [
        Taken([-1e4, 0.0], [0.0, -1e4], [advantage] * 2, {**more, "reference_logprobs": reference})
        for advantage in (1.0, -1.0, 0.0)
        for reference in ([0.0, -1e4], [-1e4, 0.0])
    ]
    inputs = inputs_of(batch_of(taken), entropy=True)
    assert np.isfinite(list(reduced(member, inputs).values())).all()
    assert np.isfinite(list(gradients(member, inputs).values())).all()


def test_sequence_ratios_count_trained_tokens_only():
    """An observation between two turns does not dilute the mean: s = sqrt(1.5 * .5), as without it."""
    between = replace(
        A, current=[A.current[0], -9.0, A.current[1]], old=[A.old[0], -1.0, A.old[1]], advantage=[1.0] * 3
    )
    observed = replace(between, trained=[True, False, True], more={})
    found = reduced(loss_of(preset="gspo"), inputs_of(batch_of([observed, replace(B, more={})])))
    assert found["train/loss"] == pytest.approx(-(sqrt(0.75) - 2.2) / 2, rel=1e-5)


# The section of a recipe.


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_resolved_section_reads_back_equal(preset):
    config = GRPOConfig(preset=preset)
    assert GRPOConfig(**config.model_dump()) == config
    assert all(getattr(config, key) == value for key, value in PRESETS.get(preset, {}).items())


def test_written_keys_go_before_the_presets():
    config = GRPOConfig(preset="dapo", clip_high=0.3, dynamic_sampling=False)
    assert (config.clip_low, config.clip_high) == (0.2, 0.3)
    assert (config.dynamic_sampling, config.overlong_buffer) == (False, 0.2)
    assert GRPOConfig(preset="dapo", overlong_buffer=None).overlong_buffer is None


def test_a_presets_setting_goes_where_a_written_key_leaves_it_without_effect():
    config = GRPOConfig(preset="rloo", kl=0)
    assert (config.kl_in, config.kl_estimator) == (None, None)
    config = GRPOConfig(preset="gspo", surrogate="none")
    assert (config.clip_low, config.clip_high) == (None, None)


def test_nulls_become_the_usual_values():
    assert GRPOConfig(surrogate="cispo").clip_high == 4.0
    assert GRPOConfig(kl=0.1).kl_estimator == "k3"
    assert GRPOConfig(kl=0.1, kl_in="reward").kl_estimator == "k1"
    assert GRPOConfig(trust_region="kl").trust_bound == ("kl", 0.05)
    assert GRPOConfig(trust_region=["kl", 0.1]).trust_bound == ("kl", 0.1)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kl_in": "loss"}, "kl_in is 'loss', which changes nothing while kl is 0"),
        ({"preset": "dr_grpo", "std": "sample"}, "std is 'sample', which changes nothing where nothing is divided"),
        ({"preset": "rloo", "std_eps": 1e-6}, "std_eps is 1e-06, which changes nothing"),
        ({"token_returns": True}, "token_returns is True.*without advantage: batch"),
        ({"ratio": "completion"}, "count once for each token; set reduction: sequences or constant"),
        ({"kl_output_clamp": 10}, "kl_output_clamp is 10.0, which changes nothing while kl is 0"),
        ({"kl_weighted": True}, "kl_weighted is True.*leave it at false"),
        ({"kl": 0.1, "kl_in": "reward", "kl_weighted": True}, "without a KL term in the loss"),
        ({"kl": 0.1, "kl_estimator": "k1"}, "gradient of k1 as a loss is 0"),
        ({"kl": 0.1, "kl_estimator": "k2", "kl_weighted": True}, "k2 has the gradient"),
        ({"surrogate": "none", "clip_high": 0.2}, "clip_high is 0.2.*surrogate: none"),
        ({"surrogate": "cispo", "dual_clip": 3}, "dual_clip is 3.0.*surrogate: clip"),
        ({"preset": "rloo", "clip_low": 0.1}, "clip_low is 0.1"),
        ({"surrogate": "log", "ratio": "sequence"}, "ratio is 'sequence'.*surrogate: log, which has no ratio"),
        ({"preset": "gmpo", "ratio": "sequence"}, "ratio is 'sequence'.*geometric, which has the mean"),
        ({"preset": "vespo", "clip_high": 0.2}, "clip_high is 0.2.*gamma or log, which clip nothing"),
        ({"covariance": ["kl", 0]}, "greater than 0"),
        ({"advantage": "batch", "gamma": 0.9}, "gamma is 0.9.*without token_returns"),
        ({"preset": "gmpo", "advantage": "batch", "token_returns": True}, "one advantage for a completion"),
        ({"preset": "vespo", "teacher_kl": 0.1}, "one advantage for a completion; leave teacher_kl out"),
        ({"surrogate": "soft", "dual_clip": 3}, "dual_clip is 3.0.*surrogate: clip"),
        ({"trust_region": ["tv", 0]}, "greater than 0"),
        ({"trust_low": 0.1}, r"trust_low is gone: write trust_region: \[tv, 0.2\]"),
        ({"advantage": "mean_relative", "overlong_buffer": 0.1}, "which a penalty would take below 0"),
        ({"advantage": "mean_relative", "length_penalty": 0.1}, "which a penalty would take below 0"),
        ({"advantage": "batch", "group_size": 1, "length_penalty": 0.1}, "a group of one has no other length"),
        ({"normalize_rewards": "each", "length_penalty": 0.1}, "would normalise length_penalty away"),
        ({"preset": "maxrl", "kl": 0.1, "kl_in": "reward"}, "which a penalty would take below 0"),
        ({"correction": "mask"}, "set old_logprobs: recompute; or leave it at none"),
        ({"geometric_mask": (0.9, 1.1)}, "geometric_mask is .*set old_logprobs: recompute"),
        ({"mismatch_limit": 2.0}, "mismatch_limit is 2.0.*set old_logprobs: recompute"),
        ({"old_logprobs": "recompute", "geometric_mask": (1.1, 2.0)}, "1, where trainer and sampler agree, is outside"),
        ({"old_logprobs": "recompute", "mismatch_limit": 1.0}, "greater than 1"),
        ({"kl": 0.1, "kl_estimator": "k3+", "kl_weighted": True}, "k3. has the gradient"),
        ({"kl": 0.1, "kl_estimator": "k3+", "kl_in": "reward"}, "a reward has none: take k3"),
        ({"group_size": 1}, "a group of one has nothing to be compared with"),
        ({"group_size": 1, "advantage": "batch", "dynamic_sampling": True}, "every group would be replaced"),
        ({"preset": "rloo", "normalize_rewards": "each"}, "normalise the KL penalty's coefficient away"),
        ({"overlong_buffer": 2.5}, "2.5 is neither a share"),
        ({**GRPOConfig().model_dump(), "preset": "dapo"}, "preset: all that dapo would change is written too"),
        ({"preset": "dappo"}, "'grpo', 'dapo'"),
        ({"clip_low": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_without_effect_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        GRPOConfig(**settings)


def test_a_group_of_one_can_be_compared_with_the_batch():
    assert GRPOConfig(group_size=1, preset="reinforce_pp").advantage == "batch"


def test_the_readme_has_every_preset():
    readme = (Path(tunix.__file__).parent / "algorithms/grpo/README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in readme for name in PRESETS)


def test_every_key_has_one_rule_at_most():
    for rules in (GRPOConfig.rules, PolicyConfig.rules):
        keys = [key for rule in rules for key in rule.keys]
        assert len(keys) == len(set(keys))


def test_over_and_the_overlong_buffer():
    assert [GRPOConfig(reduction=x).over(64) for x in ("tokens", "sequences", "constant")] == [
        "tokens",
        "sequences",
        64.0,
    ]
    assert GRPOConfig().overlong_tokens(20) is None
    assert GRPOConfig(preset="dapo").overlong_tokens(20480) == 4096  # the paper's
    assert GRPOConfig(overlong_buffer=5).overlong_tokens(20) == 5
    with pytest.raises(UserError, match=r"overlong_buffer: 30 tokens do not fit into a completion's 20"):
        GRPOConfig(overlong_buffer=30).overlong_tokens(20)


def test_kl_estimates_keep_their_precision_near_zero():
    # exp(-d) - 1 + d in float32 loses everything at d = 1e-4 (5e-9 against rounding of 6e-8); expm1 does not.
    found = float(kl_estimate(jnp.float32(1e-2), "k3"))
    assert found == pytest.approx(exp(-1e-2) - 1 + 1e-2, rel=1e-3)
