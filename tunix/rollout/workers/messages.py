"""Messages between the trainer and a worker process (JSON with its length in front, over a socket), and their server.

Only the standard library is needed here. Whatever a worker's code answers, nothing of it is ever unpickled. In a worker
a thread reads requests, so that the process notices the end of the trainer even while a call hangs; the calls run in
the main thread, where signals and event loops work as their author expects.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from tunix.errors import UserError

LENGTH = struct.Struct("!Q")


def encode(message: Any) -> bytes:
    """A message as JSON with its length in front; raises TypeError for values that JSON does not have.

    Arrays and their scalars become lists and numbers.
    """
    text = json.dumps(message, default=_plain).encode()
    return LENGTH.pack(len(text)) + text


def receive(connection: socket.socket) -> Any:
    """Receives the next message; raises EOFError where the other end is closed."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return json.loads(_exactly(connection, length))


def too_slow(deadline: float) -> str:
    """What happened to a call that exceeded its deadline, e.g. `took longer than 10 s`."""
    return f"took longer than {deadline:g} s"


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def _plain(value: Any) -> Any:
    """Arrays as lists; any other value that JSON does not have is refused."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)


def serve_requests(descriptor: int, prepare: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Answers requests on the inherited socket until its other end closes.

    Args:
        descriptor: of the socket.
        prepare: imports what the first message names, and returns the function that answers each request.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    # Linux kills this process rather than the trainer where the user's code uses up the memory.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # other systems have no such file
        file.write("1000")
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
