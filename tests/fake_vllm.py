"""A small stand-in for a vLLM server: its protocol over HTTP, answered by tunix's own, so that log-probs are true.

`manners` says what it does wrong: it can hang, die, refuse, answer twice, leave ids out, or lie about its weights.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jax
import numpy as np

from tunix.inference.batcher import Ticket
from tunix.inference.load import token_scores
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.rollout.servers.protocol import FIELD
from tunix.serving.bodies import CompletionBody, read
from tunix.serving.service import Service
from tunix.serving.tinker.futures import Refusal
from tunix.types import Sequence

LENGTH = 64


@dataclass
class Manners:
    """What a server does wrong; all of it can be changed while it runs."""

    hangs: threading.Event = field(default_factory=threading.Event)
    """While set, completions are not answered."""
    silent: threading.Event = field(default_factory=threading.Event)
    """While set, those of a run's prompts are not, though it loads weights and answers the probe."""
    sick: bool = False
    """`/health` is not answered well."""
    dies_after: int | None = None
    """Completions that it answers before it is gone."""
    fails: int = 0
    """How many of the next completions are answered with 500."""
    twice: bool = False
    """Each answer comes twice on its connection."""
    swaps: int = 0
    """How many of the next answers name another request."""
    keeps_ids: bool = False
    """No token ids are returned."""
    raw: bool = False
    """Log-probs are those before the temperature."""
    offset: float = 0.0
    """Added to all log-probs."""
    partial: bool = False
    """It loads all weights but the embeddings."""
    stale: bool = False
    """It says that it has loaded weights, and has not."""
    odd_tokens: bool = False
    """Its tokenizer has other ids."""
    delay: float = 0.0
    """Seconds before each answer."""
    together: int = 0
    """It answers none before so many are asked for at once; after half a minute, those that there are."""
    routed: Callable[[str], str | None] = str
    """What it makes of the experts that it returns, written as they are sent."""


class FakeVLLM:
    """A model that is served; weights and adapters change as they do in vLLM."""

    def __init__(self, folder: Path, length: int = LENGTH):
        self.name, self.length, self.manners = str(folder), length, Manners()
        self.asked: Counter[str] = Counter()
        """How often each request was asked, by its id; the probe's and the check's own left out."""
        self.loads: list[str] = []
        """The weights and adapters that were loaded, in order."""
        self.settings: list[dict[str, Any]] = []
        """The bodies of the completions that were asked for."""
        self.gone, self._lock = False, threading.Lock()
        self._gathered = threading.Condition(self._lock)
        self.unanswered = 0
        """Completions of a run's prompts that were asked for while it was silent."""
        self._here, self.most = 0, 0
        """Completions that it has been asked for and has not answered: now, and at most."""
        self._read(folder)

    def _read(self, folder: Path) -> None:
        options = InferenceOptions(str(folder), slots=1, length=self.length)
        self.service = Service(InferenceModel(options), adapters=True, devices=jax.devices()[:1])
        self.service.name, self.paused = self.name, False

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that it serves."""
        return [card["id"] for card in self.service.cards()[1:]]

    @property
    def version(self) -> str:
        """What it says that its weights are."""
        return self.service.version

    def restart(self, folder: Path) -> None:
        """As a supervisor would: the first weights again, and no adapter."""
        self.service.batches.close()
        self._read(folder)

    def complete(self, body: dict[str, Any], identity: str) -> dict[str, Any]:
        """Answers /v1/completions."""
        manners = self.manners
        own = not identity.startswith(("tunix-probe", "tunix-vocabulary"))
        self.unanswered += own and manners.silent.is_set()
        while manners.hangs.is_set() or (own and manners.silent.is_set()):
            time.sleep(0.02)
        with self._lock:
            self._here += 1
            self.most = max(self.most, self._here)
            self._gathered.notify_all()
            self._gathered.wait_for(lambda: self.most >= manners.together, 30)
        time.sleep(manners.delay)
        if own:
            if manners.dies_after is not None:
                self.gone = self.gone or sum(self.asked.values()) >= manners.dies_after
            if self.gone:
                raise ConnectionAbortedError
            self.asked[identity] += 1
            self.settings.append(body)
        if manners.fails:
            manners.fails -= 1
            raise Refusal(500, "EngineCore encountered an issue")
        if manners.swaps:
            manners.swaps -= 1
            identity = "tunix-another"
        with self._lock:  # one after the other, so that a caller sees them end one by one
            self._here -= 1
            return self._answer({**body, "request_id": identity})

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = self.service.prepared(read(CompletionBody, body))
        prompt, ticket = asked.answer.prompt, Ticket(asked.requests[0])
        self.service.submit([ticket])
        found = ticket.future.result(60)
        if self.manners.raw:
            whole = np.concatenate([prompt, found.tokens])
            engine, params = self.service.engine, self.service.params
            assert params is not None
            (again,) = token_scores(engine.model, params, engine.mesh, [Sequence(whole, np.arange(len(whole)) > 0)])
            found = replace(found, logprobs=again[len(prompt) :])
        moved = replace(found, logprobs=found.logprobs + np.float32(self.manners.offset))
        answer = asked.answer.whole([moved])
        (choice,) = answer["choices"]
        if FIELD in choice:
            choice[FIELD] = self.manners.routed(choice[FIELD])
        if self.manners.keeps_ids:
            del choice["token_ids"], choice["prompt_token_ids"]
        return answer

    def get(self, path: str) -> Any:
        """Answers a GET."""
        if path == "/health":
            if self.manners.sick or self.gone:
                raise Refusal(503, "the engine is dead")
            return ""
        if path == "/weight_info":
            return {"weight_version": self.service.version}
        if path == "/v1/models":
            return {"data": self.service.cards()}
        raise Refusal(404, "Not Found")

    def post(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Any:
        """Answers a POST, but for completions."""
        if path == "/tokenize":
            ids = self.service.tokens(body["prompt"], special=body["add_special_tokens"])
            return {"tokens": [i + 1 for i in ids] if self.manners.odd_tokens else ids, "max_model_len": self.length}
        if path == "/pause":
            assert query == {"mode": ["wait"]}
            self.service.batches.pause()
            self.paused = True
            return {"status": "paused"}
        if path == "/resume":
            self.service.batches.resume()
            self.paused = False
            return {"status": "resumed"}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/update_weight_version":
            self.service.version = body["new_version"]
            return {"success": True}
        if path == "/collective_rpc":
            assert self.paused
            assert body["method"] == "reload_weights"
            self._reload(Path(body["kwargs"]["weights_path"]))
            return {"results": [None]}
        if path == "/v1/load_lora_adapter":
            self._load_adapter(body["lora_name"], Path(body["lora_path"]))
            return "Success"
        if path == "/v1/unload_lora_adapter":
            self.service.unload_adapter(body["lora_name"])
            return "Success"
        raise Refusal(404, "Not Found")

    def _reload(self, folder: Path) -> None:
        self.loads.append(folder.name)
        if self.manners.stale:
            return
        before = self.service.params
        try:
            self.service.load(folder)
        except Refusal as error:
            raise Refusal(500, f"Call to collective_rpc method failed: {error}") from error
        if self.manners.partial and before and self.service.params:
            self.service.publish({**self.service.params, "embed/w": before["embed/w"]})

    def _load_adapter(self, name: str, folder: Path) -> None:
        self.loads.append(name)
        before = [Path(card["root"]) for card in self.service.cards()[1:]]
        self.service.load_adapter(name, before[0] if self.manners.stale and before else folder)


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVLLM
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answered(lambda: self.fake.get(self.path))

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if parts.path == "/v1/completions":
            identity = self.headers["X-Request-Id"]
            self._answered(lambda: self.fake.complete(body, identity), twice=self.fake.manners.twice)
        else:
            self._answered(lambda: self.fake.post(parts.path, parse_qs(parts.query), body))

    def _answered(self, answer: Any, twice: bool = False) -> None:
        status = 200
        try:
            found = answer()
        except Refusal as error:
            status, found = error.status, {"error": {"message": str(error), "code": error.status}}
        except ConnectionAbortedError:
            self.close_connection = True
            return
        content = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        kind = "text/plain" if isinstance(found, str) else "application/json"
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        try:
            for _ in range(2 if twice else 1):
                self.wfile.write(head.encode() + content)
        except OSError:  # nobody waits for it any more
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class QuietServer(ThreadingHTTPServer):
    """Many connections at once, each in a thread that ends with the process."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever asked has gone."""


@contextmanager
def served(fake: FakeVLLM) -> Iterator[str]:
    """The address of a stand-in, while it is served."""
    server = QuietServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        fake.manners.hangs.clear()
        fake.manners.silent.clear()
        server.shutdown()
        server.server_close()
