"""Environments that live in workers: each episode stays in the worker where it began, which answers one call at a time.

A call that exceeds its deadline has its worker killed, and one that ends the process ends the worker: that episode
fails. The others that lived there are replayed in a new process when they are next called: reset with the same row and
generator, and the same actions again. Answers have to be those of before.

Axes: T time.
"""

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix.errors import UserError
from tunix.rollout.environments.base import Environment, EpisodeError, Observation, Row, Step
from tunix.rollout.environments.shipped import EnvironmentMaker
from tunix.rollout.environments.worker import Host, read, saved_generator
from tunix.rollout.workers.messages import encode
from tunix.rollout.workers.process import Lost, WorkerProcess
from tunix.rollout.workers.thread import WorkerThread
from tunix.util.coded import coded

Answer = dict[str, Any]
"""What a worker answers; see `worker.py`."""


class HostProcess:
    """Environments in a process that can be killed at any moment."""

    def __init__(self, make: EnvironmentMaker) -> None:
        """Starts no process yet."""
        first = {"source": make.source, "options": dict(make.options)}
        self._process = WorkerProcess("tunix.rollout.environments.worker", first, "an environment")
        self.ensure, self.kill, self.close = self._process.ensure, self._process.kill, self._process.close

    @property
    def starts(self) -> int:
        """Processes that were started so far."""
        return self._process.starts

    def ask(self, request: Mapping[str, Any], deadline: float) -> Answer:
        """The answer to a request; see `WorkerProcess.ask`."""
        return self._process.ask(encode(request), deadline)


class HostThread:
    """Environments in a thread of this process, for a class that no other process can import; see `WorkerThread`."""

    starts = 1
    """Episodes outlive a thread that hangs."""

    def __init__(self, make: EnvironmentMaker) -> None:
        """Starts no thread yet."""
        self._host, self._thread = Host(make), WorkerThread()
        self.kill, self.close = self._thread.kill, self._thread.close

    def ensure(self) -> None:
        """Does nothing: this process is there."""

    def ask(self, request: Mapping[str, Any], deadline: float) -> Answer:
        """The answer to a request; see `WorkerThread.ask`."""
        return self._thread.ask(lambda: self._host.answer(request), deadline)


class EnvironmentWorker:
    """A worker whose lock is held from one call to its answer."""

    def __init__(self, make: EnvironmentMaker, deadline: float) -> None:
        """Starts nothing yet.

        Args:
            make: the environment.
            deadline: seconds of a call.
        """
        self.lock = threading.Lock()
        self.lost = "ended its process"
        """What happened when a process was last lost, e.g. `took longer than 10 s`."""
        self._host = HostThread(make) if make.source is None else HostProcess(make)
        self._deadline, self._closed = deadline, False
        self._over: deque[int] = deque()

    def ready(self) -> int:
        """The number of the process that lives, which is started where there is none; the lock has to be held.

        Raises:
            Lost: the worker is closed.
            UserError: the process does not start.
        """
        if self._closed:
            raise Lost("was given up")
        self._host.ensure()
        return self._host.starts

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """The answer to a request, after `ready`; the lock has to be held.

        Raises:
            Lost: the environment hung, or ended the process.
        """
        over = [self._over.popleft() for _ in range(len(self._over))]
        try:
            return self._host.ask({**request, "forget": over}, self._deadline)
        except Lost as lost:
            self.lost = str(lost)
            raise

    def forget(self, episode: int) -> None:
        """Lets go of an episode with the next call; any thread may call this, at any time."""
        self._over.append(episode)

    def close(self) -> None:
        """Ends the process; a call that still runs in it is lost."""
        self._closed = True
        self._host.kill()
        while not self.lock.acquire(timeout=0.1):
            self._host.kill()
        try:
            self._host.close()
        finally:
            self.lock.release()


class RemoteEnvironment(Environment):
    """An environment that lives in a worker; of each, `EnvironmentPool` makes a class with its name."""

    def __init__(self, pool: "EnvironmentPool", worker: EnvironmentWorker, number: int) -> None:
        """Calls nothing yet.

        Args:
            pool: does not end before its episodes.
            worker: where it lives.
            number: of the episode, unlike that of any other in the worker.
        """
        self._pool, self._worker, self._number, self._process = pool, worker, number, 0
        self._history: list[tuple[dict[str, Any], Answer]] = []
        """Requests and answers so far."""
        weakref.finalize(self, worker.forget, number).atexit = False

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """Makes the environment in the worker, and resets it; where that hung or ended the process, once more.

        Raises:
            EpisodeError: it failed, and how.
            UserError: the environment raised one; or a worker does not start, or the row cannot be sent to it.
        """
        request = {"start": self._sent(row, rng)}
        try:
            answer = self._answer(request)
        except EpisodeError:  # a reset that is lost ends the run: it may have been what others left in the process
            answer = self._answer(request)
        if "advice" in answer:
            raise UserError(answer["advice"])
        return read(_unless_failed(answer)["observation"])

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """The environment's answer to a turn.

        Raises:
            EpisodeError: it failed, and how.
        """
        answer = _unless_failed(self._answer({"action": action, "tokens": coded(tokens)}))
        observation = answer["observation"]
        return Step(None if observation is None else read(observation), answer["reward"], answer["done"])

    def _answer(self, request: dict[str, Any]) -> Answer:
        """Asks the worker, in which the episode is replayed first if it has lived in an earlier process."""
        request["episode"] = self._number
        try:
            with self._worker.lock:
                process = self._worker.ready()
                if self._history and process != self._process:
                    self._replay()
                self._process = process
                answer = self._worker.ask(request)
        except Lost as lost:
            raise EpisodeError(str(lost)) from None
        self._history.append((request, answer))
        return answer

    def _replay(self) -> None:
        """Plays all turns so far again, and compares the answers."""
        why = self._worker.lost
        for turn, (request, before) in enumerate(self._history):
            if self._worker.ask(request) != before:
                what = f"the answer to turn {turn}" if turn else "the prompt"
                raise EpisodeError(
                    f"is not deterministic given row and rng, so that it cannot be replayed: another episode of its "
                    f"worker {why}, and when its actions were repeated in a new one {what} was not that of before"
                )

    def _sent(self, row: Row, rng: np.random.Generator) -> dict[str, Any]:
        for name, value in row.items():
            try:
                encode([value])
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"the environment {type(self).__name__} reads rows whose column {name!r} cannot be sent to a "
                    f"worker ({error}): turn it into text, numbers or lists of these in the data, or leave it out"
                ) from error
        return {"row": dict(row), "rng": saved_generator(rng)}


class EnvironmentPool:
    """The workers of an environment; episodes are dealt out in turn."""

    def __init__(self, make: EnvironmentMaker, deadline: float = 10.0, workers: int | None = None) -> None:
        """Makes a first environment in a worker; the others start with their first episodes.

        Args:
            make: the environment.
            deadline: seconds of a call.
            workers: their number; None takes the number of cores, at most 8.

        Raises:
            UserError: a worker cannot import the class, or the constructor fails.
        """
        count = workers or min(8, os.cpu_count() or 1)
        self._workers = [EnvironmentWorker(make, deadline) for _ in range(count)]
        self._numbers = itertools.count()
        self.close = weakref.finalize(self, _close, self._workers)
        """Ends all workers; so does the end of this object."""
        try:
            answer = _described(make.kind.__name__, self._workers[0])
        except BaseException:
            self.close()
            raise
        facts = {"scores": answer["scores"], "stop_strings": tuple(answer["stop_strings"])}
        self.kind: type[RemoteEnvironment] = type(make.kind.__name__, (RemoteEnvironment,), facts)
        """Stands for the environment's class: has its name and its class variables."""

    def __len__(self) -> int:
        """How many can be called at a time."""
        return len(self._workers)

    def make(self) -> RemoteEnvironment:
        """A new environment, in the next worker."""
        number = next(self._numbers)
        return self.kind(self, self._workers[number % len(self._workers)], number)


def _close(workers: Sequence[EnvironmentWorker]) -> None:
    for worker in workers:
        worker.close()


def _described(name: str, worker: EnvironmentWorker) -> Answer:
    """What a first environment says about itself."""
    try:
        with worker.lock:
            worker.ready()
            answer = worker.ask({"describe": True})
    except Lost as lost:
        answer = {"failure": str(lost)}
    if "failure" in answer:
        raise UserError(answer.get("advice", f"the environment {name} cannot be made: it {answer['failure']}"))
    return answer


def _unless_failed(answer: Answer) -> Answer:
    if "failure" in answer:
        raise EpisodeError(answer["failure"])
    return answer
