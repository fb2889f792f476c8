"""Weights that are held while others are published, and calls that are paused and go on."""

from dataclasses import replace

import jax
import numpy as np

from tests.rollout.engine.test_engine_parity import full_logprobs, prompts, random_params, small_engine
from tests.tiny_models import one_device
from tests.trainers import PLAIN
from tunix.models.model import Model
from tunix.types import Completion, Sampling, requests_of

MODEL = Model(PLAIN)
SAMPLING = Sampling(max_tokens=12)


def other_params():
    return MODEL.init(jax.random.key(9), dict.fromkeys(MODEL.shapes, "float32"), one_device())


def assert_same(ones: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.versions, other.versions)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-6)


def test_what_is_held_samples_as_before_whatever_is_published():
    engine = small_engine(MODEL, random_params(MODEL))
    requests = requests_of(prompts(96), 2, SAMPLING, seed=3)
    before, held = engine.run(requests), engine.hold()
    engine.publish(other_params(), 2)
    assert_same(engine.run(requests, held=held), before)
    after = engine.run(requests)
    assert all((one.versions == 2).all() for one in after)
    assert [one.tokens.tolist() for one in after] != [one.tokens.tolist() for one in before]


def test_a_call_that_is_paused_and_continued_samples_the_same_tokens():
    engine = small_engine(MODEL, random_params(MODEL))
    requests = requests_of(prompts(96), 1, SAMPLING, seed=3)
    whole = engine.run(requests)
    asked: list[int] = []
    paused = engine.run(requests, pause=lambda sent: asked.append(sent) or sent == 1)
    assert asked[-1] == 1
    assert any(one.finish == "paused" and len(one.tokens) > 0 for one in paused)
    left = [i for i, one in enumerate(paused) if one.finish == "paused"]
    found = engine.run([replace(requests[i], so_far=paused[i]) for i in left])
    assert_same(
        [*found, *(one for one in paused if one.finish != "paused")],
        [*(whole[i] for i in left), *(one for i, one in enumerate(whole) if i not in left)],
    )


def test_one_that_goes_on_under_other_weights_has_a_version_for_each_token():
    """Each token's log-prob is that of the weights which sampled it, given all tokens before it."""
    old, new = random_params(MODEL), other_params()
    engine = small_engine(MODEL, old)
    (request,) = requests_of(prompts(96)[:1], 1, SAMPLING, seed=3)
    (first,) = engine.run([request], pause=lambda sent: sent == 1)
    assert first.finish == "paused"
    engine.publish(new, 2)
    (whole,) = engine.run([replace(request, so_far=first)])
    number = len(first.tokens)
    assert 0 < number < len(whole.tokens)
    assert whole.versions.tolist() == [1] * number + [2] * (len(whole.tokens) - number)
    np.testing.assert_array_equal(whole.tokens[:number], first.tokens)
    start = len(prompts(96)[0])
    for params, part in ((old, slice(0, number)), (new, slice(number, None))):
        expected = full_logprobs(MODEL, params, prompts(96)[0], whole)[start : start + len(whole.tokens)]
        np.testing.assert_allclose(whole.logprobs[part], expected[part], atol=1e-5)
