"""The addresses of the server: completions, models, and what a run tells it about weights; those of vLLM 0.32.

Whoever reaches the port can have it load folders that this process can read, so that it listens on loopback by default.
"""

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from tunix.hf.source import require_lm_head
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.serving.service import CompletionBody, Refusal, Service
from tunix.serving.tinker.routes import Door
from tunix.serving.tinker.tenants import Tenants

_log = logging.getLogger(__name__)


def serve(
    options: InferenceOptions, listener: socket.socket, *, enable_lora: bool, train: Path | None = None, rank: int = 32
) -> None:
    """Answers at a socket that listens already, whose clients wait until the model is read and compiled; until Ctrl-C.
    With `enable_lora` adapters may be loaded beside the weights, which then are kept twice. With `train` adapters up to
    `rank` are trained through the Tinker protocol; their checkpoints are in that folder.

    Raises:
        UserError: the model cannot be read, or scores and does not answer.
    """
    inference = InferenceModel(options)
    require_lm_head(inference.source, options.model)
    print(f"{options.model}: reading, and compiling for {inference.slots} requests at a time", file=sys.stderr)
    service = Service(inference, adapters=enable_lora)
    service.warm()
    tenants = None if train is None else Tenants(inference, train, rank)
    others = [] if tenants is None else [Mount("/api/v1", routes=Door(tenants).routes())]
    host, port, *_ = listener.getsockname()
    where = f"[{host}]" if ":" in host else host
    print(f"http://{where}:{port} answers, up to {service.length} tokens; Ctrl-C ends", file=sys.stderr, flush=True)
    try:
        server_of(service, others).run(sockets=[listener])
    finally:
        if tenants is not None:
            tenants.close()


def server_of(service: Service, others: Sequence[BaseRoute] = ()) -> uvicorn.Server:
    """What answers on the sockets that it is run with, until it is told to end; `others` are further addresses."""

    async def endpoint(request: Request) -> Response:
        try:
            try:
                body = json.loads(await request.body() or b"{}")
            except ValueError as error:
                raise Refusal(400, f"the body is no JSON: {error}") from None
            if not isinstance(body, dict):
                raise Refusal(400, f"the body is a mapping, not {str(body)[:80]!r}")
            content = await _content(service, request, body)
            return PlainTextResponse(content) if isinstance(content, str) else JSONResponse(content)
        except Refusal as refusal:
            status, message = refusal.status, str(refusal)
        except ValidationError as error:
            first = error.errors()[0]
            status, where = 400, ".".join(map(str, first["loc"]))
            message = f"{where}: {first['msg']}, not {str(first['input'])[:80]!r}"
        except Exception as error:  # a defect, or a full device: whoever asked is told, and the next are answered
            _log.exception("a request failed")
            status, message = 500, f"{type(error).__name__} {error}"
        return JSONResponse({"error": {"message": message, "code": status}}, status)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.batches.close)

    routes = [Route(path, endpoint, methods=[method]) for method, paths in ADDRESSES.items() for path in paths.split()]
    app = Starlette(routes=[*routes, *others], lifespan=lifespan)
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))


def _field(body: dict[str, Any], name: str) -> str:
    """A text that has to be there."""
    if not isinstance(value := body.get(name), str):
        raise Refusal(400, f"{name} is a text, not {value!r}")
    return value


async def _content(service: Service, request: Request, body: dict[str, Any]) -> Any:
    """What is answered: a text, or JSON values."""
    match request.url.path:
        case "/v1/completions":
            asked = CompletionBody.model_validate(body)
            prompt, future = service.complete(asked)
            return service.answer(asked, prompt, await asyncio.wrap_future(future))
        case "/v1/models":
            return {"object": "list", "data": service.cards()}
        case "/health":
            return ""
        case "/tokenize":
            ids = service.tokens(_field(body, "prompt"), special=bool(body.get("add_special_tokens", True)))
            return {"tokens": ids, "count": len(ids), "max_model_len": service.length}
        case "/pause":
            if (mode := request.query_params.get("mode", "wait")) != "wait":
                raise Refusal(400, f"mode: {mode} is not known here; wait is")
            await run_in_threadpool(service.batches.pause)
            return {"status": "paused"}
        case "/resume":
            service.batches.resume()
            return {"status": "resumed"}
        case "/collective_rpc":
            if (method := _field(body, "method")) != "reload_weights":
                raise Refusal(400, f"method: {method} is not known here; reload_weights is")
            await run_in_threadpool(service.load, Path(_field(body.get("kwargs") or {}, "weights_path")))
            return {"results": [None]}
        case "/reset_prefix_cache":
            return {"success": True}  # no prefix is kept from one call of the engine to the next
        case "/update_weight_version":
            service.version = _field(body, "new_version")
            return {"success": True}
        case "/weight_info":
            return {"weight_version": service.version}
        case "/v1/load_lora_adapter":
            name, folder = _field(body, "lora_name"), Path(_field(body, "lora_path"))
            await run_in_threadpool(service.load_adapter, name, folder)
            return "loaded"
        case "/v1/unload_lora_adapter":
            await run_in_threadpool(service.unload_adapter, _field(body, "lora_name"))
            return "unloaded"
    raise AssertionError(request.url.path)


ADDRESSES = {
    "GET": "/v1/models /health /weight_info",
    "POST": "/v1/completions /tokenize /pause /resume /collective_rpc /reset_prefix_cache /update_weight_version "
    "/v1/load_lora_adapter /v1/unload_lora_adapter",
}
"""What `_content` answers, by method."""
