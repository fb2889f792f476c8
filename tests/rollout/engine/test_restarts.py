"""Episodes whose next turn does not begin with all before: further transcripts of a request, in one slot."""

from itertools import pairwise

import numpy as np
import pytest

from tests.marks import slow
from tests.rollout.engine.test_engine_parity import full_logprobs, prompts, random_params, small_engine
from tests.tiny_models import CASES, load, reference_folder
from tests.trainers import PLAIN, RICH
from tunix.models.model import Model
from tunix.types import Completion, Request, Restart, Sampling

pytestmark = pytest.mark.models
TURNS = 4
STOPS = tuple(range(0, 96, 6))
"""A sixth of the vocabulary, so that turns are short."""


def transcripts(prompt: np.ndarray, completion: Completion) -> list[tuple[np.ndarray, list[tuple[int, int]]]]:
    """`[T]` tokens of each, and the turns in it."""
    whole, shift = np.concatenate([prompt, completion.tokens]), len(prompt)
    places = [0, *(shift + x for x in completion.restarts), len(whole)]
    found = []
    for start, end in pairwise(places):
        turns = [(a + shift - start, b + shift - start) for a, b in completion.turns]
        found.append((whole[start:end], [(a, b) for a, b in turns if a >= 0 and b <= end - start]))
    return found


def next_prompt(prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """As a template that leaves all but the last two tokens of a turn out: the transcript before it less its last
    token, these two, and a question."""
    before, turns = transcripts(prompt, completion)[-1]
    start, end = turns[-1]
    return np.concatenate([before[: start - 1], before[max(start, end - 2) : end], [4, 9]]).astype(np.int32)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Model(PLAIN), {}),
        (Model(RICH), {"speculate": 3}),
        *slow(
            [
                (Model(PLAIN), {"page": 4, "memory": None}),
                (Model(RICH), {}),
                (Model(PLAIN), {"speculate": 2, "ahead": 0}),
                ("qwen3_5-wide-values-tied", {}),
                ("gemma3-dual-rope", {}),
                ("qwen3_moe-seven-of-three", {}),
            ]
        ),
    ],
)
def test_each_transcript_has_the_log_probs_of_a_pass_over_it_alone(model, options, tmp_path):
    if isinstance(model, str):
        reference_folder(CASES[model], tmp_path)
        model, params = load(tmp_path)
    else:
        params = random_params(model)
    options = {name: x for name, x in options.items() if x is not None}
    engine = small_engine(model, params, slots=2, max_length=160, **options)
    asked = [x for x in prompts(model.config.vocab_size, (3, 17, 9)) for _ in range(2)]
    sampling = Sampling(max_tokens=40, stop_ids=STOPS)
    requests = [Request(prompt, sampling, 5, index) for index, prompt in enumerate(asked)]

    def reply(number: int, so_far: Completion) -> np.ndarray | Restart | None:
        if len(so_far.turns) == TURNS:
            return None
        if len(so_far.turns) == 2:  # this one goes on with all before
            return np.array([8, 8], np.int32)
        return Restart(next_prompt(asked[number], so_far))

    found = engine.run(requests, reply)
    assert any(len(x.turns) == TURNS and len(x.restarts) == 2 for x in found)
    for prompt, completion in zip(asked, found, strict=True):
        assert completion.drawn.sum() <= 40
        logprobs = np.concatenate([np.zeros(len(prompt)), completion.logprobs])
        at = 0
        for tokens, turns in transcripts(prompt, completion):
            nothing = np.zeros(0, np.float32)
            rest = Completion(tokens[1:], nothing, "stop", nothing.astype(np.int32), sampling, ())
            right = full_logprobs(model, params, tokens[:1], rest)
            drawn = np.zeros(len(tokens), bool)
            for start, end in turns:
                drawn[start:end] = True
            np.testing.assert_allclose(logprobs[at : at + len(tokens)][drawn], right[drawn], atol=1e-4)
            at += len(tokens)
    # Nothing of an earlier transcript is left behind in pages: the most likely tokens are those of the prompt alone.
    greedy = Sampling(max_tokens=12, temperature=0.0, stop_ids=STOPS)

    def once(number: int, so_far: Completion) -> Restart | None:
        return Restart(next_prompt(asked[number], so_far)) if len(so_far.turns) == 1 else None

    for prompt, completion in zip(asked, engine.run([Request(x, greedy, 5) for x in asked], once), strict=True):
        if completion.restarts:
            tokens, ((start, end),) = transcripts(prompt, completion)[-1]
            (alone,) = engine.run([Request(tokens[:start], greedy, 5)])
            np.testing.assert_array_equal(alone.tokens[: end - start], tokens[start:end])
            if completion.experts is not None and alone.experts is not None:  # of each transcript at its places
                begin, known = len(prompt) + completion.restarts[-1], end - 1
                np.testing.assert_array_equal(completion.experts[begin : begin + known], alone.experts[:known])
                assert completion.experts[begin : begin + known].min() >= 0


def test_no_transcript_begins_where_there_is_no_room():
    model = Model(PLAIN)
    engine = small_engine(model, random_params(model), max_length=48)
    (prompt,) = prompts(96, (5,))
    (found,) = engine.run(
        [Request(prompt, Sampling(max_tokens=30, stop_ids=STOPS), 5)],
        lambda *_: Restart(np.arange(3, 46, dtype=np.int32)),
    )
    assert (found.finish, found.restarts, len(found.turns)) == ("length", (), 1)
