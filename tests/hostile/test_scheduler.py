"""Requests that come, go and want more room than there is, at any moment: the model is a list of who waits."""

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.hostile.attack import attack
from tests.marks import slow
from tests.rollout.engine.test_arrivals import LENGTH, made
from tests.tiny_models import one_device, tokens
from tests.trainers import PLAIN
from tunix.rollout.engine.batch import Arrivals
from tunix.rollout.engine.shapes import page_bytes
from tunix.types import Completion, Request, Sampling

PROMPTS = tokens(0, 4, 30) % PLAIN.vocab_size
REQUEST = st.tuples(st.integers(0, 3), st.sampled_from([1, 5, 16, 30]), st.sampled_from([1, 3, 9, 30]))
"""Which prompt, how many of its tokens, and how many to answer with."""
ROUNDS = st.lists(st.tuples(st.lists(REQUEST, max_size=4), st.lists(st.integers(0, 20), max_size=2)), max_size=8)


@pytest.mark.parametrize("number", [8, *slow([2_000])])
def test_every_request_is_answered_once(number: int):
    """Three slots, and pages for less than two of the longest: some are stopped to make room, and go on. Whoever is not
    given up is answered, in as many rounds as tokens are wanted at most, with the tokens of every other time."""
    sizes = made().sizes
    each, ten = page_bytes(PLAIN, one_device(), sizes), [10] * len(sizes.pages)  # eight pages for the longest, and two
    engine = made(room=sum(2.0 * size * number for size, number in zip(each, ten, strict=True)))
    assert [*engine.sizes.pages] == ten
    known: dict[tuple[int, int, int, int], list[int]] = {}

    def serves(rounds: list[tuple[list[tuple[int, int, int]], list[int]]]) -> None:
        asked, gone, done, pulls = list[tuple[int, int, int]](), set[int](), dict[int, Completion](), 0
        patience = len(rounds) + 8 * sum(length + most for new, _ in rounds for _, length, most in new) + 8

        def pull(is_idle: bool) -> Arrivals | None:
            nonlocal pulls
            pulls += 1
            assert pulls < patience, "somebody waits for ever"
            if pulls > len(rounds):
                return None if is_idle else Arrivals()
            new, leaving = rounds[pulls - 1]
            requests = [
                Request(PROMPTS[prompt, :length], Sampling(max_tokens=most), 7, len(asked) + i)
                for i, (prompt, length, most) in enumerate(new)
            ]
            asked.extend(new)
            left = {number for number in leaving if number < len(asked) and number not in done}
            gone.update(left)
            return Arrivals(requests, left)

        def finished(number: int, completion: Completion) -> bool:
            assert number not in done, "answered twice"
            done[number] = completion
            return False

        engine.serve(pull, finished, lambda *_: None)
        assert done.keys() | gone == set(range(len(asked)))
        for number, completion in done.items():
            prompt, length, most = asked[number]
            assert len(completion.tokens) == min(most, LENGTH - length)
            again = known.setdefault((prompt, length, most, number), completion.tokens.tolist())
            np.testing.assert_array_equal(completion.tokens, again)

    attack(serves, ROUNDS, number)
