"""Answers of environments: quick ones come in the second round, in the order of slots; slow ones stop no other."""

import threading

import numpy as np

from tunix.rollout.engine.batch import Replies
from tunix.types import Completion, Sampling

STOPPED = Completion(
    np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", np.zeros(1, np.int32), Sampling(), ((0, 1),)
)


def taken(replies: Replies) -> list[tuple[int, list[int] | None]]:
    return [(slot, None if answer is None else answer.tolist()) for slot, answer in replies.arrived()]


def test_quick_answers_come_in_the_second_round():
    """However long the round between takes: what is computed together does not depend on the clock."""
    replies = Replies(lambda number, completion: None if number == 8 else np.full(1, number, np.int32))
    assert replies.ask(3, 7, STOPPED)
    assert replies.ask(1, 8, STOPPED)
    replies.wait()
    assert taken(replies) == []
    assert replies.ask(2, 9, STOPPED)
    assert taken(replies) == [(1, None), (3, [7])]
    assert taken(replies) == [(2, [9])]
    assert not replies
    replies.close()


def test_a_slow_answer_stops_no_other():
    go_on = threading.Event()
    replies = Replies(lambda number, completion: np.full(1, number, np.int32) if number or go_on.wait() else None)
    replies.ask(0, 0, STOPPED)
    replies.ask(1, 1, STOPPED)
    assert taken(replies) == []
    assert taken(replies) == [(1, [1])]  # it has waited for the other one, in vain
    assert taken(replies) == []
    assert 0 in replies
    go_on.set()
    replies.wait()
    assert taken(replies) == [(0, [0])]
    replies.close()
