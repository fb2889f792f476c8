"""Pairs in one row, with their prompt computed once: nothing of it may change a log-prob, a loss or a gradient."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.marks import slow
from tests.trainer.test_step import assert_close, gradients
from tests.trainers import PLAIN, RICH, trainer
from tunix.algorithms.grpo.algorithm import GRPO
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.ops import per_sequence
from tunix.data.packing import pack, row_length
from tunix.lora.config import AdapterConfig
from tunix.trainer.perf import Compilations
from tunix.trainer.step import reduce
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Sequence, Term


def sequence(tokens, trained_from, weight=1.0):
    tokens = np.asarray(tokens, np.int32)
    return Sequence(tokens, np.arange(len(tokens)) >= trained_from, weight)


def pairs(number: int, seed: int = 0, vocab: int = 96) -> list[Sequence]:
    """Ragged pairs of at most 24 tokens a side; the first shares no token, the second only its first."""
    rng = np.random.default_rng(seed)

    def one(shared: int) -> list[Sequence]:
        prompt = rng.integers(0, vocab, shared)
        weight = float(rng.choice([0.5, 1.0, 2.0]))
        sides = [rng.integers(0, vocab, int(rng.integers(2, 10))) for _ in range(2)]
        return [sequence(np.concatenate([prompt, side]), max(shared, 1), weight) for side in sides]

    return [side for i in range(number) for side in one(i if i < 2 else int(rng.integers(2, 14)))]


def margins(inputs: LossInputs) -> LossOutputs:
    """A stand-in for DPO: softplus of the difference of the sums, from a reference."""
    assert inputs.reference_logprobs is not None
    sums = per_sequence(inputs.logprobs - inputs.reference_logprobs, inputs.batch)
    chosen, rejected = sums[::2], sums[1::2]
    loss = jax.nn.softplus(rejected - chosen)
    return LossOutputs(
        {"pairs": Term(loss, "pairs")}, {"chosen": Term(chosen, "pairs"), "sum": Term(sums, "sequences")}
    )


LOSS = Loss(margins, reference=True)


def test_by_hand():
    # In common: 1 2 3; the branches repeat the 3. 2 + 3 + 4 = 9 tokens, where two rows would take 5 + 6 = 11.
    batch = pack(
        [sequence([1, 2, 3, 4, 5], 3, 2.0), sequence([1, 2, 3, 6, 7, 8], 3, 2.0)], 4, 10, sequences_per_example=2
    )
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 3, 6, 7, 8, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 4, 5, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 2, 2, 3, 3, 3, 3, 0]]
    assert batch.parents is not None
    assert batch.parents.tolist() == [[1, 1, 1, 1, 1, 1, 1, 1, 1, 0]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 1, 0]]
    assert batch.loss_mask.astype(int).tolist() == [[0, 0, 0, 1, 1, 0, 1, 1, 1, 0]]
    assert batch.lengths.tolist() == [2, 3, 1, 1]
    # Weight 2: one pair, two sequences, five trained tokens.
    assert {n: float(c) for n, c in batch.counts.items()} == {"tokens": 10, "sequences": 4, "pairs": 2}


def test_what_both_train_is_not_shared():
    # Both sides begin with 3 4: those are trained twice, so the branches begin with the prompt's last token, 2.
    batch = pack([sequence([1, 2, 3, 4], 2), sequence([1, 2, 3, 4, 5], 2)], 2, 10, sequences_per_example=2)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 2, 3, 4, 5, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 2, 2, 2, 3, 3, 3, 3, 0, 0]]


def test_nothing_in_common():
    batch = pack([sequence([1, 2], 1), sequence([3, 4], 1)], 2, 5, sequences_per_example=2)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 0]]
    assert batch.parents is not None
    assert batch.segment_ids.tolist() == batch.parents.tolist() == [[1, 1, 2, 2, 0]]


def test_a_pair_is_not_parted():
    # 4 + 4 tokens, none shared, into rows of 10: the second pair opens the second row whole.
    rows = pack([sequence([i, i], 1) for i in (1, 2, 3, 4, 5, 6)], 6, 10, sequences_per_example=2)
    assert rows.tokens.tolist() == [[1, 1, 2, 2, 3, 3, 4, 4, 0, 0], [5, 5, 6, 6, 0, 0, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match="share a row have 11 tokens; 1 to 10 fit"):
        pack([sequence(range(6), 1), sequence(range(9, 14), 1)], 2, 10, sequences_per_example=2)
    with pytest.raises(ValueError, match="do not make units of 2"):
        pack([sequence([1, 2], 1)], 2, 10, sequences_per_example=2)


def test_terms_of_pairs_by_hand():
    # Two pairs of weights 1 and 3, of which only the first lies in this pass: 1 * 5 / 4 of the loss.
    batch = pack(
        [sequence([1, 2], 1), sequence([1, 3], 1), sequence([1, 4], 1, 3.0), sequence([1, 5], 1, 3.0)], 4, 5, False, 2
    )
    first = jax.tree.map(lambda x: x[:1] if np.ndim(x) == 2 else x, batch)
    values = np.array([5.0, np.nan], np.float32)
    assert float(reduce(Term(jax.numpy.asarray(values), "pairs"), first)) == pytest.approx(5 / 4)
    # Of sequences: (7 + 9) * 1 over weights 1 + 1 + 3 + 3.
    values = np.array([7.0, 9.0, np.nan, np.inf], np.float32)
    assert float(reduce(Term(jax.numpy.asarray(values), "sequences"), first)) == pytest.approx(16 / 8)


@pytest.mark.parametrize("config", [PLAIN, pytest.param(RICH, marks=pytest.mark.slow)], ids=["plain", "windows"])
def test_a_shared_prompt_changes_nothing(config):
    client = trainer(config, rows=1, length=48, reference=True)
    client.step(pack(pairs(4, seed=9), 8, 48, sequences_per_example=2), LOSS)  # away from the reference
    sides = pairs(6)
    apart = pack(sides, 12, 48, packing=False, sequences_per_example=2)
    shared = pack(sides, 12, 48, sequences_per_example=2)
    assert shared.tokens.shape[0] < apart.tokens.shape[0]
    assert (shared.segment_ids > 0).sum() < (apart.segment_ids > 0).sum()
    loss, right = gradients(client, apart, LOSS)
    packed, found = gradients(client, shared, LOSS)
    assert packed == pytest.approx(loss, rel=2e-6)
    assert_close(found, right)
    # All in one pass, where the above took a pass for each row.
    together = trainer(config, rows=6, length=48, reference=True)
    together.state = client.state
    together.learner.reference = client.learner.reference
    whole, found = gradients(together, shared, LOSS)
    assert whole == pytest.approx(loss, rel=2e-6)
    assert_close(found, right)
    metrics = client.evaluate([shared], LOSS)
    assert metrics["eval/loss"] == pytest.approx(loss, rel=2e-6)
    by_hand = [
        client.logprobs(sides)[i][x.loss_mask].sum() - client.logprobs(sides, "reference")[i][x.loss_mask].sum()
        for i, x in enumerate(sides)
    ]
    weights = np.array([x.weight for x in sides])
    assert metrics["eval/chosen"] == pytest.approx(float((weights * by_hand)[::2].sum() / weights[::2].sum()), abs=2e-5)
    assert metrics["eval/sum"] == pytest.approx(float((weights * by_hand).sum() / weights.sum()), abs=2e-5)


@pytest.mark.slow
def test_the_reference_is_the_start_and_stays():
    sides = pairs(4)
    batch = pack(sides, 8, 48, sequences_per_example=2)
    for adapter in (None, AdapterConfig(rank=2)):
        client = trainer(rows=2, length=48, adapter=adapter, reference=True)
        before = client.logprobs(sides, "reference")
        losses = [float(client.step(batch, LOSS)["train/loss"]) for _ in range(3)]
        # At the start every margin is 0, and softplus(0) = log 2. Policy and reference are two programs, each of which
        # sums some 40 log-probs of about 5 nats in float32: the margin, a tenth of the difference, is off by 2^-24 of
        # 200 for each rounding of a sum, and the loss by half of it.
        assert losses[0] == pytest.approx(np.log(2), abs=0.05 * 200 * 8 * 2**-24)
        assert losses[2] < losses[1] < losses[0]
        for old, new in zip(before, client.logprobs(sides, "reference"), strict=True):
            np.testing.assert_array_equal(old, new)


def test_nothing_compiles_again():
    client = trainer(rows=2, length=48, reference=True)
    client.step(pack(pairs(4), 8, 48, sequences_per_example=2), LOSS)
    compilations = Compilations()
    for seed in (1, 2):
        client.step(pack(pairs(3, seed), 8, 48, sequences_per_example=2), LOSS)
    assert compilations.since_warmup == 0


def test_a_reference_has_to_be_held():
    with pytest.raises(ValueError, match="no reference"):
        trainer(rows=2, length=48).step(pack(pairs(4), 8, 48, sequences_per_example=2), LOSS)


def test_absent_sequences_have_numbers():
    batch: Batch = jax.tree.map(jax.numpy.asarray, pack([sequence([1, 2, 3], 1), sequence([4, 5], 1)], 4, 8))
    values = jax.numpy.ones(batch.tokens.shape)
    assert per_sequence(values, batch, absent=-1.0).tolist() == [2, 1, -1, -1]
    assert per_sequence(values, replace(batch, loss_mask=batch.loss_mask & (batch.sequence_ids == 0))).tolist() == [
        2,
        0,
        0,
        0,
    ]


# --- Answers to a prompt that are not compared ----------------------------------------------------------------------


def answers(groups: int, number: int, seed: int = 0) -> list[Sequence]:
    """Groups of ragged answers of up to 8 tokens to a prompt of 6, with what GRPO's loss reads of them."""
    rng = np.random.default_rng(seed)

    def one(prompt: np.ndarray, weight: float) -> Sequence:
        tokens = np.concatenate([prompt, rng.integers(0, 96, int(rng.integers(2, 9)))]).astype(np.int32)
        values = {"old_logprobs": -4 - rng.random(len(tokens)), "advantages": rng.normal(size=len(tokens))}
        named = {name: x.astype(np.float32) for name, x in values.items()}
        return Sequence(tokens, np.arange(len(tokens)) >= 6, weight, named)

    prompts = [rng.integers(0, 96, 6) for _ in range(groups)]
    return [one(prompt, float(i != 1)) for prompt in prompts for i in range(number)]


def test_a_group_in_a_row_by_hand():
    # In common: 1 2; each of the three branches repeats the 2. No pairs are counted, of two neither.
    group = [sequence([1, 2, 3], 2), sequence([1, 2, 4, 5], 2), sequence([1, 2, 6], 2, 0.0)]
    batch = pack(group, 3, 10, together=3)
    assert batch.tokens.tolist() == [[1, 2, 3, 2, 4, 5, 2, 6, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 1, 2, 3, 1, 2, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 2, 2, 3, 3, 3, 4, 4, 0, 0]]
    assert batch.parents is not None
    assert batch.parents.tolist() == [[1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 0, 0]]
    assert {n: float(c) for n, c in batch.counts.items()} == {"tokens": 3, "sequences": 2}
    assert "pairs" not in pack(group[:2], 2, 10, together=2).counts


@pytest.mark.parametrize("together", slow([2, 4]))
@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "windows"])
def test_a_prompt_that_answers_share_changes_nothing(config, together: int):
    """GRPO's loss with a KL term, one answer in four of weight 0 and with a NaN for an advantage."""
    loss = GRPO(GRPOConfig(group_size=4, kl=0.1)).objective
    client = trainer(config, rows=2, length=row_length(together, 14, 8), reference=True)
    drawn = answers(3, 4)
    for silent in drawn[1::4]:
        silent.per_token["advantages"][:] = np.nan
    apart, shared = (pack(drawn, 12, client.learner.spec.length, together=k) for k in (1, together))
    assert (shared.segment_ids > 0).sum() < 0.85 * (apart.segment_ids > 0).sum()
    client.step(pack(answers(3, 4, seed=1), 12, client.learner.spec.length, together=together), loss)
    expected, right = gradients(client, apart, loss)
    found, gradient = gradients(client, shared, loss)
    assert np.isfinite(expected)
    assert found == pytest.approx(expected, rel=2e-6)
    assert_close(gradient, right)
