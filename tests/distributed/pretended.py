"""Several processes pretended by threads, with a store of their own in place of a coordinator's."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import pytest

from tunix.distributed import processes

Result = TypeVar("Result")


class Store:
    """The part of the coordinator's client that is used."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed, self._gone = threading.Condition(), False

    def end(self) -> None:
        """A process is lost: nothing is answered any more."""
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.key_value_set_bytes(key, value.encode(), allow_overwrite)

    def key_value_dir_get(self, begin: str) -> list[tuple[str, str]]:
        with self._changed:
            if self._gone:
                raise jax.errors.JaxRuntimeError("UNAVAILABLE")
            return [(key, value.decode()) for key, value in self.values.items() if key.startswith(begin)]

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values.pop(key, None)

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        deadline = time.monotonic() + timeout_in_ms / 1000
        with self._changed:
            while key not in self.values:
                if self._gone:
                    raise jax.errors.JaxRuntimeError("UNAVAILABLE")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


def pretended(
    monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[int], Result], inherits: bool = False
) -> tuple[list[Result], Store]:
    """What `act` returns in each of the processes, and the store that they leave. Other threads, such as those of a
    server in the test, are of a process that is alone; or threads are of the process that starts them."""
    store, own = Store(), threading.local()
    monkeypatch.setattr(processes, "number", lambda: number if hasattr(own, "index") else 1)
    monkeypatch.setattr(processes, "index", lambda: getattr(own, "index", 0))
    monkeypatch.setattr(processes, "store", lambda: store)
    calls: dict[tuple[int, str], Any] = {}
    monkeypatch.setattr(processes, "turn_of", lambda name: _next(calls, (own.index, name)))

    def run(index: int) -> Result:
        own.index = index
        try:
            return act(index)
        except BaseException:
            store.end()  # the others would wait for it
            raise

    def start(thread: threading.Thread) -> None:
        if hasattr(own, "index"):
            index, inner = own.index, thread.run
            thread.run = lambda: (setattr(own, "index", index), inner())[1]
        started(thread)

    started = threading.Thread.start
    if inherits:
        monkeypatch.setattr(threading.Thread, "start", start)

    with ThreadPoolExecutor(number) as pool:
        return [future.result(60) for future in [pool.submit(run, index) for index in range(number)]], store


def _next(calls: dict[tuple[int, str], int], key: tuple[int, str]) -> int:
    calls[key] = calls.get(key, -1) + 1
    return calls[key]
