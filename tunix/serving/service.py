"""What is served: a model whose weights and adapters change when it is told to, as a run does that it samples for.

Requests arrive at any time, and are answered together by an engine that answers a list of them at a time: a thread
hands all that wait to the engine. Where more arrive while slots are empty, it pauses the call after a dispatch and goes
on with all of them. A token's random numbers follow from its request alone, so the company changes nothing.

Axes: T time.
"""

import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunix.errors import UserError
from tunix.hf.source import beside, loaded, pretrained
from tunix.inference.model import InferenceModel
from tunix.lora.multi_lora import LoadedAdapter
from tunix.models.model import Params
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import check_prompt
from tunix.rollout.engine.sampling import check
from tunix.rollout.servers.protocol import ID
from tunix.serving.body import CompletionBody
from tunix.types import Completion, Request, Workload

GATHER = 0.005
"""Seconds in which requests that arrive together are waited for."""


@dataclass(frozen=True)
class _Waiting:
    request: Request
    future: Future[Completion]


class Batcher:
    """Answers the requests of all callers in one thread."""

    def __init__(self, engine: Engine, ready: Callable[[], None]):
        """Starts the thread.

        Args:
            engine: answers.
            ready: is called in the thread before each call of the engine, e.g. to publish weights.
        """
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
        """Whether a request that waits may begin."""
        return bool(self._waiting) and not self._paused and not self._idle

    def close(self) -> None:
        """Ends the thread; what has not been answered is not answered any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _serve(self) -> None:
        carried: list[_Waiting] = []
        while (batch := self._next(carried)) is not None:
            carried = self._answered(batch)

    def _next(self, carried: list[_Waiting]) -> list[_Waiting] | None:
        """What the engine is called with next: what was paused, and what waits; None at the end."""
        with self._changed:
            if not carried:
                self._running = 0
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._begins)
        if not carried:
            time.sleep(GATHER)
        with self._changed:
            if self._closed:
                for waiting in self._waiting:
                    waiting.future.cancel()
                for begun in carried:
                    begun.future.set_exception(RuntimeError("the server ends"))
                return None
            taken, self._waiting = (self._waiting, []) if self._begins else ([], self._waiting)
            # Whoever has gone meanwhile is not answered.
            fresh = [waiting for waiting in taken if waiting.future.set_running_or_notify_cancel()]
            self._running = len(carried) + len(fresh)
            return [*carried, *fresh]

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


FIRST = "default"
"""The version of the weights that a server is started with, as vLLM calls it."""


class Refusal(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, message: str):
        """An HTTP status, and why."""
        super().__init__(message)
        self.status = status


class Service:
    """A model that answers requests."""

    def __init__(self, inference: InferenceModel, *, adapters: bool = False, devices: List[Any] | None = None):
        """Reads the weights.

        Args:
            inference: the model; its engine is not used, since weights are replaced here.
            adapters: whether adapters may be loaded beside the weights, which are kept for that.
            devices: where the model is; None for all.

        Raises:
            UserError: the model is not accessible, or cannot sample.
        """
        self._inference, self._keeps = inference, adapters
        self.name, self.length, self.version = inference.options.model, inference.limit, FIRST
        model, params, self._mesh = inference.weights(devices)
        decode = inference.tokenizer.decode if inference.tokenizer else None
        self.engine = Engine(model, self._mesh, slots=inference.slots, max_length=self.length, decode=decode)
        self._adapters: dict[str, LoadedAdapter] = {}
        self._folders: dict[str, Path] = {}
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
        sampling = body.sampling(self._inference.source.stop_ids)
        if sampling.stop_strings and self._inference.tokenizer is None:
            raise Refusal(400, f"{self.name} has no tokenizer to find stop strings with: send stop_token_ids")
        room = max(self.length - len(prompt), 1)
        request = body.request(prompt, replace(sampling, max_tokens=min(sampling.max_tokens, room)), adapter)
        try:
            check(request.sampling, self.engine.model.config.vocab_size)
            check_prompt(0, prompt, self.length, self.engine.model.config.vocab_size)
        except UserError as error:
            raise Refusal(400, str(error)) from None
        return prompt, self.batches.submit(request)

    def answer(self, body: CompletionBody, prompt: np.ndarray, completion: Completion) -> dict[str, Any]:
        """The answer to a request, from the tokens `[T]` of its prompt and its completion."""
        tokenizer = self._inference.tokenizer
        text = self._inference.text(completion, skip_special=body.skip_special_tokens)
        if tokenizer is None or body.return_tokens_as_token_ids:
            # Written so that no text can be taken for it.
            return body.answer(prompt, completion, text, lambda token: f"{ID}{token}")
        return body.answer(prompt, completion, text, lambda token: tokenizer.decode([token]))

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
            for name, folder in self._folders.items()
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
            self._adapters, self._folders = {**self._adapters, name: adapter}, {**self._folders, name: folder}
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
            self._folders = {key: folder for key, folder in self._folders.items() if key != name}
            self._stale = True

    def _publish(self) -> None:
        """Gives the engine what was loaded since it was given something last: several adapters' comings and goings at
        once, so that what it has compiled for their number fits again."""
        if not self._stale:
            return
        assert self.params is not None
        self._publications, self._stale = self._publications + 1, False
        self.engine.publish(self.params, self._publications, self._adapters)
        if not self._keeps:
            self.params = None
