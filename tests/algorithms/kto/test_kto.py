"""KTO against its paper's formula by hand, its baseline with a client whose log-probs are known, and online ranks."""

from collections.abc import Sequence as List
from dataclasses import replace
from math import exp

import jax.numpy as jnp
import numpy as np
import pytest

from tests.policy_batches import gradients, reduced, rows
from tests.preference_batches import PROMPT, Side, batch_of, inputs_of
from tunix.algorithms.kto.algorithm import KTO, without_absent
from tunix.algorithms.kto.config import KTOConfig
from tunix.data.packing import pack
from tunix.data.types import Accounting, Packed
from tunix.protocols import Client
from tunix.types import Sequence


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def labelled(current: List[float], reference: List[float], label: float, **changes) -> Side:
    return Side(current, reference, named={"label": label, "kl": 2.0}, **changes)


# log-ratios r: A 1 over two tokens, desirable; B -2 over three and C 4 over one, undesirable. z0 is 2.
A = labelled([-1.0, -2.0], [-1.5, -2.5], 1.0)
B = labelled([-1.0, -1.0, -4.0], [-1.0, -1.0, -2.0], 0.0)
C = labelled([-1.0], [-5.0], 0.0)
LOSS = KTO(KTOConfig(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)).loss


def test_by_hand():
    # beta (r - z0) = -.5; beta (z0 - r) = 2 and -1; each w (1 - sigmoid).
    expected = (1.5 * sigmoid(0.5) + 0.5 * sigmoid(-2) + 0.5 * sigmoid(1)) / 3
    found = reduced(LOSS, inputs_of(batch_of([A, B, C], sequences_per_example=1)))
    wanted = {
        "train/loss": expected,
        "rewards/chosen": 0.5,
        "rewards/rejected": (-1 + 2) / 2,
        "rewards/margin": 0.0,
        "rewards/accuracy": 1 / 3,  # A is below z0, and C above it
        "logprobs/chosen": -3.0,
        "logprobs/rejected": (-6 - 1) / 2,
        "kl/reference": (2 * 0.25 + 4 + 16) / 2 / 6,
    }
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_apo_zero_by_hand():
    loss = KTO(KTOConfig(loss="apo_zero", beta=0.5)).loss
    found = reduced(loss, inputs_of(batch_of([A, B, C], sequences_per_example=1)))
    assert found["train/loss"] == pytest.approx((1 - sigmoid(0.5) + sigmoid(-1) + sigmoid(2)) / 3, rel=1e-5)
    assert found["rewards/accuracy"] == pytest.approx(2 / 3)


def test_gradients_by_hand():
    """`-+ w beta s (1 - s)` on each token of a completion; z0 has none."""
    found = gradients(LOSS, inputs_of(batch_of([A, B, C], sequences_per_example=1)))
    slopes = (-0.75 * sigmoid(0.5) * sigmoid(-0.5), 0.25 * sigmoid(2) * sigmoid(-2), 0.25 * sigmoid(1) * sigmoid(-1))
    for (sequence, position), value in found.items():
        assert value == pytest.approx(slopes[sequence] / 3 if position >= PROMPT else 0, rel=1e-5)


def many(seed: int = 0) -> list[Side]:
    """Eight completions, one of weight 0."""
    rng = np.random.default_rng(seed)

    def one(index: int) -> Side:
        current, reference = rng.normal(-1.5, 0.5, (2, int(rng.integers(1, 8))))
        return labelled(list(current), list(reference), float(index % 3 > 0), weight=0.0 if index == 4 else 1.0)

    return [one(i) for i in range(8)]


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert one[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


def test_packing_order_passes_and_masked_tokens_change_nothing():
    batch = batch_of(many(), sequences_per_example=1)
    whole, slopes = reduced(LOSS, inputs_of(batch)), gradients(LOSS, inputs_of(batch))
    apart = batch_of(many(), sequences_per_example=1, packing=False)
    assert len(apart.tokens) > len(batch.tokens) > 1
    assert_same(reduced(LOSS, inputs_of(apart)), whole)
    assert_same(gradients(LOSS, inputs_of(apart)), slopes)
    assert_same(reduced(LOSS, inputs_of(batch_of(many()[::-1], sequences_per_example=1))), whole)
    parts = [reduced(LOSS, inputs_of(rows(batch, i, i + 1))) for i in range(len(batch.tokens))]
    assert_same({name: sum(part[name] for part in parts) for name in whole}, whole)
    for fill in (7.0, float("inf"), float("nan")):
        dirty = inputs_of(batch_of(many(), sequences_per_example=1, fill=fill))
        assert reduced(LOSS, dirty) == whole
        assert gradients(LOSS, dirty) == slopes


def test_gradients_are_finite_at_the_edges():
    sides = [labelled(x, y, label) for x, y in (([-1e4], [0.0]), ([0.0], [-1e4])) for label in (0.0, 1.0)]
    inputs = inputs_of(batch_of(sides, sequences_per_example=1))
    assert np.isfinite([*reduced(LOSS, inputs).values(), *gradients(LOSS, inputs).values()]).all()


def sequence(prompt: List[int], completion: List[int], label: float = 1.0) -> Sequence:
    tokens = np.array([*prompt, *completion], np.int32)
    return Sequence(tokens, np.arange(len(tokens)) >= len(prompt), per_sequence={"label": label})


ROWS = [sequence([1, 2], [3, 4, 5]), sequence([6], [7], 0.0), sequence([8, 9, 10], [11, 12])]


class Known(Client):
    """A client whose policy gives a token of id t the log-prob `scale t`, and whose reference gives 0."""

    def __init__(self, scale: float):
        self.scale, self.asked = scale, []

    def logprobs(self, sequences, of="policy", temperature=1.0, size=None):
        self.asked.append((of, size))
        self.mixed = sequences
        return [np.float32(self.scale if of == "policy" else 0.0) * x.tokens for x in sequences]

    def step(self, batch, loss, of="policy"):
        self.batch = batch
        return {"train/loss": 0.0, "rewards/chosen": 1.0, "rewards/rejected": 2.0, "rewards/margin": -1.0}

    def evaluate(self, batches, loss):
        self.batches = batches
        return {"eval/rewards/chosen": 1.0, "eval/rewards/rejected": 2.0, "eval/rewards/margin": -1.0}


def packed(sequences: List[Sequence], size: int) -> Packed:
    return Packed(pack(sequences, size, 8), Accounting(), tuple(sequences))


def mixed_in_rows_of(length: int) -> List[Sequence]:
    """What KTO asks the log-probs of, for rows of so many tokens."""
    client = Known(0.1)
    KTO(KTOConfig()).prepare_batch(client, pack([sequence([1], [2])], 4, length), ROWS)
    return client.mixed


def test_completions_are_put_behind_the_next_prompt():
    found = mixed_in_rows_of(5)
    assert [x.tokens.tolist() for x in found] == [[6, 3, 4, 5], [8, 9, 10, 7], [1, 2, 11, 12]]
    assert [x.loss_mask.tolist() for x in found] == [
        [False, True, True, True],
        [False] * 3 + [True],
        [False] * 2 + [True] * 2,
    ]
    assert mixed_in_rows_of(3)[1].tokens.tolist() == [8, 9, 10]  # cut off: nothing of it is left


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (0.1, 0.1 * (3 + 4 + 5 + 7 + 11 + 12) / 3),
        (-0.1, 0.0),  # clamped
    ],
)
def test_the_baseline_by_hand(scale, expected):
    client, algorithm = Known(scale), KTO(KTOConfig())
    update = algorithm.update(client, packed(ROWS, 4))
    assert update.metrics["kl/z0"] == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(client.batch.per_sequence["kl"], [expected] * 4, rtol=1e-6)
    assert client.asked == [("policy", 4), ("reference", 4)]  # S of them, though there are three
    algorithm.evaluate(client, [packed(ROWS, 4), packed(ROWS[:1], 4)])
    assert [float(batch.per_sequence["kl"][0]) for batch in client.batches] == pytest.approx([expected, 0.0])


def test_apo_zero_asks_for_no_baseline():
    client = Known(0.1)
    update = KTO(KTOConfig(loss="apo_zero")).update(client, packed(ROWS, 4))
    assert client.asked == []
    assert "kl/z0" not in update.metrics


def test_metrics_of_a_label_that_nothing_has_are_left_out():
    good = packed([ROWS[0], ROWS[2]], 4).batch
    metrics = {"rewards/chosen": 1.0, "eval/rewards/rejected": 2.0, "logprobs/rejected": 1.0, "rewards/margin": 0.0}
    assert without_absent(metrics, good) == {"rewards/chosen": 1.0}
    assert without_absent(metrics, good, packed(ROWS, 4).batch) == metrics
    assert float(good.counts["desirable"]) == 2
    assert jnp.isfinite(
        jnp.asarray(reduced(LOSS, inputs_of(batch_of([A, replace(A)], sequences_per_example=1)))["rewards/rejected"])
    )
