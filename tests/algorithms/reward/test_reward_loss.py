"""The reward model's loss by hand, what it makes of a sequence, and that packing and passes change nothing of it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.algorithms.test_pairs import pairs
from tests.marks import slow
from tests.trainer.test_step import assert_close, gradients
from tests.trainers import PLAIN, RICH, trainer
from tunix.algorithms.reward.algorithm import RewardModel
from tunix.algorithms.reward.config import RewardModelConfig
from tunix.data.packing import pack, with_spare
from tunix.trainer.perf import Compilations
from tunix.trainer.step import loss_sums
from tunix.types import LossInputs, Sequence

# -log sigmoid(x) = log(1 + exp(-x)).
AT = {1.0: 0.31326169, -1.0: 1.31326169, 0.5: 0.47407698, 0.0: 0.69314718}


def algorithm(**config) -> RewardModel:
    return RewardModel(RewardModelConfig(**config))


def inputs(scores, weights=(1.0, 1.0), margins=None, fill=0.0) -> LossInputs:
    """Two pairs whose sides have these scores, chosen before rejected; `fill` stands at every other place."""
    sides = [replace(with_spare(np.arange(1, 3 + i)), weight=weights[i // 2]) for i in range(4)]
    if margins is not None:
        sides = [replace(x, per_sequence={"margin": margins[i // 2]}) for i, x in enumerate(sides)]
    batch = jax.tree.map(jnp.asarray, pack(sides, 4, 12, sequences_per_example=2))
    values = jnp.where(batch.loss_mask, jnp.asarray(scores, jnp.float32)[batch.sequence_ids], fill)
    return LossInputs(batch, jnp.zeros(values.shape), values=values)


def reduced(given: LossInputs, **config) -> dict[str, float]:
    sums = loss_sums(algorithm(**config).loss, given)
    return {name: float(value) for name, value in sums.items()}


# Gaps: 1.5 - 0.5 = 1 and -0.5 - 0.5 = -1.
SCORES = (1.5, 0.5, -0.5, 0.5)


def test_bradley_terry_by_hand():
    found = reduced(inputs(SCORES))
    assert found["train/loss"] == pytest.approx((AT[1.0] + AT[-1.0]) / 2, rel=1e-6)
    assert found["rewards/chosen"] == pytest.approx((1.5 - 0.5) / 2)
    assert found["rewards/rejected"] == pytest.approx((0.5 + 0.5) / 2)
    assert found["rewards/margin"] == pytest.approx((1 - 1) / 2)
    assert found["rewards/accuracy"] == 0.5
    assert "loss/centring" not in found


def test_weights_count_pairs():
    found = reduced(inputs(SCORES, weights=(1.0, 3.0)))
    assert found["train/loss"] == pytest.approx((AT[1.0] + 3 * AT[-1.0]) / 4, rel=1e-6)
    assert found["rewards/accuracy"] == pytest.approx(1 / 4)


def test_margins_by_hand():
    """The gap has to exceed the margin: 1 - 0.5 = 0.5, and -1 - 0 = -1. What is reported stays the gap."""
    found = reduced(inputs(SCORES, margins=(0.5, 0.0)))
    assert found["train/loss"] == pytest.approx((AT[0.5] + AT[-1.0]) / 2, rel=1e-6)
    assert found["rewards/margin"] == pytest.approx(0.0)


def test_centring_by_hand():
    """0.1 x (1.5 + 0.5)^2 = 0.4 and 0.1 x (-0.5 + 0.5)^2 = 0."""
    found = reduced(inputs(SCORES), centring=0.1)
    assert found["loss/centring"] == pytest.approx((0.4 + 0) / 2, rel=1e-6)
    assert found["train/loss"] == pytest.approx((AT[1.0] + AT[-1.0]) / 2 + 0.2, rel=1e-6)


def test_equal_scores_are_half_a_success():
    found = reduced(inputs((2.0, 2.0, 0.0, 0.0)))
    assert (found["train/loss"], found["rewards/accuracy"]) == (pytest.approx(AT[0.0]), 0.5)


def loss_of(values, given: LossInputs, **config):
    return loss_sums(algorithm(**config).loss, replace(given, values=values))["train/loss"]


@pytest.mark.parametrize("fill", [7.0, np.inf, np.nan])
def test_other_places_are_inert(fill):
    clean, dirty = inputs(SCORES), inputs(SCORES, fill=fill)
    assert reduced(dirty, centring=0.1) == reduced(clean, centring=0.1)
    found = [jax.grad(loss_of)(given.values, given, centring=0.1) for given in (clean, dirty)]
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(found[0][~clean.batch.loss_mask], 0.0)


def test_gradients_are_finite_at_the_edges():
    given = inputs((1e4, -1e4, -1e4, 1e4), margins=(3.0, 3.0))
    found = np.asarray(jax.grad(loss_of)(given.values, given))[np.asarray(given.batch.loss_mask)]
    assert np.isfinite(found).all()
    # A pair in the right order has nothing to learn from; in the wrong one each side moves by 1 / 2 pairs.
    assert sorted(found.tolist()) == pytest.approx([-0.5, 0.0, 0.0, 0.5])


def test_a_score_stands_behind_the_last_trained_token():
    """Ids 5 6 are the prompt, 7 and 8 (a stop token) are trained, and 9 is what a template writes behind it."""
    mask = np.array([False, False, True, True, False])
    own = Sequence(np.array([5, 6, 7, 8, 9], np.int32), mask, 2.0, per_sequence={"margin": 1.0})
    found = algorithm().prepare_sequence(own)
    assert found.tokens.tolist() == [5, 6, 7, 8, 0]
    assert found.loss_mask.tolist() == [False, False, False, False, True]
    assert (found.weight, found.per_sequence) == (2.0, {"margin": 1.0})


def client(config, rows):
    """A reward model whose head is random: that of a new one is 0, and would hide what its trunk does."""
    made = trainer(config, rows=rows, length=50, has_scalar_head=True, has_lm_head=False)
    head = jax.device_put(
        jax.random.normal(jax.random.key(1), (config.d_model,)), made.learner.params["value/w"].sharding
    )
    made.state = replace(made.state, params={**made.state.params, "value/w": head})
    return made


@pytest.mark.parametrize("config", slow([PLAIN, RICH]), ids=["plain", "windows"])
def test_packing_and_passes_change_nothing(config):
    trained = algorithm(centring=0.1)
    sides = [trained.prepare_sequence(side) for side in pairs(6)]
    apart, shared = (pack(sides, 12, 50, packing=packing, sequences_per_example=2) for packing in (False, True))
    assert (shared.segment_ids > 0).sum() < (apart.segment_ids > 0).sum()
    one, many = client(config, rows=1), client(config, rows=6)
    assert "head/w" not in one.learner.params
    loss, right = gradients(one, apart, trained.objective)
    for other, batch in ((one, shared), (many, shared)):
        found, others = gradients(other, batch, trained.objective)
        assert found == pytest.approx(loss, rel=2e-6)
        assert_close(others, right)
    # The same by hand, from the scores of the sequences by themselves.
    scores = np.array([values[-1] for values in one.values(sides)])
    chosen, rejected, weights = scores[::2], scores[1::2], np.array([x.weight for x in sides[::2]])
    by_hand = np.logaddexp(0, rejected - chosen) + 0.1 * (chosen + rejected) ** 2
    assert loss == pytest.approx(float(weights @ by_hand / weights.sum()), rel=1e-5)


def test_nothing_compiles_again():
    trained, made = algorithm(), client(PLAIN, rows=2)

    def batch(number, seed):
        return pack([trained.prepare_sequence(side) for side in pairs(number, seed)], 8, 50, sequences_per_example=2)

    made.step(batch(4, 0), trained.objective)
    compilations = Compilations()
    for seed in (1, 2):
        made.step(batch(3, seed), trained.objective)
    assert compilations.since_warmup == 0
