"""The engine with pictures of several shapes: rope turns what follows a picture to other places than its own.

A picture of up to 12 soft tokens is computed in one piece of 16 or 64 tokens; DeltaNets keep their states meanwhile.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.marks import slow
from tests.models.test_qwen_vision import given, load, made, sequence
from tests.rollout.engine.test_engine_pictures import (
    assert_nothing_compiles_after_warm_up,
    assert_spread_samples_alike,
    assert_trainers_logprobs,
    engine,
    requests,
    sample,
)
from tunix.errors import UserError
from tunix.rollout.engine.pieces import Job
from tunix.types import Sampling

pytestmark = pytest.mark.models

__all__ = ["made"]

PROMPTS = (
    sequence(3, 40, (6, 3, 4), (25, 1, 5)),
    sequence(4, 11),
    sequence(5, 15, (3, 4, 2)),
    sequence(6, 33, (3, 1, 1), (6, 1, 2), (10, 2, 1), (22, 3, 3)),
)


@pytest.mark.parametrize("piece", [*slow([16]), 64])
def test_logprobs_are_those_of_the_trainer_whatever_the_pieces(made, piece):
    """Prompts with one to four pictures and without, two completions of each, in few slots."""
    model, params = load(made[0])
    found = sample(engine(model, params, piece=piece), PROMPTS, 2, Sampling(max_tokens=8))
    assert_trainers_logprobs(model, params, PROMPTS, found)
    assert any(len({tuple(one.tokens) for one in group}) > 1 for group in found)


def test_greedy_tokens_are_those_of_transformers(made):
    model, params = load(made[0])
    found = sample(engine(model, params), PROMPTS, 1, Sampling(max_tokens=8, temperature=0.0))
    for prompt, (ours,) in zip(PROMPTS, found, strict=True):
        made[1].model.rope_deltas = None
        theirs = made[1].generate(**given(prompt), max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert ours.tokens.tolist() == theirs[0, len(prompt.tokens) :].tolist()


def test_a_request_that_lost_its_pages_sees_its_pictures_again(made):
    model, params = load(made[0])
    tight = engine(model, params, max_length=56, room=115_000.0)
    assert tight.sizes.pages[-1] < 4 * 7, "pages are short"
    found = sample(tight, PROMPTS, 1, Sampling(max_tokens=14))
    assert_trainers_logprobs(model, params, PROMPTS, found)


def test_a_paused_request_goes_on_where_it_was(made):
    model, params = load(made[0])
    (whole,), sampling = sample(engine(model, params), PROMPTS[:1], 1, Sampling(max_tokens=10)), Sampling(max_tokens=10)
    short = [
        replace(whole[0], tokens=whole[0].tokens[:4], logprobs=whole[0].logprobs[:4], versions=whole[0].versions[:4])
    ]
    first = replace(short[0], finish="paused", turns=((0, 4),))
    again = [replace(requests(PROMPTS[:1], 1, sampling)[0], so_far=first)]
    found = engine(model, params).run(again)
    assert found[0].tokens.tolist() == whole[0].tokens.tolist()
    np.testing.assert_allclose(found[0].logprobs, whole[0].logprobs, atol=1e-5)


def test_nothing_compiles_after_warm_up(made):
    assert_nothing_compiles_after_warm_up(*load(made[0]), PROMPTS)


def test_a_piece_ends_before_a_picture_that_it_would_cut_or_has_no_room_for():
    """Of the prompt with four pictures, at 3, 6 to 7, 10 to 11 and 22 to 30."""
    whole = PROMPTS[3]
    for start, number, room, expected in (
        (0, 16, 4, 16),
        (0, 16, 3, 16),
        (0, 16, 2, 10),
        (0, 16, 1, 6),
        (0, 16, 0, 3),
        (0, 7, 4, 6),  # of the second picture one token would be left
        (6, 5, 4, 4),
        (12, 21, 1, 21),
        (31, 2, 0, 2),
    ):
        job = Job(0, whole.tokens[start:], start, pictures=whole.pictures)
        assert job.whole(number, room) == expected, (start, number, room)


def test_pictures_without_places_for_rope_are_refused(made):
    model, params = load(made[0])
    (prompt,) = (replace(one, pictures=replace(one.pictures, rope=None)) for one in PROMPTS[:1])
    with pytest.raises(UserError, match="pictures without places for rope"):
        sample(engine(model, params), (prompt,), 1, Sampling(max_tokens=2))


@pytest.mark.slow
def test_eight_devices_sample_what_one_does(made):
    assert_spread_samples_alike(*load(made[0]), made[0], PROMPTS)
