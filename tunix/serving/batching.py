"""Requests that arrive at any time, answered together by an engine that answers a list of them at a time.

A thread hands all that wait to the engine. Where more arrive while slots are empty, it pauses the call after a dispatch
and goes on with all of them. A token's random numbers follow from its request alone, so the company changes nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.request import Request
from tunix.types import Completion

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
        one = _Waiting(request, Future())
        with self._changed:
            self._waiting.append(one)
            self._changed.notify_all()
        return one.future

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
                for one in self._waiting:
                    one.future.cancel()
                for one in carried:
                    one.future.set_exception(RuntimeError("the server ends"))
                return None
            taken, self._waiting = (self._waiting, []) if self._begins else ([], self._waiting)
            # Whoever has gone meanwhile is not answered.
            fresh = [one for one in taken if one.future.set_running_or_notify_cancel()]
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
            found = self._engine.run([one.request for one in batch], on_done=done, pause=pause)
        except Exception as error:  # whoever asked is told, and the next requests are answered
            for one in batch:
                if not one.future.done():
                    one.future.set_exception(error)
            return []
        left = zip(batch, found, strict=True)
        return [replace(x, request=replace(x.request, so_far=y)) for x, y in left if not x.future.done()]
