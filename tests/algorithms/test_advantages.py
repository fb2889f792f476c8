"""From rewards to advantages: every number here is worked out by hand in the comment beside it."""

import itertools
from typing import get_args

import numpy as np
import pytest

from tunix.algorithms.advantages import (
    batch_normalised,
    discounted,
    gdpo,
    group_advantages,
    has_signal,
    kl_rewards,
    length_rewards,
    of_high_covariance,
    overlong_penalty,
    weighted_sum,
    whitened,
)
from tunix.algorithms.config import Advantage
from tunix.algorithms.ppo.loss import adapted_kl, explained_variance, gae
from tunix.errors import UserError

NAN = float("nan")
KINDS = get_args(Advantage)
REWARDS = np.array([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Group 1: mean 1, deviations 0 -1 -1 2. Group 2: all equal, nothing to learn.
        ("mean", [[0, -1, -1, 2], [0, 0, 0, 0]]),
        # Variance (0 + 1 + 1 + 4) / 4 = 1.5.
        ("mean_std", [[0, -(1.5**-0.5), -(1.5**-0.5), 2 * 1.5**-0.5], [0, 0, 0, 0]]),
        # Over the mean 1 of the first group, 2 of the second.
        ("mean_relative", [[0, -1, -1, 2], [0, 0, 0, 0]]),
        # Others' means: 3/3, 4/3, 4/3, 1/3.
        ("leave_one_out", [[0, -4 / 3, -4 / 3, 8 / 3], [0, 0, 0, 0]]),
        # Others of 1: 0 0 3, mean 1, itself. Of 0: 1 0 3, variance 10/3 - 16/9 = 14/9. Of 3: 1 0 0, 1/3 - 1/9 = 2/9.
        (
            "leave_one_out_std",
            [[0, -4 / 3 / (14 / 9) ** 0.5, -4 / 3 / (14 / 9) ** 0.5, 8 / 3 / (2 / 9) ** 0.5], [0, 0, 0, 0]],
        ),
        # Median of 0 0 1 3 is 0.5.
        ("median", [[0.5, -0.5, -0.5, 2.5], [0, 0, 0, 0]]),
        # All eight: mean 12/8 = 1.5; squares .25 2.25 2.25 2.25 and 4 x .25, sum 8; variance 1.
        ("batch", [[-0.5, -1.5, -1.5, 1.5], [0.5, 0.5, 0.5, 0.5]]),
        # Deviations from the groups' means have mean 0 and squares' sum 6 over eight: variance .75.
        ("mean_batch", [[0, -(0.75**-0.5), -(0.75**-0.5), 2 * 0.75**-0.5], [0, 0, 0, 0]]),
        # The same over the deviation of all eight rewards, 1.
        ("mean_batch_std", [[0, -1, -1, 2], [0, 0, 0, 0]]),
    ],
)
def test_group_advantages_by_hand(kind, expected):
    np.testing.assert_allclose(group_advantages(REWARDS, kind, eps=0.0 if kind == "batch" else 1e-12), expected)


def test_maxrl_divides_by_the_success_rate():
    """One of four right: (1 - 1/4) / (1/4) = 3 and -1; three of four: 1/3 and -1; none: nothing to learn."""
    rewards = np.array([[1.0, 0, 0, 0], [1.0, 1, 1, 0], [0.0, 0, 0, 0]])
    expected = [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0]]
    np.testing.assert_allclose(group_advantages(rewards, "mean_relative"), expected)
    with pytest.raises(UserError, match=r"divides by the group's mean reward, but one is -0.5"):
        group_advantages(np.array([[1.0, -0.5]]), "mean_relative")


@pytest.mark.parametrize(
    ("kind", "variance"),
    # The sums of squares above, 6 of four, 8 of eight and 6 of eight, over one less.
    [("mean_std", 6 / 3), ("batch", 8 / 7), ("mean_batch", 6 / 7), ("mean_batch_std", 8 / 7)],
)
def test_the_samples_deviation_divides_by_one_less(kind, variance):
    centred = REWARDS - (1.5 if kind == "batch" else REWARDS.mean(axis=1, keepdims=True))
    expected = centred / variance**0.5
    np.testing.assert_allclose(group_advantages(REWARDS, kind, 1e-12, "sample"), expected, atol=1e-9)
    np.testing.assert_allclose(REWARDS.std(ddof=1, axis=1)[0] ** 2, 2)  # numpy's, as torch.std
    # A sample alone has no deviation: 0 over the epsilon.
    assert not group_advantages(np.array([[5.0, NAN]]), kind, std="sample").any()


def test_gdpo_and_whitening_by_the_samples_deviation():
    # Group (0, 1): +-.5 over sqrt(.5); over the batch of those two the same again: sqrt(.5) (1 - ...) = +-sqrt(.5).
    np.testing.assert_allclose(
        gdpo({"a": np.array([[0.0, 1.0]])}, {"a": 1.0}, eps=1e-12, std="sample"), [[-(0.5**0.5), 0.5**0.5]]
    )
    # 1 and 3: mean 2, squares 1 + 1 over 1.
    (found,) = whitened([np.array([1.0, 9.0, 3.0])], [np.array([True, False, True])], 0.0, "sample")
    np.testing.assert_allclose(found, [-(0.5**0.5), 0, 0.5**0.5])


def test_the_epsilon_stands_beside_the_deviation():
    # Mean .5, std .5: .5 / (.5 + .0001).
    np.testing.assert_allclose(group_advantages(np.array([[0.0, 1.0]]), "mean_std"), [[-0.5 / 0.5001, 0.5 / 0.5001]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_sample_is_left_out_and_is_no_zero(kind):
    """The others' advantages are those of the group without it; a group that failed as a whole warns of nothing."""
    with_failure = group_advantages(np.array([[1.0, NAN, 0.0, 3.0], [NAN] * 4]), kind)
    without = group_advantages(np.array([[1.0, 0.0, 3.0]]), kind)
    np.testing.assert_allclose(with_failure[0, [0, 2, 3]], without[0])
    np.testing.assert_array_equal(with_failure[1], 0)
    assert with_failure[0, 1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_order_within_a_group_changes_nothing(kind):
    rewards = np.random.default_rng(0).uniform(size=(3, 5))
    order = np.array([3, 0, 4, 1, 2])
    np.testing.assert_allclose(group_advantages(rewards[:, order], kind), group_advantages(rewards, kind)[:, order])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "batch"])
def test_equal_rewards_and_lonely_samples_have_nothing_to_teach(kind):
    np.testing.assert_allclose(group_advantages(np.full((2, 3), 0.1), kind), 0, atol=1e-10)
    np.testing.assert_allclose(group_advantages(np.array([[5.0, NAN, NAN]]), kind), 0)


def test_integer_rewards_are_numbers():
    np.testing.assert_allclose(group_advantages(np.array([[0, 1]]), "mean"), [[-0.5, 0.5]])


def expected_gradient(kind: Advantage, samples: int) -> np.ndarray:
    """`E[1/G sum_i A_i grad log p(y_i)]` over all groups that a policy of three answers can draw, exactly."""
    probabilities, rewards = np.array([0.2, 0.5, 0.3]), np.array([1.0, 0.0, 4.0])
    total = np.zeros(3)
    for group in itertools.product(range(3), repeat=samples):
        drawn = list(group)
        advantages = group_advantages(rewards[drawn][None], kind)[0]
        scores = np.eye(3)[drawn] - probabilities  # of a softmax
        total += probabilities[drawn].prod() * (advantages[:, None] * scores).mean(axis=0)
    return total


def test_equal_others_divide_nothing():
    """The mean of three times 0.1 is rounded: a deviation of 1e-17 would make 6e16 of the success."""
    found = group_advantages(np.array([[1.0, 0.1, 0.1, 0.1]]), "leave_one_out_std", 0.0)
    np.testing.assert_allclose(found[0, 0], 0.9)
    # Two samples: each has one other, which differs from nothing.
    np.testing.assert_allclose(group_advantages(np.array([[2.0, 1.0]]), "leave_one_out_std", 1e-6), [[1, -1]])


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_leave_one_out_is_unbiased_and_the_mean_is_shrunk_by_one_in_g(samples):
    # grad E[R] of a softmax: p_k (R_k - E[R]); E[R] = .2 + 1.2 = 1.4.
    true = np.array([0.2 * (1 - 1.4), 0.5 * (0 - 1.4), 0.3 * (4 - 1.4)])
    np.testing.assert_allclose(expected_gradient("leave_one_out", samples), true, atol=1e-12)
    # The mean holds the sample itself, so a G-th of its own score is lost.
    np.testing.assert_allclose(expected_gradient("mean", samples), true * (samples - 1) / samples, atol=1e-12)


def test_batch_normalised_by_hand():
    # 1, 3, 5: mean 3, variance 8/3.
    values = np.array([[1.0, NAN], [3.0, 5.0]])
    std = (8 / 3) ** 0.5
    np.testing.assert_allclose(batch_normalised(values, 0.0), [[-2 / std, 0], [0, 2 / std]])
    np.testing.assert_array_equal(batch_normalised(np.full((2, 2), NAN)), 0)


def test_gdpo_tells_apart_what_a_sum_does_not():
    # The two-reward, two-sample case of the paper: (0, 1), (0, 2) and (1, 2) in sums.
    one, two = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]), np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    rewards, weights = {"one": one, "two": two}, {"one": 1.0, "two": 1.0}
    summed = group_advantages(weighted_sum(rewards, weights), "mean_std", 1e-12)
    np.testing.assert_allclose(summed, [[-1, 1]] * 3)
    # Each by itself: (-1, 1) + 0, (-1, 1) + (-1, 1), (-1, 1) + 0, so +-1, +-2, +-1; mean 0, variance (1+4+1) / 3 = 2.
    np.testing.assert_allclose(
        gdpo(rewards, weights, eps=1e-12), np.array([[-1, 1], [-2, 2], [-1, 1]]) / 2**0.5, rtol=1e-9
    )


def test_gdpo_weights_stand_on_the_advantages():
    # Spread does not matter, weights do: A = (-1, 1) and (1, -1), 3 A_1 + A_2 = (-2, 2), normalised (-1, 1).
    rewards = {"small": np.array([[0.0, 0.001]]), "large": np.array([[1000.0, 0.0]])}
    np.testing.assert_allclose(gdpo(rewards, {"small": 3.0, "large": 1.0}, eps=1e-12), [[-1, 1]])
    np.testing.assert_allclose(gdpo(rewards, {"small": 1.0, "large": 3.0}, eps=1e-12), [[1, -1]])


def test_gdpo_leaves_a_sample_out_that_failed_in_one_reward():
    whole = {"a": np.array([[0.0, 1.0, 5.0]]), "b": np.array([[1.0, 0.0, NAN]])}
    found = gdpo(whole, {"a": 1.0, "b": 0.5})
    np.testing.assert_allclose(found[:, :2], gdpo({name: x[:, :2] for name, x in whole.items()}, {"a": 1.0, "b": 0.5}))
    assert found[0, 2] == 0


def test_weighted_sum_fails_where_any_reward_did():
    rewards = {"a": np.array([[1.0, NAN]]), "b": np.array([[4.0, 4.0]])}
    np.testing.assert_array_equal(weighted_sum(rewards, {"a": 2.0, "b": 0.25}), [[3.0, NAN]])  # 2 + 1
    np.testing.assert_array_equal(weighted_sum(rewards, {"a": 0.0, "b": 1.0}), [[4.0, NAN]])


def test_has_signal():
    rewards = np.array([[0.0, 1.0], [1.0, 1.0], [NAN, 1.0], [NAN, NAN], [0.5, 0.25]])
    np.testing.assert_array_equal(has_signal(rewards), [True, False, False, False, True])


def test_overlong_penalty_falls_over_the_buffer():
    # Limit 20, buffer 4: free up to 16; 17 costs 1/4, 18 2/4, 20 4/4, and nothing costs more.
    lengths = np.array([[1, 16, 17], [18, 20, 30]])
    np.testing.assert_allclose(overlong_penalty(lengths, 20, 4), [[0, 0, -0.25], [-0.5, -1, -1]])


def test_length_rewards_by_hand():
    """Kimi k1.5, sec. 2.3.3. Lengths 10 to 30: 1/2 - 0, 1/2 - 10 / 20, 1/2 - 20 / 20; a wrong one has 0 at most; the
    longest failed in the last group but one; equal lengths say nothing."""
    lengths = np.array([[10, 20, 30, 30], [10, 20, 30, 25], [10, 20, 99, 10], [7, 7, 7, 7]])
    rewards = np.array([[1, 1, 1, 0.5], [0, 0, 0, -1], [1, 1, np.nan, 0], [1, 0, 1, 0]])
    expected = [[0.5, 0, -0.5, -0.5], [0, 0, -0.5, -0.25], [0.5, -0.5, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(length_rewards(rewards, lengths), expected)
    assert length_rewards(np.full((1, 2), np.nan), np.array([[3, 5]])).tolist() == [[0, 0]]


def test_kl_rewards_by_hand():
    policy, reference = np.array([0.0, -1.0, -2.0, -9.0]), np.array([0.0, -1.5, -1.0, -2.0])
    drawn = np.array([False, True, True, False])
    # d = 0.5 and -1: k1 d; k2 d^2/2 = .125 and .5; k3 e^-d - 1 + d = .10653 and .71828.
    np.testing.assert_allclose(kl_rewards(policy, reference, drawn, 0.1), [0, -0.05, 0.1, 0])
    # The estimate within .1.
    np.testing.assert_allclose(kl_rewards(policy, reference, drawn, 0.1, "k2", 0.1), [0, -0.01, -0.01, 0])
    np.testing.assert_allclose(kl_rewards(policy, reference, drawn, 0.1, "k2"), [0, -0.0125, -0.05, 0])
    np.testing.assert_allclose(kl_rewards(policy, reference, drawn, 1.0, "k3"), [0, -0.10653066, -0.71828183, 0])
    assert not kl_rewards(policy, policy, drawn, 0.1).any()


def test_adapted_kl_moves_by_a_fiftieth_at_most():
    assert adapted_kl(0.5, 6.6, 6.0) == pytest.approx(0.5 * 1.01)  # error 0.1, times the gain 0.1
    assert adapted_kl(0.5, 600.0, 6.0) == pytest.approx(0.5 * 1.02)  # error clipped to 0.2
    assert adapted_kl(0.5, 0.0, 6.0) == pytest.approx(0.5 * 0.98)
    assert adapted_kl(0.5, 6.0, 6.0) == 0.5


def test_gae_by_hand():
    # gamma .5, lambda .5, two tokens after a prompt of one; the last one ends the episode with reward 1.
    # delta_1 = 1 + .5 * 0 - .4 = .6, A_1 = .6; delta_0 = 0 + .5 * .4 - .2 = 0, A_0 = 0 + .25 * .6 = .15.
    advantages, returns = gae(
        np.array([0.0, 0.0, 1.0]), np.array([9.0, 0.2, 0.4]), np.array([False, True, True]), 0.5, 0.5
    )
    np.testing.assert_allclose(advantages, [0, 0.15, 0.6])
    np.testing.assert_allclose(returns, [0, 0.35, 1.0])  # A + V


def test_gae_bootstraps_an_episode_that_was_cut_short():
    # As above, but the state after the last token is worth .8: delta_1 = 1 + .4 - .4 = 1, A_0 = 0 + .25 * 1.
    advantages, _ = gae(
        np.array([0.0, 0.0, 1.0]), np.array([9.0, 0.2, 0.4]), np.array([False, True, True]), 0.5, 0.5, bootstrap=0.8
    )
    np.testing.assert_allclose(advantages, [0, 0.25, 1.0])


def test_gae_steps_over_what_an_environment_wrote():
    drawn = np.array([False, True, True, False, False, True, False])
    rewards = np.array([0.0, 0.0, 0.5, 0.0, 0.0, 2.0, 0.0])
    values = np.array([7.0, 0.1, 0.2, 8.0, 8.0, 0.3, 8.0])
    found = gae(rewards, values, drawn, 0.9, 0.8, 0.25)
    alone = gae(rewards[drawn], values[drawn], np.ones(3, bool), 0.9, 0.8, 0.25)
    for whole, part in zip(found, alone, strict=True):
        np.testing.assert_allclose(whole[drawn], part)
        np.testing.assert_array_equal(whole[~drawn], 0)
    # The last: 2 + .9 * .25 - .3 = 1.925; the one before: .5 + .9 * .3 - .2 + .72 * 1.925 = 1.956.
    np.testing.assert_allclose(found[0][[5, 2]], [1.925, 1.956])


def test_gae_between_its_extremes():
    rng = np.random.default_rng(1)
    rewards, values, drawn = rng.normal(size=6), rng.normal(size=6), np.ones(6, bool)
    # lambda 1, gamma 1: the rewards still to come, minus the value. lambda 0: the one-step error.
    to_come = np.cumsum(rewards[::-1])[::-1]
    np.testing.assert_allclose(gae(rewards, values, drawn, 1.0, 1.0)[0], to_come - values)
    np.testing.assert_allclose(gae(rewards, values, drawn, 1.0, 1.0)[1], to_come)
    np.testing.assert_allclose(
        gae(rewards, values, drawn, 0.9, 0.0)[0], rewards + 0.9 * np.append(values[1:], 0) - values
    )


def test_gae_refuses_a_reward_that_no_action_earned():
    with pytest.raises(ValueError, match="the reward 3 at token 0"):
        gae(np.array([3.0, 1.0]), np.zeros(2), np.array([False, True]), 1.0, 1.0)


def test_tokens_of_high_covariance_by_hand():
    """Log-probs -1 -1 | -9 -1, mean -3; advantages 2 2 | -2 -2, mean 0: covariances 4 4 | 12 -4. Half of four tokens
    are the highest two; those between 1 and 5 are the first two, of which a quarter is one."""
    logprobs, advantages = ([np.array([0.0, *x]) for x in xs] for xs in (([-1, -1], [-9, -1]), ([2, 2], [-2, -2])))
    masks = [np.array([False, True, True])] * 2
    found = of_high_covariance(logprobs, advantages, masks, "kl", 0.5, 0)
    assert [x.tolist() for x in found] == [[False, True, False], [False, True, False]]
    found = of_high_covariance(logprobs, advantages, masks, "clip", 0.5, 0)
    assert [x.tolist() for x in found] == [[False, True, True], [False, False, False]]
    drawn = {of_high_covariance(logprobs, advantages, masks, "clip", 0.01, seed)[0].tobytes() for seed in range(20)}
    assert len(drawn) == 2
    assert all(np.frombuffer(x, bool).sum() == 1 for x in drawn)
    nothing = [np.zeros(3, bool)] * 2
    assert not np.any(of_high_covariance(logprobs, advantages, nothing, "kl", 0.5, 0))


def test_discounted_steps_over_what_an_environment_wrote():
    """gamma 1/2: 4; 2 + 4 / 2; an observation; 1 + 4 / 2."""
    drawn = np.array([False, True, False, True, True])
    found = discounted(np.array([0.0, 1.0, 0.0, 2.0, 4.0]), drawn, 0.5)
    assert found.tolist() == [0.0, 3.0, 0.0, 4.0, 4.0]
    assert discounted(np.zeros(2), np.zeros(2, bool), 0.5).tolist() == [0, 0]


def test_whitened_over_the_tokens_of_all_sequences():
    # Counted: 1, 3, 5; mean 3, variance 8/3.
    std = (8 / 3) ** 0.5
    values = [np.array([100.0, 1.0]), np.array([3.0, 5.0, -100.0])]
    masks = [np.array([False, True]), np.array([True, True, False])]
    first, second = whitened(values, masks, eps=0.0)
    np.testing.assert_allclose(first, [0, -2 / std])
    np.testing.assert_allclose(second, [0, 2 / std, 0])
    nothing = whitened(values, [np.zeros(2, bool), np.zeros(3, bool)])
    assert [x.tolist() for x in nothing] == [[0, 0], [0, 0, 0]]


def test_explained_variance():
    returns = np.array([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns, np.full(3, 2.0)) == 0
    assert explained_variance(returns, -returns) == pytest.approx(1 - 4)  # Var(2 R) / Var(R) = 4
    assert np.isnan(explained_variance(np.ones(3), returns))
