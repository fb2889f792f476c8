"""A small stand-in for a vLLM server: its protocol over HTTP, answered by our own engine, so that log-probs are true.

`manners` says what it does wrong: it can hang, die, refuse, answer twice, leave ids out, or lie about its weights.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jax
import numpy as np

from tunix.config import MeshConfig
from tunix.errors import UserError
from tunix.hf.source import beside, loaded, pretrained
from tunix.lora.multi_lora import LoadedAdapter
from tunix.mesh import build_mesh
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import Request
from tunix.types import Completion, Sampling

LENGTH = 64


class Refusal(Exception):
    """An answer that is an error: (status, message)."""


@dataclass
class Manners:
    """What a server does wrong; all of it can be changed while it runs."""

    hangs: threading.Event = field(default_factory=threading.Event)
    """While set, completions are not answered."""
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
        self.adapters: dict[str, LoadedAdapter] = {}
        self.places: dict[str, str] = {}
        self.version, self.paused, self.gone = "default", False, False
        self._lock, self._mesh = threading.Lock(), build_mesh(MeshConfig(), jax.devices()[:1])
        self._read(folder)

    def _read(self, folder: Path) -> None:
        self.source = pretrained(str(folder))
        self.model, self.params = loaded(self.source, "float32", self._mesh)
        tokenizer = self.source.tokenizer
        decode = None if tokenizer is None else tokenizer.decode
        self.engine = Engine(self.model, self._mesh, slots=1, length=self.length, decode=decode)
        self._publish()

    def _publish(self) -> None:
        self.engine.publish(self.params, 0, self.adapters)

    def restart(self, folder: Path) -> None:
        """As a supervisor would: the first weights again, and no adapter."""
        self.version, self.adapters, self.places = "default", {}, {}
        self._read(folder)

    def complete(self, body: dict[str, Any], identity: str) -> dict[str, Any]:
        """Answers /v1/completions."""
        manners = self.manners
        while manners.hangs.is_set():
            time.sleep(0.02)
        time.sleep(manners.delay)
        if not identity.startswith(("tunix-probe", "tunix-vocabulary")):
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
        with self._lock:
            return self._answer(body, identity)

    def _answer(self, body: dict[str, Any], identity: str) -> dict[str, Any]:
        adapter = body["model"] if body["model"] != self.name else None
        if adapter is not None and adapter not in self.adapters:
            raise Refusal(404, f"The model `{adapter}` does not exist.")
        prompt = np.array(body["prompt"], np.int32)
        if int(prompt.max()) >= self.model.config.vocab_size:
            raise Refusal(400, f"Token id {int(prompt.max())} is out of vocabulary")
        sampling = Sampling(
            max_tokens=body["max_tokens"],
            temperature=float(body["temperature"]),
            top_k=body["top_k"],
            top_p=float(body["top_p"]),
            min_p=float(body["min_p"]),
            stop_ids=tuple(body["stop_token_ids"]),
            stop_strings=tuple(body["stop"]),
            top_logprobs=body["logprobs"],
        )
        (found,) = self.engine.run([Request(prompt, sampling, body["seed"] % 2**32, adapter=adapter)])
        return self._written(body, identity, found, prompt, adapter)

    def _written(
        self, body: dict[str, Any], identity: str, found: Completion, prompt: np.ndarray, adapter: str | None
    ) -> dict[str, Any]:
        logprobs = found.logprobs
        if self.manners.raw:
            whole = np.concatenate([prompt, found.tokens])
            scored = Request(whole, Sampling(1, prompt_logprobs=True), 0, adapter=adapter)
            (again,) = self.engine.run([scored])
            assert again.prompt_logprobs is not None
            logprobs = again.prompt_logprobs[len(prompt) :]
        values = (logprobs + self.manners.offset).tolist()
        names = [f"token_id:{token}" for token in found.tokens]
        top = [{name: value} for name, value in zip(names, values, strict=True)]
        if found.top is not None:
            for listed, ids, likely in zip(top, *found.top, strict=True):
                listed |= {f"token_id:{i}": float(x) for i, x in zip(ids, likely, strict=True)}
        choice: dict[str, Any] = {
            "index": 0,
            "text": "?",
            "finish_reason": found.finish,
            "logprobs": {"token_logprobs": values, "tokens": names, "top_logprobs": top},
        }
        if not self.manners.keeps_ids:
            choice |= {"token_ids": found.tokens.tolist(), "prompt_token_ids": prompt.tolist()}
        return {"id": f"cmpl-{identity}", "model": body["model"], "choices": [choice]}

    def get(self, path: str) -> Any:
        """Answers a GET."""
        if path == "/health":
            if self.manners.sick or self.gone:
                raise Refusal(503, "the engine is dead")
            return ""
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/v1/models":
            base = {"id": self.name, "root": self.name, "parent": None, "max_model_len": self.length}
            more = [{"id": name, "root": self.places[name], "parent": self.name} for name in self.adapters]
            return {"data": [base, *more]}
        raise Refusal(404, "Not Found")

    def post(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Any:
        """Answers a POST, but for completions."""
        if path == "/tokenize":
            assert self.source.tokenizer is not None
            ids = self.source.tokenizer.encode(body["prompt"])
            return {"tokens": [i + 1 for i in ids] if self.manners.odd_tokens else ids, "max_model_len": self.length}
        if path == "/pause":
            assert query == {"mode": ["wait"]}
            self.paused = True
            return {"status": "paused"}
        if path == "/resume":
            self.paused = False
            return {"status": "resumed"}
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/update_weight_version":
            self.version = body["new_version"]
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
            if body["lora_name"] not in self.adapters:
                raise Refusal(404, "no such adapter")
            del self.adapters[body["lora_name"]]
            return "Success"
        raise Refusal(404, "Not Found")

    def _reload(self, folder: Path) -> None:
        self.loads.append(folder.name)
        if self.manners.stale:
            return
        try:
            source = pretrained(str(folder))
            if source.decoder != self.source.decoder:
                raise KeyError("a parameter has another shape")
            with self._lock:
                kept = {"embed/w": self.params["embed/w"]} if self.manners.partial else {}
                self.params = {**loaded(source, "float32", self._mesh)[1], **kept}
                self._publish()
        except (UserError, KeyError) as error:
            raise Refusal(500, f"Call to collective_rpc method failed: {error}") from error

    def _load_adapter(self, name: str, folder: Path) -> None:
        self.loads.append(name)
        with self._lock:
            if self.manners.stale and self.adapters:
                self.adapters[name] = next(iter(self.adapters.values()))
            else:
                self.adapters[name] = LoadedAdapter(*beside(self.model, self.params, self._mesh, folder))
            self.places[name] = str(folder)
            self._publish()


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
            status, message = error.args
            found = {"error": {"message": message, "code": status}}
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever asked has gone."""


@contextmanager
def served(fake: FakeVLLM) -> Iterator[str]:
    """The address of a stand-in, while it is served."""
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        fake.manners.hangs.clear()
        server.shutdown()
        server.server_close()
