"""What is served: a model whose weights and adapters change when it is told to, as a run does that it samples for.

Requests arrive at any time, and are answered together by an engine that answers a list of them at a time: a thread
hands all that wait to the engine. Where more arrive while slots are empty, it pauses the call after a dispatch and goes
on with all of them. A token's random numbers follow from its request alone, so the company changes nothing.

The words of requests and answers are those of vLLM and OpenAI, and a setting that the engine does not compute is
refused, not ignored (https://docs.vllm.ai/en/latest/serving/openai_compatible_server).

Axes: T time.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator

from tunix.errors import UserError
from tunix.hf.source import beside, loaded, pretrained
from tunix.inference.model import InferenceModel
from tunix.lora.multi_lora import LoadedAdapter
from tunix.models.model import Params
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import check_prompt
from tunix.rollout.engine.sampling import check
from tunix.rollout.servers.protocol import FIELD, ID, written_experts
from tunix.types import Completion, Request, Sampling, Workload

GATHER = 0.005
"""Seconds in which requests that arrive together are waited for."""
HALF = 32
"""Bits of a request's seed that seed the engine; the rest counts as the request's number."""
FIRST = "default"
"""The version of the weights that a server is started with, as vLLM calls it."""


class CompletionBody(BaseModel):
    """A request, with the defaults of the protocol."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | list[int]
    request_id: str = Field(default_factory=lambda: secrets.token_hex(8))
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: float = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[StrictInt] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True
    # What has no effect at these values, and cannot be had at others.
    n: Literal[1] = 1
    stream: Literal[False] = False
    echo: Literal[False] = False
    repetition_penalty: Literal[1] = 1
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0

    @field_validator("prompt", mode="before")
    @classmethod
    def _single(cls, prompt: Any) -> Any:
        """Refuses a list of prompts: digits in strings are texts, no token ids."""
        if isinstance(prompt, list) and any(type(item) is not int for item in prompt):
            raise ValueError("it is a text or a list of token ids, whole numbers; several prompts are several requests")
        return prompt

    def request(self, prompt: np.ndarray, stop_ids: List[int], room: int, adapter: str | None) -> Request:
        """What the engine completes: the same tokens for the same body, whatever else it is asked for. There is `room`
        for so many tokens after the prompt `[T]`, and the model's own `stop_ids` end it unless `ignore_eos` is set."""
        seed = secrets.randbits(62) if self.seed is None else self.seed
        sampling = Sampling(
            max_tokens=min(self.max_tokens, room),
            temperature=float(self.temperature),
            top_k=max(self.top_k, 0),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            stop_ids=tuple(self.stop_token_ids) + (() if self.ignore_eos else tuple(stop_ids)),
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            top_logprobs=self.logprobs or 0,
        )
        return Request(prompt, sampling, seed % (1 << HALF), seed >> HALF, adapter=adapter)


@dataclass(frozen=True)
class _Waiting:
    request: Request
    future: Future[Completion]


class Batcher:
    """Answers the requests of all callers in one thread."""

    def __init__(self, engine: Engine, ready: Callable[[], None]):
        """Starts the thread, in which `ready` is called before each call of the engine, e.g. to publish weights."""
        self._engine, self._ready = engine, ready
        self._changed, self._alone = threading.Condition(), threading.Lock()
        self._waiting: list[_Waiting] = []
        self._running = 0
        self._paused = self._idle = self._closed = False
        self._thread = threading.Thread(target=self._serve, name="batches", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Completion]:
        """The completion of a request, to come."""
        waiting = _Waiting(request, Future())
        with self._changed:
            self._waiting.append(waiting)
            self._changed.notify_all()
        return waiting.future

    def pause(self) -> None:
        """Begins no request any more, and waits for those that have begun."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._running)

    def resume(self) -> None:
        """Begins requests again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Between two calls of the engine, whether paused or not; for one caller at a time."""
        with self._alone:
            with self._changed:
                self._idle = True
                self._changed.wait_for(lambda: not self._running)
            try:
                yield
            finally:
                with self._changed:
                    self._idle = False
                    self._changed.notify_all()

    @property
    def _begins(self) -> bool:
        return bool(self._waiting) and not self._paused and not self._idle

    def close(self) -> None:
        """Ends the thread; what has not been answered is not answered any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _serve(self) -> None:
        """Calls the engine, time and again, with what was paused and what waits."""
        carried: list[_Waiting] = []
        while True:
            if not carried:
                with self._changed:
                    self._running = 0
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or self._begins)
                time.sleep(GATHER)
            with self._changed:
                if self._closed:
                    for waiting in self._waiting:
                        waiting.future.cancel()
                    for begun in carried:
                        begun.future.set_exception(RuntimeError("the server ends"))
                    return
                taken, self._waiting = (self._waiting, []) if self._begins else ([], self._waiting)
                # Whoever has gone meanwhile is not answered.
                carried += [waiting for waiting in taken if waiting.future.set_running_or_notify_cancel()]
                self._running = len(carried)
            carried = self._answered(carried)

    def _answered(self, batch: list[_Waiting]) -> list[_Waiting]:
        """Calls the engine; the requests that were paused, to be continued."""

        def done(number: int, completion: Completion) -> bool:
            batch[number].future.set_result(completion)
            with self._changed:
                self._running -= 1
            return False

        def pause(dispatches: int) -> bool:
            with self._changed:
                room = self._running < self._engine.slots
                return self._closed or (dispatches > 0 and room and self._begins)

        try:
            self._ready()
            completions = self._engine.run([waiting.request for waiting in batch], on_done=done, pause=pause)
        except Exception as error:  # whoever asked is told, and the next requests are answered
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            return []
        left = zip(batch, completions, strict=True)
        return [replace(x, request=replace(x.request, so_far=y)) for x, y in left if not x.future.done()]


class Refusal(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, message: str):
        """An HTTP status, and why."""
        super().__init__(message)
        self.status = status


class Service:
    """A model that answers requests."""

    def __init__(self, inference: InferenceModel, *, adapters: bool = False, devices: List[Any] | None = None):
        """Reads the weights onto these devices, None for all; they are kept where adapters may be loaded beside them.
        The engine of `inference` is not used, since weights are replaced here.

        Raises:
            UserError: the model is not accessible, or cannot sample.
        """
        self._inference, self._keeps = inference, adapters
        self.name, self.length, self.version = inference.options.model, inference.limit, FIRST
        model, params, self._mesh = inference.weights(devices)
        decode = inference.tokenizer.decode if inference.tokenizer else None
        self.engine = Engine(model, self._mesh, slots=inference.slots, max_length=self.length, decode=decode)
        self._adapters: dict[str, tuple[Path, LoadedAdapter]] = {}
        self.params: Params | None = params
        """The weights, where they are kept for adapters; None else."""
        self._publications, self._stale = 0, True
        self._publish()
        self.batches = Batcher(self.engine, self._publish)
        """Answers; it can be paused."""

    def warm(self) -> None:
        """Compiles what the longest requests need, so that nothing compiles while they are answered."""
        self.engine.warm(Workload(self.engine.slots, self.length, self.length))

    def complete(self, body: CompletionBody) -> tuple[np.ndarray, Future[Completion]]:
        """The tokens `[T]` of a request's prompt, and its completion, to come.

        Raises:
            Refusal: there is no such model, or the request is invalid.
        """
        adapter = None if body.model == self.name else body.model
        if adapter is not None and adapter not in self._adapters:
            raise Refusal(404, f"The model `{adapter}` does not exist: this is {self.name}")
        prompt = np.array(self.tokens(body.prompt) if isinstance(body.prompt, str) else body.prompt, np.int32)
        request = body.request(prompt, self._inference.source.stop_ids, max(self.length - len(prompt), 1), adapter)
        if request.sampling.stop_strings and self._inference.tokenizer is None:
            raise Refusal(400, f"{self.name} has no tokenizer to find stop strings with: send stop_token_ids")
        try:
            check(request.sampling, self.engine.model.config.vocab_size)
            check_prompt(0, prompt, self.length, self.engine.model.config.vocab_size)
        except UserError as error:
            raise Refusal(400, str(error)) from None
        return prompt, self.batches.submit(request)

    def answer(self, body: CompletionBody, prompt: np.ndarray, completion: Completion) -> dict[str, Any]:
        """The answer to a request, from the tokens `[T]` of its prompt and its completion."""
        text = self._inference.text(completion, skip_special=body.skip_special_tokens) or ""
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": completion.finish, "logprobs": None}
        if body.logprobs is not None:
            tokenizer = None if body.return_tokens_as_token_ids else self._inference.tokenizer

            def spelled(tokens: np.ndarray) -> list[str]:
                # As ids they are written so that no text can be taken for one.
                return [f"{ID}{i}" if tokenizer is None else tokenizer.decode([i]) for i in tokens.tolist()]

            names, values = spelled(completion.tokens), completion.logprobs.tolist()
            top = [{name: value} for name, value in zip(names, values, strict=True)]
            if completion.top is not None:
                for listed, ids, likely in zip(top, *completion.top, strict=True):
                    listed |= zip(spelled(ids), likely.tolist(), strict=True)
            choice["logprobs"] = {"token_logprobs": values, "tokens": names, "top_logprobs": top}
        if body.return_token_ids:
            choice |= {"token_ids": completion.tokens.tolist(), "prompt_token_ids": prompt.tolist()}
            if completion.experts is not None:
                choice[FIELD] = written_experts(completion.experts[:-1])
        asked, sampled = len(prompt), len(completion.tokens)
        usage = {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}
        identity = f"cmpl-{body.request_id}"
        return {"id": identity, "object": "text_completion", "model": body.model, "choices": [choice], "usage": usage}

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text, by default after the BOS token where the tokenizer's own encoding begins with it.

        Raises:
            Refusal: there is no tokenizer, or the text has a lone surrogate.
        """
        tokenizer = self._inference.tokenizer
        if tokenizer is None:
            raise Refusal(400, f"{self.name} has no tokenizer: send token ids")
        try:
            return tokenizer.encode(text, bos=special and tokenizer.adds_bos)
        except UserError as error:
            raise Refusal(400, str(error)) from None

    def cards(self) -> list[dict[str, Any]]:
        """What is served: the model, and each adapter of it."""
        base = {"id": self.name, "object": "model", "root": self.name, "parent": None, "max_model_len": self.length}
        more = [
            {"id": name, "object": "model", "root": str(folder), "parent": self.name}
            for name, (folder, _) in self._adapters.items()
        ]
        return [base, *more]

    def load(self, folder: Path) -> None:
        """Answers from the weights of a folder, of the same structure.

        Raises:
            Refusal: they are not there, or of another model; the weights stay as they are.
        """
        try:
            source = pretrained(str(folder))
            # An export names more ids to stop at than its base, where the turns of its chat template end in others.
            if replace(source.decoder, stops=()) != replace(self._inference.source.decoder, stops=()):
                raise UserError(f"{folder} holds a model of another structure than {self.name}")
            self.publish(loaded(source, self._inference.options.dtype, self._mesh)[1])
        except UserError as error:
            raise Refusal(400, str(error)) from None

    def publish(self, params: Params) -> None:
        """Answers from these weights, as soon as the requests that have begun are answered."""
        with self.batches.idle():
            self.params, self._stale = params, True
            self._publish()

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serves a PEFT folder's adapter under a name, beside the weights.

        Raises:
            Refusal: adapters are not loaded here, or it does not fit.
        """
        if not self._keeps:
            raise Refusal(400, "it was started without --enable-lora")
        if name in self._adapters or name == self.name:
            raise Refusal(400, f"{name} is served already")
        try:
            assert self.params is not None
            adapter = LoadedAdapter(*beside(self.engine.model, self.params, self._mesh, folder))
        except UserError as error:
            raise Refusal(400, str(error)) from None
        with self.batches.idle():
            self._adapters = {**self._adapters, name: (folder, adapter)}
            self._stale = True

    def unload_adapter(self, name: str) -> None:
        """Serves an adapter no more.

        Raises:
            Refusal: there is none of that name.
        """
        with self.batches.idle():
            if name not in self._adapters:
                raise Refusal(404, f"there is no adapter {name}")
            self._adapters = {key: adapter for key, adapter in self._adapters.items() if key != name}
            self._stale = True

    def _publish(self) -> None:
        """Gives the engine what was loaded since it was given something last: several adapters' comings and goings at
        once, so that what it has compiled for their number fits again."""
        if not self._stale:
            return
        assert self.params is not None
        self._publications, self._stale = self._publications + 1, False
        adapters = {name: adapter for name, (_, adapter) in self._adapters.items()}
        self.engine.publish(self.params, self._publications, adapters)
        if not self._keeps:
            self.params = None
