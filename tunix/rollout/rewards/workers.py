"""Where rewards run: in processes that can be ended at any moment, or, for a notebook's functions, in a thread.

Both have one verb, `call`: the outcomes of some samples, or one text for all of them, and never later than the
deadline. A worker that hung or died is replaced before its next call.
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
"""Seconds beyond the deadline of samples that are awaited together: those in time are not lost with those that hang."""

_COMMAND = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from tunix.rollout.rewards.worker import serve
serve(int(sys.argv[1]))
"""


class ProcessWorker:
    """A process of its own. It is started by the first call, and again after it hung or died."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """A worker for rewards with a source."""
        self._rewards = rewards
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def call(
        self, reward: int, arguments: Mapping[str, Sequence[Any]], count: int, deadline: float
    ) -> list[Outcome] | str:
        """The outcomes of `count` samples, or what befell the call, from reward number `reward`.

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
        """Ends the process and whatever it has started; for any thread to call."""
        process = self._process
        # As long as nobody has waited for it, its number is still its own.
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process and forgets it."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _start(self) -> None:
        """A fresh process with the rewards imported."""
        self.close()
        self._connection, theirs = socket.socketpair()
        path = [str(place) for place in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno()), json.dumps(path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints goes to the standard error: the standard output is the run's own
                start_new_session=True,  # so that Ctrl-C is the trainer's alone, and one signal ends all it started
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # a reward that imports jax does not take the accelerator
            )
        known = [
            {"source": r.source, "options": dict(r.options), "batched": r.batched, "modules": r.modules}
            for r in self._rewards
        ]
        self._connection.sendall(encode(known))
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
        """The next message. A process that died is noticed even where a child of its own holds the socket open."""
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
        """What ended the process, once its socket is closed."""
        assert self._process is not None
        self.kill()  # changes nothing for one that is ending, and ends what it has started
        code = self._process.wait()
        self.close()
        return f"ended its process (signal {-code})" if code < 0 else f"ended its process (exit code {code})"


class ThreadWorker:
    """A thread of this process, for functions that no other process can import.

    A call that hangs counts as failed at its deadline like any other, but a thread cannot be ended: it is left behind,
    and goes on as long as it likes. A function that ends the process ends the run.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """A worker for any rewards."""
        self._rewards = rewards
        self._functions = [partial(reward.function, **reward.options) for reward in rewards]
        self._requests: queue.SimpleQueue[Any] | None = None

    def call(
        self, reward: int, arguments: Mapping[str, Sequence[Any]], count: int, deadline: float
    ) -> list[Outcome] | str:
        """As `ProcessWorker.call`."""
        if self._requests is None:
            self._requests = queue.SimpleQueue()
            threading.Thread(target=_obey, args=(self._requests,), daemon=True).start()
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
        """Nothing: a thread cannot be ended."""

    def close(self) -> None:
        """Lets the thread end after the call that it is in."""
        if self._requests is not None:
            self._requests.put(None)
        self._requests = None


def _obey(requests: "queue.SimpleQueue[Any]") -> None:
    while (request := requests.get()) is not None:
        request()
