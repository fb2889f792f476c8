"""Grain's order end to end: every row once per epoch, exact accounts, and a position that resumes to the bit."""

import itertools
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.pipeline import Batches, Prompts, eval_batches
from tunix.data.sources import open_rows
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import CUT_AWAY, NOTHING_TRAINED, Accounting
from tunix.errors import UserError
from tunix.recipe.notes import total_steps

CONFIG = DataConfig(train="given", max_length=16)
# Row i is recognised by its first id. Every fifth has nothing to train on; every seventh is longer than 16.
ROWS = [
    {
        "input_ids": [100 + i] + [i % 50] * (20 if i % 7 == 0 else 3),
        "loss_mask": [0] + [int(i % 5 > 0)] * (20 if i % 7 == 0 else 3),
    }
    for i in range(40)
]
GOOD = [100 + i for i in range(40) if i % 5 > 0]


def stream(rows=ROWS, batch_size=6, seed=3, epochs=1, config=CONFIG, **settings):
    return Batches(Examples(open_rows(rows), None, config, **settings), batch_size, seed, epochs)


def counted(examples):
    """The accounting of all rows."""
    return sum(map(Accounting.of, examples.first()), Accounting())


def firsts(batch):
    """The first ids of the batch's sequences, in the order of the batch."""
    place = (batch.positions == 0) & (batch.segment_ids > 0)
    return [
        int(batch.tokens[place][list(batch.sequence_ids[place]).index(i)])
        for i in range(int((batch.weights > 0).sum()))
    ]


def same(a, b):
    return a.accounting == b.accounting and json.dumps(flat(a.batch)) == json.dumps(flat(b.batch))


def flat(batch):
    """The batch as lists, for comparisons and for JSON."""
    given = {name: value for name, value in asdict(batch).items() if value is not None and value is not False}
    nested = {name: value if isinstance(value, dict) else {"": value} for name, value in given.items()}
    return {name: {key: array.tolist() for key, array in arrays.items()} for name, arrays in nested.items()}


def test_an_epoch_holds_every_good_row_once():
    packed = list(stream())
    seen = [first for one in packed for first in firsts(one.batch)]
    assert sorted(seen) == GOOD
    assert seen != GOOD, "shuffled"
    assert [len(firsts(one.batch)) for one in packed] == [6, 6, 6, 6, 6, 2]
    assert len(packed) == total_steps(len(GOOD), 6, 1)
    # Rows 0, 7, 14, 21, 28, 35 are too long; 0 and 35 of them have nothing to train on anyway.
    assert packed[-1].accounting == Accounting(40, 32, 4, {NOTHING_TRAINED: 8})
    assert packed[-1].accounting == counted(Examples(open_rows(ROWS), None, CONFIG))
    for one, later in itertools.pairwise(packed):
        assert later.accounting.kept - one.accounting.kept == len(firsts(later.batch))


def test_epochs_differ_and_seeds_differ():
    seen = [first for one in stream(epochs=2, batch_size=4) for first in firsts(one.batch)]
    assert sorted(seen[:32]) == sorted(seen[32:]) == GOOD
    assert seen[:32] != seen[32:]
    assert firsts(next(stream(seed=3)).batch) == firsts(next(stream(seed=3)).batch)
    assert firsts(next(stream(seed=3)).batch) != firsts(next(stream(seed=4)).batch)


def test_file_order():
    config = CONFIG.model_copy(update={"shuffle": False})
    assert [first for one in stream(config=config) for first in firsts(one.batch)] == GOOD
    # 32 good rows in batches of 5: epochs run into each other.
    endless = stream(config=config, epochs=None, batch_size=5)
    seen = [first for _ in range(13) for first in firsts(next(endless).batch)]
    assert seen == (GOOD + GOOD + GOOD)[:65]
    endless.close()


def test_packing_changes_rows_but_not_sequences():
    packed = list(stream())
    plain = list(stream(config=CONFIG.model_copy(update={"packing": False})))
    for one, other in zip(packed, plain, strict=True):
        assert firsts(one.batch) == firsts(other.batch)
        assert {k: float(v) for k, v in one.batch.counts.items()} == {
            k: float(v) for k, v in other.batch.counts.items()
        }
        assert one.batch.tokens.shape[0] <= other.batch.tokens.shape[0] == len(firsts(other.batch))


@pytest.mark.parametrize("after", [0, 1, 3, 7])
def test_resume_is_exact(after):
    whole = stream(epochs=3)
    expected = [next(whole) for _ in range(after)]
    state = json.loads(json.dumps(whole.get_state()))
    rest = list(whole)
    resumed = stream(epochs=3)
    resumed.set_state(state)
    assert json.loads(json.dumps(resumed.get_state())) == state
    again = list(resumed)
    assert len(again) == len(rest) == total_steps(len(GOOD), 6, 3) - after
    assert all(same(a, b) for a, b in zip(rest, again, strict=True))
    if expected:
        assert state["accounting"]["kept"] == expected[-1].accounting.kept


def test_position_is_that_of_the_last_batch_handed_out():
    batches = stream(epochs=None)
    next(batches)
    state = batches.get_state()
    following = [next(batches) for _ in range(4)]
    batches.set_state(state)  # on the same, running stream
    assert all(same(a, next(batches)) for a in following)
    batches.close()


ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
sys.path.insert(0, {root!r})
from tests.data.test_pipeline import flat, stream
batches = stream(epochs=3)
batches.set_state(json.loads(sys.argv[1]))
print(json.dumps([flat(one.batch) for one in batches]))
"""


@pytest.mark.slow
def test_resume_in_a_new_process():
    batches = stream(epochs=3)
    for _ in range(4):
        next(batches)
    state = json.dumps(batches.get_state())
    script = SCRIPT.format(root=str(ROOT))
    found = subprocess.run([sys.executable, "-c", script, state], check=True, capture_output=True, text=True)
    assert json.loads(found.stdout) == json.loads(json.dumps([flat(one.batch) for one in batches]))


@pytest.mark.slow
def test_streams_left_open_do_not_disturb_the_exit():
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.data.test_pipeline as t; "
    script += "kept = t.stream(epochs=None); next(kept); next(t.stream(epochs=None))"
    left = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert left.stderr == ""


def test_other_data_than_at_the_checkpoint():
    state = stream().get_state()
    with pytest.raises(UserError, match="has 39 rows, but had 40 when the checkpoint was written"):
        stream(ROWS[:39]).set_state(state)
    other = [*ROWS[:17], {**ROWS[17], "input_ids": [*ROWS[17]["input_ids"][:-1], 1]}, *ROWS[18:]]
    with pytest.raises(UserError, match=r"as many rows as when the checkpoint was written, but others .*--fresh"):
        stream(other).set_state(state)
    with pytest.raises(UserError, match="but others"):
        stream(list(reversed(ROWS))).set_state(state)
    with pytest.raises(UserError, match=r"but others .*then none"):
        stream().set_state({key: value for key, value in state.items() if key != "digest"})


def test_prompts_go_on_with_the_same_rows_only(tmp_path):
    """A run whose file was moved, or written in another format, goes on; with other rows of the same number it ends."""
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "moved.json").write_text(json.dumps([dict(reversed(row.items())) | {"tools": None} for row in rows]))
    (tmp_path / "other.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("5?", "6?"))

    def prompts(name):
        rows, config = open_rows(tmp_path / name), DataConfig(train="x", max_length=16)
        return Prompts(Examples(rows, bytes_tokenizer(), config, RowKind.PROMPT), 3, 2)

    first = prompts("a.jsonl")
    first.take(2)
    state = json.loads(json.dumps(first.get_state()))
    again = prompts("moved.json")
    again.set_state(state)
    assert [prompt.text for prompt in again.take(4)] == [prompt.text for prompt in first.take(4)]
    with pytest.raises(UserError, match=r"other\.jsonl has as many rows .*, but others"):
        prompts("other.jsonl").set_state(state)


def test_dropped_rows_at_the_end_are_in_the_last_account():
    rows = [{"input_ids": [1, 2]}] * 2 + [{"input_ids": [1]}] * 3
    packed = list(stream(rows, batch_size=2, config=CONFIG.model_copy(update={"shuffle": False})))
    assert len(packed) == 1
    assert packed[0].accounting == Accounting(5, 2, 0, {NOTHING_TRAINED: 3})


@pytest.mark.parametrize("epochs", [1, None])
def test_nothing_trainable_ends_with_the_reasons(epochs):
    rows = [{"input_ids": [1]}] * 3 + [{"input_ids": [1] * 20, "loss_mask": [0] * 19 + [1]}] * 2
    with pytest.raises(UserError, match="nothing in it can be trained on: ") as caught:
        next(stream(rows, epochs=epochs))
    assert f"3 x {NOTHING_TRAINED}" in str(caught.value)
    assert f"2 x {CUT_AWAY}" in str(caught.value)


def test_errors_in_the_thread_reach_the_reader():
    rows = [*ROWS[:9], {"input_ids": "oops"}]
    batches = stream(rows, batch_size=2, config=CONFIG.model_copy(update={"shuffle": False}))
    with pytest.raises(UserError, match="row 10 of the given rows: input_ids is 'oops'"):
        list(batches)
    with pytest.raises(
        UserError, match="row 30 of the given rows: token id 129 is beyond the model's vocabulary of 129"
    ):
        list(stream(ROWS[:30], vocab_size=129))
    with pytest.raises(UserError, match="a whole batch of 2 rows has weight 0"):
        list(stream([{"input_ids": [1, 2], "weight": 0}] * 4, batch_size=2))


def test_weights_reach_the_batch():
    batch = next(stream([{"input_ids": [1, 2, 3], "weight": w} for w in (0.0, 2.0)], batch_size=2)).batch
    assert sorted(batch.weights.tolist()) == [0.0, 2.0]
    assert float(batch.counts["tokens"]) == 4.0


def test_eval_batches_are_the_first_rows_in_file_order():
    batches = eval_batches(Examples(open_rows(ROWS), None, CONFIG), batch_size=4, limit=12)
    # Rows 0, 5 and 10 have nothing to train on: nine are left.
    assert [first for one in batches for first in firsts(one.batch)] == [first for first in GOOD if first < 112]
    assert [int((one.batch.weights > 0).sum()) for one in batches] == [4, 4, 1]
    with pytest.raises(UserError, match="none of its first 1 rows can be evaluated: 1 x nothing to train on"):
        eval_batches(Examples(open_rows(ROWS), None, CONFIG), batch_size=4, limit=1)


def test_text_rows_train_on_all():
    rows = [{"prompt": "ab", "completion": "c"}]
    tokenizer = bytes_tokenizer()
    for train_on, count in ((RowKind.COMPLETION, 2), (RowKind.ALL, 4)):
        batch = next(Batches(Examples(open_rows(rows), tokenizer, CONFIG, train_on), 1, 0, 1)).batch
        assert float(batch.counts["tokens"]) == count
