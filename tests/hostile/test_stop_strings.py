"""Stop strings are found at the token that completes them, however many tokens come at a time and wherever tokens cut
characters: as by reading all of the text after each token."""

import numpy as np
from hypothesis import strategies as st

from tests.hostile.attack import attack, numbers
from tunix.rollout.engine.request import SPARE, StopText

LETTERS = st.sampled_from(["a", "b", "ab", "é", "日", "\n", " ", "😀", "\0", "<|end|>"])
TEXTS = st.lists(LETTERS, min_size=1, max_size=80).map("".join)
CASES = st.tuples(
    TEXTS,
    st.lists(st.lists(LETTERS, min_size=1, max_size=4).map("".join), min_size=1, max_size=3),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.integers(0, 400), max_size=2 * SPARE),
)
HIDDEN = 256
"""A token that is not shown."""


def decode(ids: list[int]) -> str:
    return bytes(byte for byte in ids if byte != HIDDEN).decode("utf-8", "replace")


def finds(case: tuple[str, list[str], list[int], list[int]]) -> None:
    text, strings, sizes, hidden = case
    ids = [*text.encode()]
    for place in hidden:
        ids.insert(place % (len(ids) + 1), HIDDEN)
    ends = (end for end in range(1, len(ids) + 1) if any(string in decode(ids[:end]) for string in strings))
    first, looking, begin = next(ends, None), StopText(strings, decode), 0
    for i in range(len(ids)):
        end = min(begin + sizes[i % len(sizes)], len(ids))
        found = looking.find(np.array(ids[:end]), end - begin)
        assert found == (first if first is not None and first <= end else None)
        if found is not None or end == len(ids):
            return
        begin = end


@numbers
def test_a_stop_string_ends_where_it_is_complete(number: int):
    attack(finds, CASES, number)
