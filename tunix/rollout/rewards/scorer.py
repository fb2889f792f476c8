"""Scores samples with several rewards: calls are spread over workers, and the scores have the order of the samples.

A call that fails as a whole (it raised, hung or died) is repeated sample by sample, so that only the sample that caused
it is lost. All workers do the same, so their number changes no result.
"""

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tunix.errors import UserError
from tunix.rollout.rewards.base import MANY, ONE, Failure, Reward, Score, read_reward
from tunix.rollout.rewards.calls import Outcome, encode
from tunix.rollout.rewards.config import RewardFunction
from tunix.rollout.rewards.workers import ProcessWorker, ThreadWorker

TOGETHER = 32
"""Samples of an async function that one worker awaits at a time."""


class Scorer:
    """Scores completions with one or several rewards, each call within a deadline.

        with Scorer([RewardFunction(name="exact_match"), my_function]) as scorer:
            scores = scorer.score(prompts, completions, {"answer": answers})

    `start` returns at once, so that scoring overlaps with other work. A function of a notebook's cell runs in a thread
    of this process (see `ThreadWorker` for its limits), every other function in worker processes.
    """

    def __init__(
        self,
        rewards: Sequence[RewardFunction | Reward | Callable[..., Any]],
        deadline: float = 10.0,
        workers: int | None = None,
    ) -> None:
        """Reads the rewards; processes start with the first call.

        Args:
            rewards: a recipe's entries, or functions.
            deadline: seconds that a call may take.
            workers: processes; None takes the number of cores, at most 8.

        Raises:
            UserError: see `read_reward`; or two rewards have one name.
        """
        self.rewards = [read_reward(reward, deadline) for reward in rewards]
        """The rewards, in the order given."""
        names = [reward.name for reward in self.rewards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"two rewards are called {twice[0]!r}: give one of them another label")
        self._deadline = deadline
        self._remote = [reward for reward in self.rewards if reward.source is not None]
        self._local = [reward for reward in self.rewards if reward.source is None]
        count = workers or min(8, os.cpu_count() or 1)
        self._processes = _Pool([ProcessWorker(self._remote) for _ in range(count)])
        self._threads = _Pool([ThreadWorker(self._local)])

    @property
    def weights(self) -> dict[str, float]:
        """Weight by reward name."""
        return {reward.name: reward.weight for reward in self.rewards}

    def check(self, columns: Sequence[str]) -> None:
        """Checks that rows with these columns can be scored; call it before the first rollout.

        Raises:
            UserError: a column that a reward requires is missing.
        """
        for reward in self.rewards:
            reward.arguments(columns)

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> dict[str, list[Score]]:
        """Scores by reward name, each in the order of the samples.

        Args:
            prompts: one for each sample.
            completions: one for each sample.
            columns: the rows' columns by name, one value for each sample.

        Raises:
            UserError: see `start`.
        """
        return self.start(prompts, completions, columns).result()

    def start(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> "Scoring":
        """Begins to score, and returns a handle on the result.

        Raises:
            UserError: a column is missing, or has values that cannot be sent to a worker.
        """
        columns = columns or {}
        for name, values in (("completions", completions), *columns.items()):
            if len(values) != len(prompts):
                raise ValueError(f"{name} has {len(values)} values for {len(prompts)} prompts")
        parts = {reward.name: self._parts(reward, prompts, completions, columns) for reward in self.rewards}
        return Scoring(self, {name: [(part, self._submit(part)) for part in listed] for name, listed in parts.items()})

    def close(self) -> None:
        """Ends all workers; the results of calls that still run are lost."""
        self._processes.close()
        self._threads.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _parts(
        self, reward: Reward, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> "list[_Part]":
        """Splits the samples into the calls of one reward."""
        column_of = reward.arguments(list(columns))
        arguments: dict[str, Sequence[Any]] = {name: columns[column] for name, column in column_of.items()}
        names = MANY if reward.batched else ONE
        texts: dict[str, Sequence[str]] = dict(zip(names, (prompts, completions), strict=True))
        arguments |= {name: texts[name] for name in reward.texts}
        if reward.source is not None:
            for name, column in column_of.items():
                _check_sendable(reward, column, arguments[name])
        whole = _Part(reward, arguments, len(prompts))
        size = whole.count if reward.batched else TOGETHER if reward.asynchronous else 1
        return [whole.slice(i, i + size) for i in range(0, whole.count, max(size, 1))]

    def _submit(self, part: "_Part") -> "Future[list[Outcome] | str]":
        remote = part.reward.source is not None
        pool, rewards = (self._processes, self._remote) if remote else (self._threads, self._local)
        return pool.submit(rewards.index(part.reward), part.arguments, part.count, self._deadline)


class Scoring:
    """Scoring that was started; `result` waits for the scores."""

    def __init__(self, scorer: Scorer, parts: "dict[str, list[tuple[_Part, Future[list[Outcome] | str]]]]") -> None:
        """Is created by `Scorer.start`."""
        self._scorer = scorer
        self._parts = parts

    def result(self) -> dict[str, list[Score]]:
        """Waits for all scores; returns them by reward name, in the order of the samples."""
        return {name: [score for part in parts for score in self._scores(*part)] for name, parts in self._parts.items()}

    def _scores(self, part: "_Part", future: "Future[list[Outcome] | str]") -> list[Score]:
        outcomes = future.result()
        if isinstance(outcomes, str) and part.count > 1:
            singles = [part.slice(i, i + 1) for i in range(part.count)]
            again = [(single, self._scorer._submit(single)) for single in singles]
            return [score for single in again for score in self._scores(*single)]
        listed = [outcomes] if isinstance(outcomes, str) else outcomes
        reward = part.reward
        return [Failure(f"{reward.name} {o}") if isinstance(o, str) else reward.clipped(o) for o in listed]


@dataclass(frozen=True)
class _Part:
    """The samples of one call of one reward."""

    reward: Reward
    arguments: Mapping[str, Sequence[Any]]
    count: int

    def slice(self, start: int, end: int) -> "_Part":
        """The samples from `start` up to `end`."""
        arguments = {name: values[start:end] for name, values in self.arguments.items()}
        return _Part(self.reward, arguments, min(end, self.count) - start)


class _Pool:
    """A pool of workers, with a thread for each that waits for its answers."""

    def __init__(self, workers: Sequence[ProcessWorker | ThreadWorker]) -> None:
        self._workers = workers
        self._idle: queue.LifoQueue[ProcessWorker | ThreadWorker] = queue.LifoQueue()
        for worker in reversed(workers):
            self._idle.put(worker)
        self._executor = ThreadPoolExecutor(len(workers), thread_name_prefix="reward")
        self._closed = threading.Event()

    def submit(self, *request: Any) -> "Future[list[Outcome] | str]":
        """Queues a call for the next free worker."""
        return self._executor.submit(self._call, request)

    def _call(self, request: tuple[Any, ...]) -> list[Outcome] | str:
        worker = self._idle.get()
        try:
            return "was given up" if self._closed.is_set() else worker.call(*request)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        self._closed.set()
        for worker in self._workers:
            worker.kill()  # a thread that waits for it notices its end
        self._executor.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


def _check_sendable(reward: Reward, column: str, values: Sequence[Any]) -> None:
    """Refuses values that cannot be sent to a worker process."""
    try:
        encode(values if isinstance(values, list) else list(values))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the reward {reward.name} reads the column {column!r}, which holds {error}: only text, numbers, true, "
            "false, null and lists or mappings of these can be sent to a worker. Turn it into one of them in the data, "
            "or leave it out of the function's parameters"
        ) from error
