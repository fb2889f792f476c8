"""The addresses of the server: completions, models, and what a run tells it about weights; those of vLLM 0.32.

Whoever reaches the port can have it load folders that this process can read, so that it listens on loopback by default.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tunix.serving.body import CompletionBody
from tunix.serving.service import Refusal, Service

_log = logging.getLogger(__name__)
Answer = Callable[[Service, Request, dict[str, Any]], Awaitable[Any]]
"""(service, request, its body) -> what is answered: a text, or JSON values."""


def app(service: Service) -> Starlette:
    """The application that serves a model."""

    def answering(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await _answered(service, request, answer)

        return endpoint

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.batches.close)

    routes = [Route(path, answering(answer), methods=[method]) for (method, path), answer in ADDRESSES.items()]
    return Starlette(routes=routes, lifespan=lifespan)


def server_of(service: Service) -> uvicorn.Server:
    """What answers on the sockets that it is run with, until it is told to end."""
    return uvicorn.Server(uvicorn.Config(app(service), log_level="warning", access_log=False))


async def _answered(service: Service, request: Request, answer: Answer) -> Response:
    try:
        content = await answer(service, request, _read(await request.body()))
    except Refusal as refusal:
        return _error(refusal.status, str(refusal))
    except ValidationError as error:
        first = error.errors()[0]
        return _error(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {str(first['input'])[:80]!r}")
    except Exception as error:  # a defect, or a full device: whoever asked is told, and the next requests are answered
        _log.exception("a request failed")
        return _error(500, f"{type(error).__name__} {error}")
    return PlainTextResponse(content) if isinstance(content, str) else JSONResponse(content)


def _read(content: bytes) -> dict[str, Any]:
    """The body of a request."""
    try:
        body = json.loads(content or b"{}")
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is a mapping, not {str(body)[:80]!r}")
    return body


def _field(body: dict[str, Any], name: str) -> str:
    """A text that has to be there."""
    if not isinstance(value := body.get(name), str):
        raise Refusal(400, f"{name} is a text, not {value!r}")
    return value


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


async def _complete(service: Service, request: Request, body: dict[str, Any]) -> Any:
    asked = CompletionBody.model_validate(body)
    prompt, future = service.complete(asked)
    return service.answer(asked, prompt, await asyncio.wrap_future(future))


async def _health(service: Service, request: Request, body: dict[str, Any]) -> Any:
    return ""


async def _models(service: Service, request: Request, body: dict[str, Any]) -> Any:
    return {"object": "list", "data": service.cards()}


async def _tokenize(service: Service, request: Request, body: dict[str, Any]) -> Any:
    ids = service.tokens(_field(body, "prompt"), special=bool(body.get("add_special_tokens", True)))
    return {"tokens": ids, "count": len(ids), "max_model_len": service.length}


async def _pause(service: Service, request: Request, body: dict[str, Any]) -> Any:
    if (mode := request.query_params.get("mode", "wait")) != "wait":
        raise Refusal(400, f"mode: {mode} is not known here; wait is")
    await run_in_threadpool(service.batches.pause)
    return {"status": "paused"}


async def _resume(service: Service, request: Request, body: dict[str, Any]) -> Any:
    service.batches.resume()
    return {"status": "resumed"}


async def _remote_call(service: Service, request: Request, body: dict[str, Any]) -> Any:
    if (method := _field(body, "method")) != "reload_weights":
        raise Refusal(400, f"method: {method} is not known here; reload_weights is")
    await run_in_threadpool(service.load, Path(_field(body.get("kwargs") or {}, "weights_path")))
    return {"results": [None]}


async def _reset(service: Service, request: Request, body: dict[str, Any]) -> Any:
    return {"success": True}  # no prefix is kept from one call of the engine to the next


async def _update_version(service: Service, request: Request, body: dict[str, Any]) -> Any:
    service.version = _field(body, "new_version")
    return {"success": True}


async def _version(service: Service, request: Request, body: dict[str, Any]) -> Any:
    return {"weight_version": service.version}


async def _load_adapter(service: Service, request: Request, body: dict[str, Any]) -> Any:
    await run_in_threadpool(service.load_adapter, _field(body, "lora_name"), Path(_field(body, "lora_path")))
    return "loaded"


async def _unload_adapter(service: Service, request: Request, body: dict[str, Any]) -> Any:
    await run_in_threadpool(service.unload_adapter, _field(body, "lora_name"))
    return "unloaded"


ADDRESSES: dict[tuple[str, str], Answer] = {
    ("POST", "/v1/completions"): _complete,
    ("GET", "/v1/models"): _models,
    ("GET", "/health"): _health,
    ("POST", "/tokenize"): _tokenize,
    ("POST", "/pause"): _pause,
    ("POST", "/resume"): _resume,
    ("POST", "/collective_rpc"): _remote_call,
    ("POST", "/reset_prefix_cache"): _reset,
    ("POST", "/update_weight_version"): _update_version,
    ("GET", "/weight_info"): _version,
    ("POST", "/v1/load_lora_adapter"): _load_adapter,
    ("POST", "/v1/unload_lora_adapter"): _unload_adapter,
}
"""(method, path) -> what answers."""
