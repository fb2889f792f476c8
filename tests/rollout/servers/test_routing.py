"""The experts of a mixture that a server samples from: they come back with the tokens, as our own engine records them.

The stand-in answers through `tunix serve`, so that what is read here is what that writes.
"""

import base64
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fake_vllm import LENGTH, FakeVLLM, Manners, served
from tests.rollout.engine.test_experts import chosen_by
from tests.rollout.servers.conftest import PROMPTS, Policy, sampler_of
from tests.tiny_models import Case, reference_folder
from tunix.config import MeshConfig
from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import UserError
from tunix.hf.source import loaded, pretrained
from tunix.mesh import build_mesh
from tunix.rollout.servers import sampler
from tunix.rollout.servers.probe import TEXT
from tunix.rollout.servers.protocol import (
    FIELD,
    Answer,
    Ask,
    Expected,
    Routing,
    Unfit,
    experts_of,
    read_experts,
    written_experts,
)
from tunix.rollout.servers.sampler import ServerSampler, Turns
from tunix.rollout.servers.server import Server
from tunix.types import Completion, Request, Sampling, requests_of

pytestmark = pytest.mark.models

ROUTING = Routing(2, 3, 7)
"""Layers, experts of a token, experts of a layer."""
CASE = Case(
    "qwen3_moe",
    {
        "vocab_size": 272,
        "num_hidden_layers": 2,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "hidden_size": 16,
    },
)
SETTINGS = Sampling(max_tokens=8, temperature=0.7)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model, and its folder."""
    folder = tmp_path_factory.mktemp("mixture")
    return reference_folder(CASE, folder), folder


@pytest.fixture(scope="module")
def policy(mixture: tuple[Any, Path]) -> Policy:
    folder = mixture[1]
    bytes_tokenizer("llama3").save(folder)
    source, mesh = pretrained(str(folder)), build_mesh(MeshConfig(), jax.devices()[:1])
    assert source.tokenizer is not None
    ids = tuple(source.tokenizer.encode(TEXT))
    return Policy(folder, *loaded(source, "float32", mesh), mesh, source.tokenizer.decode, ids)


@pytest.fixture(scope="module")
def server(policy: Policy) -> Iterator[tuple[FakeVLLM, str]]:
    with ExitStack() as stack:
        fake = FakeVLLM(policy.folder)
        yield fake, stack.enter_context(served(fake))


@pytest.fixture
def connect(policy: Policy, server: tuple[FakeVLLM, str], tmp_path: Path) -> Iterator[Callable[..., ServerSampler]]:
    """A new sampler on the server, which makes of the experts what it is told to."""
    fake, url = server

    def connected(routed: Callable[[str], str | None] = str, **changes: Any) -> ServerSampler:
        fake.manners.routed = routed
        return sampler_of(policy, [url], tmp_path / "weights", routing=ROUTING, **changes)

    yield connected
    fake.manners.routed = Manners().routed


def assert_recorded(reference: Any, prompt: np.ndarray, completion: Completion) -> None:
    """All tokens have those of transformers' routers, but the last, which no layer has seen."""
    found = completion.experts
    assert found is not None
    assert found.dtype == np.int16
    np.testing.assert_array_equal(np.sort(found[:-1]), chosen_by(reference, prompt, completion)[:-1])
    assert (found[-1] == -1).all()


def test_completions_have_the_experts_that_their_tokens_used(
    mixture: tuple[Any, Path],
    policy: Policy,
    connect: Callable[..., ServerSampler],
    caplog: pytest.LogCaptureFixture,
):
    sampler = connect()
    sampler.publish(policy.params, 0)
    assert not caplog.records
    new = np.array([9, 9, 7], np.int32)
    stops = replace(SETTINGS, stop_ids=tuple(range(0, 272, 17)), max_tokens=20)
    found = sampler.run(requests_of(PROMPTS[:2], 2, stops, 5), lambda _, x: new if len(x.turns) < 3 else None)
    assert any(len(one.turns) > 1 for one in found), "no turn stopped: the test shows less"
    for prompt, one in zip([x for x in PROMPTS[:2] for _ in range(2)], found, strict=True):
        assert_recorded(mixture[0], prompt, one)


def test_a_server_that_returns_none_is_named_once_with_the_remedy(
    policy: Policy,
    connect: Callable[..., ServerSampler],
    server: tuple[FakeVLLM, str],
    caplog: pytest.LogCaptureFixture,
):
    sampler = connect(lambda _: None)
    with caplog.at_level(logging.WARNING):
        for version in (0, 1):
            sampler.publish(policy.moved(1e-3 * version), version)
    (line,) = caplog.messages
    assert server[1] in line
    assert "--enable-return-routed-experts" in line
    ((one,),) = sampler.sample(PROMPTS[:1], 1, SETTINGS, 5)
    assert one.experts is None
    assert len(one.tokens) == 8


def test_the_probe_is_computed_with_the_experts_that_the_server_says_it_used(
    policy: Policy, connect: Callable[..., ServerSampler], server: tuple[FakeVLLM, str]
):
    """Other experts give other log-probs; so does one that is named twice, which would be trained unseen."""
    with pytest.raises(UserError, match=f"{server[1]}: its log-probs of a probe differ from the trainer's"):
        connect(lambda text: written_experts((read_experts(text) + 1) % 7)).publish(policy.params, 0)
    with pytest.raises(UserError, match=f"{server[1]}: its routed_experts name an expert twice"):
        connect(lambda text: written_experts(0 * read_experts(text))).publish(policy.params, 0)


# --- What is read of an answer ----------------------------------------------------------------------------------------


def npy(array: np.ndarray) -> str:
    """As vLLM writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def some(tokens: int, seed: int = 0) -> np.ndarray:
    """Three different experts of seven for each token and both layers."""
    ranks = np.argsort(np.random.default_rng(seed).random((tokens, 2, 7)), axis=-1)
    return ranks[..., :3].astype(np.int16)


EXPECTED = Expected(272, LENGTH, None, 1.0, 1e-4, ROUTING)
ASK = Ask("one", (5, 6, 7, 8), {"max_tokens": 2}, EXPECTED)
RIGHT = some(5)
"""Of four tokens of a prompt and two sampled ones."""


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_any_integers_are_read(dtype: Any):
    found = experts_of({FIELD: npy(RIGHT.astype(dtype))}, ASK, 2)
    assert found is not None
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, RIGHT)
    assert experts_of({FIELD: None}, ASK, 2) is None
    assert experts_of({FIELD: "of another model"}, replace(ASK, expected=replace(EXPECTED, routing=None)), 2) is None


@pytest.mark.parametrize("most", [200, 300])
def test_what_we_write_is_vllms_form(most: int):
    unknown = np.array([[[-1, -1], [most, 0]]], np.int16)
    for given in (unknown, unknown[:, 1:]):
        text = written_experts(given)
        again = np.load(io.BytesIO(base64.b64decode(text)))
        np.testing.assert_array_equal(again, given)
        np.testing.assert_array_equal(read_experts(text), given)
    assert np.load(io.BytesIO(base64.b64decode(text))).dtype == (np.uint8 if most < 256 else np.int16)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (npy(some(6)), r"uint8 of shape \(6, 2, 3\), and integers of shape \(5, 2, 3\)|int16 of shape \(6, 2, 3\)"),
        (npy(RIGHT[:-1]), r"shape \(4, 2, 3\)"),
        (npy(RIGHT[:, :1]), r"shape \(5, 1, 3\)"),
        (npy(RIGHT[..., :2]), r"shape \(5, 2, 2\)"),
        (npy(RIGHT.astype(np.float32)), "float32"),
        (npy(RIGHT + 1), "numbers from 1 to 7, and a layer has experts 0 to 6"),
        (npy(RIGHT - 2), "numbers from -2 to 4"),
        (npy(np.zeros_like(RIGHT)), "twice for one token"),
        ("not a file", "cannot be read"),
        (base64.b64encode(b"neither").decode(), "cannot be read"),
        (npy(RIGHT)[:60], "cannot be read"),
        ([[1, 2, 3]], "cannot be read"),
    ],
)
def test_experts_of_another_model_are_refused_with_a_remedy(given: Any, says: str):
    with pytest.raises(Unfit, match=says) as caught:
        experts_of({FIELD: given}, ASK, 2)
    assert "take a server with this run's model" in str(caught.value)


def test_processes_tell_each_other_what_the_probe_came_to():
    answer = Answer(np.array([3, 4], np.int32), np.array([-1, -2], np.float32), False, experts=RIGHT)
    for one in (answer, replace(answer, experts=None)):
        back = sampler._answer(sampler._saved(Server("http://127.0.0.1:9", 1.0), one))
        assert isinstance(back, Answer)
        np.testing.assert_equal(back.experts, one.experts)
        assert back.tokens.tolist() == [3, 4]


# --- Turns ------------------------------------------------------------------------------------------------------------

PROMPT = np.array([5, 6, 7], np.int32)


def answer(tokens: list[int], experts: np.ndarray | None, stopped: bool = True) -> Answer:
    return Answer(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), stopped, experts=experts)


def turns_of(so_far: Completion | None = None, **settings: Any) -> Turns:
    decode = lambda ids: "".join(chr(int(i)) for i in ids)  # noqa: E731
    return Turns(Request(PROMPT, Sampling(20, **settings), 0, so_far=so_far), 0, 0, LENGTH, decode)


def test_a_token_keeps_what_was_recorded_first_and_later_turns_fill_in_the_rest():
    turns = turns_of()
    assert turns.ask("x", EXPECTED).expected.routing == ROUTING
    first, second = some(4, 1), some(8, 2)
    turns.take(answer([65, 66], first))
    turns.observe([70, 71])
    turns.take(answer([67, 68], second))
    found = turns.completion().experts
    assert found is not None
    np.testing.assert_array_equal(found, [*first, *second[4:], np.full((2, 3), -1)])


def test_what_a_stop_string_cuts_off_is_forgotten():
    turns = turns_of(stop_strings=("B",))
    first, second = some(6, 1), some(8, 2)
    turns.take(answer([65, 66, 67, 68], first, stopped=False))
    assert turns.completion().tokens.tolist() == [65, 66]
    np.testing.assert_array_equal(turns.completion().experts, first[:5])
    turns.observe([70, 71])
    turns.take(answer([72, 73], second))
    found = turns.completion().experts
    np.testing.assert_array_equal(found, [*first[:5], *second[5:], np.full((2, 3), -1)])


def test_a_completion_that_goes_on_keeps_what_it_had_and_gaps_stay_unknown():
    before = turns_of()
    before.take(answer([65, 66], some(4, 1)))
    before.observe([70, 71])
    so_far = before.completion()
    assert so_far.experts is not None
    after = turns_of(so_far)
    np.testing.assert_array_equal(after.completion().experts, so_far.experts)
    after.take(answer([67], None))  # this server tells nothing
    found = after.completion().experts
    np.testing.assert_array_equal(found, [*some(4, 1), *np.full((4, 2, 3), -1)])
    assert turns_of().completion().experts is None
