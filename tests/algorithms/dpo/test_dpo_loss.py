"""The DPO family: each form against its paper's formula by hand, and what must not change the loss of any."""

from dataclasses import replace
from math import exp, log
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tunix
from tests.marks import slow
from tests.policy_batches import gradients, reduced, rows
from tests.preference_batches import PROMPT, Side, batch_of, inputs_of
from tunix.algorithms.dpo.algorithm import DPO
from tunix.algorithms.dpo.config import REFERENCED, DPOConfig, Form
from tunix.algorithms.dpo.loss import robust, slope


def loss_of(**settings):
    return DPO(DPOConfig(**settings)).loss


def softplus(x: float) -> float:
    return log(1 + exp(x))  # -log sigmoid(-x)


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def log_odds(mean: float) -> float:
    return mean - log(1 - exp(mean))


# log p, log p_ref, their difference d, tokens: A -3, -4, 1, 2. B -6, -4, -2, 3. C -2, -1, -1, 1. D -1, -2, 1, 2.
A = Side([-1.0, -2.0], [-1.5, -2.5], named={"margin": 2.0})
B = Side([-1.0, -1.0, -4.0], [-1.0, -1.0, -2.0], named={"margin": 2.0})
C = Side([-2.0], [-1.0], named={"margin": 1.0})
D = Side([-0.5, -0.5], [-1.0, -1.0], named={"margin": 1.0})
PAIRS = [A, B, C, D]  # h = 1 - -2 = 3, and -1 - 1 = -2; with beta .1: .3 and -.2
NLL = (1.5 + 2) / 2  # means over tokens of A and C


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (softplus(-0.3) + softplus(0.2)) / 2),
        ({"beta": 0.5}, (softplus(-1.5) + softplus(1.0)) / 2),
        # A fifth of the labels is wrong.
        (
            {"label_smoothing": 0.2},
            0.8 * (softplus(-0.3) + softplus(0.2)) / 2 + 0.2 * (softplus(0.3) + softplus(-0.2)) / 2,
        ),
        (
            {"loss": "robust", "label_smoothing": 0.2},
            (0.8 * (softplus(-0.3) + softplus(0.2)) / 2 - 0.2 * (softplus(0.3) + softplus(-0.2)) / 2) / 0.6,
        ),
        # (h - 1 / (2 * .1))^2 on sums ...
        ({"loss": "ipo"}, ((3 - 5) ** 2 + (-2 - 5) ** 2) / 2),
        # ... and on means: 1/2 + 2/3 and -1 - 1/2.
        ({"loss": "ipo", "length_normalized": True}, ((7 / 6 - 5) ** 2 + (-1.5 - 5) ** 2) / 2),
        ({"loss": "hinge"}, (0.7 + 1.2) / 2),
        ({"loss": "hinge", "beta": 0.5}, (0 + 2) / 2),  # gaps 1.5, beyond the margin, and -1
        ({"loss": "apo_zero"}, (1 - sigmoid(0.1) + sigmoid(-0.2) + 1 - sigmoid(-0.1) + sigmoid(0.1)) / 2),
        ({"loss": "apo_down"}, (sigmoid(0.1) + 1 - sigmoid(0.3) + sigmoid(-0.1) + 1 - sigmoid(-0.2)) / 2),
        # 2 * (-1.5 + 2) - 1 = 0, and 2 * (-2 + .5) - 1 = -4.
        ({"loss": "simpo"}, (log(2) + softplus(4)) / 2),
        # 3 * .5 - .5 = 1, and 3 * -1.5 - .5 = -5; CPO-SimPO has the NLL too.
        ({"loss": "simpo", "beta": 3, "gamma": 0.5, "sft_weight": 2}, (softplus(-1) + softplus(5)) / 2 + 2 * NLL),
        (
            {"loss": "orpo"},
            NLL + 0.1 * (softplus(log_odds(-2) - log_odds(-1.5)) + softplus(log_odds(-0.5) - log_odds(-2))) / 2,
        ),
        # .1 * (-3 + 6) = .3, .1 * (-2 + 1) = -.1, and the NLL.
        ({"loss": "cpo"}, (softplus(-0.3) + softplus(0.1)) / 2 + NLL),
        ({"loss": "cpo", "sft_weight": 0}, (softplus(-0.3) + softplus(0.1)) / 2),
        ({"length_normalized": True, "beta": 1}, (softplus(-7 / 6) + softplus(1.5)) / 2),
        # .8 and .5 of two forms.
        (
            {"loss": {"sigmoid": 0.8, "hinge": 0.5}},
            (0.8 * (softplus(-0.3) + softplus(0.2)) + 0.5 * (0.7 + 1.2)) / 2,
        ),
        # B's third token counts a quarter of its -2, D's second a quarter of its .5: log-ratios -.5 and .625.
        ({"ld_alpha": 0.25}, (softplus(-0.1 * 1.5) + softplus(0.1 * 1.625)) / 2),
        # Equal lengths: 1 - 0 and -1 - .5.
        ({"ld_alpha": 0.0, "loss": "hinge"}, (1 - 0.1 * 1 + 1 + 0.1 * 1.5) / 2),
        ({"sft_weight": 0.5}, (softplus(-0.3) + softplus(0.2)) / 2 + 0.5 * NLL),
        # beta (-1/u_w + 1/u_l): .1 (e^2 - e^-1), and .1 (e^-1 - e).
        (
            {"divergence": "forward_kl"},
            (softplus(-0.1 * (exp(2) - exp(-1))) + softplus(-0.1 * (exp(-1) - exp(1)))) / 2,
        ),
        # beta (log 2u_w/(1+u_w) - log 2u_l/(1+u_l)), u = e, e^-2; e^-1, e.
        (
            {"divergence": "js"},
            (
                softplus(-0.1 * (log(2 * exp(1) / (1 + exp(1))) - log(2 * exp(-2) / (1 + exp(-2)))))
                + softplus(-0.1 * (log(2 * exp(-1) / (1 + exp(-1))) - log(2 * exp(1) / (1 + exp(1)))))
            )
            / 2,
        ),
        # alpha 1/2: f'(u) = 2 (1 - u^-1/2).
        (
            {"divergence": "alpha"},
            (softplus(-0.2 * (exp(1) - exp(-0.5))) + softplus(-0.2 * (exp(-0.5) - exp(0.5)))) / 2,
        ),
        # KL((s, 1 - s) || (.9, .1)) with s = sigmoid(.3) and sigmoid(-.2).
        (
            {"loss": "exo", "label_smoothing": 0.1},
            sum(s * log(s / 0.9) + (1 - s) * log((1 - s) / 0.1) for s in (sigmoid(0.3), sigmoid(-0.2))) / 2,
        ),
        # Logistic and exponential, mixed by m = sigmoid(d / .05): beta .05 makes d .15 and -.1, d / .05 3 and -2.
        (
            {"loss": "discopop"},
            (
                (1 - sigmoid(3)) * softplus(-0.15)
                + sigmoid(3) * exp(-0.15)
                + (1 - sigmoid(-2)) * softplus(0.1)
                + sigmoid(-2) * exp(0.1)
            )
            / 2,
        ),
        # Rewards .1, -.2 and -.1, .1, each for itself.
        (
            {"loss": "nca"},
            (
                softplus(-0.1)
                + (softplus(0.1) + softplus(-0.2)) / 2
                + softplus(0.1)
                + (softplus(-0.1) + softplus(0.1)) / 2
            )
            / 2,
        ),
        # Log-ratios 1, -2 and -1, 1; eta 2: (1 - 1)^2 + (-2 + 1)^2, and (-1 - 1)^2 + (1 + 1)^2. The paper's eta: 1000.
        ({"loss": "sppo_hard", "beta": 0.5}, (1 + 8) / 2),
        ({"loss": "sppo_hard"}, (499**2 + 498**2 + 501**2 + 501**2) / 2),
        (
            {"divergence": "forward_kl", "loss": "hinge"},
            (1 - 0.1 * (exp(2) - 1 / exp(1)) + 1 - 0.1 * (exp(-1) - exp(1))) / 2,
        ),
    ],
)
def test_each_form_by_hand(settings, expected):
    batch = batch_of(PAIRS)
    assert reduced(loss_of(**settings), inputs_of(batch))["train/loss"] == pytest.approx(expected, rel=1e-5)
    if DPOConfig(**settings).has_reference:  # asked beforehand, it is the same
        found = reduced(loss_of(**settings), inputs_of(batch, asked_before=True))
        assert found["train/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        # d/dr_w of softplus(-g) = -sigmoid(-g); each of a completion's tokens has beta times it, over two pairs.
        ({}, (-0.05 * sigmoid(-0.3), 0.05 * sigmoid(-0.3)), (-0.05 * sigmoid(0.2), 0.05 * sigmoid(0.2))),
        # 2 (h - 5), -4 and -14, over two.
        ({"loss": "ipo"}, (-2, 2), (-7, 7)),
        # Of means: 2 (7/6 - 5) = -23/3 over 2 and 3 tokens; 2 (-6.5) = -13 over 1 and 2; over two pairs.
        ({"loss": "ipo", "length_normalized": True}, (-23 / 12, 23 / 18), (-13 / 2, 13 / 4)),
        ({"loss": "hinge"}, (-0.05, 0.05), (-0.05, 0.05)),
        # sigmoid' = s (1 - s).
        (
            {"loss": "apo_zero"},
            (-0.05 * sigmoid(0.1) * sigmoid(-0.1), 0.05 * sigmoid(-0.2) * sigmoid(0.2)),
            (-0.05 * sigmoid(0.1) * sigmoid(-0.1), 0.05 * sigmoid(0.1) * sigmoid(-0.1)),
        ),
        # The chosen one falls by its own sigmoid', and rises by the gap's.
        (
            {"loss": "apo_down"},
            (
                0.05 * (sigmoid(0.1) * sigmoid(-0.1) - sigmoid(0.3) * sigmoid(-0.3)),
                0.05 * sigmoid(0.3) * sigmoid(-0.3),
            ),
            (
                0.05 * (sigmoid(0.1) * sigmoid(-0.1) - sigmoid(0.2) * sigmoid(-0.2)),
                0.05 * sigmoid(0.2) * sigmoid(-0.2),
            ),
        ),
        # beta 2 over the tokens: sigmoid(0) 2/2 and 2/3; sigmoid(4) 2/1 and 2/2; over two pairs.
        ({"loss": "simpo"}, (-0.25, 1 / 6), (-sigmoid(4), sigmoid(4) / 2)),
        # -1/|y| of the NLL; the odds have d log odds / d log p = 1 / (1 - P).
        (
            {"loss": "orpo"},
            (
                -0.25 - 0.025 * sigmoid(log_odds(-2) - log_odds(-1.5)) / (1 - exp(-1.5)),
                0.05 / 3 * sigmoid(log_odds(-2) - log_odds(-1.5)) / (1 - exp(-2)),
            ),
            (
                -0.5 - 0.05 * sigmoid(log_odds(-0.5) - log_odds(-2)) / (1 - exp(-2)),
                0.025 * sigmoid(log_odds(-0.5) - log_odds(-2)) / (1 - exp(-0.5)),
            ),
        ),
        # f'' u = 1 / u, in place of 1: e^-1 and e^2; e and e^-1.
        (
            {"divergence": "forward_kl"},
            (
                -0.05 * exp(-1) * sigmoid(-0.1 * (exp(2) - exp(-1))),
                0.05 * exp(2) * sigmoid(-0.1 * (exp(2) - exp(-1))),
            ),
            (
                -0.05 * exp(1) * sigmoid(-0.1 * (exp(-1) - exp(1))),
                0.05 * exp(-1) * sigmoid(-0.1 * (exp(-1) - exp(1))),
            ),
        ),
    ],
)
def test_gradients_by_hand(settings, first, second):
    found = gradients(loss_of(**settings), inputs_of(batch_of(PAIRS)))
    for sequence, (side, wanted) in enumerate(zip(PAIRS, (*first, *second), strict=True)):
        own = [value for (s, t), value in found.items() if s == sequence and t >= PROMPT]
        np.testing.assert_allclose(own, [wanted] * len(side.current), rtol=2e-5)
    assert not any(value for (_, t), value in found.items() if t < PROMPT)


def test_metrics_by_hand():
    found = reduced(loss_of(sft_weight=0.5), inputs_of(batch_of(PAIRS)))
    expected = {
        "rewards/chosen": (0.1 - 0.1) / 2,
        "rewards/rejected": (-0.2 + 0.1) / 2,
        "rewards/margin": (0.3 - 0.2) / 2,
        "rewards/accuracy": 0.5,
        "logprobs/chosen": (-3 - 2) / 2,
        "logprobs/rejected": (-6 - 1) / 2,
        # d^2 / 2 over eight tokens: .5 twice, 0 0 -2, -1, .5 twice.
        "kl/reference": (2 * 0.25 + 4 + 1 + 2 * 0.25) / 2 / 8,
        "loss/preference": (softplus(-0.3) + softplus(0.2)) / 2,
        "loss/sft": 0.5 * NLL,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert found.keys() == expected.keys() | {"train/loss"}
    simpo = reduced(loss_of(loss="simpo"), inputs_of(batch_of(PAIRS)))
    assert (simpo["rewards/chosen"], simpo["rewards/rejected"]) == pytest.approx(((-3 - 4) / 2, (-4 - 1) / 2))
    assert "kl/reference" not in simpo
    orpo = reduced(loss_of(loss="orpo"), inputs_of(batch_of(PAIRS)))
    assert orpo["rewards/chosen"] == pytest.approx((log_odds(-1.5) + log_odds(-2)) / 2)


def test_at_the_reference_nothing_is_preferred():
    """Where the policy is the reference every reward is 0; ties count as half right."""
    same = [replace(side, reference=side.current) for side in PAIRS]
    for settings in ({}, *({"divergence": name} for name in ("forward_kl", "js", "alpha"))):
        found = reduced(loss_of(**settings), inputs_of(batch_of(same)))
        assert found["train/loss"] == pytest.approx(log(2), rel=1e-6)
        assert (found["rewards/chosen"], found["rewards/rejected"], found["kl/reference"]) == pytest.approx(
            (0, 0, 0), abs=1e-7
        )
        assert found["rewards/accuracy"] == 0.5


def test_pairs_are_weighted():
    # Weights 3 and 1: (3 * .7 + 1.2) / 4.
    heavier = [replace(A, weight=3.0), replace(B, weight=3.0), C, D]
    found = reduced(loss_of(loss="hinge"), inputs_of(batch_of(heavier)))
    assert found["train/loss"] == pytest.approx((3 * 0.7 + 1.2) / 4, rel=1e-6)
    assert found["rewards/accuracy"] == 0.75


def test_the_robust_loss_is_unbiased():
    """Over labels of which a share e is flipped its mean is DPO's over the right ones."""
    gap = jnp.array([0.7, -1.3])
    flipped = 0.7 * robust(gap, 0.3) + 0.3 * robust(-gap, 0.3)
    np.testing.assert_allclose(flipped, -jax.nn.log_sigmoid(gap), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "generator"),
    [
        ({"divergence": "reverse_kl"}, lambda u: u * jnp.log(u)),
        ({"divergence": "forward_kl"}, lambda u: -jnp.log(u)),
        ({"divergence": "js"}, lambda u: u * jnp.log(u) - (u + 1) * jnp.log((u + 1) / 2)),
        (
            {"divergence": "alpha", "alpha": 0.3},
            lambda u: (u**0.7 - 0.7 * u - 0.3) / (0.3 * -0.7),
        ),
    ],
)
def test_slopes_are_those_of_the_divergences(settings, generator):
    """`slope` is the derivative of the paper's f, but for a constant."""
    u = jnp.array([0.1, 0.9, 1.0, 2.5, 30.0])
    wanted = jax.vmap(jax.grad(generator))(u) - jax.grad(generator)(1.0)
    np.testing.assert_allclose(slope(jnp.log(u), **settings), wanted, rtol=1e-5, atol=1e-6)


# What must not change anything, for every form.

FAMILY = {
    **{form: {"loss": form} for form in Form.__args__},
    **{name: {"divergence": name} for name in ("forward_kl", "js", "alpha")},
    "normalized": {"length_normalized": True, "sft_weight": 0.1},
    "weighted": {"policy_weights": True, "loss": "simpo"},
    "added": {"loss": {"sigmoid": 0.5, "apo_zero": 2.0, "exo": 0.25}, "sft_weight": 0.5},
    "tails": {"ld_alpha": 0.5, "divergence": "js"},
    "sft_of_tokens": {"sft_weight": 0.1, "sft_reduction": "tokens"},
}


def many(seed: int = 0) -> list[Side]:
    """Six pairs of 1 to 6 tokens a side, one with an observation inside, one of weight 0."""
    rng = np.random.default_rng(seed)

    def one(i: int) -> Side:
        pair = i // 2
        number = int(rng.integers(2, 7))
        current, reference = rng.normal(-1.5, 0.5, (2, number)).clip(max=-0.01)
        trained = [True] * number
        if pair == 1:
            trained[number // 2] = False
        return Side(
            list(current),
            list(reference),
            trained,
            0.0 if pair == 4 else 1.0 + pair % 2,
            {"margin": 1.0 + pair, "baseline": 0.1 * i, "policy_weight": 1 - 0.05 * i},
        )

    return [one(i) for i in range(12)]


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert one[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


def moved(found: dict) -> dict:
    """The places with a gradient: a shared prompt has none, and lies elsewhere when it is not shared."""
    return {place: value for place, value in found.items() if value}


USUAL = ("sigmoid", "ipo", "nca", "aot", "aot_unpaired", "discopop", "simpo", "orpo", "js", "normalized")
"""Forms whose sums and weights differ; the others are slopes of their own of the same log-ratios, each of
which the tests by hand know."""


@pytest.fixture(params=[*USUAL, *slow(form for form in FAMILY if form not in USUAL)], name="form")
def _form(request):
    return loss_of(**FAMILY[request.param])


def test_packed_equals_unpacked(form):
    """With their prompt shared, and each pair in a row of its own."""
    packed, apart = (batch_of(many(), packing=packing) for packing in (True, False))
    assert packed.parents is not None
    assert apart.parents is None
    packed, apart = inputs_of(packed), inputs_of(apart)
    assert packed.logprobs.shape[0] < apart.logprobs.shape[0]
    assert_same(reduced(form, packed), reduced(form, apart))
    assert_same(moved(gradients(form, packed)), moved(gradients(form, apart)))


def test_order_of_the_pairs_changes_nothing(form):
    order = [3, 5, 0, 4, 1, 2]
    sides = many()
    shuffled = inputs_of(batch_of([sides[2 * i + j] for i in order for j in (0, 1)]))
    straight = inputs_of(batch_of(sides))
    assert_same(reduced(form, shuffled), reduced(form, straight))
    found = {(2 * order[s // 2] + s % 2, t): value for (s, t), value in moved(gradients(form, shuffled)).items()}
    assert_same(found, moved(gradients(form, straight)))


def test_passes_sum_to_the_whole_batch(form):
    batch = replace(batch_of(many()), parents=None)  # the loss does not read them
    whole = reduced(form, inputs_of(batch))
    inputs = [inputs_of(rows(batch, i, i + 1)) for i in range(len(batch.tokens))]
    assert len(inputs) > 1
    parts = [reduced(form, one) for one in inputs]
    assert_same({name: sum(part[name] for part in parts) for name in whole}, whole)
    found = [moved(gradients(form, one)) for one in inputs]
    assert_same(
        {place: value for one in found for place, value in one.items()}, moved(gradients(form, inputs_of(batch)))
    )


def test_masked_tokens_are_inert(form):
    """Whatever stands at prompts, observations and padding."""
    clean = inputs_of(batch_of(many()))
    value, wanted = reduced(form, clean), gradients(form, clean)
    for fill in (7.0, float("inf"), float("nan")):
        dirty = inputs_of(batch_of(many(), fill=fill))
        assert reduced(form, dirty) == value
        assert gradients(form, dirty) == wanted
    assert moved(wanted)
    assert not {(s, t) for s, t in moved(wanted) if t < PROMPT or s in (8, 9)}  # nor the pair of weight 0


def test_gradients_are_finite_at_the_edges(form):
    """Completions that one side thinks impossible, or certain."""
    impossible, certain = [-1e4, -1e4], [0.0, 0.0]
    sides = [
        Side(current, reference, named={"margin": 1.0, "baseline": 0.5, "policy_weight": 0.5})
        for ours in ((impossible, certain), (certain, impossible), (certain, certain))
        for current, reference in ((ours[0], ours[1]), (ours[1], ours[0]))
    ]
    inputs = inputs_of(batch_of(sides))
    assert np.isfinite(list(reduced(form, inputs).values())).all()
    assert np.isfinite(list(gradients(form, inputs).values())).all()


# The section of a recipe.


def test_nulls_become_the_usual_values():
    assert (DPOConfig().beta, DPOConfig().label_smoothing, DPOConfig().sft_weight) == (0.1, 0.0, 0.0)
    assert (DPOConfig(loss="simpo").beta, DPOConfig(loss="simpo").gamma) == (2.0, 1.0)
    assert (DPOConfig(loss="orpo").sft_weight, DPOConfig(loss="cpo").sft_weight) == (1.0, 1.0)
    assert DPOConfig(loss="robust").label_smoothing == 0.1
    several = DPOConfig(loss={"nca": 1.0, "exo": 0.5})
    assert (several.beta, several.label_smoothing, several.has_reference) == (0.1, 0.001, True)
    assert DPOConfig(divergence="alpha").alpha == 0.5
    assert (DPOConfig(loss="exo").label_smoothing, DPOConfig(loss="sppo_hard").beta) == (0.001, 0.001)
    assert DPOConfig(loss="discopop").beta == 0.05
    assert DPOConfig().sequences_per_update(4) == 8


@pytest.mark.parametrize("settings", [*FAMILY.values(), {"online": True, "group_size": 4}, {"reference": "precompute"}])
def test_a_resolved_section_reads_back_equal(settings):
    config = DPOConfig(**settings)
    assert DPOConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing is 0.1.*read by sigmoid, robust, simpo, cpo"),
        ({"loss": "nca", "label_smoothing": 0.1}, "label_smoothing is 0.1.*read by .*exo, aot, aot_unpaired"),
        ({"offset": 0.1}, "offset is gone: a column `margin` is for reward models"),
        ({"loss": "exo", "label_smoothing": 0}, "exo takes the logarithm"),
        ({"loss": "bco"}, "loss: bco is gone: take nca or apo_zero"),
        ({"loss": "bco", "reward_shift": False}, "reward_shift is gone: .*\n.*loss: bco is gone: take nca"),
        ({"gamma": 1.0}, "gamma is 1.0.*loss: simpo"),
        ({"sft_reduction": "tokens"}, "sft_reduction is 'tokens'.*set sft_weight"),
        ({"loss": "aot", "divergence": "js"}, "divergence is 'js'.*read by sigmoid, robust, hinge"),
        ({"loss": "simpo", "divergence": "js"}, "divergence is 'js'.*read by sigmoid, robust, hinge"),
        ({"alpha": 0.5}, "alpha is 0.5.*divergence: alpha"),
        ({"loss": "orpo", "length_normalized": True}, "length_normalized is True.*orpo are normalised always"),
        ({"divergence": "js", "length_normalized": True}, "only the reverse KL"),
        ({"loss": "cpo", "reference": "precompute"}, "reference is 'precompute'.*losses with a reference"),
        ({"online": True, "reference": "precompute"}, "reference is 'precompute'.*given pairs"),
        ({"ld_alpha": 0.5, "loss": "simpo"}, "ld_alpha is 0.5.*sums of log-ratios"),
        ({"policy_weights": True, "loss": "aot"}, "policy_weights is True.*sides of different pairs"),
        ({"loss": {}}, "an empty sum"),
        ({"loss": {"sigmoid": 1, "simpo": 1}}, "'sigmoid', 'robust'"),
        ({"loss": {"sigmoid": 0}}, "greater than 0"),
        ({"loss": {"sigmoid": 1, "nca": 1}, "divergence": "js"}, "divergence is 'js'.*read by sigmoid, robust, hinge"),
        ({"loss": {"hinge": 1, "nca": 1}, "label_smoothing": 0.1}, "label_smoothing is 0.1"),
        ({"loss": {"exo": 1, "nca": 1}, "label_smoothing": 0}, "exo takes the logarithm"),
        ({"ld_alpha": 0.5, "length_normalized": True}, "ld_alpha is 0.5.*sums of log-ratios"),
        ({"group_size": 4}, "group_size is 4.*online: true"),
        ({"online": True, "group_size": 1}, "1 completion of a prompt makes no pair"),
        ({"loss": "robust", "label_smoothing": 0}, "robust without a share of wrong labels is sigmoid"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"beta": 0}, "greater than 0"),
        ({"loss": "dpo"}, "'sigmoid', 'robust'"),
    ],
)
def test_settings_without_effect_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        DPOConfig(**settings)


def test_every_key_has_one_rule_at_most():
    keys = [key for rule in DPOConfig.rules for key in rule.keys]
    assert len(keys) == len(set(keys))


def test_the_readme_has_every_form():
    readme = (Path(tunix.__file__).parent / "algorithms/dpo/README.md").read_text(encoding="utf-8")
    assert all(f"| `{form}` |" in readme for form in Form.__args__)
    assert set(REFERENCED) < set(Form.__args__)
