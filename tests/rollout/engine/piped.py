"""A sampler in another process: every call goes over a pipe to an engine there, and callbacks come back over it.

It is the seam for engines elsewhere: nothing but the sampler's verbs, arrays and records crosses.
"""

import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tunix.protocols import Sampler
from tunix.types import Completion, OnDone, Reply, Request, Workload


class PipedSampler(Sampler):
    """Implements `Sampler` so that the engine's own tests can be asked of it."""

    def __init__(self, make: Callable[[], Any]):
        """Starts the process.

        Args:
            make: builds the engine there; importable, so that it can be sent.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make), daemon=True)
        self._process.start()
        there.close()

    def publish(self, params: Mapping[str, Any], version: int) -> None:
        self._call("publish", {name: np.asarray(x) for name, x in params.items()}, version)

    def warm(self, work: Workload) -> None:
        self._call("warm", work)

    def run(
        self,
        requests: Sequence[Request],
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        on_tokens: Callable | None = None,
    ) -> list[Completion]:
        return self._call("run", requests, reply=reply, on_done=on_done, on_tokens=on_tokens)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()

    def _call(self, name: str, *args: Any, **callbacks: Callable | None) -> Any:
        """The answer of the engine there; what it asks of the callbacks meanwhile is answered here."""
        self._pipe.send((name, args, [key for key, x in callbacks.items() if x is not None]))
        while True:
            kind, value = self._pipe.recv()
            if kind == "error":
                raise value
            if kind == "done":
                return value
            self._pipe.send(callbacks[kind](*value))


def _serve(pipe: Connection, make: Callable[[], Any]) -> None:
    """The loop of the other process, until it is sent None."""
    engine = make()
    # Environments are asked in threads, and the pipe bears one question at a time.
    turn = threading.Lock()

    def asked(key: str) -> Callable:
        def ask(*args: Any) -> Any:
            with turn:
                pipe.send((key, args))
                return pipe.recv()

        return ask

    while (call := pipe.recv()) is not None:
        name, args, callbacks = call
        try:
            pipe.send(("done", getattr(engine, name)(*args, **{key: asked(key) for key in callbacks})))
        except Exception as error:
            pipe.send(("error", error))
