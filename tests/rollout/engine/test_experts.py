"""The experts that the engine records for each token, against transformers' routers on the same tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rollout.engine.test_arrivals import turns
from tests.rollout.engine.test_engine_parity import prompts, small_engine
from tests.tiny_models import CASES, Case, load, reference_folder
from tests.trainers import PLAIN
from tunix.errors import UserError
from tunix.models.model import Model
from tunix.rollout.backlog import decoded, encoded
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.experts import Known, Recorded, of_sequence
from tunix.types import Completion, Sampling, requests_of

pytestmark = pytest.mark.models

SAMPLING = Sampling(max_tokens=12)
QWEN = Case(
    "qwen3_moe",
    {"num_hidden_layers": 2, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "hidden_size": 16},
)


def chosen_by(reference, prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """`[T L k]` the experts that transformers' routers choose, in ascending order."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]))[None].long()
    with torch.no_grad():
        logits = reference(ids, output_router_logits=True).router_logits
    k = reference.config.num_experts_per_tok
    return np.stack([np.sort(one.reshape(ids.shape[1], -1).topk(k).indices.numpy()) for one in logits], axis=1)


def assert_those_of(reference, asked, completions) -> None:
    for prompt, completion in zip(asked, completions, strict=True):
        assert completion.experts is not None
        assert completion.experts.dtype == np.int16
        np.testing.assert_array_equal(np.sort(completion.experts), chosen_by(reference, prompt, completion))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> tuple:
    folder = tmp_path_factory.mktemp("qwen")
    reference = reference_folder(QWEN, folder)
    return reference, *load(folder)


@pytest.fixture(scope="module")
def engine(qwen) -> Engine:
    return small_engine(*qwen[1:], page=32)


def test_a_conversation_whose_pages_are_kept(qwen):
    """The experts of what is not computed again come from the sequence that had it, each token's own."""
    served = small_engine(*qwen[1:], page=8)
    completions, computed, requests = turns(served, 4)
    assert computed[1:] == [3, 3, 3]
    assert_those_of(qwen[0], [request.prompt for request in requests], completions)


def test_prompts_in_pieces_shared_prompts_and_sampled_tokens(qwen, engine):
    # Three slots for eight requests: prompts are computed in pieces of 16, followed, and kept for those that wait.
    asked = prompts(97)
    found = engine.sample(asked, 2, SAMPLING, seed=5)
    assert_those_of(qwen[0], [p for p in asked for _ in range(2)], [x for group in found for x in group])


def test_an_environments_tokens(qwen, engine):
    asked = prompts(97, (5, 9))
    stops = replace(SAMPLING, stop_ids=tuple(range(3, 19)), max_tokens=24)
    new = np.array([61, 7, 11], np.int32)
    found = engine.run(requests_of(asked, 1, stops, seed=5), lambda _, x: new if len(x.turns) < 3 else None)
    assert any(len(x.turns) > 1 for x in found), "no turn stopped: the test shows nothing"
    assert_those_of(qwen[0], asked, found)


def test_a_paused_request_keeps_what_was_recorded(qwen, engine):
    asked = prompts(97, (5, 9))
    requests = requests_of(asked, 1, SAMPLING, seed=5)
    paused, other = engine.run(requests, pause=lambda sent: sent == 1)
    assert 0 < len(paused.tokens) < 12
    assert paused.finish == "paused"
    marked = replace(paused, experts=np.full_like(paused.experts, 6))
    first, second = engine.run([replace(x, so_far=y) for x, y in zip(requests, (marked, other), strict=True)])
    before = len(asked[0]) + len(paused.tokens)
    assert np.all(first.experts[:before] == 6)
    np.testing.assert_array_equal(np.sort(first.experts[before:]), chosen_by(qwen[0], asked[0], first)[before:])
    assert_those_of(qwen[0], asked[1:], [second])


@pytest.mark.slow
def test_layers_with_states_guesses_and_sinks(tmp_path):
    cases = ((CASES["qwen3_5_moe-five-of-two"], {}), (QWEN, {"speculate": 2}), (CASES["gpt_oss-five-of-two"], {}))
    for number, (case, options) in enumerate(cases):
        folder = tmp_path / str(number)
        reference = reference_folder(case, folder)
        small = small_engine(*load(folder), **options)
        asked = [*prompts(97), np.array([5, 6] * 8, np.int32)]
        found = small.sample(asked, 2, replace(SAMPLING, temperature=0.0), seed=5)
        assert_those_of(reference, [p for p in asked for _ in range(2)], [x for group in found for x in group])


def test_a_dense_model_records_nothing():
    model = Model(PLAIN)
    assert model.config.routed is None
    assert of_sequence(3, None, []) is None


def test_unknown_tokens_are_filled_in_and_known_ones_kept():
    # A piece with positions 1 to 3 of a prompt of 2 and a completion of 3, of which the last was never recorded.
    piece = Recorded(np.arange(10, 18, dtype=np.int16).reshape(1, 4, 2, 1))
    after = np.array([[[1], [2]], [[-1], [-1]], [[-1], [-1]]], np.int16)
    found = of_sequence(2, after, [Known(piece, 0, 1, 3, 1)])
    # Row 0 of the piece from column 1 on: [12 13], [14 15], [16 17] are of positions 1, 2 and 3.
    np.testing.assert_array_equal(found[..., 0], [[-1, -1], [12, 13], [1, 2], [16, 17], [-1, -1]])


def test_a_completion_is_saved_with_its_experts():
    tokens = np.array([4, 5], np.int32)
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    one = Completion(tokens, -tokens.astype(np.float32), "stop", tokens, SAMPLING, ((0, 2),), experts=experts)
    back = decoded(json.loads(json.dumps(encoded(one))), SAMPLING)
    np.testing.assert_array_equal(back.experts, experts)
    assert back.experts.dtype == np.int16
    assert decoded(encoded(replace(one, experts=None)), SAMPLING).experts is None


def test_a_completion_is_saved_with_the_ids_that_it_was_drawn_from():
    tokens, sampling = np.array([4, 5, 9], np.int32), Sampling(max_tokens=3, top_k=2).for_training
    top = np.array([[4, 7], [5, 1], [0, 0]], np.int32), np.array([[0, -np.inf], [-0.1, -2.4], [0, 0]], np.float32)
    one = Completion(tokens, -tokens.astype(np.float32), "stop", tokens, sampling, ((0, 2),), top=top)
    np.testing.assert_array_equal(one.candidates, [[4, -1], [5, 1], [-1, -1]])  # an environment wrote the last one
    back = decoded(json.loads(json.dumps(encoded(one))), sampling)
    np.testing.assert_array_equal(back.candidates, one.candidates)
    assert replace(one, sampling=replace(sampling, top_k=0)).candidates is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"top_p": 0.9}, "top_p: 0.9: .*set top_k as well"),
        ({"min_p": 0.1}, "min_p: 0.1: "),
        ({"top_k": 65}, "64 or less"),
    ],
)
def test_draws_that_cannot_be_replayed_are_refused(settings, why):
    with pytest.raises(UserError, match=why):
        _ = Sampling(**settings).for_training
