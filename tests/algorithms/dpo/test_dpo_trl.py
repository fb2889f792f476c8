"""The DPO family against TRL's own loss code, and what is known of a whole batch before an update of it.

The numbers are those of TRL 1.16, `DPOTrainer._compute_loss` from the log-ratios to the mean of the losses, in float32
on the log-probs below; its gradients are of a completion's log-prob.
"""

from collections.abc import Sequence as List
from dataclasses import replace
from math import exp, log

import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.policy_batches import gradients, reduced, rows
from tests.preference_batches import LENGTH, PROMPT, Side
from tunix.algorithms.dpo.algorithm import DPO
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.dpo.loss import BASELINE, slope
from tunix.data.packing import pack
from tunix.data.types import Accounting, Packed
from tunix.protocols import Client
from tunix.types import Batch, Loss, LossInputs, Sequence

pytestmark = pytest.mark.models

CHOSEN, REJECTED = [-6.0, -5.4, -6.55, -7.78, -6.91], [-7.98, -5.88, -3.32, -6.98, -7.24]
REFERENCE_CHOSEN, REFERENCE_REJECTED = [-5.27, -4.86, -6.39, -9.18, -6.95], [-6.94, -7.9, -4.01, -9.83, -9.17]
SIDES = [
    Side([current], [reference])
    for pair in zip(CHOSEN, REFERENCE_CHOSEN, REJECTED, REFERENCE_REJECTED, strict=True)
    for current, reference in (pair[:2], pair[2:])
]


class Known(Client):
    """Knows each sequence's log-probs, and takes a step without changing anything."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def logprobs(self, sequences: List[Sequence], of: str = "policy", temperature: float = 1.0) -> list[np.ndarray]:
        self.asked.append(of)
        return [one.per_token["current" if of == "policy" else "reference"] for one in sequences]

    def step(self, batch: Batch, loss: Loss, of: str = "policy") -> dict[str, float]:
        return reduced(loss.function, inputs_of(batch))


def sequences_of(sides: List[Side]) -> list[Sequence]:
    return [side.sequence(10 + 20 * (i % 2)) for i, side in enumerate(sides)]


def packed_of(sides: List[Side], packing: bool = True) -> Packed:
    sequences = sequences_of(sides)
    return Packed(pack(sequences, len(sides), LENGTH, packing, 2), Accounting(), tuple(sequences))


def inputs_of(batch: Batch) -> LossInputs:
    current, reference = (jnp.asarray(batch.per_token[name]) for name in ("current", "reference"))
    per_token = {name: x for name, x in batch.per_token.items() if name == "reference_logprobs"}
    inputs = LossInputs(replace(batch, per_token=per_token), current)
    return inputs if per_token else replace(inputs, reference_logprobs=reference)


def measured(settings: dict, sides: List[Side] = SIDES, packing: bool = True) -> LossInputs:
    """What the loss reads of a batch, after the scoring that comes before an update."""
    packed = packed_of(sides, packing)
    return inputs_of(DPO(DPOConfig(**settings)).prepare_batch(Known(), packed.batch, packed.sequences))


def loss_of(settings: dict):
    return DPO(DPOConfig(**settings)).loss


TRL = [
    ({"loss": "sigmoid"}, 0.915207, [-0.028606, -0.040985, -0.033804, -0.036424, -0.038284], None),
    ({"loss": "hinge"}, 1.3864, [-0.06] * 5, None),
    ({"loss": "robust"}, 0.963507, [-0.036106, -0.048485, -0.041304, -0.043924, -0.045784], None),
    (
        {"loss": "apo_zero"},
        1.092826,
        [-0.014822, -0.014902, -0.014991, -0.014357, -0.014999],
        [0.014641, 0.013703, 0.01484, 0.012561, 0.01381],
    ),
    (
        {"loss": "apo_down"},
        1.093588,
        [-0.000146, 0.001913, 0.000233, 4.5e-05, 0.001143],
        [0.014968, 0.012989, 0.014759, 0.014312, 0.013856],
    ),
    ({"loss": "exo"}, 3.436155, [-0.101986, -0.099685, -0.105699, -0.105077, -0.103558], None),
    (
        {"loss": "nca"},
        1.511605,
        [-0.019908, -0.018637, -0.01608, -0.005687, -0.01473],
        [0.012679, 0.019411, 0.016547, 0.021048, 0.019225],
    ),
    (
        {"loss": "sppo_hard"},
        13.908329,
        [-0.958667, -0.882667, -0.730667, -0.106667, -0.650667],
        [0.250667, 1.474667, 0.942667, 1.806667, 1.438667],
    ),
    ({"loss": "discopop"}, 0.961384, [-0.01431, -0.040985, -0.030732, -0.036311, -0.038274], None),
    ({"loss": "aot"}, 0.905929, [-0.03473, -0.037657, -0.033804, -0.036424, -0.03595], None),
    (
        {"loss": "aot", "label_smoothing": 0.1},
        0.867289,
        [-0.02873, -0.031657, -0.027804, -0.030424, -0.02995],
        None,
    ),
    (
        {"loss": "aot_unpaired"},
        0.913008,
        [-0.028606, -0.035473, -0.039109, -0.036424, -0.038657],
        [0.028606, 0.038657, 0.035473, 0.036424, 0.039109],
    ),
    (
        {"loss": "aot_unpaired", "label_smoothing": 0.1},
        0.874368,
        [-0.022606, -0.029473, -0.033109, -0.030424, -0.032657],
        [0.022606, 0.032657, 0.029473, 0.030424, 0.033109],
    ),
    (
        {"divergence": "forward_kl"},
        0.777766,
        [-0.05524, -0.063482, -0.038742, -0.007607, -0.032333],
        [0.075316, 0.004907, 0.016559, 0.001784, 0.004885],
    ),
    (
        {"divergence": "js"},
        0.747803,
        [-0.019578, -0.021427, -0.017095, -0.006081, -0.015883],
        [0.021437, 0.003972, 0.010576, 0.001681, 0.004109],
    ),
    # TRL's f_alpha_divergence_coef is 0.5, 0.8 and 0.3: 1 less ours.
    (
        {"divergence": "alpha"},
        0.822759,
        [-0.04009, -0.050159, -0.03614, -0.01604, -0.034636],
        [0.046811, 0.013946, 0.023627, 0.007768, 0.013462],
    ),
    (
        {"divergence": "alpha", "alpha": 0.2},
        0.868837,
        [-0.032791, -0.044211, -0.034707, -0.025887, -0.036606],
        [0.034888, 0.026495, 0.029281, 0.01937, 0.025084],
    ),
    (
        {"loss": "hinge", "divergence": "alpha", "alpha": 0.7},
        1.194272,
        [-0.100017, -0.087562, -0.067111, -0.022519, -0.058343],
        [0.124256, 0.01459, 0.037016, 0.008161, 0.015539],
    ),
]
"""Settings with beta 0.3, the loss, and its gradients of chosen and rejected; None: the same with the other sign."""


@pytest.mark.parametrize(("settings", "loss", "chosen", "rejected"), TRL)
def test_loss_and_gradients_are_trls(settings, loss, chosen, rejected):
    settings = {"beta": 0.3, **settings}
    inputs = measured(settings)
    assert reduced(loss_of(settings), inputs)["train/loss"] == pytest.approx(loss, abs=2e-6)
    found = gradients(loss_of(settings), inputs)
    wanted = [x for pair in zip(chosen, rejected or [-x for x in chosen], strict=True) for x in pair]
    np.testing.assert_allclose([found[i, PROMPT] for i in range(10)], wanted, atol=1.5e-6)


def test_the_alphas_are_each_others_complement():
    """TRL 1.16: f'(u) = (u^(a-1) - 1) / (a - 1), reverse KL at a = 1. Ours: (1 - u^-a) / a, reverse KL at a = 0."""
    log_u = np.array([-2.0, -0.3, 0.0, 1.5], np.float32)
    for theirs in (0.1, 0.5, 0.9):
        wanted = [(exp(x) ** (theirs - 1) - 1) / (theirs - 1) for x in log_u]
        found = slope(jnp.asarray(log_u), "alpha", 1 - theirs)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


def softplus(x: float) -> float:
    return log(1 + exp(x))  # -log sigmoid(-x)


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


# Completions of one token. Margins 3 and -1 by the policy, 0 and 1 by the reference; log-ratios 1, -2 and -1, 1.
FOUR = [Side([-3.0], [-4.0]), Side([-6.0], [-4.0]), Side([-2.0], [-1.0]), Side([-1.0], [-2.0])]


@pytest.mark.parametrize(
    ("form", "expected", "slopes"),
    [
        # Smallest with smallest: -1 - 0 and 3 - 1, so the pairs' gaps are .2 and -.1. Unsorted they are .3 and -.2.
        (
            "aot",
            (softplus(-0.2) + softplus(0.1)) / 2,
            [-sigmoid(-0.2), sigmoid(-0.2), -sigmoid(0.1), sigmoid(0.1)],
        ),
        # -1 with -2 and 1 with 1: gaps .1, of the second chosen and the first rejected one, and 0, of the others.
        (
            "aot_unpaired",
            (softplus(-0.1) + softplus(0)) / 2,
            [-sigmoid(0), sigmoid(-0.1), -sigmoid(-0.1), sigmoid(0)],
        ),
    ],
)
def test_sorted_forms_by_hand(form, expected, slopes):
    inputs, loss = measured({"loss": form}, FOUR), loss_of({"loss": form})
    assert reduced(loss, inputs)["train/loss"] == pytest.approx(expected, rel=1e-6)
    found = gradients(loss, inputs)
    # Each times beta, over two pairs.
    np.testing.assert_allclose([found[i, PROMPT] for i in range(4)], [0.05 * x for x in slopes], rtol=1e-5)


def test_policy_weights_by_hand():
    """Every token has the logits log 3, log 2 and 0: p = 1/2, 1/3, 1/6, their squares sum to 7/18, p / sum p^2 is 9/7,
    6/7 and 3/7. At half the temperature p is 9/14, 4/14 and 1/14. The weight of a side is a geometric mean; the gap of
    both pairs' rewards is 0, so the loss is the mean weight times log 2. TRL's `use_weighting` has the same formula."""

    class Three(Known):
        def logprobs(
            self, sequences: List[Sequence], of: str = "policy", temperature: float = 1.0, size: int | None = None
        ) -> list[np.ndarray]:
            assert (of, size) == ("policy", 4)
            p = np.array([3.0, 2.0, 1.0]) ** (1 / temperature)
            return [np.log(p / p.sum())[x.tokens % 3] for x in sequences]

    # Ids from 10 and from 30: 10 % 3 = 1, 11 % 3 = 2; 30 % 3 = 0.
    pairs = [Side([-1.0, -1.0], [-1.0, -1.0]), Side([-1.0], [-1.0]), Side([-1.0], [-1.0]), Side([-2.0], [-2.0])]
    packed, algorithm = packed_of(pairs), DPO(DPOConfig(policy_weights=True))
    inputs = inputs_of(algorithm.prepare_batch(Three(), packed.batch, packed.sequences))
    found = reduced(algorithm.loss, inputs)
    first, second = (6 / 7 * 3 / 7) ** 0.5 * 9 / 7, 6 / 7 * 9 / 7
    assert found["policy/weight"] == pytest.approx((first + second) / 2, rel=1e-6)
    assert found["train/loss"] == pytest.approx(log(2) * (first + second) / 2, rel=1e-6)


def several(seed: int = 3) -> list[Side]:
    """Seven pairs of 1 to 5 tokens a side, the last one of weight 0."""
    rng = np.random.default_rng(seed)
    numbers = [int(rng.integers(1, 6)) for _ in range(14)]
    return [
        Side(list(rng.normal(-1.5, 0.5, n)), list(rng.normal(-1.5, 0.5, n)), weight=0.0 if i > 11 else 1.0)
        for i, n in enumerate(numbers)
    ]


@pytest.mark.parametrize("settings", [{}, *slow([{"length_normalized": True, "beta": 2.0}])])
@pytest.mark.parametrize("form", ["aot", "aot_unpaired"])
def test_sorting_sees_the_whole_batch_whatever_its_cut(form, settings):
    """Packed or not, in any order, row by row: one loss, one gradient; a pair of weight 0 takes no rank."""
    settings = {"loss": form, **settings}
    loss, sides = loss_of(settings), several()
    whole = measured(settings, sides)
    value, wanted = reduced(loss, whole)["train/loss"], gradients(loss, whole)
    apart = measured(settings, sides, packing=False)
    assert reduced(loss, apart)["train/loss"] == pytest.approx(value, rel=1e-6)
    order = [4, 0, 6, 2, 5, 1, 3]
    shuffled = measured(settings, [sides[2 * i + j] for i in order for j in (0, 1)])
    assert reduced(loss, shuffled)["train/loss"] == pytest.approx(value, rel=1e-6)
    found = {(2 * order[s // 2] + s % 2, t): x for (s, t), x in gradients(loss, shuffled).items() if x}
    assert found == pytest.approx({place: x for place, x in wanted.items() if x}, rel=1e-5)
    asked = apart.batch.per_token["reference_logprobs"]
    named = {"current": apart.logprobs, "reference": asked, "reference_logprobs": asked}
    batch = replace(apart.batch, per_token={name: np.asarray(x) for name, x in named.items()})
    parts = [inputs_of(rows(batch, i, i + 2)) for i in range(0, len(batch.tokens), 2)]
    assert len(parts) > 2
    assert sum(reduced(loss, part)["train/loss"] for part in parts) == pytest.approx(value, rel=1e-6)
    by_parts = {place: x for part in parts for place, x in gradients(loss, part).items() if x}
    assert by_parts == pytest.approx({place: x for place, x in wanted.items() if x}, rel=1e-5)
    six = measured(settings, sides[:12])
    assert reduced(loss, six)["train/loss"] == pytest.approx(value, rel=1e-6)


def test_a_sorted_form_asks_the_reference_once():
    """Its log-probs come with the scoring, and the update needs no pass of its own; where they are there, none."""
    algorithm, client = DPO(DPOConfig(loss="aot")), Known()
    packed = packed_of(several())
    batch = algorithm.prepare_batch(client, packed.batch, packed.sequences)
    assert client.asked == ["policy", "reference"]
    assert algorithm.needs.reference == "step"
    assert not algorithm.objective.reference
    mask = np.asarray(batch.loss_mask)
    given = np.asarray(packed.batch.per_token["reference"])
    np.testing.assert_array_equal(np.asarray(batch.per_token["reference_logprobs"])[mask], given[mask])
    before, client = DPO(DPOConfig(loss="aot", reference="precompute")), Known()
    ready = [
        replace(x, per_token={**x.per_token, "reference_logprobs": x.per_token["reference"]}) for x in packed.sequences
    ]
    found = before.prepare_batch(client, packed.batch, ready)
    assert client.asked == ["policy"]
    np.testing.assert_allclose(found.per_sequence[BASELINE], batch.per_sequence[BASELINE])
