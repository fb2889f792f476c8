"""Workers that call rewards: processes that can be killed at any moment, or, for a notebook's functions, a thread.

Both have one method, `call`: the outcomes of some samples, or one text for all of them, at the deadline at the latest.
A worker that hung or died is replaced before its next call.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tunix.errors import UserError
from tunix.rollout.rewards.base import Reward
from tunix.rollout.rewards.calls import Outcome, encode, perform, receive, too_slow

START = 120.0
"""Seconds that a worker has to import the rewards: a user's module may import torch from a cold disk."""
GRACE = 1.0
"""Seconds beyond the deadline for samples awaited together: those in time are not lost with others that hang."""

_COMMAND = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from tunix.rollout.rewards.worker import serve
serve(int(sys.argv[1]))
"""


class ProcessWorker:
    """A worker process: the first call starts it, and the next call starts it again after it hung or died."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """A worker for rewards that a process can import (`Reward.source`)."""
        self._rewards = rewards
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def call(
        self, reward: int, arguments: Mapping[str, Sequence[Any]], count: int, deadline: float
    ) -> list[Outcome] | str:
        """Calls reward number `reward` for `count` samples; their outcomes, or one text where the call failed.

        Raises:
            UserError: the process cannot import the rewards.
        """
        request = encode((reward, arguments, count, deadline))
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None
        together = self._rewards[reward].asynchronous and not self._rewards[reward].batched
        limit = time.monotonic() + deadline + GRACE * together
        try:
            self._connection.settimeout(deadline)
            self._connection.sendall(request)
            return self._answer(limit)
        except TimeoutError:
            self.close()
            return too_slow(deadline)
        except (EOFError, OSError):
            return self._death()

    def kill(self) -> None:
        """Kills the process and all that it has started; any thread may call this."""
        process = self._process
        # Until it has been waited for, its process id cannot belong to another process.
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills the process and closes its socket."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _start(self) -> None:
        """Starts a new process and waits until it has imported the rewards."""
        self.close()
        self._connection, theirs = socket.socketpair()
        path = [str(place) for place in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno()), json.dumps(path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints goes to the standard error: the standard output is the run's
                start_new_session=True,  # so that Ctrl-C reaches the trainer alone, and one signal ends all it started
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # a reward that imports jax does not take the accelerator
            )
        loaded = [
            {"source": r.source, "options": dict(r.options), "batched": r.batched, "modules": r.modules}
            for r in self._rewards
        ]
        self._connection.sendall(encode(loaded))
        try:
            answer = self._answer(time.monotonic() + START)
        except TimeoutError:
            answer = {"error": f"importing the functions took longer than {START:g} s"}
        except (EOFError, OSError):
            answer = {"error": self._death()}
        if "error" in answer:
            self.close()
            raise UserError(f"a reward's worker process does not start: {answer['error']}")

    def _answer(self, limit: float) -> Any:
        """Waits for the next message; notices the process's death even where its child keeps the socket open."""
        assert self._connection is not None
        assert self._process is not None
        while True:
            left = limit - time.monotonic()
            if left <= 0:
                raise TimeoutError
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

    def _death(self) -> str:
        """Ends the process after its socket has closed; returns how it ended, as an outcome."""
        assert self._process is not None
        self.kill()  # also kills what it has started
        code = self._process.wait()
        self.close()
        return f"ended its process (signal {-code})" if code < 0 else f"ended its process (exit code {code})"


class ThreadWorker:
    """A worker thread of this process, for functions that no other process can import.

    A call that hangs counts as failed at its deadline like any other, but a thread cannot be killed: it is abandoned
    and goes on by itself. A function that ends the process ends the run.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """A worker for any rewards."""
        self._rewards = rewards
        self._functions = [partial(reward.function, **reward.options) for reward in rewards]
        self._requests: queue.SimpleQueue[Any] | None = None

    def call(
        self, reward: int, arguments: Mapping[str, Sequence[Any]], count: int, deadline: float
    ) -> list[Outcome] | str:
        """Calls a reward for some samples; see `ProcessWorker.call`."""
        if self._requests is None:
            self._requests = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._requests,), daemon=True).start()
        answers: queue.SimpleQueue[list[Outcome] | str] = queue.SimpleQueue()
        batched = self._rewards[reward].batched
        together = self._rewards[reward].asynchronous and not batched
        self._requests.put(lambda: answers.put(perform(self._functions[reward], batched, arguments, count, deadline)))
        try:
            return answers.get(timeout=deadline + GRACE * together)
        except queue.Empty:
            self.close()
            return too_slow(deadline)

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
