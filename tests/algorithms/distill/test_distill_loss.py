"""The losses of distillation on numbers by hand, and what must not change them."""

from dataclasses import replace
from math import log

import jax.numpy as jnp
import numpy as np
import pytest

from tests.policy_batches import PROMPT, Taken, batch_of, gradients, inputs_of, reduced, rows
from tunix.algorithms.distill.algorithm import Distill
from tunix.algorithms.distill.config import DistillConfig
from tunix.algorithms.distill.loss import distill_loss, prefix_weights
from tunix.trainer.step import loss_sums
from tunix.types import Compared, Divergence, LossInputs, LossOutputs, Sampling

NAMES = ("teacher_logprobs", "divergence", "agreement")
PLACES = [(0, PROMPT), (0, PROMPT + 1), (1, PROMPT)]
# Two completions of 2 tokens and 1: what is drawn has p_old = 1/2 everywhere, the teacher finds 1/4, 1/2 and 1 there.
# p moved on to 1/2, 1/4 and 1/2 meanwhile, so r = 1, 1/2, 1; A = log(q / p_old) = -log 2, 0, log 2.
GIVEN = [
    Taken(
        [log(1 / 2), log(1 / 4)],
        [log(1 / 2)] * 2,
        [0.0] * 2,
        {"teacher_logprobs": [log(1 / 4), log(1 / 2)], "divergence": [0.5, 1.0], "agreement": [1.0, 0.0]},
    ),
    Taken(
        [log(1 / 2)],
        [log(1 / 2)],
        [0.0],
        {"teacher_logprobs": [0.0], "divergence": [3.0], "agreement": [1.0]},
    ),
]


def with_teacher(inputs: LossInputs) -> LossInputs:
    """The batch's values of these names where the trainer puts them."""
    own = {name: jnp.asarray(inputs.batch.per_token[name]) for name in NAMES}
    return replace(inputs, compared=Compared(own["divergence"], own["teacher_logprobs"], own["agreement"]))


def algorithm(**settings) -> Distill:
    return Distill(DistillConfig(**settings), Sampling(max_tokens=12))


@pytest.fixture
def inputs() -> LossInputs:
    return with_teacher(inputs_of(batch_of(GIVEN)))


def test_the_divergence_is_averaged_and_reported(inputs):
    found = reduced(algorithm().loss, inputs)
    assert found["train/loss"] == pytest.approx((0.5 + 1 + 3) / 3)
    assert found["distill/divergence"] == pytest.approx((0.5 + 1 + 3) / 3)
    assert found["distill/agreement"] == pytest.approx(2 / 3)
    assert found["distill/teacher_logprob"] == pytest.approx((log(1 / 4) + log(1 / 2)) / 3)


def test_temperature_multiplies_by_its_square_and_the_text_counts_as_it_is_weighted(inputs):
    by_config = reduced(algorithm(sft_weight=0.5).loss, inputs)
    assert by_config["loss/distill"] == pytest.approx(1.5)

    def loss(inputs: LossInputs) -> LossOutputs:
        assert inputs.compared is not None
        return distill_loss(inputs.compared, inputs.logprobs, temperature=2.0, sft_weight=0.5)

    found = reduced(loss, inputs)
    assert found["loss/distill"] == pytest.approx(4 * 1.5)
    assert found["loss/sft"] == pytest.approx(0.5 * (log(2) + log(4) + log(2)) / 3)
    assert found["train/loss"] == pytest.approx(found["loss/distill"] + found["loss/sft"])
    assert found["distill/divergence"] == pytest.approx(1.5)


def test_drawn_tokens_are_credited_with_the_teachers_opinion(inputs):
    loss = algorithm(on_policy=True).loss
    found = reduced(loss, inputs)
    # -r A: log 2, 0, -log 2
    assert found["train/loss"] == pytest.approx(0.0, abs=1e-6)
    # Of log p_old - log q: log 2, 0, -log 2
    assert found["distill/divergence"] == pytest.approx(0.0, abs=1e-6)
    assert found["policy/ratio"] == pytest.approx((1 + 0.5 + 1) / 3)
    # d/dlog p of -r A / 3 is -r A / 3
    by_token = gradients(loss, inputs)
    np.testing.assert_allclose([by_token[place] for place in PLACES], [log(2) / 3, 0, -log(2) / 3], atol=1e-6)


def test_the_expected_gradient_of_drawn_tokens_is_that_of_the_reverse_kl():
    """Over every token that could be drawn, by its probability: p_v grad of -A_v log p_v, against p_v (g_v - s)."""
    p, q = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.25, 0.25])
    every = [
        Taken([log(x)], [log(x)], [0.0], {"teacher_logprobs": [log(y)]}, weight=x) for x, y in zip(p, q, strict=True)
    ]
    by_token = gradients(algorithm(on_policy=True).loss, inputs_of(batch_of(every)))
    pull = np.array([by_token[i, PROMPT] for i in range(3)])  # p_v log(p_v / q_v), the weights being p
    by_logits = pull - p * pull.sum()  # d log p_v / d z_k = 1[v = k] - p_k
    ratio = np.log(p / q)
    np.testing.assert_allclose(by_logits, p * (ratio - (p * ratio).sum()), atol=1e-6)


def test_on_own_text_the_mismatch_is_measured(inputs):
    sums = loss_sums(algorithm(on_policy=True).gated_loss, inputs)
    assert float(sums["mismatch/mean"]) == pytest.approx(log(2) / 3, rel=1e-5)  # only the second token has moved
    assert float(sums["mismatch/max"].value) == pytest.approx(log(2), rel=1e-5)


def test_tokens_before_the_text_departs_count_more():
    """|A| is 1, 2 and 3 at three tokens, 6 in all: of gamma 1/2 are left (6 - 0) / 6, (6 - 1) / 6 and (6 - 3) / 6."""
    weights = prefix_weights(np.array([0, 1, 0, -2, 3], np.float32), 0.5)
    assert weights[[1, 3, 4]] == pytest.approx([1.5, 1 + 5 / 12, 1.25])
    assert prefix_weights(np.zeros(2, np.float32), 0.5) == pytest.approx([1.5, 1.5])  # where nothing has departed


def test_the_weights_are_factors_of_the_advantage():
    """A is -log 2, 0, log 2, the ratio 1, 1/2, 1: with weights 3, 5, 7 the mean of -r w A is (3 - 7) log 2 / 3."""
    taken = [
        replace(x, more={**x.more, "prefix_weights": weights})
        for x, weights in zip(GIVEN, [[3.0, 5.0], [7.0]], strict=True)
    ]
    result = reduced(algorithm(on_policy=True, prefix_weight=0.5).loss, with_teacher(inputs_of(batch_of(taken))))
    assert result["train/loss"] == pytest.approx((3 - 7) * log(2) / 3)
    assert result["distill/divergence"] == pytest.approx(0.0, abs=1e-6)  # (log 2 + 0 - log 2) / 3, without weights


# What must not change anything.

SETTINGS = {
    "given": {"sft_weight": 0.3},
    "sampled": {"on_policy": True},
    "weighted": {"on_policy": True, "prefix_weight": 0.5},
    "own_text": {"on_policy": True, "divergence": "jsd"},
}


def drawn() -> list[Taken]:
    """Five completions with numbers of their own for every token; one has an observation, one counts for nothing."""
    rng = np.random.default_rng(3)

    def one(index: int) -> Taken:
        number = int(rng.integers(2, 7))
        current, old, *more = rng.normal(-1.0, 0.6, (2 + len(NAMES), number)).tolist()
        trained = [True, *(rng.random(number - 1) < (0.5 if index == 1 else 1.1))]
        return Taken(current, old, [0.0] * number, dict(zip(NAMES, more, strict=True)), trained, float(index != 3))

    return [one(index) for index in range(5)]


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def loss(request):
    return algorithm(**request.param).loss


def test_gradients_are_finite_and_masked_tokens_inert(loss):
    quiet = with_teacher(inputs_of(batch_of(drawn())))
    loud = with_teacher(inputs_of(batch_of(drawn(), fill=np.inf)))
    assert reduced(loss, loud) == reduced(loss, quiet)
    found, wanted = gradients(loss, loud), gradients(loss, quiet)
    assert found == wanted
    assert np.all(np.isfinite(list(found.values())))


def test_packed_equals_unpacked(loss):
    packed, single = (with_teacher(inputs_of(batch_of(drawn(), packing))) for packing in (True, False))
    assert packed.logprobs.shape[0] < single.logprobs.shape[0]
    assert reduced(loss, packed) == pytest.approx(reduced(loss, single), rel=1e-5, abs=1e-7)
    assert gradients(loss, packed) == pytest.approx(gradients(loss, single), rel=1e-5, abs=1e-7)


def test_parts_of_a_batch_add_up_to_it(loss):
    whole = batch_of(drawn(), packing=False)
    parts = [reduced(loss, with_teacher(inputs_of(rows(whole, i, i + 1)))) for i in range(5)]
    total = reduced(loss, with_teacher(inputs_of(whole)))
    assert {name: sum(part[name] for part in parts) for name in total} == pytest.approx(total, rel=1e-5, abs=1e-7)


# The section.


@pytest.mark.parametrize(
    ("settings", "filled"),
    [
        ({}, {"divergence": "forward_kl", "beta": None, "group_size": None}),
        ({"divergence": "jsd"}, {"beta": 0.5}),
        ({"on_policy": True}, {"divergence": "sampled", "group_size": 1}),
    ],
)
def test_null_is_filled_in_and_read_back(settings, filled):
    config = DistillConfig(**settings)
    assert {name: getattr(config, name) for name in filled} == filled
    assert DistillConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"beta": 0.3}, "without divergence: jsd"),
        ({"divergence": "jsd", "beta": 1.0}, "less than 1"),
        ({"divergence": "sampled"}, "set on_policy: true"),
        ({"on_policy": True, "top_k": 5}, "asks for one token"),
        ({"on_policy": True, "divergence": "jsd", "prefix_weight": 0.5}, "without divergence: sampled"),
        ({"temperature": 2.0}, "temperature is gone: it is 1 on given text, and rollout.temperature"),
        ({"on_policy": True, "sft_weight": 0.5}, "only prompts are read"),
        ({"group_size": 4}, "without on_policy: true"),
        ({"top_k": -1}, "greater than or equal to 0"),
    ],
)
def test_what_changes_nothing_is_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        DistillConfig(**settings)


def test_what_is_asked_of_the_model():
    given, sampled = algorithm(top_k=8), algorithm(on_policy=True)
    assert given.objective.divergence == Divergence("forward_kl", top_k=8)
    assert not given.objective.logprobs
    assert algorithm(sft_weight=0.1).objective.logprobs
    assert sampled.objective.divergence is None
    assert sampled.held_out_objective.divergence == Divergence("reverse_kl")
    own = Distill(DistillConfig(on_policy=True, divergence="jsd", beta=0.2), Sampling(temperature=0.7))
    assert own.objective.divergence == own.held_out_objective.divergence == Divergence("jsd", 0.2, temperature=0.7)
    assert own.objective.temperature == 0.7
