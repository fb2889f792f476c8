"""Bodies that are nearly right: never a 500, never a hang, and the next good request is answered."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.marks import slow
from tests.serving.test_openai import ADD, HI, Shared

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": [5, 6, 7],
        "max_tokens": 2,
        "n": 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [4],
        "logprobs": 1,
        "stream": False,
        "echo": False,
        "return_token_ids": True,
        "ignore_eos": True,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "Be."}, *HI],
        "max_tokens": 2,
        "n": 1,
        "temperature": 0.5,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [ADD],
        "tool_choice": "auto",
        "stream": False,
        "stop": "x",
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/inference/v1/generate": {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 2, "temperature": 0.5, "seed": 3, "logprobs": 1, "stop_token_ids": [1]},
        "cache_salt": "a",
    },
    "/tokenize": {"prompt": "a b", "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}},
    "/update_weight_version": {"new_version": "1"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
}
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63 - 1,
    2**63,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\x00",
    "\ud800",
    "é" * 300,
    "<|eot_id|>",
    "{{ 1 }}",
    [],
    [[]],
    [None],
    [1, "a"],
    {},
    {"role": "user"},
    {"type": "text"},
    {"$ref": "#"},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values within a value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    """A body with up to three changes: values that are odd, left out, repeated or under another name; or cut bytes."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        if not body:
            break
        *way, key = rng.choice(list(places(body)))
        holder: Any = body
        try:
            for step in way:
                holder = holder[step]
            match rng.randrange(5):
                case 0:
                    holder[key] = copy.deepcopy(rng.choice(ODD))
                case 1:
                    holder[key] = [copy.deepcopy(holder[key])] * rng.choice([1, 2, 300])
                case 2:
                    holder[key] = {"a": copy.deepcopy(holder[key])}
                case 3:
                    del holder[key]
                case 4:
                    holder[rng.choice([f"{key}s", "n", "stream", "model"])] = copy.deepcopy(rng.choice(ODD))
        except (TypeError, KeyError, IndexError):  # what was there before has gone
            continue
    raw = json.dumps(body).encode()
    if rng.random() < 0.05:
        return raw[: rng.randrange(len(raw))]
    if rng.random() < 0.05:
        at = rng.randrange(len(raw))
        return raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    return raw


@pytest.mark.parametrize("number", [25, *slow([10_000])])
def test_no_body_ends_the_server(shared: Shared, number: int):
    """Each refusal has the protocol's form, and every hundred bodies a good one is answered."""
    service, url = shared
    rng = random.Random(number)
    statuses = dict.fromkeys((200, 400, 403, 404, 413, 429), 0)
    with httpx.Client(base_url=url, timeout=600) as client:  # a body may ask for 300 answers of 500 tokens
        for path, good in GOOD.items():
            model = {"model": service.name} if path in list(GOOD)[:3] else {}
            for i in range(number):
                content = mutated({**model, **good}, rng)
                answer = client.post(path, content=content)
                assert answer.status_code in statuses, (path, content, answer.text)
                statuses[answer.status_code] += 1
                if answer.status_code >= 400:
                    error = answer.json()["error"]
                    assert error.keys() == {"message", "type", "param", "code"}, (path, content)
                    assert error["message"], (path, content)
                if i % 100 == 99 or i == number - 1:
                    body = {"model": service.name, **GOOD["/v1/completions"]}
                    assert client.post("/v1/completions", json=body).status_code == 200
    assert statuses[200] > number // 10
    assert statuses[400] > number
    assert service.batches.load == (0, 0)
