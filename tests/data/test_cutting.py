"""Packing `split` and `wrapped`: pieces by hand, nothing lost, and a position within a text that resumes to the bit."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_pipeline import flat
from tunix.cli import main
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.pipeline import Batches, eval_batches, shuffled
from tunix.data.sources import open_rows
from tunix.data.types import CUT_AWAY, NOTHING_TRAINED, Accounting, Kept
from tunix.errors import UserError
from tunix.recipe.recipe import Recipe

# a of 6 tokens, b of 4, c of 2.
TEXTS = [{"input_ids": [10, 11, 12, 13, 14, 15]}, {"input_ids": [20, 21, 22, 23]}, {"input_ids": [30, 31]}]
MODES = ["split", "wrapped"]


def config(packing, max_length=4, **settings) -> DataConfig:
    return DataConfig(train="given", **{"max_length": max_length, "packing": packing, "shuffle": False, **settings})


def stream(rows, settings: DataConfig, batch_size=8, epochs: int | None = 1) -> Batches:
    return Batches(Examples(open_rows(rows), None, settings), batch_size, 3, epochs)


def tokens_of(batch) -> list[list[int]]:
    """The tokens of each row."""
    return [row[ids > 0].tolist() for row, ids in zip(batch.tokens, batch.segment_ids, strict=True)]


def test_wrapped_by_hand():
    """The rows of TRL 1.16's `pack_dataset(..., strategy="wrapped")` on these texts; each piece is a segment."""
    (packed,) = stream(TEXTS, config("wrapped"))
    batch = packed.batch
    assert tokens_of(batch) == [[10, 11, 12, 13], [14, 15, 20, 21], [22, 23, 30, 31]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 0, 1]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 2, 2]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 0], [1, 1, 2, 2], [3, 3, 4, 4]]
    # The first token of a piece is no target, though all were to be trained.
    assert batch.loss_mask.astype(int).tolist() == [[0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 1]]
    assert {name: float(x) for name, x in batch.counts.items()} == {"tokens": 7, "sequences": 5}
    assert packed.accounting == Accounting(3, 3, 0, {}, pieces=5)


def test_split_by_hand():
    """Pieces are packed as texts are; here the rows are those of TRL 1.16's `bfd_split`."""
    (packed,) = stream(TEXTS, config("split"))
    assert tokens_of(packed.batch) == [[10, 11, 12, 13], [20, 21, 22, 23], [14, 15, 30, 31]]
    assert packed.batch.segment_ids.tolist()[2] == [1, 1, 2, 2]
    assert packed.batch.positions.tolist()[2] == [0, 1, 0, 1]
    assert packed.batch.loss_mask.astype(int).tolist() == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1]]
    assert packed.accounting == Accounting(3, 3, 0, {}, pieces=4)
    # Where nothing is too long it is the usual packing.
    short = [{"input_ids": [i, i + 1, i + 2]} for i in range(5)]
    (one,), (other,) = stream(short, config("split")), stream(short, config(True))
    assert flat(one.batch) == flat(other.batch)


def test_batches_count_pieces_and_begin_new_rows():
    """Three pieces a batch: the next one goes on within b, at the beginning of a row."""
    first, second = stream(TEXTS, config("wrapped"), batch_size=3)
    assert tokens_of(first.batch) == [[10, 11, 12, 13], [14, 15, 20, 21]]
    assert tokens_of(second.batch) == [[22, 23, 30, 31]]
    # b counts as kept with its first piece.
    assert first.accounting == Accounting(2, 2, 0, {}, pieces=3)
    assert second.accounting == Accounting(3, 3, 0, {}, pieces=5)
    assert first.batch.weights.shape == second.batch.weights.shape == (3,)
    first, second = stream(TEXTS, config("split"), batch_size=2)
    assert tokens_of(first.batch) == [[10, 11, 12, 13], [14, 15]]
    assert tokens_of(second.batch) == [[20, 21, 22, 23], [30, 31]]


def test_pieces_without_a_target_are_left_out_and_counted():
    """A prompt longer than a row, a target that only begins a piece, and a last token alone."""
    rows = [
        {"input_ids": [1] * 9, "loss_mask": [0] * 7 + [1] * 2},  # 4 and 4 (its last token trained) and 1
        {"input_ids": [2] * 6, "loss_mask": [0] * 4 + [1, 0]},  # the fifth begins the second piece
        {"input_ids": [3] * 5},  # the fifth is alone
        {"input_ids": [4] * 3, "loss_mask": [0] * 3},
        {"input_ids": [5] * 4, "loss_mask": [0, 0, 0, 1]},
    ]
    (packed,) = stream(rows, config("split"))
    assert tokens_of(packed.batch) == [[1] * 4, [3] * 4, [5] * 4]
    assert packed.batch.loss_mask.astype(int).tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]]
    # Left out: 1's first and last, 2's both, 3's last. Row 4 never had a target.
    wanted = Accounting(5, 3, 0, {CUT_AWAY: 1, NOTHING_TRAINED: 1}, pieces=3, untrained=5)
    assert packed.accounting == wanted
    (held_out,) = eval_batches(Examples(open_rows(rows), None, config("split")), 8, 10)
    assert held_out.accounting == wanted
    assert flat(held_out.batch) == flat(packed.batch)
    with pytest.raises(UserError, match=f"nothing in it can be trained on: 1 x {CUT_AWAY}"):
        next(stream(rows[1:2], config("split")))
    # A text that is not cut by a whole row's length loses nothing: 4 + 2 of row 1 are one piece of 6.
    assert sum(isinstance(x, Kept) for x in Examples(open_rows(rows), None, config("split", max_length=9)).first()) == 4


def ragged(number: int = 30) -> list[dict]:
    """Texts of 2 to 40 tokens; of every third one the first half is not trained."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 41, number).tolist()
    starts = [size // 2 if i % 3 == 0 else 1 for i, size in enumerate(lengths)]
    return [
        {"input_ids": [100 * i + t for t in range(size)], "loss_mask": [int(t >= start) for t in range(size)]}
        for i, (size, start) in enumerate(zip(lengths, starts, strict=True))
    ]


@pytest.mark.parametrize("packing", MODES)
def test_every_target_is_trained_once_but_those_that_begin_a_piece(packing):
    rows, settings = ragged(), config(packing, max_length=8, shuffle=True)
    found = list(stream(rows, settings, batch_size=5))
    assert len(found) == len(list(shuffled(Examples(open_rows(rows), None, settings), 5, 3, 1)))
    trained = [int(t) for one in found for t in one.batch.tokens[one.batch.loss_mask]]
    starts = [
        int(t) for one in found for t in one.batch.tokens[(one.batch.positions == 0) & (one.batch.segment_ids > 0)]
    ]
    assert len(set(trained)) == len(trained)
    wanted = {t for row in rows for t, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on}
    missing = wanted - set(trained)
    assert set(trained) <= wanted
    # Each of them begins a piece, or is the last token of its text, alone in a piece that was left out.
    assert missing <= {*starts, *(row["input_ids"][-1] for row in rows)}
    assert 0 < len(missing) < found[-1].accounting.pieces
    account = found[-1].accounting
    assert account.rows == account.kept + sum(account.dropped.values()) == 30
    assert account.pieces == sum(int((one.batch.weights > 0).sum()) for one in found)
    for one in found:
        ids = one.batch.segment_ids
        # One text and one stretch of it in each segment; rows of wrapped are full but for the batch's last and a single
        # place that no target fits into.
        for row, segment in {(row, int(ids[row, t])) for row, t in zip(*np.nonzero(ids), strict=True)}:
            own = one.batch.tokens[row][ids[row] == segment]
            assert np.diff(own).tolist() == [1] * (len(own) - 1)
        if packing == "wrapped":
            assert ((ids == 0).sum(1)[:-1] <= 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("packing", MODES)
def test_resume_is_exact_within_a_text(packing):
    rows, settings = ragged(), config(packing, max_length=8, shuffle=True)
    whole = stream(rows, settings, batch_size=4, epochs=2)
    states, batches = [json.loads(json.dumps(whole.get_state()))], []
    for one in whole:
        batches.append((flat(one.batch), one.accounting))
        states.append(json.loads(json.dumps(whole.get_state())))
    assert any(state["begin"] for state in states), "no batch ends within a text"
    for after in (0, 1, 7, next(i for i, state in enumerate(states) if state["begin"])):
        again = stream(rows, settings, batch_size=4, epochs=2)
        again.set_state(states[after])
        assert [(flat(one.batch), one.accounting) for one in again] == batches[after:]


# A recipe.


def recipe(folder: Path, **data) -> Path:
    path = folder / "r.yaml"
    settings = {"train": "t.jsonl", "max_length": 4, **data}
    path.write_text(f"model: {{init: random, family: llama}}\nsteps: 1\nbatch_size: 3\ndata: {json.dumps(settings)}\n")
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    return path


@pytest.mark.parametrize(
    ("data", "algorithm", "complaint"),
    [
        ({"packing": "bfd"}, "sft", "data.packing: 'bfd' is not one of true, false, 'wrapped', 'split'"),
        ({"packing": "wraped"}, "sft", "Did you mean 'wrapped'"),
        ({"packing": "split", "on_overflow": "drop"}, "sft", "on_overflow 'drop' changes nothing with packing 'split'"),
        ({"packing": "wrapped"}, "dpo", "data.packing: wrapped cuts a text into pieces, and dpo reads pairs"),
        ({"packing": "split"}, "kto", "kto reads labelled completions"),
        ({"packing": "split"}, "grpo", "grpo reads prompts"),
        ({"packing": "split"}, "reward", "reward reads pairs"),
    ],
)
def test_bad_values(data, algorithm, complaint, tmp_path):
    path = recipe(tmp_path, **data)
    with pytest.raises(UserError) as found:
        Recipe.load(path, [f"algorithm.name={algorithm}"])
    assert complaint in str(found.value)


def test_aot_wants_two_pairs(tmp_path):
    path = recipe(tmp_path)
    with pytest.raises(UserError, match="batch_size: aot sorts the pairs of a batch, and 1 has no other"):
        Recipe.load(path, ["algorithm.name=dpo", "algorithm.loss=aot", "batch_size=1"])
    assert Recipe.load(path, ["algorithm.name=dpo", "algorithm.loss=aot"]).batch_size == 3


def test_booleans_stay_what_they_are(tmp_path):
    path = recipe(tmp_path, packing=False)
    assert Recipe.load(path).data.packing is False
    assert Recipe.load(path, ["data.packing=true"]).data.packing is True
    resolved = Recipe.load(path, ["data.packing=wrapped"])
    assert resolved.data.packing == "wrapped"
    assert Recipe.build(resolved.sections()) == resolved


@pytest.mark.parametrize("packing", MODES)
def test_inspect_shows_pieces(packing, tmp_path, capsys):
    assert main(["inspect", str(recipe(tmp_path, packing=packing))]) == 0
    out = capsys.readouterr().out
    assert "row 1, piece 1 of 2: 4 tokens, 3 trained" in out
    assert "row 1, piece 2 of 2: 2 tokens, 1 trained" in out
    b = "row 2, piece 2 of 2: 2 tokens" if packing == "wrapped" else "row 2: 4 tokens"
    assert b in out
    lines = {line.split()[0]: line.split()[1] for line in out.splitlines() if len(line.split()) > 1}
    assert lines["pieces"] == ("5" if packing == "wrapped" else "4")
    assert "truncated" not in out
