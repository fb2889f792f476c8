"""Who may do what, how much, and what becomes of a request whose client has gone or whose server is to end."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.test_openai import Shared
from tunix.cli import main
from tunix.errors import UserError
from tunix.rollout.servers.handover import Handover
from tunix.rollout.servers.protocol import Unfit
from tunix.rollout.servers.server import Server
from tunix.serving.app import server_of
from tunix.serving.gate import Gate
from tunix.serving.service import Service
from tunix.util.ports import read_key

Serve = Callable[..., tuple[Service, str]]
UPDATES: dict[str, dict[str, Any]] = {
    "/pause": {},
    "/resume": {},
    "/reset_prefix_cache": {},
    "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": "."}},
    "/update_weight_version": {"new_version": "1"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "."},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}


def long(service: Service, **changes: Any) -> dict[str, Any]:
    """A request that takes a while."""
    return {"model": service.name, "prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, **changes}


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


# --- Keys -------------------------------------------------------------------------------------------------------------


def test_a_key_is_wanted_where_there_is_one(shared: Shared, caplog: pytest.LogCaptureFixture):
    from tests.serving.conftest import listening

    service, _ = shared
    caplog.set_level(logging.DEBUG)
    with listening(service, Gate(key="se cret")) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "se cret"}, {"x-api-key": "x"}):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                answer = httpx.get(f"{url}{path}", headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert "se cret" not in answer.text
        for headers in ({"Authorization": "Bearer se cret"}, {"x-api-key": "se cret"}):
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
    assert "se cret" not in caplog.text


def test_where_a_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TUNIX_API_KEY", raising=False)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert read_key(None, host) is None
    for host in ("0.0.0.0", "10.0.0.1", "::"):
        with pytest.raises(UserError, match=f"--host {host} is reached from other machines: give a key"):
            read_key(None, host)
    monkeypatch.setenv("TUNIX_API_KEY", "of the environment")
    assert read_key(None, "0.0.0.0") == "of the environment"
    file = tmp_path / "key"
    with pytest.raises(UserError, match="cannot be read"):
        read_key(file, "127.0.0.1")
    file.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        read_key(file, "127.0.0.1")
    file.write_text("of the file\n")
    assert read_key(file, "0.0.0.0") == "of the file"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["m", "--host", "0.0.0.0"], "--host 0.0.0.0 is reached from other machines"),
        ([], "wants a model, or --tiny"),
        (["m", "--tiny"], "and not both"),
    ],
)
def test_what_the_command_refuses(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TUNIX_API_KEY", raising=False)
    assert main(["serve", *words]) == 2
    assert says in capsys.readouterr().err


# --- Weights ----------------------------------------------------------------------------------------------------------


def test_weights_stay_as_they_are_unless_a_folder_is_named(shared: Shared):
    """And the run that would hand its own over is told which option is missing."""
    import asyncio

    _, url = shared
    for path, body in UPDATES.items():
        answer = httpx.post(f"{url}{path}", json=body)
        assert answer.status_code == 403, path
        assert "start it with --allow-updates FOLDER" in answer.json()["error"]["message"]
    for adapter, option in ((False, "--allow-updates"), (True, "--enable-lora --allow-updates")):
        handover = Handover(Path("weights"), lambda *_: None, adapter)
        with pytest.raises(Unfit, match=f"start tunix serve with {option} {Path('weights').resolve()}"):
            asyncio.run(handover.load(Server(url, 10.0), Path("weights/1"), fresh=False))


def test_nothing_is_loaded_from_elsewhere(model: Path, serve: Serve, tmp_path: Path):
    """Also not by way of a link, or of dots."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(model)
    _, url = serve(adapters=True, updates=inside)
    for path in (model, inside / "link", inside / ".." / model.name, "/etc", ""):
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        adapter = {"lora_name": "a", "lora_path": str(path)}
        for name, body in (("/collective_rpc", reload), ("/v1/load_lora_adapter", adapter)):
            answer = httpx.post(f"{url}{name}", json=body)
            assert answer.status_code == 403
            assert f"is not within {inside}" in answer.json()["error"]["message"]


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_a_body_is_read_within_a_limit(shared: Shared):
    from tests.serving.conftest import listening

    service, _ = shared
    with listening(service, Gate(body=1000)) as url:
        answer = httpx.post(f"{url}/v1/completions", content=b" " * 1001)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert httpx.post(f"{url}/tokenize", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "the body is no JSON"),
        (b"\xff", "the body is no JSON"),
        (b"[1]", "the body is a mapping"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": ' + b"[" * 500 + b"]" * 500 + b"}", "model: "),
        (json.dumps({"model": "\ud83d", "prompt": "a"}).encode(), "does not exist"),
    ],
)
def test_bodies_that_are_none(shared: Shared, content: bytes, says: str):
    for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
        answer = httpx.post(f"{shared[1]}{path}", content=content)
        error = answer.json()["error"]
        assert answer.status_code in (400, 404)
        assert error.keys() == {"message", "type", "param", "code"}
        assert path != "/v1/completions" or says in error["message"]


def test_addresses_that_are_none(shared: Shared):
    answer = httpx.post(f"{shared[1]}/v1/chat/completion", json={})
    assert answer.status_code == 404
    assert "Did you mean '/v1/chat/completions'?" in answer.json()["error"]["message"]
    assert httpx.get(f"{shared[1]}/v1/completions").status_code == 405


def test_no_more_wait_than_may(serve: Serve):
    """One is told to come again, and the others are answered."""
    service, url = serve(waiting=2)
    service.batches.pause()
    with ThreadPoolExecutor(2) as pool:
        body = long(service, max_tokens=2)
        waiting = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(2)]
        until(lambda: service.batches.load == (0, 2))
        for path, more in (("/v1/completions", body), ("/v1/completions", {**body, "n": 3, "stream": True})):
            answer = httpx.post(f"{url}{path}", json=more)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        service.batches.resume()
        assert [x.result(60).status_code for x in waiting] == [200, 200]


def test_no_more_answers_are_streamed_than_may(shared: Shared):
    from tests.serving.conftest import listening

    service, _ = shared
    with listening(service, Gate(streams=1)) as url:
        body = long(service, prompt="a", stream=True, echo=True)
        service.batches.pause()
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as first:
            lines = first.iter_lines()  # whose end would be the stream's
            assert next(lines).startswith("data: "), "it begins with the prompt"
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 429
            service.batches.resume()
            whole = httpx.post(f"{url}/v1/completions", json=long(service, max_tokens=2), timeout=60)
            assert whole.status_code == 200
        until(lambda: service.batches.load == (0, 0))
        again = httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 2}, timeout=60)
        assert again.status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_takes_too_long_is_given_up(shared: Shared, streams: bool):
    from tests.serving.conftest import listening

    service, _ = shared
    with listening(service, Gate(seconds=0.2)) as url:
        service.batches.pause()
        answer = httpx.post(f"{url}/v1/completions", json=long(service, stream=streams), timeout=60)
        error = json.loads(answer.text.removeprefix("data: ").partition("\n")[0])["error"]
        assert answer.status_code == (200 if streams else 504)
        assert (error["code"], error["type"]) == ("timeout", "timeout_error")
        assert "more than 0.2 seconds" in error["message"]
        until(lambda: service.batches.load == (0, 0))
        service.batches.resume()


# --- Clients that go, and servers that end ----------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_whose_client_has_gone_is_given_up(shared: Shared, streams: bool):
    service, url = shared
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(long(service, n=4, stream=streams)).encode()
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: service.batches.load[0] == 4)
    until(lambda: service.batches.load == (0, 0))
    assert "tunix_cancelled_total" in service.metrics()


def test_what_has_begun_is_answered_before_the_server_ends(serve: Serve):
    service, _ = serve()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = server_of(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{url}/v1/completions", json=long(service, max_tokens=60), timeout=60)
            until(lambda: service.batches.load[0] == 1)
            server.should_exit = True
            assert answer.result(60).status_code == 200
        thread.join(60)
        assert not thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
