"""`tunix serve` records what X-Session-ID names: token ids, log-probs and versions, until the session ends."""

from typing import Any

import httpx
import pytest

from tests.serving.conftest import listening
from tunix.serving import gate
from tunix.serving.service import Service

Shared = tuple[Service, str]


def ask(shared: Shared, session: str | None, prompt: Any, **settings: Any) -> httpx.Response:
    service, url = shared
    body = {
        "model": service.name,
        "prompt": prompt,
        "max_tokens": 4,
        "return_token_ids": True,
        "logprobs": 0,
        **settings,
    }
    headers = {} if session is None else {"X-Session-ID": session}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def test_a_session_is_recorded_and_ends(shared: Shared):
    _, url = shared
    (first,) = ask(shared, "a", [5, 6, 7], seed=1).json()["choices"]
    after = [5, 6, 7, *first["token_ids"], 9]
    stream = ask(shared, "a", after, seed=2, stream=True)  # a streamed turn is recorded as well
    assert stream.text.endswith("data: [DONE]\n\n")
    ask(shared, "b", [5, 6, 7], seed=1, temperature=0.5, top_k=3)
    ask(shared, None, [5, 6, 7])
    recorded = httpx.get(f"{url}/sessions/a").json()
    assert recorded == httpx.post(f"{url}/sessions/a/end").json()
    (transcript,) = recorded["transcripts"]
    assert transcript["tokens"][: len(after)] == after
    ends = 3 + len(first["token_ids"])
    assert transcript["turns"] == [[3, ends], [ends + 1, len(transcript["tokens"])]]
    assert transcript["logprobs"][3:ends] == pytest.approx(first["logprobs"]["token_logprobs"], abs=1e-6)
    assert transcript["logprobs"][ends] == 0
    assert {*transcript["versions"]} == {1}
    (other,) = httpx.post(f"{url}/sessions/b/end").json()["transcripts"]
    assert other["turns"] == [[3, len(other["tokens"])]]


def test_what_has_ended_is_refused(shared: Shared):
    _, url = shared
    ask(shared, "c", [5, 6])
    httpx.post(f"{url}/sessions/c/end")
    again = ask(shared, "c", [5, 6])
    assert (again.status_code, again.json()["error"]["code"]) == (409, "session_has_ended")
    assert httpx.get(f"{url}/sessions/c").status_code == 409
    nowhere = httpx.get(f"{url}/sessions/none")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "session_not_found")
    long = ask(shared, "x" * 201, [5, 6])
    assert long.status_code == 400
    assert "X-Session-ID has 201 characters, more than 200" in long.json()["error"]["message"]


def test_a_refused_request_is_no_turn(shared: Shared):
    _, url = shared
    assert ask(shared, "d", [5, 6], temperature=-1).status_code == 400
    assert ask(shared, "d", [5, 6], n=2).status_code == 200
    assert len(httpx.post(f"{url}/sessions/d/end").json()["transcripts"]) == 2


def test_sessions_have_limits(shared: Shared, monkeypatch: pytest.MonkeyPatch):
    service, _ = shared
    monkeypatch.setattr(gate, "MOST", 1)
    monkeypatch.setattr(gate, "ROOM", 8)
    monkeypatch.setattr(gate, "REMEMBERED", 1)
    monkeypatch.setattr(service, "sessions", gate.Sessions())
    with listening(service) as url:
        few = service, url
        (choice,) = ask(few, "a", [5, 6, 7, 8, 9], ignore_eos=True).json()["choices"]
        assert len(choice["token_ids"]) == 3  # 8 tokens, with its prompt
        full = ask(few, "a", [5, 6, 7, 8, 9, *choice["token_ids"]])
        assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert ask(few, "b", [5]).status_code == 200  # there is room for one, and the oldest is forgotten
        assert httpx.get(f"{url}/sessions/a").json()["error"]["code"] == "session_not_found"
        for name in "bc":
            assert ask(few, name, [5]).status_code == 200
            httpx.post(f"{url}/sessions/{name}/end")
        assert ask(few, "b", [5]).status_code == 200  # that it has ended is forgotten, too
        assert ask(few, "c", [5]).status_code == 409
