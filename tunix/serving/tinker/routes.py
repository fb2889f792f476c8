"""The addresses of the Tinker protocol, below `/api/v1`: bodies are read and checked, and handed to `tenants.py`.

Whatever computes is answered with a promise, for whose result the client asks at `retrieve_future`. A request of a
model that has a number fails there, since later ones wait for it; others are refused at once.
"""

import asyncio
import functools
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import numpy as np
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunix.errors import UserError
from tunix.rollout.engine.request import check_prompt
from tunix.rollout.engine.sampling import check
from tunix.serving.tinker.checkpoints import Run
from tunix.serving.tinker.compute import Step
from tunix.serving.tinker.futures import Refusal, Result
from tunix.serving.tinker.tenants import Sampler, Sampling, Tenants
from tunix.serving.tinker.wire import parsed
from tunix.types import Request
from tunix.types import Sampling as Settings

_log = logging.getLogger(__name__)
TESTED = SpecifierSet(">=0.38,<0.39")
"""The versions of the SDK that this was tried with."""
HOLD = 25.0
"""Seconds for which a poll is held until it is told to come again; the SDK gives up after 45."""
SILENT = 3600.0
"""Seconds without a heartbeat after which a session has ended."""
PROTOBUF = "application/x-protobuf"
NOTE = "The unembedding and the embedding are not adapted here: train_unembed changes nothing"
"""What clients log when they begin a session."""


class Body(BaseModel):
    """A request's JSON values; unknown ones are refused by name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: str = ""


class SessionBody(Body):
    """`create_session`."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None


class LoraBody(Body):
    """Which adapter a model has."""

    rank: int
    seed: int | None = None
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
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: dict[str, Any] | None = None


class AdamBody(Body):
    """The settings of an update; see `compute.Step`."""

    type: Literal["adamw", "adam", ""] = ""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OrderedBody(Body):
    """What a request has that is a place in a model's order."""

    model_id: str
    seq_id: Annotated[int, Field(ge=1)]


class OptimBody(OrderedBody):
    """`optim_step`; other rules than AdamW have another field."""

    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(OrderedBody):
    """`save_weights` and `save_weights_for_sampler`."""

    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class LoadBody(Body):
    """`load_weights`, into a new model of a session or into one that is there."""

    path: str
    optimizer: bool
    session_id: str | None = None
    model_seq_id: int | None = None
    model_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: dict[str, Any] | None = None
    weights_access_token: str | None = None


class SamplerBody(Body):
    """`create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(Body):
    """A part of a prompt; only text is read."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class PromptBody(Body):
    """A prompt in parts."""

    chunks: list[ChunkBody]


class SamplingBody(Body):
    """How tokens are sampled."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorBody(Body):
    """A tensor as JSON."""

    data: list[int]
    dtype: Literal["int64"]
    shape: list[int]


class SampleBody(Body):
    """`asample`. What is not computed here may only be left out."""

    sampling_session_id: str
    seq_id: Annotated[int, Field(ge=0)]
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    topk_prompt_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


@dataclass
class Session:
    """A client's session."""

    metadata: dict[str, Any] | None
    heard: float
    """When it was heard of last, by the monotonic clock."""


class Door:
    """What answers at the addresses."""

    def __init__(self, tenants: Tenants):
        """Answers for these models and samplers."""
        self.tenants = tenants
        self._sessions: dict[str, Session] = {}

    def routes(self) -> list[Route]:
        """All addresses."""
        posts = {
            "client/config": self.config,
            "client/dynamic_config": self.config,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "telemetry": self.telemetry,
            "sessions/{session}/finish": self.finish,
            "create_model": self.create_model,
            "get_info": self.info,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "load_weights": self.load_weights,
            "weights_info": self.weights_info,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.sample,
            "retrieve_future": self.retrieve,
        }
        gets = {
            "healthz": self.health,
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler}": self.sampler,
            "sessions": self.sessions,
            "sessions/{session}": self.session,
            "training_runs": self.runs,
            "training_runs/{run}": self.run,
            "training_runs/{run}/checkpoints": self.checkpoints,
            "checkpoints": self.checkpoints,
        }
        deletes = {"training_runs/{run}/checkpoints/{kind}/{name}": self.delete}
        methods = {"POST": posts, "GET": gets, "DELETE": deletes}
        return [
            Route(f"/{path}", functools.partial(_answer, handler), methods=[method])
            for method, paths in methods.items()
            for path, handler in paths.items()
        ]

    # Sessions.

    async def config(self, request: HttpRequest) -> Any:
        """Flags of the client, all at their defaults."""
        _check_version((await _json(request)).get("sdk_version"))
        return {}

    async def create_session(self, request: HttpRequest) -> Any:
        """Begins a session, and ends those of clients that are gone."""
        body = SessionBody.model_validate(await _json(request))
        _check_version(body.sdk_version)
        now = time.monotonic()
        for name in [name for name, session in self._sessions.items() if session.heard < now - SILENT]:
            self._end(name)
        name = secrets.token_hex(8)
        self._sessions[name] = Session(body.user_metadata, now)
        return {"type": "create_session", "session_id": name, "info_message": NOTE}

    async def heartbeat(self, request: HttpRequest) -> Any:
        """Notes that a client lives."""
        self._session(str((await _json(request)).get("session_id")), gone=410).heard = time.monotonic()
        return {"type": "session_heartbeat"}

    async def telemetry(self, _: HttpRequest) -> Any:
        """Accepts what clients tell of themselves, and keeps nothing of it."""
        return {"status": "accepted"}

    async def finish(self, request: HttpRequest) -> Any:
        """Ends a session."""
        self._end(request.path_params["session"])
        return {}

    def _session(self, name: str, gone: int = 404) -> Session:
        if (session := self._sessions.get(name)) is None:
            raise Refusal(gone, f"there is no session {name}, or it has ended")
        return session

    def _end(self, name: str) -> None:
        if self._sessions.pop(name, None) is not None:
            self.tenants.end(name)

    # Training.

    async def create_model(self, request: HttpRequest) -> Any:
        """A new model of a session."""
        values = await _json(request)
        body, model = (
            CreateBody.model_validate(values),
            f"{values.get('session_id')}:train:{values.get('model_seq_id')}",
        )
        self._session(body.session_id)
        if (lora := body.lora_config) is None:
            raise Refusal(400, "lora_config: adapters alone are trained here; set a rank")
        kinds = {True: lora.train_attn, False: lora.train_mlp}
        modules = tuple(name for name in self.tenants.compute.modules if kinds[_attends(name)])
        self.tenants.open(model)
        run = Run(body.base_model, lora.rank, modules, body.user_metadata)
        return self._promise(model, 0, values, functools.partial(self.tenants.create, model, run, lora.seed))

    async def info(self, request: HttpRequest) -> Any:
        """What a model is."""
        model = str((await _json(request)).get("model_id"))
        if (tenant := self.tenants.models.get(model)) is None:
            raise Refusal(404, f"there is no model {model}: it was not created, or its session has ended")
        source = self.tenants.inference.source
        tokenizer = str(source.files or source.folder or self.tenants.name)
        data = {"arch": source.decoder.family, "model_name": self.tenants.name, "tokenizer_id": tokenizer}
        return {
            "type": "get_info",
            "model_id": model,
            "model_data": data,
            "is_lora": True,
            "lora_rank": tenant.run.rank,
            "model_name": self.tenants.name,
        }

    async def forward_backward(self, request: HttpRequest) -> Any:
        """Adds gradients, or computes the losses alone."""
        message = parsed(await request.body())
        if message.seq_id < 1:
            raise Refusal(400, f"seq_id: {message.seq_id}; it is 1 or more")
        # Maps have no order in protobuf, so that a body that is sent again may have other bytes.
        body, work = message.SerializeToString(deterministic=True), self.tenants.forward_backward
        name = self.tenants.submit(message.model_id, message.seq_id, body, functools.partial(work, message))
        return {"request_id": name, "model_id": message.model_id}

    async def optim_step(self, request: HttpRequest) -> Any:
        """Applies the gradients."""
        values = await _json(request)
        body = OptimBody.model_validate(values)
        model = body.model_id

        def work() -> Result:
            if body.adam_params is None:
                kind = (body.optimizer_params or {}).get("type")
                raise UserError(f"optimizer_params: {kind!r} is not computed here; AdamParams are")
            return self.tenants.optim_step(model, Step(**body.adam_params.model_dump(exclude={"type"})))

        return self._promise(model, body.seq_id, values, work)

    async def save_weights(self, request: HttpRequest) -> Any:
        """Saves weights and optimizer."""
        values = await _json(request)
        body = SaveBody.model_validate(values)
        name = body.path or f"{body.seq_id:06d}"
        work = functools.partial(self.tenants.save, body.model_id, name, body.overwrite, body.user_metadata)
        return self._promise(body.model_id, body.seq_id, values, work)

    async def save_weights_for_sampler(self, request: HttpRequest) -> Any:
        """Saves weights to sample from: under a name, or as a sampler in memory."""
        values = await _json(request)
        body = SaveBody.model_validate(values)
        if body.sampling_session_seq_id is None:
            name = body.path or f"{body.seq_id:06d}"
            work = functools.partial(self.tenants.save_sampler, body.model_id, name, body.user_metadata)
        else:
            session, _, _ = body.model_id.partition(":")
            sampler = f"{session}:sample:{body.sampling_session_seq_id}"
            work = functools.partial(self.tenants.snapshot, body.model_id, sampler)
        return self._promise(body.model_id, body.seq_id, values, work)

    async def load_weights(self, request: HttpRequest) -> Any:
        """Loads a checkpoint to go on from."""
        values = await _json(request)
        body = LoadBody.model_validate(values)
        new = body.session_id is not None
        model, number = f"{body.session_id}:train:{body.model_seq_id}" if new else body.model_id or "", body.seq_id or 0
        if new:
            self._session(str(body.session_id))
            self.tenants.open(model)

        def work() -> Result:
            if body.base_model is not None:
                self.tenants.check_base(body.base_model)
            return self.tenants.load(model, body.path, body.optimizer, body.user_metadata, new=new)

        return self._promise(model, number, values, work)

    def _promise(self, model: str, number: int, values: dict[str, Any], work: Callable[[], Result]) -> Any:
        name = self.tenants.submit(model, number, json.dumps(values, sort_keys=True).encode(), work)
        return {"request_id": name, "model_id": model}

    # Sampling.

    async def create_sampling_session(self, request: HttpRequest) -> Any:
        """A sampler of the base, or of a checkpoint."""
        body = SamplerBody.model_validate(await _json(request))
        self._session(body.session_id)
        if body.model_path is not None:
            self.tenants.checkpoints.existing(body.model_path)
        else:
            self.tenants.check_base(body.base_model)
        name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self.tenants.samplers.setdefault(name, Sampler(name, path=body.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def sampler(self, request: HttpRequest) -> Any:
        """What a sampler is."""
        sampler = self.tenants.sampler(request.path_params["sampler"])
        path = {} if sampler.path is None else {"model_path": sampler.path}
        return {"sampler_id": sampler.name, "base_model": self.tenants.name, **path}

    async def sample(self, request: HttpRequest) -> Any:
        """Completions of a prompt."""
        values = await _json(request)
        body = SampleBody.model_validate(values)
        sampler, name = self.tenants.sampler(body.sampling_session_id), f"{body.sampling_session_id}:{body.seq_id}"
        requests, (scored, targets) = self._requests(body), self._scored(body)
        promise = self.tenants.promises.reserve(name, json.dumps(values, sort_keys=True).encode())
        if promise is not None:
            self.tenants.sample(Sampling(promise, sampler, requests, scored, targets))
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(body.num_samples)]}

    def _requests(self, body: SampleBody) -> list[Request]:
        """The requests to the engine.

        Raises:
            UserError: a setting or the prompt is invalid.
        """
        inference, params = self.tenants.inference, body.sampling_params
        prompt = np.array([token for chunk in body.prompt.chunks for token in chunk.tokens], np.int64)
        check_prompt(0, prompt, inference.limit, inference.source.decoder.vocab_size)
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        ids = inference.source.stop_ids if stops is None else [stop for stop in stops if isinstance(stop, int)]
        texts = [stop for stop in stops or [] if isinstance(stop, str)]
        if texts and inference.tokenizer is None:
            raise UserError(f"sampling_params.stop: {self.tenants.name} has no tokenizer to find texts with: send ids")
        room = inference.limit - len(prompt)
        settings = Settings(
            max_tokens=min(params.max_tokens or room, room),
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            stop_ids=tuple(ids),
            stop_strings=tuple(texts),
            top_logprobs=body.topk_sample_logprobs,
        )
        check(settings, inference.source.decoder.vocab_size)
        seed = secrets.randbits(32) if params.seed is None else params.seed % (1 << 32)
        return [Request(prompt.astype(np.int32), settings, seed, i) for i in range(body.num_samples)]

    def _scored(self, body: SampleBody) -> tuple[int | None, np.ndarray | None]:
        """From which token on log-probs of the prompt are asked for, and the ids to score at each.

        Raises:
            UserError: the ids do not fit the prompt.
        """
        length, last = sum(len(chunk.tokens) for chunk in body.prompt.chunks), body.prompt_logprobs_last_n
        scored = max(1 if last is None else length - last, 1) if body.prompt_logprobs else None
        if (tensor := body.target_prompt_logprobs) is None:
            return scored, None
        vocab, ids = self.tenants.compute.decoder.vocab_size, np.array(tensor.data, np.int64)
        if len(tensor.shape) != 2 or tensor.shape[0] != length - 1 or np.prod(tensor.shape) != len(ids) or not len(ids):
            raise UserError(f"target_prompt_logprobs has the shape {tensor.shape}; [{length - 1}, K] fits the prompt")
        if not -1 <= ids.min() <= ids.max() < vocab:
            raise UserError(f"target_prompt_logprobs holds ids outside of the vocabulary, 0 to {vocab - 1}, and not -1")
        return scored, ids.reshape(tensor.shape)

    async def retrieve(self, request: HttpRequest) -> Any:
        """A result, or that it is not there yet."""
        name = str((await _json(request)).get("request_id"))
        try:
            result = await self.tenants.promises.result(name, HOLD)
        except Refusal:
            raise
        except Exception as error:
            user = isinstance(error, UserError)
            message = str(error) if user else f"{type(error).__name__}: {error}"
            return {"error": message, "category": "user" if user else "server"}
        if result is None:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(again, 408)
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else result

    # What there is.

    async def health(self, _: HttpRequest) -> Any:
        """That it answers."""
        return {"status": "ok"}

    async def capabilities(self, _: HttpRequest) -> Any:
        """The base."""
        limit = self.tenants.inference.limit
        model = {"model_name": self.tenants.name, "max_context_length": limit, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    async def sessions(self, _: HttpRequest) -> Any:
        """All sessions."""
        return {"sessions": list(self._sessions)}

    async def session(self, request: HttpRequest) -> Any:
        """A session's models and samplers."""
        name = request.path_params["session"]
        session, begin = self._session(name), f"{name}:"
        return {
            "training_run_ids": [x for x in self.tenants.models if x.startswith(begin)],
            "sampler_ids": [x for x in self.tenants.samplers if x.startswith(begin)],
            "user_metadata": session.metadata,
        }

    async def runs(self, request: HttpRequest) -> Any:
        """Training runs, the newest first."""
        names = self.tenants.checkpoints.runs()
        offset, limit = (int(request.query_params.get(key, value)) for key, value in (("offset", 0), ("limit", 20)))
        cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
        return {"training_runs": [self._run(name) for name in names[offset : offset + limit]], "cursor": cursor}

    async def run(self, request: HttpRequest) -> Any:
        """A training run."""
        return self._run(request.path_params["run"])

    def _run(self, name: str) -> dict[str, Any]:
        run, saved = self.tenants.checkpoints.run(name), self.tenants.checkpoints.listed(name)
        last = {
            kind: next((x for x in saved if x["checkpoint_type"] == kind), None) for kind in ("training", "sampler")
        }
        return {
            "training_run_id": name,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run.rank,
            "corrupted": False,
            "last_request_time": datetime.now(UTC).isoformat(),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": run.user_metadata,
        }

    async def checkpoints(self, request: HttpRequest) -> Any:
        """The checkpoints of a run, or of all."""
        return {"checkpoints": self.tenants.checkpoints.listed(request.path_params.get("run"))}

    async def delete(self, request: HttpRequest) -> Any:
        """Deletes a checkpoint."""
        self.tenants.checkpoints.delete("tinker://{run}/{kind}/{name}".format(**request.path_params))
        return {}

    async def weights_info(self, request: HttpRequest) -> Any:
        """What a checkpoint is of."""
        path = str((await _json(request)).get("tinker_path"))
        self.tenants.checkpoints.existing(path)
        run = self.tenants.checkpoints.run(path.split("/")[2])
        attends = {_attends(name) for name in run.modules}
        switches = {"train_unembed": False, "train_attn": True in attends, "train_mlp": False in attends}
        return {"base_model": run.base_model, "is_lora": True, "lora_rank": run.rank, **switches}


def _attends(module: str) -> bool:
    """Whether a module counts as attention in the protocol, and not as the ffn."""
    return not module.startswith(("gate_", "up_", "down_", "experts.", "per_layer_"))


def _check_version(version: str | None) -> None:
    """Checks a version of the SDK.

    Raises:
        Refusal: it was not tried with this server.
    """
    try:
        tried = version is not None and Version(version) in TESTED
    except InvalidVersion:
        tried = False
    if not tried:
        raise Refusal(
            400, f"sdk_version: {version}; this server speaks to tinker {TESTED}: pip install 'tinker{TESTED}'"
        )


async def _json(request: HttpRequest) -> dict[str, Any]:
    """The JSON values of a body.

    Raises:
        Refusal: it is no JSON object.
    """
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is an object, not {str(body)[:80]!r}")
    return body


async def _answer(handler: Callable[[HttpRequest], Awaitable[Any]], request: HttpRequest) -> Response:
    """Calls a handler; errors are answered in the protocol's form."""
    try:
        if (version := request.headers.get("x-sdk-version")) is not None:
            _check_version(version)
        content = await handler(request)
        return content if isinstance(content, Response) else JSONResponse(content)
    except Refusal as refusal:
        status, detail = refusal.status, str(refusal)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        status, detail = 400, f"{where}: {first['msg']}, not {str(first['input'])[:80]!r}"
    except UserError as error:
        status, detail = 400, str(error)
    except asyncio.CancelledError:
        raise
    except Exception as error:  # a defect: whoever asked is told, and the next are answered
        _log.exception("a request failed")
        status, detail = 500, f"{type(error).__name__}: {error}"
    return JSONResponse({"detail": detail}, status)
