"""The server in OpenAI's form: completions and chats, whole and streamed, tools, and what vLLM adds."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

import tunix
from tunix.data.chat import render_prompt
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.serving.bodies import ChatBody, read
from tunix.serving.service import Service
from tunix.types import Completion, Request, Sampling

Shared = tuple[Service, str]
HI = [{"role": "user", "content": "Hi"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def post(shared: Shared, path: str, body: dict[str, Any], status: int = 200, **headers: str) -> Any:
    """What is answered to a body for the shared model."""
    service, url = shared
    content = json.dumps({"model": service.name, **body})
    answer = httpx.post(f"{url}{path}", content=content, headers=headers, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()


def complete(shared: Shared, body: dict[str, Any]) -> list[dict[str, Any]]:
    return post(shared, "/v1/completions", {"prompt": [5, 6, 7], "seed": 9, **body})["choices"]


def events(shared: Shared, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which has to end well."""
    service, url = shared
    with httpx.stream("POST", f"{url}{path}", json={"model": service.name, "stream": True, **body}, timeout=120) as x:
        assert x.status_code == 200
        assert x.headers["content-type"].startswith("text/event-stream")
        said = [line.removeprefix("data: ") for line in x.iter_lines() if line]
    assert said.pop() == "[DONE]"
    return [json.loads(line) for line in said]


def joined(chunks: list[dict[str, Any]], index: int, name: str) -> Any:
    """A text, or a list, of one choice of a completion's chunks."""
    parts = [choice[name] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(parts) if isinstance(parts[0], str) else [x for part in parts for x in part]


# --- Completions ------------------------------------------------------------------------------------------------------


def test_choices_are_the_samples_of_generate(shared: Shared):
    """As `tunix generate` numbers them: sample i of a prompt has the seed and the number i."""
    service, _ = shared
    body = {"n": 3, "max_tokens": 9, "return_token_ids": True, "ignore_eos": True, "temperature": 0.8}
    choices = complete(shared, body)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    engine = InferenceModel(InferenceOptions(service.name, slots=4)).engine
    sampling = Sampling(max_tokens=9, temperature=0.8)
    alone = engine.run([Request(np.array([5, 6, 7], np.int32), sampling, 9, i) for i in range(3)])
    assert [choice["token_ids"] for choice in choices] == [x.tokens.tolist() for x in alone]
    (single,) = complete(shared, {**body, "n": 1})
    assert single["token_ids"] == choices[0]["token_ids"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_a_whole_answer_says(shared: Shared, n: int):
    body = {"prompt": "12+", "seed": 4, "n": n, "max_tokens": 40, "logprobs": 2, "return_token_ids": True}
    body |= {"ignore_eos": True, "echo": False, "stream_options": {"include_usage": True}}
    chunks = events(shared, "/v1/completions", body)
    whole = post(shared, "/v1/completions", {key: x for key, x in body.items() if key != "stream_options"})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert len(chunks) > n + 1, "it came in parts"
    for choice in whole["choices"]:
        index, logprobs = choice["index"], choice["logprobs"]
        mine = [x for chunk in chunks for x in chunk["choices"] if x["index"] == index]
        assert joined(chunks, index, "text") == choice["text"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        tokens = [token for x in mine for token in x.get("token_ids", [])]
        assert tokens == choice["token_ids"]
        for name in ("tokens", "text_offset"):
            assert [y for x in mine if x["logprobs"] for y in x["logprobs"][name]] == logprobs[name], name
        values = [y for x in mine if x["logprobs"] for y in x["logprobs"]["token_logprobs"]]
        np.testing.assert_allclose(values, logprobs["token_logprobs"], atol=1e-5)
        assert [x["finish_reason"] for x in mine] == [None] * (len(mine) - 1) + ["length"]


def test_stop_strings_end_an_answer_and_are_shown_where_that_is_asked(shared: Shared):
    body = {"max_tokens": 60, "ignore_eos": True, "seed": 3, "prompt": "ab"}
    (free,) = complete(shared, body)
    stop = next(letter for letter in free["text"][6:] if letter.isascii() and letter not in free["text"][:6])
    before = free["text"].partition(stop)[0]
    for includes, text in ((False, before), (True, before + stop)):
        ends = {**body, "stop": [stop], "include_stop_str_in_output": includes}
        (choice,) = complete(shared, ends)
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert joined(events(shared, "/v1/completions", ends), 0, "text") == text


def test_a_stop_token_is_no_text_unless_it_is_asked_for(shared: Shared):
    """Special tokens are shown, and the stop token is among them only where what stops is included."""
    service, _ = shared
    body = {"max_tokens": 1, "seed": 3, "return_token_ids": True, "skip_special_tokens": False, "ignore_eos": True}
    (free,) = complete(shared, body)
    (ended,) = complete(shared, {**body, "stop_token_ids": free["token_ids"]})
    assert (ended["text"], ended["token_ids"], ended["finish_reason"]) == ("", free["token_ids"], "stop")
    (shown,) = complete(shared, {**body, "stop_token_ids": free["token_ids"], "include_stop_str_in_output": True})
    assert shown["text"] == free["text"] == service.tokenizer.decode(free["token_ids"])


def test_the_prompt_is_repeated(shared: Shared):
    body = {"prompt": "12+3", "seed": 1, "max_tokens": 3}
    (plain,), (echoed,) = complete(shared, body), complete(shared, {**body, "echo": True})
    assert echoed["text"] == "12+3" + plain["text"]
    assert joined(events(shared, "/v1/completions", {**body, "echo": True}), 0, "text") == echoed["text"]


def test_log_probs_of_a_prompt(shared: Shared):
    """As evaluation harnesses ask: token by token those of the training code, None for the first, and alternatives."""
    service, _ = shared
    ids, body = [5, 9, 6, 7, 5], {"echo": True, "logprobs": 2, "temperature": 0, "return_tokens_as_token_ids": True}
    (scored,) = complete(shared, {**body, "prompt": ids, "max_tokens": 0})
    logprobs = scored["logprobs"]
    assert (scored["finish_reason"], logprobs["tokens"]) == ("length", [f"token_id:{i}" for i in ids])
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    (expected,) = tunix.load(service.name).score([{"input_ids": ids}])
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], expected.logprobs, atol=1e-5)
    by_token = (logprobs[key][1:] for key in ("token_logprobs", "tokens", "top_logprobs"))
    for value, name, top in zip(*by_token, strict=True):
        assert top[name] == value <= max(top.values()) < 0
        assert len(top) in (2, 3)
    (longer,) = complete(shared, {**body, "prompt": ids, "max_tokens": 3, "ignore_eos": True})
    assert longer["logprobs"]["token_logprobs"][:5] == logprobs["token_logprobs"]
    text = service.tokenizer.decode(ids)
    assert scored["text"] == text == longer["text"][: len(text)]
    assert [len(values) for values in longer["logprobs"].values()] == [8] * 4
    plain = {"prompt": "12+3", "add_special_tokens": False, "echo": True, "logprobs": 0, "max_tokens": 0}
    (named,) = complete(shared, plain)
    assert named["logprobs"]["tokens"] == [named["text"][i] for i in named["logprobs"]["text_offset"]] == list("12+3")
    (full,) = complete(shared, {"prompt": [5] * 512, "echo": True, "logprobs": 0, "max_tokens": 0})
    assert len(full["logprobs"]["tokens"]) == 512


def test_several_prompts_are_answered_as_alone(shared: Shared):
    texts = {"n": 2, "max_tokens": 6, "seed": 3, "echo": True, "logprobs": 1}
    for prompts in (["12+3", "a", "12+3"], [[5, 6, 7], [8]]):
        choices = complete(shared, {**texts, "prompt": prompts})
        alone = [choice for prompt in prompts for choice in complete(shared, {**texts, "prompt": prompt})]
        assert [choice["index"] for choice in choices] == list(range(2 * len(prompts)))
        assert [choice["text"] for choice in choices] == [choice["text"] for choice in alone]
        for choice, other in zip(choices, alone, strict=True):
            pairs = zip(choice["logprobs"]["token_logprobs"][1:], other["logprobs"]["token_logprobs"][1:], strict=True)
            assert all(abs(a - b) < 1e-5 for a, b in pairs)
    body = {"prompt": ["12+3", "a"], "max_tokens": 6, "seed": 3, "stream_options": {"include_usage": True}}
    chunks = events(shared, "/v1/completions", body)
    whole = post(shared, "/v1/completions", {**body, "stream_options": None})
    assert [joined(chunks[:-1], i, "text") for i in (0, 1)] == [choice["text"] for choice in whole["choices"]]
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == 7  # each begins with BOS


def test_what_cannot_be_sampled_has_a_finite_log_prob(shared: Shared):
    (choice,) = complete(shared, {"max_tokens": 1, "top_k": 1, "logprobs": 3, "return_tokens_as_token_ids": True})
    assert sorted(choice["logprobs"]["top_logprobs"][0].values()) == [-9999.0, -9999.0, 0.0]


# --- Chats ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_rendered_by_the_folders_own_template(shared: Shared):
    service, _ = shared
    prompt = render_prompt(HI, service.tokenizer).tokens
    body = {"messages": HI, "seed": 5, "max_tokens": 12, "return_token_ids": True}
    body |= {"logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    answer = post(shared, "/v1/chat/completions", body)
    assert answer["object"] == "chat.completion"
    assert answer["prompt_token_ids"] == prompt.tolist()
    (choice,) = answer["choices"]
    same = {"prompt": prompt.tolist(), "seed": 5, "max_tokens": 12, "return_token_ids": True, "logprobs": 2}
    (completed,) = complete(shared, {**same, "ignore_eos": True})
    assert choice["token_ids"] == completed["token_ids"]
    assert choice["message"] == {"role": "assistant", "content": completed["text"]}
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 12,
        "total_tokens": len(prompt) + 12,
    }
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == completed["logprobs"]["tokens"]
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in content)
    values = [entry["logprob"] for entry in content]
    np.testing.assert_allclose(values, completed["logprobs"]["token_logprobs"], atol=1e-5)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(entry["logprob"] <= entry["top_logprobs"][0]["logprob"] + 1e-6 for entry in content)


def test_a_chat_is_streamed(shared: Shared):
    body = {"messages": HI, "seed": 5, "max_completion_tokens": 30, "max_tokens": 99, "logprobs": True}
    body |= {"return_token_ids": True, "ignore_eos": True}
    whole = post(shared, "/v1/chat/completions", body)
    chunks = events(shared, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[-1]["usage"] == whole["usage"]
    parts = [chunk["choices"][0] for chunk in chunks[1:-1]]
    (choice,) = whole["choices"]
    assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
    assert [x for part in parts for x in part["token_ids"]] == choice["token_ids"]
    tokens = [entry["token"] for part in parts for entry in part["logprobs"]["content"]]
    assert tokens == [entry["token"] for entry in choice["logprobs"]["content"]]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


CALL = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("said", "choice", "content", "calls", "finish"),
    [
        (CALL, "auto", None, [("add", {"a": 1, "b": 2})], "tool_calls"),
        (f"{CALL}; {CALL}", "auto", None, [("add", {"a": 1, "b": 2})] * 2, "tool_calls"),
        (CALL, "none", CALL, [], "stop"),
        ("3", "auto", "3", [], "stop"),
        ('{"name": "add", "parameters": 3}', "auto", '{"name": "add", "parameters": 3}', [], "stop"),
        (CALL.removeprefix('{"name": "add"'), "required", None, [("add", {"a": 1, "b": 2})], "tool_calls"),
        (CALL.removeprefix('{"name": "add"'), NAMED, None, [("add", {"a": 1, "b": 2})], "tool_calls"),
        ("?", NAMED, '{"name": "add"?', [], "stop"),
    ],
)
def test_calls_of_tools_are_read_back(
    shared: Shared,
    streams: bool,
    said: str,
    choice: str | dict[str, Any],
    content: str | None,
    calls: list[tuple[str, dict[str, int]]],
    finish: str,
):
    """From what the model wrote in its family's markup; a call that cannot be read is text. One that has to come is
    begun in the prompt."""
    service, _ = shared
    body = read(ChatBody, {"model": service.name, "messages": HI, "tools": [ADD], "tool_choice": choice})
    asked = service.prepared(body)
    prompt, answer = service.tokenizer.decode(asked.requests[0].prompt), asked.answer
    assert '"name": "add"' in prompt
    assert prompt.endswith('{"name": "add"') == (choice in ("required", NAMED))
    tokens = np.array([*service.tokenizer.encode(said), service.tokenizer.stop_ids[-1]], np.int32)
    sampling = Sampling(stop_ids=service.tokenizer.stop_ids)
    zeros = np.zeros(len(tokens), np.float32)
    completion = Completion(tokens, zeros, "stop", zeros.astype(np.int32), sampling, ((0, len(tokens)),))
    if streams:
        chunk = answer.next(0, completion, ended=True)
        assert chunk is not None
        ((message, ended),) = [(x["delta"], x["finish_reason"]) for x in chunk["choices"]]
        assert [call.pop("index") for call in message.get("tool_calls", [])] == list(range(len(calls)))
    else:
        ((message, ended),) = [(x["message"], x["finish_reason"]) for x in answer.whole([completion])["choices"]]
    assert (message["content"], ended) == (content, finish)
    told = message.get("tool_calls", [])
    assert [(x["function"]["name"], json.loads(x["function"]["arguments"])) for x in told] == calls
    assert len({x["id"] for x in told}) == len(calls)


def test_a_conversation_with_tools_goes_on(shared: Shared):
    """As a client sends back what it was answered: nulls, and arguments as text."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": "ok", "refusal": None, "audio": None, "tool_calls": None}
    messages = [{"role": "system", "content": "Short."}, *HI, asked, {"role": "user", "content": "and?"}]
    body = {"messages": messages, "tools": [ADD], "max_tokens": 2, "seed": 0}  # one in fifty ends in a stop token
    assert post(shared, "/v1/chat/completions", body)["choices"][0]["finish_reason"] == "length"
    called = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    error = post(shared, "/v1/chat/completions", {"messages": called, "max_tokens": 2}, 400)["error"]
    assert "the chat template does not write" in error["message"], "this template knows no calls"


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages", "message 1 has the role 'boss', not one of"),
        ({"messages": []}, "messages", "messages: "),
        ({"messages": [{"role": "user"}]}, "messages", "message 1 (user) has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"messages": None}, "messages", "messages: it has to be there"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "should match"),
        ({"tools": [{"type": "browser", "function": {"name": "a"}}]}, "tools.0.type", "Input should be 'function'"),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"type": "whole"}}}]},
            "tools.0.function.parameters",
            "it is no JSON schema: 'whole' is not valid",
        ),
        ({"tool_choice": "any"}, "tool_choice", 'it is "auto", "none", "required" or {"type"'),
        ({"tool_choice": "required"}, None, "tool_choice: it is none of the tools []"),
        ({"tool_choice": NAMED}, None, "tool_choice: it is none of the tools []"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice", 'it is "auto", "none"'),
        (
            {"tools": [ADD], "tool_choice": {**NAMED, "function": {"name": "none"}}},
            "tool_choice",
            'it is "auto", "none"',
        ),
        ({"tools": [ADD], "tool_choice": {**NAMED, "function": {"name": "a"}}}, None, "none of the tools ['add']"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "Input should be 'text'"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.type", "should be 'text'"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "Input should be True"),
        ({"top_logprobs": 2}, None, "top_logprobs: they go with logprobs: true"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs", "none of ['messages']"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "leaves no room for an answer"),
    ],
)
def test_chats_that_cannot_be_answered(shared: Shared, changes: dict[str, Any], param: str | None, says: str):
    error = post(shared, "/v1/chat/completions", {"messages": HI, "max_tokens": 1, **changes}, 400)["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["code"] == ("context_length_exceeded" if "no room" in says else None)


# --- What vLLM adds ---------------------------------------------------------------------------------------------------


def test_models_are_listed_with_their_context(shared: Shared):
    service, url = shared
    (card,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert card.items() >= {"id": service.name, "object": "model", "max_model_len": 512}.items()
    error = post(shared, "/v1/completions", {"model": service.name + "s", "prompt": "a"}, 404)["error"]
    assert f"Did you mean '{service.name}'?" in error["message"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert httpx.get(f"{url}/v1/models/{service.name}").json() == card
    gone = httpx.get(f"{url}/v1/models/{service.name}s")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


def test_what_clients_send_along_has_no_effect(shared: Shared):
    """Of what platforms keep and route by: at values that change no answer."""
    along = {"metadata": {"run": "a"}, "store": False, "service_tier": "auto", "user": "me"}
    assert [x["text"] for x in complete(shared, along)] == [x["text"] for x in complete(shared, {})]
    for name, value in {"store": True, "service_tier": "flex", "metadata": [1]}.items():
        error = post(shared, "/v1/completions", {"prompt": [5], name: value}, 400)["error"]
        assert error["param"] == name


def test_texts_and_messages_are_tokenized_and_back(shared: Shared):
    service, _ = shared
    ids = service.tokenizer.encode("a b")
    answer = post(shared, "/tokenize", {"prompt": "a b", "add_special_tokens": False})
    assert answer == {"tokens": ids, "count": 3, "max_model_len": 512}
    assert post(shared, "/detokenize", {"tokens": ids}) == {"prompt": "a b"}
    answer = post(shared, "/tokenize", {"messages": HI, "tools": [ADD]})
    assert "Adds." in service.tokenizer.decode(answer["tokens"])
    info = httpx.get(f"{shared[1]}/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"]) == ("<eos>", service.tokenizer.chat_template)
    assert "outside" in post(shared, "/detokenize", {"tokens": [99999]}, 400)["error"]["message"]
    assert "prompt" in post(shared, "/tokenize", {}, 400)["error"]["message"]


def test_token_ids_in_and_out(shared: Shared):
    """As verifiers' client for training asks: each token named by its id, with a finite log-prob."""
    params = {"temperature": 0.7, "max_tokens": 6, "seed": 2, "logprobs": 1, "skip_special_tokens": False}
    body = {"token_ids": [5, 6, 7], "sampling_params": {**params, "stop_token_ids": [1], "ignore_eos": True}}
    answer = post(shared, "/inference/v1/generate", body, **{"X-Session-ID": "rollout-1"})
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(-9999 < entry["logprob"] <= 0 for entry in content)
    assert answer["usage"]["completion_tokens"] == len(content) == 6
    same = {"temperature": 0.7, "max_tokens": 6, "seed": 2, "stop_token_ids": [1], "ignore_eos": True}
    (completed,) = complete(shared, {**same, "return_token_ids": True})
    assert completed["token_ids"] == choice["token_ids"]


def test_counts_are_told_to_prometheus(shared: Shared):
    def counted() -> dict[str, float]:
        text = httpx.get(f"{shared[1]}/metrics").text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        assert all(f"# TYPE {name.partition('{')[0]} " in text for name, _, _ in lines)
        return {name: float(value) for name, _, value in lines}

    before = counted()
    complete(shared, {"max_tokens": 7, "ignore_eos": True})
    after = counted()
    assert after["tunix_prompt_tokens_total"] - before["tunix_prompt_tokens_total"] == 3
    assert after["tunix_generation_tokens_total"] - before["tunix_generation_tokens_total"] == 7
    name = 'tunix_completions_total{finish="length"}'
    assert after[name] - before.get(name, 0) == 1
    assert after["tunix_requests_running"] == after["tunix_requests_waiting"] == 0
