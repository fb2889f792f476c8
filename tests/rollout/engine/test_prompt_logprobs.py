"""Log-probs of a prompt's own tokens, as the training code computes them; whatever else is asked for at the time."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout.engine.test_arrivals import LENGTH, made, same, serve
from tests.rollout.engine.test_engine_parity import prompts, random_params
from tests.tiny_models import one_device
from tests.trainers import PLAIN, RICH
from tunix.errors import UserError
from tunix.inference.load import token_scores
from tunix.models.model import Model
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.slots import Slots
from tunix.types import Completion, Request, Sampling, Sequence

ASKS = Sampling(max_tokens=3, temperature=0.0, prompt_logprobs=True, top_logprobs=2)
ALONE = replace(ASKS, max_tokens=0)


def check(config: Any, asked: SequenceOf[np.ndarray], completions: SequenceOf[Completion]) -> None:
    """Against the training code, and the alternatives against all logits."""
    model = Model(config)
    params, several = random_params(model), [prompt for prompt in asked if len(prompt) > 1]
    sequences = [Sequence(prompt, np.ones(len(prompt), bool)) for prompt in several]
    expected = iter(token_scores(model, params, one_device(), sequences))
    tokens = jnp.asarray([np.pad(prompt, (0, LENGTH - len(prompt))) for prompt in asked])
    places = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    hidden, _ = model.forward(params, tokens, places, jnp.ones_like(tokens))
    all_logits = np.asarray(model.logits(params, hidden)).astype(np.float64)
    for prompt, completion, logits in zip(asked, completions, all_logits, strict=True):
        scores, logits = completion.prompt_scores, logits[: len(prompt) - 1]
        assert scores is not None
        np.testing.assert_allclose(scores.logprobs, next(expected) if len(prompt) > 1 else [0], atol=1e-5)
        ranked = np.sort(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[:, ::-1]
        np.testing.assert_allclose(scores.top_logprobs[1:], ranked[:, :2], atol=1e-4)
        np.testing.assert_array_equal(scores.top_ids[1:, 0], logits.argmax(-1))


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_prompts_are_scored_as_in_training(config: Any):
    """Shorter and longer than a piece of 16 tokens, and of every length that there is room for."""
    asked = prompts(config.vocab_size, (1, 5, 40, 16, 64, 33))
    engine = made(config)
    completions = engine.run([Request(prompt, ALONE, 0) for prompt in asked])
    check(config, asked, completions)
    assert {(len(x.tokens), x.finish) for x in completions} == {(0, "length")}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return made()


def test_they_change_nothing_else(engine: Engine):
    """Beside requests with the same prompts, which share theirs, and after these have ended."""
    asked = prompts(PLAIN.vocab_size, (30, 30, 12))
    requests = [Request(prompt, sampling, 7, i) for i, prompt in enumerate(asked) for sampling in (ASKS, ALONE)]
    plain = [Request(prompt, Sampling(max_tokens=3, temperature=0.0), 7, i) for i, prompt in enumerate(asked)]
    done, _, _ = serve(engine, [plain, requests, (), (), requests, plain])
    assert len(done) == 18
    same([done[i] for i in (0, 1, 2)], engine.run(plain))
    came = [*plain, *requests, *requests, *plain]
    scored = [number for number, request in enumerate(came) if request.sampling.prompt_logprobs]
    check(PLAIN, [came[i].prompt for i in scored], [done[i] for i in scored])
    assert all((done[i].prompt_scores is None) == (i not in scored) for i in done)
    assert all(len(done[i].tokens) == came[i].sampling.max_tokens for i in done)


def test_they_are_whole_where_pages_run_short(monkeypatch: pytest.MonkeyPatch):
    """Requests that are preempted, and computed again with what they have sampled."""
    suspended, leave = [], Slots.suspend
    monkeypatch.setattr(
        Slots, "suspend", lambda self, slot, version: suspended.append(slot) or leave(self, slot, version)
    )
    asked = prompts(PLAIN.vocab_size, (20, 17, 25))
    requests = [Request(prompt, replace(ASKS, max_tokens=30), 7, i) for i, prompt in enumerate(asked)]
    engine = made(room=45_000.0)
    completions = engine.run(requests)
    check(PLAIN, asked, completions)
    assert [len(x.tokens) for x in completions] == [30] * 3
    assert suspended


def test_nothing_is_sampled_only_where_the_prompt_is_scored(engine: Engine):
    with pytest.raises(UserError, match="max_tokens is 0; it must be at least 1"):
        engine.run([Request(prompts(10, (3,))[0], Sampling(max_tokens=0), 0)])
    with pytest.raises(UserError, match="prompt 0 has 65 tokens"):
        engine.run([Request(prompts(10, (65,))[0], ALONE, 0)])
