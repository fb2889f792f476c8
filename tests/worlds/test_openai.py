"""OpenAI's own client against `tunix serve`: chats, streams, tools in a loop, errors as exceptions; and as an agent."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
import pytest

from tests.scripted_engine import Scripted
from tests.serving.conftest import listening
from tests.test_pages import blocks
from tunix.data.config import DataConfig
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.rollout.environments.agents import PlayedEpisode
from tunix.rollout.environments.config import AgentConfig
from tunix.serving.agents import AgentPlayer
from tunix.serving.answers import Reader
from tunix.serving.app import tiny_source
from tunix.serving.gate import Gate
from tunix.serving.service import Service
from tunix.types import Sampling

pytestmark = pytest.mark.worlds
TEMPLATE = """
{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Qwen's format of calls, in short."""
HI: Any = [{"role": "user", "content": "Hi"}]
DOUBLE: Any = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Twice a number.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    source = tiny_source()
    assert source.tokenizer is not None
    source = replace(source, tokenizer=source.tokenizer.replace_template(TEMPLATE))
    service = Service(InferenceModel(InferenceOptions("tiny", slots=4), source), devices=jax.devices()[:1])
    yield service
    service.batches.close()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with listening(service, Gate(key="secret")) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)


def test_models(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "tunix")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 2048


@pytest.mark.parametrize("stream", [False, True])
def test_chats(client: openai.OpenAI, stream: bool):
    asked: Any = {"model": "tiny", "messages": HI, "max_completion_tokens": 12, "seed": 3, "logprobs": True}
    asked |= {"top_logprobs": 2, "n": 2, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    answer = client.chat.completions.create(**asked)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    if not stream:
        for choice in answer.choices:
            assert choice.finish_reason == "length"
            assert choice.model_extra is not None
            assert choice.logprobs is not None
            assert len(choice.model_extra["token_ids"]) == len(choice.logprobs.content or []) == 12
        return
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == answer.usage
    for choice in answer.choices:
        parts = [x for chunk in chunks for x in chunk.choices if x.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert parts[-1].finish_reason == "length"


def test_completions(client: openai.OpenAI):
    asked: Any = {"model": "tiny", "prompt": "2 + 3 =", "max_tokens": 12, "seed": 3, "logprobs": 2, "n": 2}
    answer = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    for choice in answer.choices:
        parts = [x for chunk in chunks for x in chunk.choices if x.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset or []) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tools_in_a_loop(client: openai.OpenAI, stream: bool, monkeypatch: pytest.MonkeyPatch):
    """As an agent does it: until the model calls no more, with what it was answered sent back."""
    call = '<tool_call>\n{"name": "double", "arguments": {"a": 2}}\n</tool_call>'
    # The last one is read twice: as a turn, and as text since it calls nothing.
    said = [f"Wait. {call}", "It is 4.", "It is 4."]
    monkeypatch.setattr(Reader, "read", lambda _, x, *, ended: (said.pop(0) if ended else "", slice(len(x.tokens))))
    messages, results = list(HI), list[int]()
    while (message := turn(client, messages, stream))["tool_calls"]:
        messages.append(message)
        for asked in message["tool_calls"]:
            results.append(2 * json.loads(asked["function"]["arguments"])["a"])
            messages.append({"role": "tool", "tool_call_id": asked["id"], "content": str(results[-1])})
    assert results == [4]
    assert (message["content"], said) == ("It is 4.", [])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "double"}}])
def test_a_call_that_has_to_come_is_begun(client: openai.OpenAI, choice: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Reader, "read", lambda _, x, *, ended: (', "arguments": {"a": 2}}\n</tool_call>', slice(0)))
    asked: Any = {"model": "tiny", "messages": HI, "tools": [DOUBLE], "max_tokens": 4, "tool_choice": choice}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("double", {"a": 2})


def turn(client: openai.OpenAI, messages: list[Any], stream: bool) -> dict[str, Any]:
    """The assistant's message, as a whole or put together from what is streamed."""
    asked: Any = {"model": "tiny", "messages": messages, "tools": [DOUBLE], "max_tokens": 4}
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message.model_dump()
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    calls = [call.model_dump(exclude={"index"}) for delta in deltas for call in delta.tool_calls or ()]
    return {"role": "assistant", "content": "".join(delta.content or "" for delta in deltas), "tool_calls": calls}


def test_errors_are_its_exceptions(client: openai.OpenAI):
    def ask(**changes: Any) -> None:
        client.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 2, **changes})

    with pytest.raises(openai.NotFoundError, match="The model `tinny` does not exist") as unknown:
        ask(model="tinny")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="no room") as long:
        ask(messages=[{"role": "user", "content": "x" * 3000}])
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="presence_penalty: Input should be 0"):
        ask(presence_penalty=1.0)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_stream_that_is_left(client: openai.OpenAI, service: Service):
    stream = client.completions.create(model="tiny", prompt="a", max_tokens=1500, stream=True)
    next(iter(stream))
    stream.close()
    ended = threading.Event()
    while service.batches.load != (0, 0):
        assert not ended.wait(0.01)
    assert len(client.completions.create(model="tiny", prompt="a", max_tokens=2).choices) == 1


def test_the_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    (block,) = blocks("docs/guide/serving.md", "python")
    namespace: dict[str, Any] = {}
    exec(compile(block.text, "serving.md", "exec"), namespace)
    assert namespace["server"].returncode is not None
    assert isinstance(namespace["text"], str)


def test_a_loop_with_tools_is_an_episode():
    """The unmodified client plays; what was sampled is recorded once, in two transcripts."""
    call = '<tool_call>\n{"name": "double", "arguments": {"a": 21}}\n</tool_call>'
    source = tiny_source()
    assert source.tokenizer is not None
    source = replace(source, tokenizer=source.tokenizer.replace_template(TEMPLATE))
    inference = InferenceModel(InferenceOptions("tiny"), source)
    engine = Scripted(inference, lambda prompt: "It is 42." if "<|im_start|>tool" in prompt else call)
    program = str(Path(__file__).with_name("openai_agent.py"))
    config = AgentConfig(command=(sys.executable, program, "{question}"))
    data = DataConfig(train="rows.jsonl", max_length=2048)
    player = AgentPlayer(config, source, data, 1.0, None)
    with closing(player):
        sampling = Sampling(max_tokens=512, stop_ids=source.stop_ids)
        rows = [{"question": "What is twice 21?"}] * 2
        batch = player.play(engine, rows, sampling, 0, [0, 1])
        assert batch.scores == [1.0, 1.0], batch.logged
        for episode in batch.episodes:
            assert isinstance(episode, PlayedEpisode)
            completion, tokenizer = episode.completion, source.tokenizer
            said = [tokenizer.decode(completion.tokens[a:b], skip_special=True) for a, b in completion.turns]
            assert sorted(said) == sorted([call, "It is 42.", call])
            assert completion.drawn.sum() == np.sum(completion.logprobs == -0.5)
            assert len(completion.restarts) == 1
            assert {*completion.versions} == {7}
        batch.finish([x.completion for x in batch.episodes if isinstance(x, PlayedEpisode)])
