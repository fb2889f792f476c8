"""Sequences that have ended, by what they begin with."""

from dataclasses import replace

import numpy as np
import pytest

from tunix.rollout.engine.page_tables import WORTH, PageTables
from tunix.rollout.engine.shapes import Sizes

PAGE, LENGTH = 16, 64
BARE = Sizes(4, LENGTH, 64, PAGE, 8, 0, 0, (None,), (400,), 1, "bfloat16")


def in_common(sequence: np.ndarray, other: np.ndarray) -> int:
    pairs = zip(sequence.tolist(), other.tolist(), strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(sequence), len(other)))


@pytest.mark.parametrize("window", [None, 24])
def test_of_all_kept_sequences_that_with_most_in_common_is_found(window: int | None):
    """Against a comparison with every sequence that was ever kept: two letters, so that many begin alike."""
    sizes = replace(BARE, windows=(window,))
    rng, tables, kept, number = np.random.default_rng(0), PageTables(sizes), list[tuple[np.ndarray, str | None]](), 0
    for turn in range(60):
        tokens, adapter = rng.integers(0, 2, rng.integers(1, LENGTH)).astype(np.int32), rng.choice(["a", None])
        if kept and turn % 3:  # goes on from one before
            before = kept[rng.integers(len(kept))][0]
            tokens = np.concatenate([before[: rng.integers(1, len(before) + 1)], tokens])[:LENGTH]
        most = max((in_common(x, tokens[:-1]) for x, name in kept if name == adapter), default=0)
        if (shared := tables.find(tokens, adapter)) is None:
            assert most < PAGE // WORTH or window is not None
        else:
            ended, common = shared
            assert ended.adapter == adapter
            assert common == in_common(ended.tokens, tokens[:-1]) >= PAGE // WORTH
            assert common == most or window is not None
            first = 0 if window is None else max(0, common - window + 1) // PAGE
            assert {*range(first, -(-common // PAGE))} <= ended.held[0].keys()
            number += 1
        tables.cover(0, 0, len(tokens))
        tables.retain(0, tokens, adapter, None)
        tables.release(0)
        kept.append((tokens, adapter))
    assert number > 30


def test_what_a_sequence_continues_goes_and_what_it_repeats_stays():
    tables, tokens = PageTables(BARE), np.arange(40, dtype=np.int32)
    for length in (20, 40, 30):
        tables.cover(0, 0, length)
        tables.retain(0, tokens[:length], None, None)
        tables.release(0)
    assert [len(ended.tokens) for ended in tables._ended] == [40]
    assert tables.find(tokens, None) == (next(iter(tables._ended)), 39)
    # The pages of all that went are free again: three of 400 are held.
    assert len(tables._pools[0][0].free) == 397
