"""Streams and held-out batches of pairs: a pair is one row of the data, of the account and of `batch_size`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tunix.algorithms.base import Algorithm
from tunix.algorithms.dpo.algorithm import DPO
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.kto.algorithm import KTO
from tunix.algorithms.kto.config import KTOConfig
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.pipeline import Batches, Layout, eval_batches
from tunix.data.sources import open_rows
from tunix.data.types import EMPTY, EQUAL, Accounting, Packed
from tunix.errors import UserError
from tunix.protocols import Client
from tunix.recipe.recipe import Recipe
from tunix.run.evaluation import Evaluation, Samples, samples_of
from tunix.trainer.progress import Display
from tunix.types import Sequence

CONFIG = DataConfig(train="given", max_length=6, shuffle=False)
# Prompts of one to three tokens. Row 3 has equal sides and row 5 says nothing on one.
ROWS = [
    {
        "prompt_ids": [100 + i] * (1 + i % 3),
        "chosen_ids": [10 + i, 20],
        "rejected_ids": [10 + i, 20] if i == 3 else [] if i == 5 else [30 + i],
        "weight": 1 + i % 2,
    }
    for i in range(8)
]
PAIRS = Layout(sequences_per_example=2)
GOOD = [0, 1, 2, 4, 6, 7]


def spared(sequence: Sequence) -> Sequence:
    """One token more, which alone is trained."""
    tokens = np.append(sequence.tokens, 9).astype(np.int32)
    return replace(sequence, tokens=tokens, loss_mask=np.arange(len(tokens)) == len(tokens) - 1)


def examples(rows=ROWS, config=CONFIG):
    return Examples(open_rows(rows), None, config, RowKind.PAIRS)


def stream(rows=ROWS, batch_size=4, layout=PAIRS, **changes):
    return Batches(examples(rows, CONFIG.model_copy(update=changes)), batch_size, 0, 1, layout)


def chosen(packed):
    """Row numbers by the chosen sides' prompts."""
    return [int(one.tokens[0]) - 100 for one in packed.sequences[::2]]


def test_a_batch_has_pairs_and_the_account_has_rows():
    first, last = stream()
    assert (chosen(first), chosen(last)) == (GOOD[:4], GOOD[4:])
    # The dropped row 5 follows the first batch's last row, and is taken with it.
    assert first.accounting == Accounting(6, 4, 0, {EQUAL: 1, EMPTY: 1})
    assert last.accounting == Accounting(8, 6, 0, {EQUAL: 1, EMPTY: 1})
    assert last.accounting == sum(map(Accounting.of, examples().first()), Accounting())
    sides = [one.tokens.tolist() for one in first.sequences[:4]]
    assert sides == [[100, 10, 20], [100, 30], [101, 101, 11, 20], [101, 101, 31]]
    # Rows 0, 1, 2, 4 weigh 1, 2, 1, 1, and rows 6 and 7 weigh 1 and 2; a pair trains three tokens.
    assert {name: float(x) for name, x in first.batch.counts.items()} == {"tokens": 15, "sequences": 10, "pairs": 5}
    assert {name: float(x) for name, x in last.batch.counts.items()} == {"tokens": 9, "sequences": 6, "pairs": 3}
    assert first.batch.tokens.shape[1] == 2 * 6
    assert first.batch.weights.tolist() == [1, 1, 2, 2, 1, 1, 1, 1]
    assert last.batch.weights.tolist() == [1, 1, 2, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("packing", [True, False])
def test_the_algorithm_prepares_what_is_packed(packing):
    first, _ = stream(layout=Layout(2, 1, spared), packing=packing)
    assert [one.tokens.tolist() for one in first.sequences[:2]] == [[100, 10, 20, 9], [100, 30, 9]]
    # 2 (6 + 1) places, so that the longest pair fits; without packing each pair has a row of its own.
    assert first.batch.tokens.shape[1] == 14
    assert packing or len(first.batch.tokens) == 4
    mask = np.asarray(first.batch.loss_mask)
    assert np.asarray(first.batch.tokens)[mask].tolist() == [9] * 8
    full = {"prompt_ids": [1] * 4, "chosen_ids": [2] * 9, "rejected_ids": [3] * 9}
    (packed,) = stream([full], layout=Layout(2, 1, spared), packing=packing)
    assert packed.accounting == Accounting(1, 1, 1)
    assert [len(one.tokens) for one in packed.sequences] == [7, 7]


def test_held_out_pairs():
    first, last = eval_batches(examples(), 4, 7, PAIRS)
    assert (chosen(first), chosen(last)) == (GOOD[:4], GOOD[4:5])
    assert first.accounting == last.accounting == Accounting(7, 5, 0, {EQUAL: 1, EMPTY: 1})
    assert [float(one.batch.counts["pairs"]) for one in (first, last)] == [5, 1]
    with pytest.raises(UserError, match="none of its first 1 rows can be evaluated: 1 x chosen and rejected are equal"):
        eval_batches(examples(ROWS[3:4]), 4, 7, PAIRS)
    with pytest.raises(UserError, match="nothing in it can be trained on: 1 x chosen and rejected are equal"):
        next(stream(ROWS[3:4]))
    with pytest.raises(UserError, match="a whole batch of 2 rows has weight 0"):
        next(stream([{**row, "weight": 0} for row in ROWS[:2]]))


def test_resume_is_exact():
    whole = stream(batch_size=2, shuffle=True)
    next(whole)
    state, rest = whole.get_state(), [chosen(one) for one in whole]
    again = stream(batch_size=2, shuffle=True)
    again.set_state(state)
    assert [chosen(one) for one in again] == rest
    assert len(rest) == 2


class Idle(Client):
    """Is asked nothing."""


def shown(algorithm: Algorithm, packed: list[Packed], number: int) -> Samples:
    """What a run with these held-out batches shows."""
    sizes = {"model": {"init": "random", "family": "llama"}, "data": {"train": "rows", "eval": "held"}, "output": "run"}
    recipe = Recipe.build({**sizes, "batch_size": 4, "steps": 1, "eval": {"samples": number}})
    display, idle = Display("run", 1, 0), Idle()  # pyright: ignore[reportAbstractUsage]  # nothing calls it
    return samples_of(recipe, Evaluation(algorithm, packed), idle, None, Path("run"), display)


def test_samples_show_what_is_wanted():
    samples = shown(DPO(DPOConfig()), eval_batches(examples(), 4, 8, PAIRS), 3)
    # Row 0's prompt has a single token, which could as well be BOS: that asks nothing.
    assert [request.prompt.tolist() for request in samples.requests] == [[101, 101], [102] * 3, [104, 104]]
    assert samples.expected == [[11, 20], [12, 20], [14, 20]]
    labelled = [{"prompt_ids": [7, 8], "completion_ids": [i], "label": bool(i % 2)} for i in range(1, 6)]
    (batch,) = eval_batches(Examples(open_rows(labelled), None, CONFIG, RowKind.LABELS), 8, 8)
    assert batch.batch.per_sequence["label"].tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
    assert shown(KTO(KTOConfig()), [batch], 8).expected == [[1], [3], [5]]
