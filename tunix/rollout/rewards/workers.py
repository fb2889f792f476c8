"""Workers that call rewards: processes that can be killed at any moment, or, for a notebook's functions, a thread.

Both have one method, `call`: the outcomes of some samples, or one text for all of them, at the deadline at the latest.
A worker that hung or died is replaced before its next call.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tunix.rollout.rewards.base import Reward
from tunix.rollout.rewards.calls import Answer, perform
from tunix.rollout.workers.messages import encode
from tunix.rollout.workers.process import Lost, WorkerProcess
from tunix.rollout.workers.thread import WorkerThread

GRACE = 1.0
"""Seconds beyond the deadline for samples awaited together: those in time are not lost with others that hang."""


class ProcessWorker:
    """A worker process: the first call starts it, and the next call starts it again after it hung or died."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """A worker for rewards that a process can import (`Reward.source`)."""
        self._rewards = rewards
        loaded = [
            {
                "source": r.source,
                "options": dict(r.options),
                "batched": r.batched,
                "modules": r.modules,
                "logs": r.logs,
            }
            for r in rewards
        ]
        self._process = WorkerProcess("tunix.rollout.rewards.worker", loaded, "a reward")

    def call(self, reward: int, arguments: Mapping[str, Sequence[Any]], count: int, deadline: float) -> Answer:
        """Calls reward number `reward` for `count` samples; their outcomes, or one text where the call failed.

        Raises:
            UserError: the process cannot import the rewards.
        """
        request = encode((reward, arguments, count, deadline))
        self._process.ensure()
        try:
            return Answer(*self._process.ask(request, deadline, _grace(self._rewards[reward])))
        except Lost as lost:
            return Answer(str(lost), {}, {})

    def kill(self) -> None:
        """Kills the process and all that it has started; any thread may call this."""
        self._process.kill()

    def close(self) -> None:
        """Kills the process and closes its socket."""
        self._process.close()


class ThreadWorker:
    """A worker thread of this process, for functions that no other process can import; see `WorkerThread`."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """A worker for any rewards."""
        self._rewards = rewards
        self._functions = [partial(reward.function, **reward.options) for reward in rewards]
        self._thread = WorkerThread()

    def call(self, reward: int, arguments: Mapping[str, Sequence[Any]], count: int, deadline: float) -> Answer:
        """Calls a reward for some samples; see `ProcessWorker.call`."""
        batched, logs = self._rewards[reward].batched, self._rewards[reward].logs
        call = partial(perform, self._functions[reward], batched, arguments, count, deadline, logs)
        try:
            return self._thread.ask(call, deadline, _grace(self._rewards[reward]))
        except Lost as lost:
            return Answer(str(lost), {}, {})

    def kill(self) -> None:
        """Does nothing: a thread cannot be killed."""

    def close(self) -> None:
        """Ends the thread after its present call."""
        self._thread.close()


def _grace(reward: Reward) -> float:
    return GRACE if reward.asynchronous and not reward.batched else 0.0
