"""Scores samples with several rewards: calls are spread over workers, and the scores have the order of the samples.

Samples may come one after the other, as a sampler completes them: a call starts as soon as it has all of its samples.
A call that fails as a whole (it raised, hung or died) is repeated sample by sample, so that only the sample that caused
it is lost. All workers do the same, so neither their number nor the order of arrival changes a result.

Workers are processes that can be killed at any moment, or, for a notebook's functions, a thread. A call comes back with
the outcomes of some samples, or one text for all of them, at the deadline at the latest. A worker that hung or died is
replaced before its next call.
"""

import copy
import inspect
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tunix.errors import UserError
from tunix.rollout.rewards.base import LOGS, Failure, Reward, Score, read_reward
from tunix.rollout.rewards.calls import Answer, prepare
from tunix.rollout.rewards.config import RewardFunction
from tunix.rollout.workers.process import Lost, WorkerProcess, WorkerThread, encode
from tunix.util.nested import reach

GRACE = 1.0
"""Seconds beyond the deadline for samples awaited together: those in time are not lost with others that hang."""
TOGETHER = 32
"""Samples of an async function that one worker awaits at a time."""


class Scorer:
    """Scores completions with one or several rewards, each call within a deadline.

        with Scorer([RewardFunction(name="exact_match"), my_function]) as scorer:
            scores = scorer.score(prompts, completions, {"answer": answers})

    `open` returns at once, so that scoring overlaps with other work. A function of a notebook's cell runs in a thread
    of this process (see `WorkerThread` for its limits), every other function in worker processes.
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
        remote = [reward for reward in self.rewards if reward.source is not None]
        local = [reward for reward in self.rewards if reward.source is None]
        self.pools = [_Pool(remote, deadline, workers or min(8, os.cpu_count() or 1)), _Pool(local, deadline, 1)]
        """Processes, and a thread for those that no other process can import."""

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
            UserError: a column is missing, or has values that cannot be sent to a worker.
        """
        columns = columns or {}
        for name, values in (("completions", completions), *columns.items()):
            if len(values) != len(prompts):
                raise ValueError(f"{name} has {len(values)} values for {len(prompts)} prompts")
        scoring = self.open(list(columns))
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            scoring.add(number, prompt, completion, {name: values[number] for name, values in columns.items()})
        return scoring.result()

    def open(self, columns: Sequence[str]) -> "Scoring":
        """Begins to score samples that come one after the other, with these columns.

        Raises:
            UserError: a column that a reward requires is missing.
        """
        return Scoring(self, columns)

    def only(self, *, batched: bool) -> "Scorer | None":
        """The same workers with the functions that read the whole batch, or with those that read single samples; None
        without any."""
        part = copy.copy(self)
        part.rewards = [reward for reward in self.rewards if reward.batched == batched]
        return part if part.rewards else None

    def close(self) -> None:
        """Ends all workers; the results of calls that still run are lost."""
        for pool in self.pools:
            pool.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Scoring:
    """Scoring that was begun: samples are added in any order, and `result` waits for the scores."""

    def __init__(self, scorer: Scorer, columns: Sequence[str]) -> None:
        """Is created by `Scorer.open`."""
        self._scorer = scorer
        self._column_of = {reward.name: reward.arguments(columns, strict=False) for reward in scorer.rewards}
        self._waiting: dict[str, list[_Sample]] = {reward.name: [] for reward in scorer.rewards}
        """Samples whose call is not complete yet, by reward."""
        self._calls: dict[str, list[tuple[Sequence[_Sample], Future[Answer]]]] = {
            reward.name: [] for reward in scorer.rewards
        }
        self._spans: list[_Span] = []
        self.metrics: dict[str, list[float]] = {}
        """What rewards logged until `result`, as `reward/name`, e.g. `{"accuracy_reward/parsed": [0.5]}`."""
        self.logged: dict[int, dict[str, Any]] = {}
        """What rewards logged of single samples until `result`, by their numbers and as `reward/name`."""

    def add(
        self,
        number: int,
        prompt: str,
        completion: str,
        columns: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Adds a sample; calls that are complete with it start at once.

        Args:
            number: its place among the scores.
            prompt: its prompt.
            completion: what is scored.
            columns: the row's columns by name; one that is missing counts as None.
            messages: the prompt as messages, which functions in TRL's style read; None where the row has none.

        Raises:
            UserError: a column has a value that cannot be sent to a worker.
        """
        for reward in self._scorer.rewards:
            names = reward.texts
            texts: dict[str, Any] = dict(zip(names, (prompt, completion), strict=True))
            if reward.style == "trl" and messages is not None:
                texts = {"prompts": messages, "completions": [{"role": "assistant", "content": completion}]}
            column_of = self._column_of[reward.name]
            arguments = {name: _value(columns, column) for name, column in column_of.items()}
            if reward.source is not None:
                values = [(column, arguments[name]) for name, column in column_of.items()]
                for column, value in [("prompt", texts.get("prompts", "")), *values]:
                    try:
                        encode([value])
                    except (TypeError, ValueError) as error:
                        raise UserError(
                            f"the reward {reward.name} reads the column {column!r}, which holds {error}: only text, "
                            "numbers, true, false, null and lists or mappings of these can be sent to a worker. Turn "
                            "it into one of them in the data, or leave it out of the function's parameters"
                        ) from error
            waiting = self._waiting[reward.name]
            waiting.append((number, arguments | {name: texts[name] for name in reward.taken(names)}))
            single = not reward.batched
            if single and len(waiting) == (TOGETHER if inspect.iscoroutinefunction(reward.function) else 1):
                self._start(reward)

    def result(self) -> dict[str, list[Score]]:
        """Waits for all scores; returns them by reward name, in the order of the samples' numbers."""
        for reward in self._scorer.rewards:  # those that were waiting for more samples: there are no more
            if self._waiting[reward.name]:
                self._start(reward)
        self.metrics, self.logged = {}, {}
        by_name = {
            reward.name: dict(
                pair
                for samples, future in self._calls[reward.name]
                for pair in self._scores(reward, samples, future.result())
            )
            for reward in self._scorer.rewards
        }
        return {name: [scores[number] for number in sorted(scores)] for name, scores in by_name.items()}

    def seconds(self, until: float) -> tuple[float, float]:
        """Seconds of all calls that have ended, before a moment of `time.monotonic` and in total."""
        spans = list(self._spans)
        before = sum((max(min(end, until) - start, 0.0) for start, end in spans), 0.0)
        return before, sum((end - start for start, end in spans), 0.0)

    def _start(self, reward: Reward) -> None:
        """Starts a call of a reward for the samples that wait; one for the whole batch reads it in its order."""
        samples, self._waiting[reward.name] = self._waiting[reward.name], []
        samples = sorted(samples, key=lambda sample: sample[0]) if reward.batched else samples
        self._calls[reward.name].append((samples, self._submit(reward, samples)))

    def _submit(self, reward: Reward, samples: "Sequence[_Sample]") -> "Future[Answer]":
        pool = self._scorer.pools[reward.source is None]
        return pool.executor.submit(pool.call, reward, samples, self._spans)

    def _scores(self, reward: Reward, samples: "Sequence[_Sample]", answer: Answer) -> list[tuple[int, Score]]:
        """The number and the score of each sample of a call; where it failed as a whole the samples are called one by
        one."""
        outcomes, metrics, columns = answer
        if isinstance(outcomes, str) and len(samples) > 1:
            again = [([sample], self._submit(reward, [sample])) for sample in samples]
            return [pair for single, future in again for pair in self._scores(reward, single, future.result())]
        scores = [
            Failure(f"{reward.name} {x}") if isinstance(x, str) else x
            for x in ([outcomes] if isinstance(outcomes, str) else outcomes)
        ]
        numbers = [number for number, _ in samples]
        for name, values in metrics.items():
            self.metrics.setdefault(f"{reward.name}/{name}", []).extend(values)
        for name, values in columns.items():
            for number, value in zip(numbers, values, strict=True):
                self.logged.setdefault(number, {})[f"{reward.name}/{name}"] = value
        return list(zip(numbers, scores, strict=True))


def _value(columns: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or within one by a dotted name; None where there is none."""
    try:
        return reach(columns, name)
    except KeyError:
        return None


_Sample = tuple[int, Mapping[str, Any]]
"""The number of a sample, and the arguments with which a reward reads it."""
_Span = tuple[float, float]
"""Start and end of a call, by `time.monotonic`."""


class _Pool:
    """Workers that call some rewards: processes for those that can be imported, else threads of this process.

    For each a thread waits for its answers; the next call starts it again after it hung or died.
    """

    def __init__(self, rewards: Sequence[Reward], deadline: float, count: int) -> None:
        self._rewards, self._deadline = rewards, deadline
        specs = [
            {
                "function": x.source or x.function,
                "options": dict(x.options),
                "modules": x.modules,
                "batched": x.batched,
                "logs": x.taken(LOGS) if x.style == "trl" else None,
                "details": x.style == "verl",
            }
            for x in rewards
        ]
        threads = any(x.source is None for x in rewards)
        self._workers = [
            WorkerThread(prepare(specs)) if threads else WorkerProcess(prepare.__module__, specs, "a reward")
            for _ in range(count)
        ]
        self._idle: queue.LifoQueue[WorkerProcess | WorkerThread] = queue.LifoQueue()
        for idle in reversed(self._workers):
            self._idle.put(idle)
        self.executor = ThreadPoolExecutor(count, thread_name_prefix="reward")
        self._closed = threading.Event()

    def call(self, reward: Reward, samples: Sequence[_Sample], spans: list[_Span]) -> Answer:
        """A free worker's outcomes of the samples, or one text where the call failed; adds its time to the spans.

        Raises:
            UserError: no worker can import the rewards.
        """
        worker, start = self._idle.get(), time.monotonic()
        try:
            if self._closed.is_set():
                return Answer("was given up", {}, {})
            worker.ensure()
            together = inspect.iscoroutinefunction(reward.function) and not reward.batched
            arguments = {name: [sample[name] for _, sample in samples] for name in samples[0][1]}
            request = (self._rewards.index(reward), arguments, len(samples), self._deadline)
            return Answer(*worker.ask(request, self._deadline, GRACE if together else 0.0))
        except Lost as lost:
            return Answer(str(lost), {}, {})
        finally:
            spans.append((start, time.monotonic()))
            self._idle.put(worker)

    def close(self) -> None:
        self._closed.set()
        for worker in self._workers:
            worker.kill()  # a thread that waits for it notices its end
        self.executor.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
