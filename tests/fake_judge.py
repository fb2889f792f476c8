"""A small stand-in for an OpenAI-compatible server that judges; `Manners` says what it does wrong."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.fake_vllm import QuietServer

RUBRIC = """Judge what was written.

- capitals (3): letters are capitals.
- short: it is
  no longer than it has to be.
"""


def write_rubric(folder: Path) -> Path:
    (folder / "rubric.md").write_text(RUBRIC)
    return folder / "rubric.md"


def answer_in(question: str, name: str = "answer") -> str:
    """The text between the tags of a question, the last of which are those of what is judged."""
    return re.findall(rf"<{name}>\n(.*?)\n</{name}>", question, re.DOTALL)[-1]


def verdict(capitals: float, short: float) -> str:
    return json.dumps({"capitals": {"score": capitals, "reason": "x"}, "short": {"score": short, "reason": "y"}})


def by_rule(messages: list[dict[str, str]]) -> str:
    """The share of capitals, and 1 for `short`; of two answers the one with more capitals, the first where equal."""
    question = messages[0]["content"]

    def share(text: str) -> float:
        return sum(c.isascii() and c.isupper() for c in text) / max(len(text), 1)

    if "<answer A>" not in question:
        return verdict(round(share(answer_in(question)), 3), 1)
    first, second = (share(answer_in(question, f"answer {side}")) for side in "AB")
    return json.dumps({"better": "A" if first >= second else "B", "reason": f"{first:.2f} and {second:.2f}"})


@dataclass
class FakeJudge:
    """A judge, what it has been asked, and what it does wrong."""

    reply: Callable[[list[dict[str, str]]], Any] = by_rule
    models: tuple[str, ...] = ("strict",)
    statuses: list[int] = field(default_factory=list)
    """Of the next answers."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of answers that refuse."""
    hangs: threading.Event = field(default_factory=threading.Event)
    dies_after: int | None = None
    """Questions that it answers before every connection breaks."""
    lists: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    at_once: int = 0
    most: int = 0
    delay: float = 0.0


class _Handler(BaseHTTPRequestHandler):
    fake: FakeJudge
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        listed = {"data": [{"id": name} for name in self.fake.models]}
        self._send(
            *((200, listed) if self.path == "/v1/models" and self.fake.lists else (404, {"error": "no such page"}))
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        fake = self.fake
        if fake.dies_after is not None and len(fake.bodies) >= fake.dies_after:
            self.close_connection = True
            return
        fake.bodies.append(body)
        fake.keys.add(self.headers.get("Authorization"))
        fake.at_once += 1
        fake.most = max(fake.most, fake.at_once)
        time.sleep(fake.delay)
        while fake.hangs.is_set():
            time.sleep(0.02)
        fake.at_once -= 1
        if fake.statuses and (status := fake.statuses.pop(0)) != 200:
            self._send(status, {"error": {"message": "come back later"}}, fake.headers)
            return
        self._send(200, {"choices": [{"message": {"role": "assistant", "content": fake.reply(body["messages"])}}]})

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        try:
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # nobody waits for it any more
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def served(fake: FakeJudge) -> Iterator[str]:
    """The address of a stand-in's API, while it is served."""
    server = QuietServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        fake.hangs.clear()
        server.shutdown()
        server.server_close()
