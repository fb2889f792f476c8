"""Workers that answer requests within a deadline, and are replaced after they hung or died.

A process can be killed at any moment: `WorkerProcess` is the run's side of it, `serve` the worker's. Messages are JSON
over a pipe: whatever a worker's code answers, nothing of it is ever unpickled. A thread
is for code that no other process can import, such as that of a notebook's cell. Only the standard library is needed.
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tunix.errors import UserError
from tunix.util.faults import planned

START = 120.0
"""Seconds that a worker has to import what it runs: a user's module may import torch from a cold disk."""
_COMMAND = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from tunix.rollout.workers.process import serve
serve(int(sys.argv[1]), sys.argv[2])
"""


def encode(message: Any) -> bytes:
    """A message as JSON; raises TypeError for values that JSON does not have.

    Arrays and their scalars become lists and numbers.
    """

    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError(type(value).__name__)

    return json.dumps(message, default=plain).encode()


def refuse_unsendable(what: str, column: str, value: Any) -> None:
    """Checks that a worker can receive the value of a column.

    Raises:
        UserError: JSON does not have it; begins with what reads it.
    """
    try:
        encode(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{what} reads the column {column!r}, which holds {error}: only text, numbers, true, false, null and lists "
            "or mappings of these can be sent to a worker. Turn it into one of them in the data, or leave it out"
        ) from error


def too_slow(deadline: float) -> str:
    """What happened to a call that exceeded its deadline, e.g. `took longer than 10 s`."""
    return f"took longer than {deadline:g} s"


def serve(descriptor: int, module: str) -> None:
    """Answers requests on an inherited pipe until its other end closes: the worker process.

    A thread reads the requests, so that the process notices the end of the run even while a call hangs; the calls are
    in the main thread, where signals and event loops work as their author expects.

    Args:
        descriptor: of the pipe.
        module: its `prepare` takes the first message, imports what that names, and returns what answers each request.
    """
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    # Linux kills this process rather than the trainer where the user's code uses up the memory.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # other systems have no such file
        file.write("1000")
    first = json.loads(connection.recv_bytes())
    try:
        answer = importlib.import_module(module).prepare(first)
    except (UserError, ImportError) as error:
        connection.send_bytes(encode({"error": str(error)}))
        return
    connection.send_bytes(encode({"ready": True}))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    process, mark = os.getpid(), os.environ[MARK]

    def read() -> None:
        try:
            while True:
                requests.put(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            end_marked(mark)
            os.killpg(0, signal.SIGKILL)  # this process and all that it has started

    threading.Thread(target=read, daemon=True).start()
    while True:
        message = encode(answer(requests.get()))
        if os.getpid() != process:  # a fork in the user's code that has come back to ours: its parent answers
            os._exit(0)
        connection.send_bytes(message)


MARK = "TUNIX_WORKER"
"""The environment variable by which what a worker has started is recognised, in whatever session it is."""


def end_marked(mark: str) -> None:
    """Kills the processes that were started with a mark, other than this one; where there is no /proc, none."""
    variable, quiet = f"{MARK}={mark}".encode(), 0
    for _ in range(50):  # until nobody is left: one that has just been started has no environment to be read yet
        number = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it is another user's, or has ended
                if variable in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)
                    number += 1
        quiet = 0 if number else quiet + 1
        if quiet == 3:
            break
        time.sleep(0.003)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a group, and what it has started in there; nothing where it has been waited for: its
    process id may belong to another one by then."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


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
        self._connection: Connection | None = None
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
        self._connection, theirs = Pipe()
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
            self._connection.send_bytes(encode(self._first))
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
        message, fault = encode(request), planned("worker")
        limit = time.monotonic() + deadline + grace
        if fault == "die":
            self.kill()
        try:
            if fault != "hang":
                self._connection.send_bytes(message)
            return self._answer(limit)
        except TimeoutError:
            self.close()
            raise Lost(too_slow(deadline)) from None
        except (EOFError, OSError):
            raise Lost(self._death()) from None

    def kill(self) -> None:
        """Kills the process and all that it has started; any thread may call this."""
        if (process := self._process) is not None:
            kill_group(process)
            end_marked(self._mark)

    def close(self) -> None:
        """Kills the process and closes its pipe."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _answer(self, limit: float) -> Any:
        """Waits for the next message; notices the process's death even where its child keeps the pipe open."""
        assert self._connection is not None
        assert self._process is not None
        while (left := limit - time.monotonic()) > 0:
            if self._connection.poll(min(left, 0.25)):
                return json.loads(self._connection.recv_bytes())
            if self._process.poll() is not None:
                with contextlib.suppress(ProcessLookupError):  # the child that it left behind
                    os.killpg(self._process.pid, signal.SIGKILL)
                raise EOFError
        raise TimeoutError

    def _death(self) -> str:
        """Ends the process after its pipe has closed; returns how it ended."""
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
