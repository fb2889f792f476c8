"""What arrives on the server's socket that no client library sends: each is refused by a 4xx or hung up, and the next
good request is answered. Bodies are in test_fuzz.py, keys and limits in test_operation.py."""

import socket
import time

import httpx
import pytest

from tests.serving.test_openai import Shared
from tunix.serving.gate import Gate

BODY = b'{"prompt": "a"}'
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
SENT: dict[str, tuple[bytes, bytes]] = {
    "no protocol": (b"\0\xff\r\n\r\n", b"400"),
    "no address": (b"POST  HTTP/1.1\r\n\r\n", b"400"),
    "a length that is none": (HEAD + b"Content-Length: -1\r\n\r\n", b"400"),
    "a length of 5000 digits": (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", b"400"),
    "two lengths": (HEAD + b"Content-Length: 1\r\n" + LENGTH + BODY, b"400"),
    "chunks and a length": (HEAD + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"zz\r\n", b"400"),
    "a chunk that is none": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
    "a header of 1 MB": (HEAD + b"A: " + b"a" * (1 << 20) + b"\r\n\r\n", b"4"),
    "a header in a header": (HEAD + b"X-Session-ID: a\x0bb\rSet-Cookie: c\r\n" + LENGTH + BODY, b"400"),
    "another origin": (HEAD + b"Origin: https://example.com\r\n" + LENGTH + BODY, b"403"),
    "an origin that has none": (HEAD + b"Origin: null\r\n" + LENGTH + BODY, b"403"),
    "a name that leads here": (HEAD.replace(b"localhost", b"localhost.example.com:80") + LENGTH + BODY, b"403"),
    "a method of nobody": (b"BREW /tokenize HTTP/1.1\r\nHost: localhost\r\n\r\n", b"4"),
    "an address with line ends": (b"GET /v1/models/%0d%0aSet-Cookie:%20a HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
    "an address above": (b"GET /v1/models/..%2f..%2fetc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
}


def answered(url: str, sent: bytes) -> bytes:
    """What comes back, until the server hangs up or has answered."""
    host, _, port = url.rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        try:
            client.sendall(sent)
            return client.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            return b""


@pytest.mark.parametrize(("sent", "status"), SENT.values(), ids=SENT)
def test_what_no_client_sends_is_refused(sent: bytes, status: bytes, shared: Shared):
    answer = answered(shared[1], sent)
    assert not answer or answer.startswith(b"HTTP/1.1 " + status), answer[:300]
    assert b"\nSet-Cookie" not in answer
    assert answered(shared[1], HEAD + LENGTH + BODY).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "content", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"]
)
def test_a_page_cannot_pause_a_server_without_a_key(content: str, shared: Shared):
    """A browser sends these without asking first, and names the page's origin."""
    headers = {"Content-Type": content, "Origin": "https://example.com"}
    answer = httpx.post(f"{shared[1]}/pause", content=b"{}", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_origin"
    for origin in ("http://localhost:3000", "http://127.0.0.1", "http://[::1]:1"):
        assert httpx.post(f"{shared[1]}/tokenize", json={"prompt": "a"}, headers={"Origin": origin}).status_code == 200


def test_a_key_opens_the_server_under_every_name(shared: Shared):
    from tests.serving.conftest import listening

    headers = {"Host": "models.example.com", "Origin": "https://example.com", "Authorization": "Bearer k"}
    with listening(shared[0], Gate(key="k")) as url:
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_a_body_that_does_not_come_is_given_up(shared: Shared):
    from tests.serving.conftest import listening

    with listening(shared[0], Gate(seconds=0.2)) as url:
        start = time.monotonic()
        assert answered(url, HEAD + LENGTH + BODY[:3]).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - start < 20
        assert answered(url, HEAD + LENGTH + BODY).startswith(b"HTTP/1.1 200")
