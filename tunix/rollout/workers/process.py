"""Workers that answer requests within a deadline, and are replaced after they hung or died.

A process can be killed at any moment: `WorkerProcess` is the run's side of it, `serve` the worker's. Messages are JSON
with their length in front, over a socket: whatever a worker's code answers, nothing of it is ever unpickled. A thread
is for code that no other process can import, such as that of a notebook's cell. Only the standard library is needed.
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunix.errors import UserError

START = 120.0
"""Seconds that a worker has to import what it runs: a user's module may import torch from a cold disk."""
LENGTH = struct.Struct("!Q")
_COMMAND = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from tunix.rollout.workers.process import serve
serve(int(sys.argv[1]), sys.argv[2])
"""


def encode(message: Any) -> bytes:
    """A message as JSON with its length in front; raises TypeError for values that JSON does not have.

    Arrays and their scalars become lists and numbers.
    """

    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError(type(value).__name__)

    text = json.dumps(message, default=plain).encode()
    return LENGTH.pack(len(text)) + text


def receive(connection: socket.socket) -> Any:
    """Receives the next message; raises EOFError where the other end is closed."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return json.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def too_slow(deadline: float) -> str:
    """What happened to a call that exceeded its deadline, e.g. `took longer than 10 s`."""
    return f"took longer than {deadline:g} s"


def serve(descriptor: int, module: str) -> None:
    """Answers requests on an inherited socket until its other end closes: the worker process.

    A thread reads the requests, so that the process notices the end of the run even while a call hangs; the calls are
    in the main thread, where signals and event loops work as their author expects.

    Args:
        descriptor: of the socket.
        module: its `prepare` takes the first message, imports what that names, and returns what answers each request.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    # Linux kills this process rather than the trainer where the user's code uses up the memory.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # other systems have no such file
        file.write("1000")
    first = receive(connection)
    try:
        answer = importlib.import_module(module).prepare(first)
    except (UserError, ImportError) as error:
        connection.sendall(encode({"error": str(error)}))
        return
    connection.sendall(encode({"ready": True}))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    process, mark = os.getpid(), os.environ[MARK]

    def read() -> None:
        try:
            while True:
                requests.put(receive(connection))
        except (EOFError, OSError):
            end_marked(mark)
            os.killpg(0, signal.SIGKILL)  # this process and all that it has started

    threading.Thread(target=read, daemon=True).start()
    while True:
        message = encode(answer(requests.get()))
        if os.getpid() != process:  # a fork in the user's code that has come back to ours: its parent answers
            os._exit(0)
        connection.sendall(message)


MARK = "TUNIX_WORKER"
"""The environment variable by which what a worker has started is recognised, in whatever session it is."""


def end_marked(mark: str) -> None:
    """Kills the processes that were started with a mark, other than this one; where there is no /proc, none."""
    variable = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is another user's, or has ended
            if variable in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)


class Lost(Exception):
    """A worker hung or died during a call; the text ends a sentence that begins with the name of what was called."""


class WorkerProcess:
    """A process that answers one request at a time, each within a deadline."""

    def __init__(self, module: str, first: Any, what: str) -> None:
        """Starts no process yet.

        Args:
            module: see `serve`.
            first: the first message to each process; JSON.
            what: whose process it is in messages, e.g. `a reward`.
        """
        self.starts = 0
        """Processes that were started so far: what one of them remembers is lost with it."""
        self._module, self._first, self._what = module, first, what
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._mark = uuid.uuid4().hex

    @property
    def lives(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.poll() is None

    def ensure(self) -> None:
        """Starts a process where there is none, or where it has died, and waits until it has imported what it runs.

        Raises:
            UserError: it cannot import what it is to run.
        """
        if self.lives:
            return
        self.close()
        self.starts += 1
        self._connection, theirs = socket.socketpair()
        path = json.dumps([str(place) for place in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno()), self._module, path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the user's code prints goes to the standard error: the standard output is the run's
                start_new_session=True,  # so that Ctrl-C reaches the trainer alone, and one signal ends all it started
                # Code that imports jax does not take the accelerator, and sets of texts have one order in all workers.
                env={"PYTHONHASHSEED": "0", **os.environ, "JAX_PLATFORMS": "cpu", MARK: self._mark},
            )
        try:
            self._connection.sendall(encode(self._first))
            answer = self._answer(time.monotonic() + START)
        except TimeoutError:
            answer = {"error": f"importing what it runs took longer than {START:g} s"}
        except (EOFError, OSError):
            answer = {"error": self._death()}
        if "error" in answer:
            self.close()
            raise UserError(f"{self._what}'s worker process does not start: {answer['error']}")

    def ask(self, request: Any, deadline: float, grace: float = 0.0) -> Any:
        """Sends a request; returns the answer.

        Args:
            request: see `encode`.
            deadline: seconds that the call may take.
            grace: seconds beyond the deadline until the process is killed.

        Raises:
            Lost: the process hung or died; it is no more.
        """
        assert self._connection is not None, "call ensure() first"
        message = encode(request)
        limit = time.monotonic() + deadline + grace
        try:
            self._connection.settimeout(deadline)
            self._connection.sendall(message)
            return self._answer(limit)
        except TimeoutError:
            self.close()
            raise Lost(too_slow(deadline)) from None
        except (EOFError, OSError):
            raise Lost(self._death()) from None

    def kill(self) -> None:
        """Kills the process and all that it has started; any thread may call this."""
        process = self._process
        # Until it has been waited for, its process id cannot belong to another process.
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process is not None:
            end_marked(self._mark)

    def close(self) -> None:
        """Kills the process and closes its socket."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _answer(self, limit: float) -> Any:
        """Waits for the next message; notices the process's death even where its child keeps the socket open."""
        assert self._connection is not None
        assert self._process is not None
        while (left := limit - time.monotonic()) > 0:
            self._connection.settimeout(min(left, 0.25))
            try:
                if self._connection.recv(1, socket.MSG_PEEK):
                    self._connection.settimeout(left)
                    return receive(self._connection)
                raise EOFError
            except TimeoutError:
                if self._process.poll() is not None:
                    with contextlib.suppress(ProcessLookupError):  # the child that it left behind
                        os.killpg(self._process.pid, signal.SIGKILL)
                    raise EOFError from None
        raise TimeoutError

    def _death(self) -> str:
        """Ends the process after its socket has closed; returns how it ended."""
        assert self._process is not None
        self.kill()  # also kills what it has started
        code = self._process.wait()
        self.close()
        return f"ended its process (signal {-code})" if code < 0 else f"ended its process (exit code {code})"


class WorkerThread:
    """A thread that answers one request at a time; one that hung is replaced before the next.

    A call that hangs counts as failed at its deadline like any other, but a thread cannot be killed: it is abandoned
    and goes on by itself. Code that ends the process ends the run.
    """

    starts, lives = 1, True
    """As of `WorkerProcess`: what code remembers outlives a thread that hangs."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        """Starts no thread yet; what answers a request raises nothing."""
        self._answer = answer
        self._requests: queue.SimpleQueue[Any] | None = None

    def ensure(self) -> None:
        """Does nothing: this process is there."""

    def ask(self, request: Any, deadline: float, grace: float = 0.0) -> Any:
        """The answer to a request, which is handed over as it is; see `WorkerProcess.ask`."""
        if self._requests is None:
            requests = self._requests = queue.SimpleQueue()

            def work() -> None:
                while (asked := requests.get()) is not None:
                    asked[1].put(self._answer(asked[0]))

            threading.Thread(target=work, daemon=True).start()
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put((request, answers))
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
