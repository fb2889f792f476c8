"""The worker's side of a process: it answers one request after the other, and imports nothing heavy by itself.

A thread reads requests, so that the process notices the end of the trainer even while a call hangs; the calls run in
the main thread, where signals and event loops work as their author expects.
"""

import contextlib
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from tunix.errors import UserError
from tunix.rollout.workers.messages import encode, receive


def serve_requests(descriptor: int, prepare: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Answers requests on the inherited socket until its other end closes.

    Args:
        descriptor: of the socket.
        prepare: imports what the first message names, and returns the function that answers each request.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    _volunteer_when_memory_ends()
    first = receive(connection)
    try:
        answer = prepare(first)
    except (UserError, ImportError) as error:
        connection.sendall(encode({"error": str(error)}))
        return
    connection.sendall(encode({"ready": True}))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    while True:
        connection.sendall(encode(answer(requests.get())))


def _read(connection: socket.socket, requests: "queue.SimpleQueue[Any]") -> None:
    """Puts requests into the queue; when the socket closes, kills this process and all that it started."""
    try:
        while True:
            requests.put(receive(connection))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _volunteer_when_memory_ends() -> None:
    """Makes Linux kill this process rather than the trainer where the user's code uses up the memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # other systems have no such file
        file.write("1000")
