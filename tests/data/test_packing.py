"""Packing loses nothing, splits nothing, and counts what losses divide by."""

from dataclasses import replace

import numpy as np
import pytest

from tunix.data.packing import pack
from tunix.types import Sequence


def sequence(tokens, mask=None, weight=1.0, **per_token):
    tokens = np.asarray(tokens, np.int32)
    mask = np.ones(len(tokens), bool) if mask is None else np.asarray(mask, bool)
    return Sequence(tokens, mask, weight, {name: np.asarray(values, np.float32) for name, values in per_token.items()})


def test_by_hand():
    # Lengths 2, 5, 3 into rows of 6: the 5 opens row 0 and leaves 1; the 3 opens row 1, the 2 fits behind it.
    batch = pack([sequence([1, 2], weight=0.5), sequence([3, 4, 5, 6, 7], [1, 0, 0, 1, 1]), sequence([8, 9, 8])], 4, 6)
    assert batch.tokens.tolist() == [[3, 4, 5, 6, 7, 0], [8, 9, 8, 1, 2, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 0]]
    assert batch.sequence_ids.tolist() == [[1, 1, 1, 1, 1, 0], [2, 2, 2, 0, 0, 0]]
    # First tokens are never trained, though every mask began with True.
    assert batch.loss_mask.astype(int).tolist() == [[0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 1, 0]]
    assert batch.weights.tolist() == [0.5, 1, 1, 0]
    assert batch.lengths.tolist() == [1, 2, 2, 1]
    assert {name: float(count) for name, count in batch.counts.items()} == {"tokens": 0.5 * 1 + 2 + 2, "sequences": 2.5}
    assert np.mean(batch.segment_ids == 0) == pytest.approx(2 / 12)


def test_what_a_sampler_recorded_is_unknown_where_nothing_was():
    drawn = replace(sequence([1, 2], [0, 1]), candidates=np.array([[-1, -1], [2, 7]], np.int32))
    batch = pack([drawn, sequence([3, 4, 5])], 2, 6)
    unknown = [-1, -1]
    assert batch.tokens.tolist() == [[3, 4, 5, 1, 2, 0]]
    assert batch.candidates is not None
    assert batch.candidates.tolist() == [[unknown, unknown, unknown, unknown, [2, 7], unknown]]
    assert batch.experts is None


def test_without_packing_each_has_its_row():
    sequences = [sequence([1, 2], old=[0, 5]), sequence([3, 4, 5], old=[0, 6, 7])]
    batch = pack(sequences, 2, 4, packing=False)
    assert batch.tokens.tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]
    assert batch.per_token["old"].tolist() == [[0, 5, 0, 0], [0, 6, 7, 0]]
    packed = pack(sequences, 2, 8)
    assert packed.per_token["old"].tolist() == [[0, 6, 7, 0, 5, 0, 0, 0]]
    for name in batch.counts:
        assert batch.counts[name] == packed.counts[name]


def test_every_sequence_can_be_read_back():
    rng = np.random.default_rng(0)
    sequences = [
        Sequence(
            rng.integers(1, 99, n).astype(np.int32),
            np.r_[False, True, rng.random(n - 2) < 0.5],
            per_token={"x": rng.random(n).astype(np.float32)},
            per_sequence={"advantage": float(i)},
        )
        for i, n in enumerate(np.clip(rng.lognormal(4.5, 0.8, 500), 2, 512).astype(int))
    ]
    batch = pack(sequences, 512, 512)
    assert np.mean(batch.segment_ids == 0) < 0.05  # ragged data, as in the issue
    real = batch.segment_ids > 0
    for i, original in enumerate(sequences):
        place = real & (batch.sequence_ids == i)
        assert len(set(np.nonzero(place)[0])) == 1, "in one row"
        assert len(set(batch.segment_ids[place])) == 1
        assert batch.tokens[place].tolist() == original.tokens.tolist()
        assert batch.positions[place].tolist() == list(range(len(original.tokens)))
        assert batch.loss_mask[place].tolist() == original.loss_mask.tolist()
        assert batch.per_token["x"][place].tolist() == original.per_token["x"].tolist()
        assert batch.per_sequence["advantage"][i] == i
        assert batch.lengths[i] == original.loss_mask.sum()
    assert real.sum() == sum(len(s.tokens) for s in sequences)
    assert not batch.loss_mask[~real].any()
    assert batch.weights.sum() == 500
    for row in batch.segment_ids:  # segments are 1, 2, ... and then padding
        used = row[row > 0]
        assert (np.diff(used) >= 0).all()
        assert set(used) == set(range(1, used.max() + 1))
        assert not row[len(used) :].any()


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "0 sequences do not fill a batch of 1 to 2"),
        ([sequence([1, 2])] * 3, "3 sequences do not fill"),
        ([sequence(range(9))], "have 9 tokens; 1 to 8 fit"),
        ([sequence([])], "sequence 0 has no token"),
        ([sequence([1, 2], [1, 0])], "no token of the batch is trained"),
        ([sequence([1, 2], x=[1, 2]), sequence([1, 2])], "sequence 1 names other values"),
        ([sequence([1, 2], x=[1])], "x of sequence 0 has 1 values for 2 tokens"),
        ([sequence([1, 2], [1])], "loss_mask of sequence 0 has 1 values for 2 tokens"),
    ],
)
def test_what_cannot_be_packed(sequences, message):
    with pytest.raises(ValueError, match=message):
        pack(sequences, 2, 8)


def test_rows_for_several_devices_are_filled_evenly():
    """Lengths 6, 5, 4, 3, 2, 2 in rows of 8: three are enough, four of them take 6, 5, 4 + 2 and 3 + 2."""
    lengths = [2, 6, 3, 5, 2, 4]
    sequences = [sequence(np.full(n, i + 1)) for i, n in enumerate(lengths)]
    one, several = pack(sequences, 6, 8), pack(sequences, 6, 8, multiple=4)
    assert one.tokens.shape == (3, 8)
    assert [sorted(set(row[row > 0])) for row in several.tokens] == [[2], [4], [5, 6], [1, 3]]
    assert (several.segment_ids > 0).sum(axis=1).tolist() == [6, 5, 6, 5]
    assert several.segment_ids[2].tolist() == [1, 1, 1, 1, 2, 2, 0, 0]
    for name, count in one.counts.items():
        assert several.counts[name] == count


def test_sequences_that_fit_only_as_they_fitted_first():
    """In rows of 6, first fit fills two rows with 3 + 3 and 2 + 2 + 2; the emptiest row first needs seven tokens."""
    sequences = [sequence(np.full(n, 1)) for n in (3, 3, 2, 2, 2)]
    assert (pack(sequences, 5, 6, multiple=2).segment_ids > 0).sum(axis=1).tolist() == [6, 6]


@pytest.mark.parametrize("packing", ["wrapped", False])
def test_rows_that_keep_their_order_are_made_up_with_empty_ones(packing):
    sequences = [sequence(np.full(4, i + 1)) for i in range(3)]
    plain, several = pack(sequences, 3, 4, packing), pack(sequences, 3, 4, packing, multiple=2)
    assert several.tokens.tolist() == [*plain.tokens.tolist(), [0] * 4]


def test_what_shares_a_row_still_does_on_several_devices():
    sequences = [sequence([7, 8, *np.full(n, i + 1)], [0, 0, *np.ones(n)]) for i, n in enumerate((3, 2, 1, 4))]
    batch = pack(sequences, 4, 12, together=2, multiple=2)
    # Of the prompt's two tokens each has the last one: 1 + (1 + 3) + (1 + 2) and 1 + (1 + 1) + (1 + 4).
    assert sorted((batch.segment_ids > 0).sum(axis=1).tolist()) == [8, 8]
    assert batch.parents is not None
    owners = [sorted(set(ids[real])) for ids, real in zip(batch.sequence_ids, batch.segment_ids > 0, strict=True)]
    assert sorted(owners) == [[0, 1], [2, 3]]


P = [7, 8, 9]
"""A prompt that three transcripts begin with."""


def episode() -> Sequence:
    """Four transcripts: two answers to a prompt, of which the second is gone on with, and another prompt."""
    transcripts = [[*P, 11, 12], [*P, 13, 14, 15], [*P, 13, 14, 15, 16, 17, 18], [1, 2, 3]]
    trained = [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 1]]
    starts = np.cumsum([len(x) for x in transcripts])[:-1]
    made = sequence(np.concatenate(transcripts), np.concatenate(trained), place=range(sum(map(len, transcripts))))
    return replace(made, restarts=tuple(int(x) for x in starts))


def test_a_trie_by_hand():
    batch = pack([episode()], 1, 20, trie=True)
    # The second is the trunk. The first leaves it after the prompt, the third where the second is trained; the fourth
    # shares nothing. A branch repeats the last token that it shares.
    assert batch.tokens.tolist() == [[7, 8, 9, 11, 12, 9, 13, 14, 15, 16, 17, 18, 13, 14, 15, 1, 2, 3, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5, 0, 1, 2, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 2, 2, 1, 4, 4, 4, 4, 4, 4, 1, 1, 1, 6, 6, 6, 0, 0]]
    assert batch.parents is not None
    assert batch.interleaved
    assert batch.parents.tolist() == [[1] * 15 + [6] * 3 + [0] * 2]
    assert batch.loss_mask.astype(int).tolist() == [[0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0]]
    assert batch.lengths.tolist() == [7]
    alone = pack([replace(episode(), restarts=())], 1, 23, trie=True)
    assert alone.segment_ids.tolist() == [[1] * 23]
    assert not pack([episode()], 1, 23).interleaved


def test_a_trie_trains_each_token_once_and_after_the_one_before_it():
    rng, prompt = np.random.default_rng(0), [int(x) for x in range(3, 43)]
    for trial in range(40):
        transcripts, trained, history = [], [], [*prompt]
        for _ in range(8):  # a turn of 10 tokens, of which the next transcripts show the last 4
            turn = rng.integers(50, 90, 10).tolist()
            transcripts.append([*history, *turn])
            trained.append(np.arange(len(history) + 10) >= len(history))
            history = [*history, *turn[rng.integers(6, 8) :], 1, 2] if rng.random() < 0.9 else [*prompt[:20], 5]
        starts = np.cumsum([len(x) for x in transcripts])[:-1]
        whole, mask = np.concatenate(transcripts), np.concatenate(trained)
        observed = np.where(rng.random(len(whole)) < (trial % 2) * 0.02, ~mask, False)
        observed[[0, *starts]] = False
        made = sequence(whole, mask, place=range(len(whole)), observed=observed)
        made = replace(made, restarts=tuple(int(x) for x in starts))
        batch = pack([made], 1, len(whole), trie=True)
        assert batch.parents is not None
        place, used = batch.per_token["place"][0].astype(int), batch.segment_ids[0] > 0
        np.testing.assert_array_equal(batch.tokens[0][used], whole[place[used]])
        read = (mask | observed).astype(bool)
        assert sorted(place[used & read[place]]) == np.flatnonzero(read).tolist()
        for column in np.flatnonzero(used & read[place]):
            assert batch.tokens[0, column - 1] == whole[place[column] - 1]
            assert batch.positions[0, column - 1] == batch.positions[0, column] - 1
            assert batch.segment_ids[0, column - 1] == batch.segment_ids[0, column]
        # What a token sees are its transcript's earlier tokens, in their order.
        segments, parents = batch.segment_ids[0], batch.parents[0]
        for column in np.flatnonzero(used):
            seen = (segments == segments[column]) | (segments == parents[column])
            seen &= np.arange(len(seen)) <= column
            order = np.flatnonzero(seen)[np.argsort(batch.positions[0][seen])]
            begin = int(max(x for x in [0, *starts] if x <= place[column]))
            assert batch.tokens[0][order].tolist() == whole[begin : place[column] + 1].tolist()
        if trial % 2 == 0:
            assert used.sum() < 1.3 * prefixes_of(transcripts)
            assert len(whole) > 2 * prefixes_of(transcripts)


def prefixes_of(transcripts: list[list[int]]) -> int:
    """Tokens of a trie in which every shared token stands once."""
    return len({tuple(x[:n]) for x in transcripts for n in range(1, len(x) + 1)})


@pytest.mark.parametrize("turns", [20, 5])
def test_a_history_that_is_shortened_begins_another_trunk(turns: int):
    """Forty turns of 50 tokens, of which the next transcripts show the last 10; after every few of them a summary takes
    the place of all turns."""
    rng = np.random.default_rng(0)
    history = prompt = rng.integers(3, 900, 50).tolist()
    transcripts, trained = [], []
    for number in range(40):
        if number and number % turns == 0:
            history = [*prompt, *rng.integers(3, 900, 20).tolist()]
        turn = rng.integers(3, 900, 50).tolist()
        transcripts.append([*history, *turn])
        trained.append(np.arange(len(history) + 50) >= len(history))
        history = [*history, *turn[40:], 1, 2]
    made = sequence(np.concatenate(transcripts), np.concatenate(trained))
    made = replace(made, restarts=tuple(int(x) for x in np.cumsum([len(x) for x in transcripts])[:-1]))
    batch = pack([made], 1, len(made.tokens), trie=True)
    assert batch.parents is not None
    # Each trunk has the prompt once.
    trunks = 40 // turns
    assert len(np.unique(batch.parents[batch.segment_ids > 0])) == trunks
    assert np.count_nonzero(batch.segment_ids) < 1.1 * prefixes_of(transcripts) + 50 * (trunks - 1)
