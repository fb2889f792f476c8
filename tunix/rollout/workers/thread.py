"""A worker thread of this process, for code that no other process can import, such as that of a notebook's cell.

A call that hangs counts as failed at its deadline like any other, but a thread cannot be killed: it is abandoned and
goes on by itself. Code that ends the process ends the run.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tunix.rollout.workers.messages import too_slow
from tunix.rollout.workers.process import Lost

T = TypeVar("T")


class WorkerThread:
    """A thread that answers one request at a time; one that hung is replaced before the next."""

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._requests: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def ask(self, call: Callable[[], T], deadline: float, grace: float = 0.0) -> T:
        """Calls a function, which raises nothing, in the thread; returns what it returns.

        Args:
            call: without arguments.
            deadline: seconds that it may take.
            grace: seconds beyond the deadline until it is abandoned.

        Raises:
            Lost: it hangs.
        """
        if self._requests is None:
            self._requests = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._requests,), daemon=True).start()
        answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._requests.put(lambda: answers.put(call()))
        try:
            return answers.get(timeout=deadline + grace)
        except queue.Empty:
            self.close()
            raise Lost(too_slow(deadline)) from None

    def kill(self) -> None:
        """Does nothing: a thread cannot be killed."""

    def close(self) -> None:
        """Ends the thread after its present call."""
        if self._requests is not None:
            self._requests.put(None)
        self._requests = None


def _work(requests: "queue.SimpleQueue[Any]") -> None:
    while (request := requests.get()) is not None:
        request()
