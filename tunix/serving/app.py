"""The addresses of the server: OpenAI's, vLLM's own, and what a run tells it about weights.

A request is let in by its key (`Gate`), read within limits, answered as a whole or as a stream of events, and given up
when its client has gone. Every error has OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.
"""

import asyncio
import hmac
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from tunix.data.tokenizer import bytes_tokenizer
from tunix.errors import nearest
from tunix.hf.source import Source, require_lm_head
from tunix.inference.batcher import Ticket
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.models.families.table import small, with_sizes
from tunix.serving.bodies import ChatBody, CompletionBody, GenerateBody, read
from tunix.serving.gate import LOOPBACK, Gate
from tunix.serving.service import Asked, Service
from tunix.serving.tinker.compute import Compute
from tunix.serving.tinker.futures import Refusal
from tunix.serving.tinker.routes import Door, json_answer, json_values, read_body
from tunix.serving.tinker.tenants import Tenants
from tunix.types import Completion
from tunix.util.ports import KEY

TINY = {
    "vocab_size": 272,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn": 64,
}
TINY_LENGTH, TINY_SLOTS = 2048, 4
"""Tokens of a prompt and its answer of the random model, at most, and requests that it answers at a time."""
DRAIN = 60
"""Seconds in which requests that have begun are answered when the server is told to end."""
RETRY = 1
"""Seconds after which a client may ask again where too many wait."""
GONE = 499
"""The status of a request whose client has gone, which nobody reads."""
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    504: "timeout_error",
}
"""The protocol's type of an error; of all others `invalid_request_error`."""
Sampled = CompletionBody | ChatBody | GenerateBody
Content = Callable[[Service, dict[str, Any], Request], Any]
"""(service, body, request) -> what is answered: a text, or JSON values."""
_log = logging.getLogger(__name__)


def serve(
    options: InferenceOptions,
    listener: socket.socket,
    *,
    enable_lora: bool = False,
    allow_updates: Path | None = None,
    api_key: str | None = None,
    tiny: bool = False,
    train: Path | None = None,
    rank: int = 32,
) -> None:
    """Answers at a socket that listens already, whose clients wait until the model is read and compiled; until Ctrl-C.

    Args:
        options: the model.
        listener: the socket.
        enable_lora: whether adapters may be loaded beside the weights, which then are kept twice.
        allow_updates: the folder from which weights and adapters may be loaded; None where none may.
        api_key: what clients have to send; None where everybody is let in.
        tiny: whether a small random model is served, and none is read.
        train: the folder of checkpoints of adapters that are trained through the Tinker protocol; None where none are.
        rank: the highest of these adapters' ranks.

    Raises:
        UserError: the model cannot be read, or scores and does not answer.
    """
    inference = InferenceModel(options, tiny_source() if tiny else None)
    require_lm_head(inference.source, options.model)
    print(f"{options.model}: reading, and compiling for {inference.slots} requests at a time", file=sys.stderr)
    service = Service(inference, adapters=enable_lora or train is not None, updates=allow_updates)
    tenants, others = None, list[BaseRoute]()
    if train is not None:
        assert service.params is not None
        compute = Compute(service.engine, service.params, rank, service.length)
        tenants = Tenants(inference, compute, service.batches, service.publish_unlisted, train)
        others.append(Mount("/api/v1", routes=Door(tenants).routes()))
    if not tiny:
        service.warm()
    host, port, *_ = listener.getsockname()
    where = f"[{host}]" if ":" in host else host
    print(f"http://{where}:{port} answers, up to {service.length} tokens; Ctrl-C ends", file=sys.stderr, flush=True)
    try:
        server_of(service, Gate(api_key), others).run(sockets=[listener])
    finally:
        service.batches.close()
        if tenants is not None:
            tenants.close()


def tiny_source() -> Source:
    """A random model of two layers that reads and writes bytes, for trying out clients: its answers mean nothing."""
    decoder = replace(with_sizes(small("llama"), TINY), max_positions=TINY_LENGTH)
    return Source(decoder, bytes_tokenizer("chatml"))


def server_of(service: Service, gate: Gate | None = None, others: Sequence[BaseRoute] = ()) -> uvicorn.Server:
    """What answers on the sockets that it is run with, until it is told to end.

    Args:
        service: what is served.
        gate: who is let in; None for everybody, within the usual limits.
        others: further addresses, whose requests are let in by the same key.
    """
    gate, routes, streams = gate or Gate(), list[BaseRoute](others), set[object]()
    for path, kind in ANSWERS.items():
        answer = partial(_answered, service, gate, streams, kind)
        routes.append(Route(path, partial(_safely, answer), methods=["POST"]))
    for path, (method, content) in {**CALLS, **dict.fromkeys(UPDATES, ("POST", _updated))}.items():
        routes.append(Route(path, partial(_safely, partial(_called, service, gate, content)), methods=[method]))

    def outside(path: str, refusal: Refusal) -> Response:
        """An error that no endpoint has raised, in the form of the door that was knocked at."""
        if path.startswith("/api/v1/"):
            return json_answer({"detail": str(refusal)}, refusal.status)
        return refused(refusal)

    async def failed(request: Request, error: Any) -> Response:
        """The answer where there is no such address, or no such method."""
        path = request.url.path
        hint = nearest(path, [*ANSWERS, *CALLS, *UPDATES]) if error.status_code == 404 else ""
        hint = " Start it with --train FOLDER." if path.startswith("/api/v1/") and not others else hint
        return outside(path, Refusal(error.status_code, f"{request.method} {path:.200}: {error.detail}.{hint}"))

    app = Starlette(routes=routes, exception_handlers={HTTPException: failed})

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        """Lets those in who have the key; whether the server is well is told to everybody."""
        headers = dict[bytes, bytes](scope["headers"]) if scope["type"] == "http" else {}
        places = (headers[name] for name in (b"host", b"origin") if name in headers)
        # Where no key tells it from this machine's own programs, a page in a browser is known by its origin, or by a
        # name that its owner has made one of this machine (DNS rebinding).
        if gate.key is None and not all(map(LOOPBACK.fullmatch, places)):
            said = (
                f"a page of another host asks a server without a key: reach it as localhost, or give it a key in {KEY}"
            )
            await outside(scope["path"], Refusal(403, said, code="foreign_origin"))(scope, receive, send)
            return
        key = headers.get(b"x-api-key") or headers.get(b"authorization", b"").partition(b"Bearer ")[2]
        # How long a comparison takes says nothing of the key.
        admitted = gate.key is None or hmac.compare_digest(key, gate.key.encode())
        if scope["type"] == "http" and scope["path"] != "/health" and not admitted:
            said = f"the key lacks or is wrong: send it as Authorization: Bearer KEY (a run takes it from {KEY})"
            await outside(scope["path"], Refusal(401, said, code="invalid_api_key"))(scope, receive, send)
        else:
            await app(scope, receive, send)

    # Clients drop connections that are idle for some seconds (httpx: 5): where the server did first, a request that was
    # just sent would be lost.
    config = uvicorn.Config(guarded, log_level="warning", access_log=False, timeout_keep_alive=60)
    config.timeout_graceful_shutdown = DRAIN
    return uvicorn.Server(config)


def refused(refusal: Refusal) -> Response:
    """The answer to a request that cannot be answered."""
    headers = {"Retry-After": str(RETRY)} if refusal.status == 429 else None
    return json_answer({"error": _error(refusal)}, refusal.status, headers)


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = TYPES.get(refusal.status, "invalid_request_error")
    return {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}


async def body_of(request: Request, gate: Gate) -> dict[str, Any]:
    """The body of a request, read within the limit.

    Raises:
        Refusal: it is too long, or no JSON mapping.
    """
    try:
        async with asyncio.timeout(gate.seconds):
            raw = await read_body(request, gate.body)
    except TimeoutError:
        raise Refusal(408, f"the body takes more than {gate.seconds:g} seconds", code="timeout") from None
    return json_values(raw, "a mapping")


async def _safely(answer: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    """What is answered to a request, errors included."""
    try:
        return await answer(request)
    except Refusal as refusal:
        return refused(refusal)
    except ClientDisconnect:
        return refused(Refusal(GONE, "the client has gone"))
    except Exception as error:  # a defect, or a full device: whoever asked is told, and the next are answered
        _log.exception("a request failed")
        return refused(Refusal(500, f"{type(error).__name__} {error}"))


async def _called(service: Service, gate: Gate, content: Content, request: Request) -> Response:
    """Answers a call that takes no time of the engine, or changes what it has."""
    if request.url.path in UPDATES and service.updates is None:
        raise Refusal(
            403,
            "its weights cannot be changed: start it with --allow-updates FOLDER, the folder that holds them "
            "(a run's rollout.weights_folder)",
        )
    said = await run_in_threadpool(content, service, await body_of(request, gate), request)
    return PlainTextResponse(said) if isinstance(said, str) else json_answer(said)


async def _answered(
    service: Service, gate: Gate, streams: set[object], kind: type[Sampled], request: Request
) -> Response:
    """Answers a request whose tokens are sampled; `streams` has those that are on their way."""
    body = await body_of(request, gate)
    if identity := request.headers.get("x-request-id"):
        body.setdefault("request_id", identity)
    session = service.sessions.of(request.headers)
    asked = await run_in_threadpool(lambda: service.prepared(read(kind, body)))
    if body.get("stream") and len(streams) >= gate.streams:
        raise Refusal(429, "too many answers are streamed: try again", code="rate_limit_exceeded")
    if session is not None:
        requests, turns = service.sessions.begin(session, asked.answer.body, asked.requests)
        asked = replace(asked, requests=requests, turns=turns)
    if not body.get("stream"):
        completions = await _completed(service, asked, request, gate.seconds)
        return json_answer(await run_in_threadpool(asked.answer.whole, completions))
    return _stream(service, asked, streams, gate.seconds)


async def _completed(service: Service, asked: Asked, request: Request, seconds: float) -> list[Completion]:
    """The completions of a request, which is given up when its client has gone, or after so many seconds."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tickets = _submitted(service, asked)
    completions = asyncio.gather(*(asyncio.wrap_future(ticket.future) for ticket in tickets))
    completions.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to read it
    gone = asyncio.ensure_future(left())
    try:
        await asyncio.wait({completions, gone}, return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
        if not completions.done():
            raise ClientDisconnect if gone.done() else _late(seconds)
        answers = completions.result()
    finally:
        gone.cancel()
        completions.cancel()
        _give_up(service, asked, tickets)
    service.answered(len(asked.answer.prompt), answers)
    return answers


def _late(seconds: float) -> Refusal:
    return Refusal(504, f"the answer takes more than {seconds:g} seconds: ask for fewer tokens", code="timeout")


def _submitted(service: Service, asked: Asked, note: Callable[[int, Completion], None] | None = None) -> list[Ticket]:
    """Has a request answered, of which `note` receives the choices as they grow, and its session what was sampled."""
    tickets = [Ticket(request, note and partial(note, index)) for index, request in enumerate(asked.requests)]
    for turn, ticket in zip(asked.turns, tickets, strict=False):  # before whoever waits for it can ask again
        ticket.future.add_done_callback(lambda x, turn=turn: turn.end(None if x.exception() else x.result()))
    try:
        service.submit(tickets)
    except Refusal:
        for turn in asked.turns:
            turn.end()
        raise
    return tickets


def _give_up(service: Service, asked: Asked, tickets: Sequence[Ticket]) -> None:
    """Ends what is not answered yet."""
    for turn in asked.turns:
        turn.end()
    if left := [ticket for ticket in tickets if not ticket.future.done()]:
        service.counts["cancelled"] += len(left)
        service.batches.give_up(left)


def _stream(service: Service, asked: Asked, streams: set[object], seconds: float) -> Response:
    """An answer as events, each as soon as its tokens are there, for so many seconds at most."""
    answer, loop, changed = asked.answer, asyncio.get_running_loop(), asyncio.Event()
    latest: dict[int, Completion] = {}  # of each choice, so that a slow client holds no more than that
    end = loop.time() + seconds

    def note(index: int, completion: Completion) -> None:
        latest[index] = completion
        loop.call_soon_threadsafe(changed.set)

    tickets = _submitted(service, asked, note)
    for ticket in tickets:
        ticket.future.add_done_callback(lambda _: loop.call_soon_threadsafe(changed.set))

    def ended() -> None:
        streams.discard(asked)
        _give_up(service, asked, tickets)

    async def events() -> AsyncIterator[str]:
        try:
            for index in range(len(tickets)):
                if (first := answer.first(index)) is not None:
                    yield _event(first)
            left = set(range(len(tickets)))
            while left:
                await asyncio.wait_for(changed.wait(), end - loop.time())
                changed.clear()
                for index in sorted(left):
                    ended = tickets[index].future.done()
                    completion = tickets[index].future.result() if ended else latest.pop(index, None)
                    if ended:
                        left.remove(index)
                    if completion is not None and (chunk := answer.next(index, completion, ended=ended)) is not None:
                        yield _event(chunk)
            completions = [ticket.future.result() for ticket in tickets]
            service.answered(len(answer.prompt), completions)
            if answer.body.stream_options.include_usage:
                yield _event(answer.last(completions))
        except TimeoutError:
            yield _event({"error": _error(_late(seconds))})
        except Exception as error:  # the status is sent already
            _log.exception("a stream failed")
            yield _event({"error": _error(Refusal(500, f"{type(error).__name__} {error}"))})
        yield "data: [DONE]\n\n"

    streams.add(asked)
    return _Events(events(), ended)


class _Events(StreamingResponse):
    """Events that are sent until they end, or their client has gone."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], None]):
        """`ended` is called then."""
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


def _event(content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _text(body: dict[str, Any], name: str) -> str:
    """A text that has to be there."""
    if not isinstance(value := body.get(name), str):
        raise Refusal(400, f"{name} is a text, not {str(value)[:80]!r}", param=name)
    return value


def _updated(service: Service, body: dict[str, Any], request: Request) -> Any:
    """Answers one of `UPDATES`."""
    match request.url.path:
        case "/pause":
            if (mode := request.query_params.get("mode", "wait")) != "wait":
                raise Refusal(400, f"mode: {mode:.80} is not known here; wait is", param="mode")
            service.batches.pause()
            return {"status": "paused"}
        case "/resume":
            service.batches.resume()
            return {"status": "resumed"}
        case "/collective_rpc":
            if (method := _text(body, "method")) != "reload_weights":
                raise Refusal(400, f"method: {method:.80} is not known here; reload_weights is", param="method")
            kwargs = body.get("kwargs")
            service.load(service.allowed(_text(kwargs if isinstance(kwargs, dict) else {}, "weights_path")))
            return {"results": [None]}
        case "/update_weight_version":
            service.version = _text(body, "new_version")
        case "/v1/load_lora_adapter":
            name = _text(body, "lora_name")
            service.load_adapter(name, service.allowed(_text(body, "lora_path")))
            return "loaded"
        case "/v1/unload_lora_adapter":
            service.unload_adapter(_text(body, "lora_name"))
            return "unloaded"
    return {"success": True}  # of /reset_prefix_cache too: what is kept of prompts goes with the weights


ANSWERS: dict[str, type[Sampled]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/inference/v1/generate": GenerateBody,
}
"""What tokens are sampled for, by address."""
CALLS: dict[str, tuple[str, Content]] = {
    "/health": ("GET", lambda *_: ""),
    "/v1/models": ("GET", lambda service, *_: {"object": "list", "data": service.cards()}),
    "/v1/models/{model:path}": ("GET", lambda service, _, request: service.card(**request.path_params)),
    "/metrics": ("GET", lambda service, *_: service.metrics()),
    "/weight_info": ("GET", lambda service, *_: {"weight_version": service.version}),
    "/tokenizer_info": ("GET", lambda service, *_: service.tokenizer_info),
    "/tokenize": ("POST", lambda service, body, _: service.tokenized(body)),
    "/detokenize": ("POST", lambda service, body, _: service.detokenized(body)),
    "/sessions/{name}": ("GET", lambda service, _, request: service.sessions.get(**request.path_params).written()),
    "/sessions/{name}/end": ("POST", lambda service, _, request: service.sessions.end(**request.path_params).written()),
}
"""Other addresses with their method."""
UPDATES = (
    "/pause",
    "/resume",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
"""Those that change what answers, by POST."""
