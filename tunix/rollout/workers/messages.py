"""Messages between the trainer and a worker process: JSON with its length in front, over a socket.

Only the standard library is needed here. Whatever a worker's code answers, nothing of it is ever unpickled.
"""

import json
import socket
import struct
from typing import Any

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
