"""PPO's losses: numbers worked out by hand, and what must not change them."""

from dataclasses import replace
from math import log

import numpy as np
import pytest

from tests.policy_batches import PROMPT, Taken, batch_of, gradients, inputs_of, reduced, rows
from tunix.algorithms.ppo.algorithm import PPO
from tunix.algorithms.ppo.config import PPOConfig
from tunix.types import LossInputs, LossOutputs, Sampling

# Ratios 1.5, .5 and 1.1; an advantage for each token. Values moved by +.5, -.1 and +.3 since the rollout.
A = Taken(
    current=[log(0.5), -1.0],
    old=[log(0.5 / 1.5), -1.0 - log(0.5)],
    advantage=[1.0, -1.0],
    more={
        "values": [1.0, 0.4],
        "old_values": [0.5, 0.5],
        "returns": [2.0, 0.0],
        "reference_logprobs": [log(0.25), -1.0],
    },
)
B = Taken(
    current=[-2.0],
    old=[-2.0 - log(1.1)],
    advantage=[-2.0],
    more={"values": [0.3], "old_values": [0.0], "returns": [0.1], "reference_logprobs": [-2.0 + log(2)]},
)
# min(1.5, 1.2), min(-.5, -.8), min(-2.2, -2.2).
POLICY = -(1.2 - 0.8 - 2.2) / 3
# Values clipped to .7, .4, .2; squares (1, 1.69), (.16, .16), (.04, .01): the larger of each.
SQUARES = (1.69, 0.16, 0.04)


def ppo(**settings):
    return PPO(PPOConfig(**settings), Sampling(max_tokens=10))


def loss_of(**settings):
    """Of the policy and of its critic: one loss with a shared trunk, two losses else."""
    algorithm = ppo(**settings)

    def both(inputs: LossInputs) -> LossOutputs:
        policy, value = algorithm.gated_loss(inputs), algorithm.value_loss(inputs)
        return LossOutputs({**policy.terms, **value.terms}, {**policy.metrics, **value.metrics}, policy.peaks)

    return algorithm.gated_loss if algorithm.config.critic == "shared" else both


@pytest.fixture(name="inputs")
def _inputs():
    return inputs_of(batch_of([A, B]), values=True)


def test_both_losses_by_hand(inputs):
    found = reduced(loss_of(), inputs)
    assert found["loss/policy"] == pytest.approx(POLICY, rel=1e-5)
    assert found["loss/value"] == pytest.approx(0.5 * sum(SQUARES) / 3, rel=1e-5)
    assert found["train/loss"] == pytest.approx(POLICY + 0.5 * sum(SQUARES) / 3, rel=1e-5)
    assert found["policy/clipped"] == pytest.approx(2 / 3)
    assert found["value/clipped"] == pytest.approx(1 / 3)
    assert found["value/mean"] == pytest.approx((1.0 + 0.4 + 0.3) / 3)
    assert found["value/error"] == pytest.approx((1 + 0.16 + 0.04) / 3)


def test_a_shared_trunk_weighs_the_value_loss_by_half(inputs):
    assert reduced(loss_of(critic="shared"), inputs)["loss/value"] == pytest.approx(0.25 * sum(SQUARES) / 3, rel=1e-5)


def test_without_a_value_clip(inputs):
    found = reduced(loss_of(value_clip=None), inputs)
    assert found["loss/value"] == pytest.approx(0.5 * (1 + 0.16 + 0.04) / 3, rel=1e-5)
    assert "value/clipped" not in found


def test_gradients_by_hand(inputs):
    places = [(0, PROMPT), (0, PROMPT + 1), (1, PROMPT)]
    on_policy, on_values = gradients(loss_of(), inputs), gradients(loss_of(), inputs, over="values")
    # Both of A's tokens are clipped; B: r A = -2.2.
    np.testing.assert_allclose([on_policy[place] for place in places], [0, 0, 2.2 / 3], rtol=1e-5)
    # V - R where the clip does not bind: A's first is held at .7, nothing flows.
    np.testing.assert_allclose([on_values[place] for place in places], [0, 0.4 / 3, 0.2 / 3], rtol=1e-5)


def test_the_value_loss_alone_leaves_the_policy_alone(inputs):
    """The critic's warm-up."""
    assert not any(gradients(ppo().value_loss, inputs).values())
    assert gradients(ppo().value_loss, inputs, over="values") == gradients(loss_of(), inputs, over="values")


def test_the_policys_reduction_is_not_the_values(inputs):
    found = reduced(loss_of(reduction="sequences"), inputs)
    assert found["loss/policy"] == pytest.approx(-((1.2 - 0.8) / 2 - 2.2) / 2, rel=1e-5)
    assert found["loss/value"] == pytest.approx(0.5 * sum(SQUARES) / 3, rel=1e-5)


def test_kl_in_the_reward_is_only_reported_and_in_the_loss_counts(inputs):
    k3 = (0.5 - 1 + log(2) + 2 - 1 - log(2)) / 3  # ref/p - 1 - log(ref/p) at ref/p = .5, 1, 2
    in_reward, in_loss = reduced(loss_of(kl=0.1), inputs), reduced(loss_of(kl=0.1, kl_in="loss"), inputs)
    assert in_reward["kl/reference"] == in_loss["kl/reference"] == pytest.approx(k3, rel=1e-5)
    assert "loss/kl" not in in_reward
    assert in_loss["loss/kl"] == pytest.approx(0.1 * k3, rel=1e-5)


def test_an_adapted_coefficient_comes_with_the_batch(inputs):
    """It changes from step to step, and a compiled step must not know it."""
    batch = replace(inputs.batch, per_sequence={"kl_coefficient": np.full(2, 0.4, np.float32)})
    found = reduced(loss_of(kl=0.1, kl_in="loss", kl_target=3.0), replace(inputs, batch=batch))
    fixed = reduced(loss_of(kl=0.4, kl_in="loss"), inputs)
    assert found["loss/kl"] == pytest.approx(fixed["loss/kl"])


def test_dual_clip_bounds_a_runaway_token():
    # Ratio 10, advantage -1: -10 without, -3 with; no gradient.
    one = Taken([0.0], [-log(10)], [-1.0])
    assert reduced(ppo().loss, inputs_of(batch_of([one])))["train/loss"] == pytest.approx(10, rel=1e-5)
    bounded = inputs_of(batch_of([one]))
    assert reduced(ppo(dual_clip=3).loss, bounded)["train/loss"] == pytest.approx(3)
    assert not any(gradients(ppo(dual_clip=3).loss, bounded).values())


# What must not change anything.

SETTINGS = {
    "plain": {},
    "rich": {"kl": 0.1, "kl_in": "loss", "kl_weighted": True, "dual_clip": 3, "entropy_bonus": 0.01},
    "shared": {"critic": "shared", "value_clip": None, "reduction": "constant", "kl": 0.2},
    "corrected": {"old_logprobs": "recompute", "correction": "truncate", "reduction": "sequences"},
}
NAMES = ("reference_logprobs", "sampler_logprobs", "entropy", "values", "old_values", "returns")


def rollouts() -> list[Taken]:
    """Five completions with numbers of their own for every token; one has an observation, one failed."""
    rng = np.random.default_rng(3)

    def one(index: int) -> Taken:
        number = int(rng.integers(2, 7))
        current, *more = rng.normal(-1.0, 0.6, (1 + len(NAMES), number)).tolist()
        old = [x + float(rng.normal(0, 0.4)) for x in current]
        trained = [not (index == 1 and t == 0) for t in range(number)]
        named = dict(zip(NAMES, more, strict=True))
        return Taken(current, old, rng.normal(size=number).tolist(), named, trained, 0.0 if index == 3 else 1.0)

    return [one(index) for index in range(5)]


@pytest.fixture(params=SETTINGS, name="loss")
def _loss(request):
    return loss_of(**SETTINGS[request.param])


def both(taken: list[Taken], packing: bool = True, fill: float = 0.0):
    return inputs_of(batch_of(taken, packing, fill), entropy=True, values=True)


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert one[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


def test_packed_equals_unpacked(loss):
    packed, apart = both(rollouts()), both(rollouts(), packing=False)
    assert_same(reduced(loss, packed), reduced(loss, apart))
    for over in ("logprobs", "values"):
        assert_same(gradients(loss, packed, over), gradients(loss, apart, over))


def test_passes_sum_to_the_whole_batch(loss):
    batch = batch_of(rollouts())
    whole = reduced(loss, inputs_of(batch, entropy=True, values=True))
    parts = [reduced(loss, inputs_of(rows(batch, i, i + 1), True, True)) for i in range(len(batch.tokens))]
    assert len(parts) > 1
    assert_same({name: sum(part[name] for part in parts) for name in whole}, whole)


@pytest.mark.parametrize("fill", [7.0, float("inf"), float("nan")])
def test_masked_tokens_are_inert(loss, fill):
    clean, dirty = both(rollouts()), both(rollouts(), fill=fill)
    assert reduced(loss, dirty) == reduced(loss, clean)
    for over in ("logprobs", "values"):
        assert gradients(loss, dirty, over) == gradients(loss, clean, over)


def test_gradients_are_finite_at_the_edges(loss):
    more = {name: [0.0, 0.0] for name in NAMES} | {"reference_logprobs": [-1e4, 0.0], "returns": [1e4, -1e4]}
    taken = [Taken([0.0, -1e4], [-1e4, 0.0], [advantage] * 2, more) for advantage in (1.0, -1.0)]
    for over in ("logprobs", "values"):
        assert np.isfinite(list(gradients(loss, both(taken), over).values())).all()


# The section of a recipe.


def test_what_null_stands_for():
    own, shared = PPOConfig(kl=0.05), PPOConfig(critic="shared")
    assert (own.kl_in, own.kl_estimator, shared.kl_in) == ("reward", "k1", None)
    assert PPOConfig(**own.model_dump()) == own
    assert PPOConfig(**shared.model_dump()) == shared


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kl_target": 6}, "kl_target is 6.0.*set kl"),
        ({"critic": "shared", "critic_learning_rate": 1e-4}, "critic_learning_rate is 0.0001"),
        ({"critic": "shared", "critic_warmup": 5}, "critic_warmup is 5.*moves the policy's trunk"),
        ({"correction": "mask"}, "set old_logprobs: recompute"),
        ({"lam": 1.5}, "less than or equal to 1"),
        ({"preset": "grpo"}, "preset"),
    ],
)
def test_settings_without_effect_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        PPOConfig(**settings)


def test_every_key_has_one_rule_at_most():
    keys = [key for rule in PPOConfig.rules for key in rule.keys]
    assert len(keys) == len(set(keys))
