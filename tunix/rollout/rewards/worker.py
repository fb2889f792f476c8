"""The process that reward functions run in: it only calls `serve`, and imports nothing heavy by itself.

A thread reads requests, so that the process notices the end of the trainer even while a reward hangs; the calls run in
the main thread, where signals and event loops work as a function's author expects.
"""

import contextlib
import functools
import importlib
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from tunix.errors import UserError
from tunix.rollout.rewards.calls import encode, perform, receive
from tunix.util.plugins import load_object


def serve(descriptor: int) -> None:
    """Answers requests on the inherited socket until its other end closes."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    _volunteer_when_memory_ends()
    rewards = receive(connection)
    try:
        functions = [_load(reward) for reward in rewards]
    except (UserError, ImportError) as error:
        connection.sendall(encode({"error": str(error)}))
        return
    connection.sendall(encode({"ready": True}))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    while True:
        i, arguments, count, deadline = requests.get()
        connection.sendall(encode(perform(functions[i], rewards[i]["batched"], arguments, count, deadline)))


def _load(reward: dict[str, Any]) -> Callable[..., Any]:
    """Loads a function and its heavy modules, and binds its options."""
    for module in reward["modules"]:
        importlib.import_module(module)
    return functools.partial(load_object(reward["source"]), **reward["options"])


def _read(connection: socket.socket, requests: "queue.SimpleQueue[Any]") -> None:
    """Puts requests into the queue; when the socket closes, kills this process and all that it started."""
    try:
        while True:
            requests.put(receive(connection))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _volunteer_when_memory_ends() -> None:
    """Makes Linux kill this process rather than the trainer where a reward uses up the memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # other systems have no such file
        file.write("1000")
