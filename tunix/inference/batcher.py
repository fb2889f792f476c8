"""Requests of all callers, answered together by one call of the engine that goes on while the weights live.

A thread calls the engine (`Engine.serve`), which asks between two dispatches for what has come, and is told who has
gone. A token's random numbers follow from its request alone, so the company changes nothing. The call ends where
weights are replaced (`idle`), and begins again with the next request; adapters that nobody uses are replaced meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from tunix.rollout.engine.batch import Arrivals
from tunix.rollout.engine.engine import Engine
from tunix.types import Completion, Request

GATHER = 0.005
"""Seconds in which requests that arrive together are waited for."""
ENDS = RuntimeError("the server ends")
"""Why a request is not answered that has come too late."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Ticket:
    """A request, and its completion to come."""

    request: Request
    """What is completed."""
    on_progress: Callable[[Completion], None] | None = None
    """Receives the completion so far, in the thread of the engine, as it grows; None where nobody reads it so early."""
    future: Future[Completion] = field(default_factory=Future)
    """The whole completion; it cannot be cancelled, since the engine's thread sets it: see `Batcher.give_up`."""

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()


class Batcher:
    """Answers the requests of all callers in one thread."""

    def __init__(self, engine: Engine, ready: Callable[[], bool]):
        """Starts the thread, in which `ready` is called before each call of the engine and each dispatch with new
        requests: it publishes what they need, and returns whether that was anything."""
        self._engine, self._ready = engine, ready
        self._changed, self._alone = threading.Condition(), threading.Lock()
        self._waiting: list[Ticket] = []
        self._running: dict[int, Ticket] = {}
        """What the engine has, by number."""
        self._came, self._gone = 0, list[int]()
        self._paused = self._idle = self._closed = self._calls = False
        self._thread = threading.Thread(target=self._serve, name="batches", daemon=True)
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """How many requests the engine has, and how many wait for it."""
        return len(self._running), len(self._waiting)

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Answers these, unless it was closed."""
        with self._changed:
            self._waiting += tickets
            closed = self._closed
            self._changed.notify_all()
        if closed:
            self.refuse(lambda _: True, ENDS)

    def give_up(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for these any more: what is not answered ends after the next dispatch."""
        with self._changed:
            self._waiting = [ticket for ticket in self._waiting if ticket not in tickets]
            for number in [number for number, ticket in self._running.items() if ticket in tickets]:
                del self._running[number]
                self._gone.append(number)
            self._changed.notify_all()

    def refuse(self, which: Callable[[Request], bool], error: Exception) -> None:
        """Ends those that wait, and that cannot be answered any more, with an error."""
        with self._changed:
            refused = [ticket for ticket in self._waiting if which(ticket.request)]
            self._waiting = [ticket for ticket in self._waiting if ticket not in refused]
        for ticket in refused:
            ticket.future.set_exception(error)

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
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._calls)
            try:
                yield
            finally:
                with self._changed:
                    self._idle = False
                    self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread; what has not been answered is not answered any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def _begins(self) -> bool:
        return bool(self._waiting) and not self._paused and not self._idle

    def _serve(self) -> None:
        """Calls the engine, time and again."""
        while True:
            with self._changed:
                self._calls = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._begins)
                if self._closed:
                    break
                self._calls, self._came = True, 0
            error, fails = ENDS, False
            try:
                self._ready()
                self._engine.serve(self._pull, self._done, self._progressed)
            except Exception as failure:  # whoever asked is told, and the next requests are answered
                _log.exception("the engine failed")
                error, fails = RuntimeError(repr(failure)) if isinstance(failure, StopIteration) else failure, True
            with self._changed:
                # Where it failed before it took any, those that wait are told.
                ended = [*self._running.values(), *(self._waiting if fails and not self._came else ())]
                self._waiting = [ticket for ticket in self._waiting if ticket not in ended]
                self._running, self._gone = {}, []
            for ticket in ended:
                ticket.future.set_exception(error)
        self.refuse(lambda _: True, ENDS)

    def _pull(self, is_idle: bool) -> Arrivals | None:
        """What has come and gone since the engine asked last; None where its call is to end."""
        with self._changed:
            if is_idle and not self._begins:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._idle or self._begins)
            if self._closed or (is_idle and self._idle):
                return None
        if is_idle:
            time.sleep(GATHER)
        with self._changed:
            new, self._waiting = (self._waiting, []) if self._begins else ([], self._waiting)
            self._running |= enumerate(new, start=self._came)
            self._came += len(new)
            gone, self._gone = self._gone, []
            watched = [number for number, ticket in self._running.items() if ticket.on_progress is not None]
        # After they were taken: what they need was noted before they came.
        published = self._engine.hold() if new and self._ready() else None
        return Arrivals([ticket.request for ticket in new], gone, watched, published)

    def _done(self, number: int, completion: Completion) -> bool:
        with self._changed:
            ticket = self._running.pop(number, None)
            self._changed.notify_all()
        if ticket is not None:
            ticket.future.set_result(completion)
        return False

    def _progressed(self, number: int, completion: Completion) -> None:
        ticket = self._running.get(number)
        if ticket is not None and ticket.on_progress is not None:
            ticket.on_progress(completion)
