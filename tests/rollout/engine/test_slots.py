"""The slots on the host: sampled tokens are written down by arrays, and stop strings are looked for in a tail."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.rollout.engine.test_shapes import BARE
from tunix.rollout.engine.programs import Flow
from tunix.rollout.engine.request import Episode, StopText
from tunix.rollout.engine.sampling import MOST_TOP, Draw
from tunix.rollout.engine.slots import Slots
from tunix.types import Request, Sampling

LENGTH = 400


def text_of(tokens: Sequence[int]) -> str:
    """A toy tokenizer whose ids are of no, one, two or three characters."""
    return "".join(("", "a", "ab", "bca")[token % 4] for token in tokens)


def episode(number: int, prompt: int = 3, **settings) -> Episode:
    request = Request(np.ones(prompt, np.int32), Sampling(**settings), seed=7, index=number)
    strings = request.sampling.stop_strings
    return Episode(request, number, StopText(strings, text_of) if strings else None)


def draws(tokens: np.ndarray) -> Draw:
    """What a dispatch returns for these tokens `[St Sl]`."""
    shape = (*tokens.shape, MOST_TOP)
    ids = np.broadcast_to(np.arange(MOST_TOP), shape) + 100 * tokens[..., None]
    return Draw(tokens, -tokens.astype(np.float32), ids.astype(np.int32), -ids.astype(np.float32))


def filled(*episodes: Episode, number: int = 4) -> Slots:
    slots = Slots(replace(BARE, slots=number, max_length=LENGTH))
    for slot, one in enumerate(episodes):
        slots.admit(slot, one)
        slots.start(slot)
    return slots


def take(slots: Slots, tokens: np.ndarray, counts: Sequence[int]) -> list[int]:
    """A dispatch of all slots that sampled these tokens `[St Sl]`."""
    return slots.take(np.arange(len(slots.held)), slots.generations.copy(), draws(tokens), np.array(counts))


def flow(slots: Slots) -> Flow:
    return slots.flow(np.arange(len(slots.held)))


def test_tokens_of_several_dispatches_are_written_one_behind_the_other():
    slots = filled(episode(0, max_tokens=5), episode(1, max_tokens=9, top_logprobs=2), number=3)
    tokens = np.arange(1, 13, dtype=np.int32).reshape(4, 3)
    assert take(slots, tokens, [4, 2, 0]) == []
    assert slots.new(1).tolist() == [2, 5]
    assert flow(slots).progress.held.tolist() == [7, 5, 0]
    assert flow(slots).progress.left.tolist() == [1, 7, 0]
    assert take(slots, tokens + 20, [1, 4, 0]) == [0]
    done = slots.completion(0, 6)
    assert (done.tokens.tolist(), done.finish, done.turns) == ([1, 4, 7, 10, 21], "length", ((0, 5),))
    assert (done.logprobs.tolist(), done.versions.tolist()) == ([-1.0, -4.0, -7.0, -10.0, -21.0], [6] * 5)
    slots.release(0)
    assert slots.running.tolist() == [1]
    assert list(slots.episodes) == [1]
    assert take(slots, tokens + 40, [0, 3, 0]) == [1]
    done = slots.completion(1, 6)
    assert done.tokens.tolist() == [2, 5, 22, 25, 28, 31, 42, 45, 48]
    assert done.top is not None
    np.testing.assert_array_equal(done.top[0], 100 * done.tokens[:, None] + [0, 1])


def test_a_stop_id_ends_a_turn_and_an_observation_opens_the_next():
    slots = filled(episode(0, max_tokens=30, stop_ids=(9,)))
    tokens = np.array([[5], [9]], np.int32).repeat(4, axis=1)
    assert take(slots, tokens, [2, 0, 0, 0]) == [0]
    assert slots.completion(0, 1).finish == "stop"
    new = slots.observe(0, np.array([11, 12], np.int32))
    assert new is not None
    # The prompt's three tokens and the first sampled one are held already.
    assert (new.tolist(), slots.held[0]) == ([9, 11, 12], 7)
    assert (flow(slots).progress.left[0], slots.left[0]) == (0, 28)
    slots.start(0)
    assert flow(slots).progress.left[0] == 28
    assert take(slots, tokens, [2, 0, 0, 0]) == [0]
    done = slots.completion(0, 1)
    assert (done.tokens.tolist(), done.turns) == ([5, 9, 11, 12, 5, 9], ((0, 2), (4, 6)))
    assert done.logprobs.tolist() == [-5.0, -9.0, 0.0, 0.0, -5.0, -9.0]


def test_an_observation_that_leaves_no_room_ends_the_episode():
    slots = filled(episode(0, max_tokens=LENGTH, stop_ids=(9,)))
    tokens = np.full((1, 4), 9, np.int32)
    assert take(slots, tokens, [1, 0, 0, 0]) == [0]
    assert slots.observe(0, np.zeros(LENGTH - 4, np.int32)) is None
    assert slots.completion(0, 1).finish == "length"


def test_an_episode_that_leaves_its_slot_keeps_everything():
    slots = filled(*(episode(number, prompt=number + 1, max_tokens=9) for number in range(4)))
    take(slots, np.arange(8, dtype=np.int32).reshape(2, 4), [2, 1, 2, 1])
    one = slots.suspend(2, 1)
    assert (one.number, list(slots.episodes)) == (2, [0, 1, 3])
    assert slots.admit(2, one).tolist() == [1, 1, 1, 2, 6]
    assert slots.running.tolist() == [0, 1, 3]
    slots.start(2)
    # It comes last now: the first to leave again.
    assert slots.running.tolist() == [0, 1, 3, 2]
    assert flow(slots).progress.held.tolist() == [3, 3, 5, 5]
    assert flow(slots).progress.drawn.tolist() == [2, 1, 2, 1]
    assert take(slots, np.full((7, 4), 50, np.int32), [3, 7, 7, 0]) == [2]
    done = slots.completion(2, 1)
    assert (done.tokens.tolist(), done.finish) == ([2, 6, *[50] * 7], "length")
    assert done.logprobs.tolist() == [-2.0, -6.0, *[-50.0] * 7]


@pytest.mark.parametrize("size", [1, 3, 8, 50])
@pytest.mark.parametrize("strings", [("bcabca",), ("aaaa", "cabb"), ("aabaa",)])
def test_stop_strings_end_where_the_whole_text_first_has_one(strings: tuple[str, ...], size: int):
    rng = np.random.default_rng(size)
    for _ in range(40):
        turn = rng.choice(4, 300, p=(0.55, 0.15, 0.15, 0.15)).astype(np.int32)
        first = next((n for n in range(301) if any(x in text_of(turn[:n].tolist()) for x in strings)), None)
        looks, found = StopText(strings, text_of), None
        for end in range(size, 301, size):
            found = looks.find(turn[:end], size)
            if found is not None:
                break
        assert found == (first if first is not None and first <= 300 // size * size else None)


def test_looking_for_a_stop_string_costs_the_same_however_long_the_turn_is():
    sizes = []

    def decode(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return "x" * len(tokens)

    looks, turn = StopText(("</answer>",), decode), np.zeros(4096, np.int32)
    for end in range(8, 4097, 8):
        assert looks.find(turn[:end], 8) is None
    assert max(sizes) < 100
    assert len(sizes) < 1.5 * 512


def test_what_is_behind_a_stop_string_is_dropped():
    slots = filled(episode(0, max_tokens=30, stop_strings=("bcabca",), top_logprobs=1))
    tokens = np.array([1, 3, 3, 2, 2, 2], np.int32)[:, None].repeat(4, axis=1)
    assert take(slots, tokens, [6, 0, 0, 0]) == [0]
    done = slots.completion(0, 1)
    assert (done.tokens.tolist(), done.finish) == ([1, 3, 3], "stop")
    assert flow(slots).progress.held[0] == 6
    assert flow(slots).progress.drawn[0] == 3
    assert done.top is not None
    assert len(done.top[0]) == 3


def test_what_was_sampled_for_a_turn_that_is_over_is_dropped():
    """A dispatch was sent before the last one was read, in which slot 0 came to a stop string and slot 1 to its end."""
    slots = filled(
        episode(0, max_tokens=30, stop_strings=("ab",)), episode(1, max_tokens=2), episode(2, max_tokens=9), number=3
    )
    before, every = slots.generations.copy(), np.arange(3)
    assert slots.take(every, before, draws(np.full((2, 3), 2, np.int32)), np.array([2, 2, 2])) == [0, 1]
    slots.release(1)
    slots.admit(1, episode(3, max_tokens=5))
    assert slots.take(every, before, draws(np.full((3, 3), 1, np.int32)), np.array([3, 0, 3])) == []
    assert slots.completion(0, 1).tokens.tolist() == [2]
    assert slots.new(2).tolist() == [1, 1, 1]
    assert flow(slots).progress.held.tolist() == [4, 3, 8]


def test_the_host_counts_where_a_turn_begins_and_the_device_until_it_ends():
    slots = filled(episode(0, max_tokens=30, stop_ids=(9,)), episode(1, max_tokens=9), number=3)
    slots.admit(2, episode(2, max_tokens=4))
    # The last slot waits for its prompt: nothing is left of it, whatever the device has.
    assert (flow(slots).fresh.tolist(), flow(slots).fresh.tolist()) == ([True] * 3, [False, False, True])
    assert flow(slots).progress.left.tolist() == [30, 9, 0]
    slots.start(2)
    assert take(slots, np.full((1, 3), 9, np.int32), [1, 1, 0]) == [0]
    assert (flow(slots).fresh.tolist(), flow(slots).fresh.tolist()) == ([True, False, True], [True, False, False])
    assert flow(slots).progress.left.tolist() == [0, 8, 4]
