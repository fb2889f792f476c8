"""Promises of results, and the order in which the requests of a model are carried out.

A request is answered at once with a promise, whose result the client asks for until it is there. The promise is named
after the model and the request's sequence number, so that a request that is sent again is the same promise. The
requests of a model are carried out strictly in the order of these numbers, in whichever order they arrive; models take
turns, so that none waits for another that has much to do, or whose next request never comes.
"""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from tunix.errors import UserError

Result = bytes | dict[str, Any]
"""What was computed: a serialised protobuf message, or JSON values."""
KEEP = 1800.0
"""Seconds for which a result is kept once it is there: several polls for it may overlap."""
SWEEP = 256
"""Requests after which results that were kept long enough are dropped."""


class Refusal(Exception):
    """A request that is refused when it arrives, with the status and the fields of the error that say so."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        """`param` is the field of the body that is wrong, and `code` OpenAI's name of the mistake."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass
class Promise:
    """A result to come."""

    request_id: str
    """Its name, e.g. `6d1f:train:0:3`."""
    digest: bytes
    """The hash of the request's body: another one under the same name is refused."""
    future: Future[Result] = field(default_factory=Future)
    """The result, or the exception that the client is shown."""
    fulfilled: float | None = None
    """When, by the monotonic clock; None while it is not."""

    def settle(self, outcome: Result | Exception) -> None:
        """Fulfils or fails it, unless that was done before: its session may have ended meanwhile."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
            self.fulfilled = time.monotonic()


Job = tuple[Promise, Callable[[], Result]]
"""What was promised, and what computes it."""


class Promises:
    """The promises of all clients; usable from several threads."""

    def __init__(self):
        self._promises: dict[str, Promise] = {}
        self._lock, self._number = threading.Lock(), 0

    def reserve(self, request_id: str, body: bytes) -> Promise | None:
        """A new promise; None where this request was promised already.

        Args:
            request_id: the name of the promise.
            body: the request's, in one form for all that mean the same.

        Raises:
            Refusal: another request has this name.
        """
        digest = hashlib.sha256(body).digest()
        with self._lock:
            self._number += 1
            if self._number % SWEEP == 0:
                before = time.monotonic() - KEEP
                kept = {name: x for name, x in self._promises.items() if (x.fulfilled or before) >= before}
                self._promises = kept
            if (known := self._promises.get(request_id)) is not None:
                if known.digest != digest:
                    raise Refusal(
                        400, f"{request_id} was sent before with another body: a sequence number is used once"
                    )
                return None
            promise = self._promises[request_id] = Promise(request_id, digest)
        return promise

    async def result(self, request_id: str, seconds: float) -> Result | None:
        """The result of a promise, for which it waits so long; None where it is not there by then.

        Raises:
            Refusal: there is no such promise.
            Exception: the request failed.
        """
        if (promise := self._promises.get(request_id)) is None:
            raise Refusal(404, f"there is no request {request_id}, or its result was dropped {KEEP:g} s after it came")
        waiting = asyncio.wrap_future(promise.future)
        done, _ = await asyncio.wait({waiting}, timeout=seconds)
        return waiting.result() if done else None

    def fail(self, error: Exception, of: str = "") -> None:
        """Fails what is not fulfilled, of the model or sampler whose name begins these promises' names."""
        with self._lock:
            failing = [promise for name, promise in self._promises.items() if name.startswith(of)]
        for promise in failing:
            promise.settle(error)


class Turns:
    """The jobs of all models. Its owner holds a lock around every call."""

    def __init__(self):
        self._next: dict[str, int] = {}  # in the order in which the models have their turn
        self._jobs: dict[tuple[str, int], Job] = {}

    def open(self, model: str) -> None:
        """Begins a model's order, at the number 0."""
        self._next.setdefault(model, 0)

    def close(self, session: str) -> None:
        """Ends the orders of models whose names begin so: what waits in them is not carried out, and what comes is
        refused."""
        self._next = {model: number for model, number in self._next.items() if not model.startswith(session)}
        self._jobs = {place: job for place, job in self._jobs.items() if place[0] in self._next}

    def check(self, model: str) -> None:
        """Checks that a model's order has begun.

        Raises:
            Refusal: there is no such model.
        """
        if model not in self._next:
            raise Refusal(404, f"there is no model {model}: it was not created, or its session has ended")

    def add(self, model: str, number: int, job: Job) -> None:
        """Puts a job in its place; it is ready as soon as all before it have been taken.

        Raises:
            UserError: the number was used before.
        """
        if number < self._next[model]:
            raise UserError(f"{model}: request {number} was carried out before, and its result is dropped")
        self._jobs[model, number] = job

    def take(self) -> Job | None:
        """The next job of the model whose turn it is; None where none is ready."""
        for model, number in self._next.items():
            if (job := self._jobs.pop((model, number), None)) is not None:
                del self._next[model]
                self._next[model] = number + 1  # behind all others
                return job
        return None
