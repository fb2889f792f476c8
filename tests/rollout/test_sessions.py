"""What programs ask becomes transcripts: a sampled token is trained once, and scored as in its transcript alone."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tunix.data.packing import pack
from tunix.data.types import Prompt
from tunix.rollout.backlog import decoded, encoded
from tunix.rollout.sessions import NoRoom, Session
from tunix.rollout.types import sequence_of
from tunix.types import Completion, Sampling, Sequence

SAMPLING = Sampling(max_tokens=50)


def sampled(*tokens: int, version: int = 3, finish: str = "stop") -> Completion:
    """A turn whose log-probs are a hundredth of its tokens, below 0."""
    ids = np.array(tokens, np.int32)
    versions = np.full(len(ids), version, np.int32)
    return Completion(ids, -ids.astype(np.float32) / 100, finish, versions, SAMPLING, ((0, len(ids)),))  # pyright: ignore[reportArgumentType]


def ask(session: Session, prompt: list[int], *answer: int, most: int = 10) -> None:
    session.begin(np.array(prompt, np.int32), most).end(sampled(*answer))


def test_turns_that_extend_each_other_are_one_transcript_and_a_fork_begins_another():
    session = Session(room=100, most=50)
    ask(session, [1, 2], 3, 4)
    ask(session, [1, 2, 3, 4, 5], 6)
    ask(session, [1, 2, 9], 7, 8)  # the first turn was edited
    ask(session, [1, 2, 3, 4, 5, 6, 5, 5], 2)  # and the first transcript goes on
    prompt, completion = session.episode(SAMPLING)
    assert prompt.tolist() == [1, 2]
    assert completion.tokens.tolist() == [3, 4, 5, 6, 5, 5, 2, 1, 2, 9, 7, 8]
    assert completion.turns == ((0, 2), (3, 4), (6, 7), (10, 12))
    assert completion.restarts == (7,)
    assert completion.drawn.sum() == 2 + 1 + 2 + 1  # each sampled token once
    np.testing.assert_allclose(
        completion.logprobs, np.array([3, 4, 0, 6, 0, 0, 2, 0, 0, 0, 7, 8], np.float32) / -100, atol=1e-7
    )
    assert completion.versions.tolist() == [3] * 12
    sequence = sequence_of(Prompt(prompt, "", {}), completion)
    assert sequence.restarts == (9,)
    assert sequence.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1]
    first, second = session.written()["transcripts"]
    assert first["tokens"] == [1, 2, 3, 4, 5, 6, 5, 5, 2]
    assert second == {
        "tokens": [1, 2, 9, 7, 8],
        "logprobs": pytest.approx([0, 0, 0, -0.07, -0.08]),
        "versions": [3] * 5,
        "turns": [[3, 5]],
    }


def test_a_saved_episode_has_its_transcripts():
    session = Session(room=100, most=50)
    ask(session, [1, 2], 3)
    ask(session, [4], 5)
    _, completion = session.episode(SAMPLING)
    again = decoded(json.loads(json.dumps(encoded(completion))), SAMPLING)
    assert again.restarts == completion.restarts == (1,)
    assert again.turns == completion.turns


def test_a_request_that_is_given_up_trains_nothing_and_the_next_goes_on():
    session = Session(room=30, most=20)
    ask(session, [1, 2], 3)
    lost = session.begin(np.array([1, 2, 3, 4]), 10)
    with pytest.raises(NoRoom):  # what may be sampled is reserved while it runs: 30 - 3 - 1 - 10 = 16 are left
        session.begin(np.arange(16), 1)
    lost.end()
    lost.end(sampled(9))  # too late: nobody has read it
    ask(session, [1, 2, 3, 4], 5)  # the client asks again
    ask(session, [7, 7], 8, most=1)
    _, completion = session.episode(SAMPLING)
    assert completion.tokens.tolist() == [3, 4, 5, 7, 7, 8]
    assert completion.restarts == (3,)


def test_the_same_prompt_at_once_is_two_transcripts():
    session = Session(room=30, most=20)
    turns = [session.begin(np.array([1, 2]), 5) for _ in range(2)]
    for turn, token in zip(turns, (3, 4), strict=True):
        turn.end(sampled(token))
    _, completion = session.episode(SAMPLING)
    assert completion.tokens.tolist() == [3, 1, 2, 4]
    assert [turn.number for turn in turns] == [0, 1]


def test_room_is_for_all_transcripts_and_what_it_cuts_off_is_truncated():
    session = Session(room=10, most=4)
    turn = session.begin(np.array([1, 2, 3]), 100)
    assert turn.most == 4
    turn.end(sampled(4, 5, 6, finish="length"))
    assert session.episode(SAMPLING)[1].finish == "length"
    turn = session.begin(np.array([1, 2, 3, 4, 5, 6, 7]), 100)  # 7 of 10 are taken, 1 of 4 may be sampled
    assert turn.most == 1
    turn.end(sampled(8))
    with pytest.raises(NoRoom, match="room for 2 further tokens, 0 of them sampled, and 1 are new"):
        session.begin(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9]), 1)
    short = Session(room=10, most=4)
    ask(short, [1], 2, most=1)
    assert short.episode(SAMPLING)[1].finish == "stop"


def test_a_program_that_asks_for_nothing_is_a_sequence_without_a_target():
    prompt, completion = Session(room=10, most=4).episode(SAMPLING)
    sequence = sequence_of(Prompt(prompt, "", {}), completion)
    assert sequence.tokens.tolist() == [0]
    assert not sequence.loss_mask.any()


def test_transcripts_are_segments_of_one_sequence():
    """By hand: two transcripts of 3 and 4 tokens, and a sequence of 2, in a row of 10."""
    mask = np.array([0, 0, 1, 1, 0, 0, 1], bool)  # the first token of a transcript is no target
    values = np.arange(7, dtype=np.float32)
    episode = Sequence(np.arange(1, 8, dtype=np.int32), mask, per_token={"x": values}, restarts=(3,))
    other = Sequence(np.array([8, 9], np.int32), np.array([0, 1], bool), per_token={"x": values[:2]})
    batch = pack([episode, other], 2, 10)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 2, 3, 3, 0]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 1, 0]]
    assert batch.loss_mask.astype(int).tolist() == [[0, 0, 1, 0, 0, 0, 1, 0, 1, 0]]
    assert batch.per_token["x"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 0]]
    assert batch.lengths.tolist() == [2, 1]
    assert float(batch.counts["sequences"]) == 2
    with pytest.raises(ValueError, match="7 tokens"):  # all of an episode is in one row
        pack([episode], 1, 6)
    # Of a group, whose sequences would share their prompt, an episode's are whole.
    plain = replace(episode, restarts=())
    assert pack([plain, plain], 2, 20, together=2).parents.max() == 1
    group = pack([episode, plain], 2, 20, together=2)
    assert group.tokens.tolist() == [[*range(1, 8), *range(1, 8), *[0] * 6]]
    assert group.parents.tolist() == group.segment_ids.tolist()


def test_log_probs_are_those_of_each_transcript_alone():
    from tests.trainers import trainer

    client, rng = trainer(), np.random.default_rng(0)
    parts = [rng.integers(1, 60, n).astype(np.int32) for n in (5, 7)]
    whole = Sequence(np.concatenate(parts), np.arange(12) % 5 > 0, restarts=(5,))
    (together,) = client.logprobs([whole])
    alone = client.logprobs([Sequence(x, np.ones(len(x), bool)) for x in parts])
    np.testing.assert_allclose(together, np.concatenate(list(alone)), atol=1e-5)
    joined = client.logprobs([replace(whole, restarts=())])[0]
    assert np.abs(joined[5:] - together[5:]).max() > 1e-3
