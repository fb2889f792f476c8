"""The addresses of the Tinker protocol, below `/api/v1`: bodies are read and checked, and handed to `tenants.py`.

Whatever computes is answered with a promise, for whose result the client asks at `retrieve_future`. A request that has
a place in a model's order fails there, since later ones wait for it; others are refused at once. What the protocol has
and this server has not is refused by name, or has no address.
"""

import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tunix.errors import UserError
from tunix.rollout.engine.request import check_prompt
from tunix.rollout.engine.sampling import check
from tunix.serving.tinker.checkpoints import Run
from tunix.serving.tinker.compute import Step
from tunix.serving.tinker.futures import Refusal, Result
from tunix.serving.tinker.tenants import Sampler, Sampling, Tenants
from tunix.serving.tinker.wire import Id, parsed
from tunix.types import Request
from tunix.types import Sampling as Settings

_log = logging.getLogger(__name__)
TESTED = SpecifierSet(">=0.38,<0.39")
"""The versions of the SDK that this was tried with."""
HOLD = 25.0
"""Seconds for which a poll is held until it is told to come again; the SDK gives up after 45."""
SILENT = 3600.0
"""Seconds without a heartbeat after which a session has ended."""
MOST = 64 << 20
"""Bytes of a body at most; those of the SDK have 5 MB, or one datum."""
NOTE = "Embedding, unembedding and experts are not adapted here: train_unembed changes nothing"
"""What clients log when they begin a session."""
FFN = ("gate_", "up_", "down_", "per_layer_")
"""Begin the names of modules that `train_mlp` means. Others count as attention, such as the parts of a DeltaNet."""

Long = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
"""A number that arrays hold."""


class Body(BaseModel):
    """A request's JSON values; unknown ones are refused by name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    type: Any = ""


class LoraBody(Body):
    """Which adapter a model has."""

    rank: Annotated[int, Field(ge=1, lt=1 << 31)]
    seed: Long | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(Body):
    """Which update rule a model has: AdamW alone."""

    type: Literal["adamw"] = "adamw"
    version: Any = None


class CreateBody(Body):
    """`create_model`."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraBody
    optimizer_config: OptimizerBody | None = None
    user_metadata: dict[str, Any] | None = None


class AdamBody(Body):
    """The settings of an update; see `compute.Step`."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OrderedBody(Body):
    """What a request has that has a place in a model's order."""

    model_id: str
    seq_id: Annotated[int, Field(ge=1)]


class OptimBody(OrderedBody):
    """`optim_step`; the settings of other rules than AdamW have another field."""

    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(OrderedBody):
    """`save_weights` and `save_weights_for_sampler`."""

    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Long | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class LoadBody(Body):
    """`load_weights`: into a new model of a session, or into one that is there."""

    path: str
    optimizer: bool
    session_id: str | None = None
    model_seq_id: int | None = None
    model_id: str | None = None
    seq_id: Annotated[int, Field(ge=1)] | None = None
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: dict[str, Any] | None = None


class SamplerBody(Body):
    """`create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(Body):
    """A part of a prompt; only text is read."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Id]


class PromptBody(Body):
    """A prompt in parts."""

    chunks: list[ChunkBody]


class SamplingBody(Body):
    """How tokens are sampled."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Long | None = None
    stop: str | list[str] | list[Id] | None = None
    temperature: float = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_p: float = 1.0


class SampleBody(Body):
    """`asample`. What is not computed here may only be left out."""

    sampling_session_id: str
    seq_id: Annotated[int, Field(ge=0)]
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_sample_logprobs: Literal[0] = 0
    topk_prompt_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


Kind = TypeVar("Kind", bound=Body)


class Door:
    """What answers at the addresses."""

    def __init__(self, tenants: Tenants):
        """Answers for these models and samplers."""
        self.tenants = tenants
        self._heard: dict[str, float] = {}  # session -> when it was heard of last, by the monotonic clock

    def routes(self) -> list[Route]:
        """All addresses."""
        name, limit = self.tenants.name, self.tenants.inference.limit
        model = {"model_name": name, "max_context_length": limit, "trainable": True, "sampleable": True}
        posts = {
            "client/config": self._config,
            "client/dynamic_config": self._config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": partial(_constant, {"status": "accepted"}),  # and nothing of it is kept
            "sessions/{session}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "weights_info": self._weights_info,
        }
        gets = {
            "healthz": partial(_constant, {"status": "ok"}),
            "get_server_capabilities": partial(_constant, {"supported_models": [model]}),
            "samplers/{sampler}": self._sampler,
            "training_runs": self._stored,
            "training_runs/{run}": self._stored,
            "training_runs/{run}/checkpoints": self._stored,
            "checkpoints": self._stored,
        }
        deletes = {"training_runs/{run}/checkpoints/{kind}/{name}": self._stored}
        return [
            Route(f"/{path}", partial(_answer, handler), methods=[method])
            for method, paths in (("POST", posts), ("GET", gets), ("DELETE", deletes))
            for path, handler in paths.items()
        ]

    # Sessions.

    async def _config(self, request: HttpRequest) -> Any:
        _check_version((await _json(request)).get("sdk_version"))
        return {}  # all flags at their defaults

    async def _create_session(self, request: HttpRequest) -> Any:
        _check_version((await _json(request)).get("sdk_version"))
        now = time.monotonic()
        for name in [name for name, heard in self._heard.items() if heard < now - SILENT]:
            self._end(name)
        session = secrets.token_hex(8)
        self._heard[session] = now
        return {"type": "create_session", "session_id": session, "info_message": NOTE}

    async def _heartbeat(self, request: HttpRequest) -> Any:
        session = str((await _json(request)).get("session_id"))
        self._check_session(session, gone=410)
        self._heard[session] = time.monotonic()
        return {"type": "session_heartbeat"}

    async def _finish(self, request: HttpRequest) -> Any:
        self._end(request.path_params["session"])
        return {}

    def _check_session(self, session: str, gone: int = 404) -> None:
        if session not in self._heard:
            raise Refusal(gone, f"there is no session {session}, or it has ended")

    def _end(self, session: str) -> None:
        if self._heard.pop(session, None) is not None:
            self.tenants.end(session)

    # Training.

    async def _create_model(self, request: HttpRequest) -> Any:
        body, text = await _read(CreateBody, request)
        self._check_session(body.session_id)
        lora, model = body.lora_config, f"{body.session_id}:train:{body.model_seq_id}"
        modules = tuple(
            name
            for name in self.tenants.compute.modules
            if (lora.train_mlp if name.startswith(FFN) else lora.train_attn)
        )
        run = Run(body.base_model, lora.rank, modules, body.user_metadata)
        return self.tenants.submit(model, 0, text, partial(self.tenants.create, model, run, lora.seed), new=True)

    async def _info(self, request: HttpRequest) -> Any:
        model = str((await _json(request)).get("model_id"))
        if (tenant := self.tenants.models.get(model)) is None:
            raise Refusal(404, f"there is no model {model}: it was not created, or its session has ended")
        name, source = self.tenants.name, self.tenants.inference.source
        tokenizer = str(source.files or source.folder or name)
        data = {"arch": source.decoder.family, "model_name": name, "tokenizer_id": tokenizer}
        adapter = {"is_lora": True, "lora_rank": tenant.run.rank}
        return {"type": "get_info", "model_id": model, "model_data": data, "model_name": name, **adapter}

    async def _forward_backward(self, request: HttpRequest) -> Any:
        message = parsed(await read_body(request, MOST))
        if message.seq_id < 1:
            raise Refusal(400, f"seq_id: {message.seq_id}; it is 1 or more")
        # Maps have no order in protobuf: a body that is sent again may have other bytes.
        text, work = message.SerializeToString(deterministic=True), partial(self.tenants.forward_backward, message)
        return self.tenants.submit(message.model_id, message.seq_id, text, work)

    async def _optim_step(self, request: HttpRequest) -> Any:
        body, text = await _read(OptimBody, request)

        def work() -> Result:
            if body.adam_params is None:
                kind = (body.optimizer_params or {}).get("type")
                raise UserError(f"optimizer_params: {kind!r} is not computed here; AdamParams are")
            return self.tenants.optim_step(body.model_id, Step(**body.adam_params.model_dump(exclude={"type"})))

        return self.tenants.submit(body.model_id, body.seq_id, text, work)

    async def _save(self, request: HttpRequest) -> Any:
        body, text = await _read(SaveBody, request)
        kind = "weights" if request.url.path.endswith("/save_weights") else "sampler_weights"
        name = body.path or f"{body.seq_id:06d}"
        work = partial(self.tenants.save, body.model_id, kind, name, body.overwrite)
        if kind == "sampler_weights" and body.sampling_session_seq_id is not None:
            sampler = f"{body.model_id.partition(':')[0]}:sample:{body.sampling_session_seq_id}"
            work = partial(self.tenants.snapshot, body.model_id, sampler)
        return self.tenants.submit(body.model_id, body.seq_id, text, work)

    async def _load_weights(self, request: HttpRequest) -> Any:
        body, text = await _read(LoadBody, request)
        new = body.session_id is not None
        model, number = f"{body.session_id}:train:{body.model_seq_id}" if new else body.model_id or "", body.seq_id or 0
        if new:
            self._check_session(str(body.session_id))
        base = body.base_model or self.tenants.name
        work = partial(self.tenants.load, model, base, body.path, body.optimizer, body.user_metadata, new=new)
        return self.tenants.submit(model, number, text, work, new=new)

    # Sampling.

    async def _create_sampling_session(self, request: HttpRequest) -> Any:
        body, _ = await _read(SamplerBody, request)
        self._check_session(body.session_id)
        if body.model_path is None:
            self.tenants.check_base(body.base_model)
        else:
            self.tenants.checkpoints.folder(body.model_path)
        name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self.tenants.samplers.setdefault(name, Sampler(name, path=body.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def _sampler(self, request: HttpRequest) -> Any:
        sampler = self.tenants.sampler(request.path_params["sampler"])
        path = {} if sampler.path is None else {"model_path": sampler.path}
        return {"sampler_id": sampler.name, "base_model": self.tenants.name, **path}

    async def _sample(self, request: HttpRequest) -> Any:
        body, text = await _read(SampleBody, request)
        sampler, name = self.tenants.sampler(body.sampling_session_id), f"{body.sampling_session_id}:{body.seq_id}"
        inference, params = self.tenants.inference, body.sampling_params
        prompt = np.array([token for chunk in body.prompt.chunks for token in chunk.tokens], np.int64)
        check_prompt(0, prompt, inference.limit, inference.source.decoder.vocab_size)
        # Whatever is named stops in place of the model's own ids, an empty list included.
        stops = inference.source.stop_ids if params.stop is None else params.stop
        stops, room = [stops] if isinstance(stops, str) else stops, inference.limit - len(prompt)
        settings = Settings(
            max_tokens=min(params.max_tokens or room, room),
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            stop_ids=tuple(stop for stop in stops if isinstance(stop, int)),
            stop_strings=tuple(stop for stop in stops if isinstance(stop, str)),
        )
        if settings.stop_strings and inference.tokenizer is None:
            raise UserError(f"sampling_params.stop: {self.tenants.name} has no tokenizer to find texts with: send ids")
        check(settings, inference.source.decoder.vocab_size)
        seed = secrets.randbits(32) if params.seed is None else params.seed % (1 << 32)
        requests = [Request(prompt.astype(np.int32), settings, seed, i) for i in range(body.num_samples)]
        last = body.prompt_logprobs_last_n
        scored = max(1, len(prompt) - last if last else 1) if body.prompt_logprobs else None
        if (promise := self.tenants.promises.reserve(name, text)) is not None:
            await run_in_threadpool(self.tenants.sample, Sampling(promise, sampler, requests, scored))
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(body.num_samples)]}

    async def _retrieve(self, request: HttpRequest) -> Any:
        name = str((await _json(request)).get("request_id"))
        try:
            result = await self.tenants.promises.result(name, HOLD)
        except Refusal:
            raise
        except UserError as error:
            return {"error": str(error), "category": "user"}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "category": "server"}
        if result is None:
            return json_answer({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
        return Response(result, media_type="application/x-protobuf") if isinstance(result, bytes) else result

    # What there is.

    async def _stored(self, request: HttpRequest) -> Any:
        """Runs, a run, all checkpoints, or those of a run; or deletes one."""
        checkpoints, run = self.tenants.checkpoints, request.path_params.get("run")
        if request.method == "DELETE":
            checkpoints.delete("tinker://{run}/{kind}/{name}".format(**request.path_params))
            return {}
        described = [checkpoints.described(name) for name in ([run] if run else checkpoints.runs)]
        name, listed = "training_runs", [about for about, _ in described]
        if request.url.path.endswith("/checkpoints"):
            name, listed = "checkpoints", [x for _, of_run in described for x in of_run]
        elif run:
            return listed[0]
        try:
            offset, limit = (int(request.query_params.get(key, most)) for key, most in (("offset", 0), ("limit", 1000)))
        except ValueError:
            raise Refusal(400, "offset and limit are whole numbers") from None
        cursor = {"offset": offset, "limit": limit, "total_count": len(listed)}
        return {name: listed[max(offset, 0) :][: max(limit, 0)], "cursor": cursor}

    async def _weights_info(self, request: HttpRequest) -> Any:
        path = str((await _json(request)).get("tinker_path"))
        self.tenants.checkpoints.folder(path)
        run = self.tenants.checkpoints.run(path.split("/")[2])
        ffn = [name.startswith(FFN) for name in run.modules]
        return {
            "base_model": run.base_model,
            "is_lora": True,
            "lora_rank": run.rank,
            "train_unembed": False,
            "train_mlp": any(ffn),
            "train_attn": not all(ffn),
        }


async def _constant(content: Any, _: HttpRequest) -> Any:
    return content


def _check_version(version: Any) -> None:
    """Refuses a version of the SDK that was not tried with this server."""
    try:
        tried = Version(str(version)) in TESTED
    except InvalidVersion:
        tried = False
    if not tried:
        raise Refusal(400, f"sdk_version: {version}; this server was tried with {TESTED}: pip install 'tinker{TESTED}'")


async def read_body(request: HttpRequest, most: int) -> bytes:
    """A body, or a Refusal where it has more bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise Refusal(413, f"the body has more than {most} bytes", code="request_too_large")
    return bytes(body)


def json_values(body: bytes, wanted: str) -> dict[str, Any]:
    """The values of a JSON body, which has to be what is `wanted`, e.g. `an object`; or a Refusal."""
    try:
        values = json.loads(body or b"{}")
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise Refusal(400, f"the body is {wanted}, not {str(values)[:80]!r}")
    return values


def json_answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in ASCII, and not by JSONResponse: a text may have halves of characters, and numbers be none."""
    return Response(json.dumps(content), status, headers, "application/json")


async def _json(request: HttpRequest) -> dict[str, Any]:
    return json_values(await read_body(request, MOST), "an object")


async def _read(kind: type[Kind], request: HttpRequest) -> tuple[Kind, bytes]:
    """A body, and the same in one form for all that mean the same."""
    values = await _json(request)
    return kind.model_validate(values), json.dumps(values, sort_keys=True).encode()


async def _answer(handler: Callable[[HttpRequest], Awaitable[Any]], request: HttpRequest) -> Response:
    """Calls a handler; errors are answered in the protocol's form."""
    try:
        if (version := request.headers.get("x-sdk-version")) is not None:
            _check_version(version)
        content = await handler(request)
        return content if isinstance(content, Response) else json_answer(content)
    except Refusal as refusal:
        status, detail = refusal.status, str(refusal)
    except ValidationError as error:
        first = error.errors()[0]
        status, detail = 400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {str(first['input'])[:80]!r}"
    except UserError as error:
        status, detail = 400 if request.method == "POST" else 404, str(error)
    except Exception as error:  # a defect: whoever asked is told, and the next are answered
        _log.exception("a request failed")
        status, detail = 500, f"{type(error).__name__}: {error}"
    return json_answer({"detail": detail}, status)
