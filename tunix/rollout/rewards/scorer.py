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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tunix.errors import UserError
from tunix.rollout.rewards.base import LOGS, Failure, Reward, Score, read_reward
from tunix.rollout.rewards.calls import Answer, prepare
from tunix.rollout.rewards.config import RewardFunction
from tunix.rollout.workers.process import Lost, WorkerProcess, WorkerThread, refuse_unsendable
from tunix.util.nested import reach

GRACE = 1.0
"""Seconds beyond the deadline for samples awaited together: those in time are not lost with others that hang."""
TOGETHER = 32
"""Samples of an async function that one worker awaits at a time."""


class Scorer:
    """Scores completions with one or several rewards, each call within a deadline.

        with Scorer([RewardFunction(name="exact_match"), my_function]) as scorer:
            scoring = Scoring(scorer, {"": ["answer"]})
            scoring.add(0, "2+2=", "4", {"answer": "4"})
            scores = scoring.result()

    `add` returns at once, so that scoring overlaps with other work. A function of a notebook's cell runs in a thread of
    this process (see `WorkerThread` for its limits), every other function in worker processes.
    """

    def __init__(
        self,
        rewards: Sequence[RewardFunction | Reward | Callable[..., Any]],
        deadline: float = 10.0,
        workers: int | None = None,
        data_sets: Collection[str] = (),
    ) -> None:
        """Reads the rewards; processes start with the first call.

        Args:
            rewards: a recipe's entries, or functions.
            deadline: seconds that a call may take.
            workers: processes; None takes the number of cores, at most 8.
            data_sets: those with rewards of their own (`Reward.data_set`), or with none at all.

        Raises:
            UserError: see `read_reward`; or two rewards of a data set have one name, or those of two data sets have one
                name and two weights.
        """
        self.rewards = [read_reward(reward, deadline) for reward in rewards]
        """The rewards, in the order given."""
        self.data_sets = frozenset(data_sets)
        seen: dict[str, list[Reward]] = {}
        for reward in self.rewards:
            for other in seen.setdefault(reward.name, []):
                if other.data_set == reward.data_set:
                    raise UserError(f"two rewards are called {reward.name!r}: give one of them another label")
                if other.weight != reward.weight:
                    raise UserError(
                        f"data.train: the reward {reward.name} of {reward.data_set} has weight {reward.weight:g}, and "
                        f"{other.weight:g} for another data set: give one of them another label"
                    )
            seen[reward.name].append(reward)
        remote = [reward for reward in self.rewards if reward.source is not None]
        local = [reward for reward in self.rewards if reward.source is None]
        self.pools = [_Pool(remote, workers or min(8, os.cpu_count() or 1)), _Pool(local, 1)]
        """Processes, and a thread for those that no other process can import."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight by reward name."""
        return {reward.name: reward.weight for reward in self.rewards}

    def check(self, columns: Sequence[str], data_set: str = "") -> None:
        """Checks that rows of a data set with these columns can be scored; call it before the first rollout.

        Raises:
            UserError: a column that a reward requires is missing.
        """
        for reward in self.of(data_set):
            reward.arguments(columns)

    def of(self, data_set: str) -> list[Reward]:
        """The rewards of a data set."""
        return [x for x in self.rewards if x.data_set == (data_set if data_set in self.data_sets else "")]

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

    def __init__(self, scorer: Scorer, columns: Mapping[str, Iterable[str]]) -> None:
        """Begins to score samples whose rows have these columns, by data set.

        Raises:
            UserError: a column that a reward requires is missing.
        """
        self._scorer = scorer
        present: dict[str, list[str]] = {}
        """Columns of the data sets that have rewards of their own, and, under an empty name, of all others."""
        for data_set, names in columns.items():
            present.setdefault(data_set if data_set in scorer.data_sets else "", []).extend(names)
        self._column_of = {
            id(reward): reward.arguments(list(dict.fromkeys(present[reward.data_set])), strict=False)
            for reward in scorer.rewards
            if reward.data_set in present
        }
        self._waiting: dict[int, list[_Sample]] = {id(reward): [] for reward in scorer.rewards}
        """Samples whose call is not complete yet, by reward."""
        self._calls: list[tuple[Reward, Sequence[_Sample], Future[Answer]]] = []
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
        data_set: str = "",
    ) -> None:
        """Adds a sample; calls that are complete with it start at once.

        Args:
            number: its place among the scores.
            prompt: its prompt.
            completion: what is scored.
            columns: the row's columns by name; one that is missing counts as None.
            messages: the prompt as messages, which functions in TRL's style read; None where the row has none.
            data_set: that of the row.

        Raises:
            UserError: a column has a value that cannot be sent to a worker.
        """
        for reward in self._scorer.of(data_set):
            names = reward.texts
            texts: dict[str, Any] = dict(zip(names, (prompt, completion), strict=True))
            if reward.style == "trl" and messages is not None:
                texts = {"prompts": messages, "completions": [{"role": "assistant", "content": completion}]}
            column_of = self._column_of[id(reward)]
            arguments = {name: _value(columns, column) for name, column in column_of.items()}
            if reward.source is not None:
                values = [(column, arguments[name]) for name, column in column_of.items()]
                for column, value in [("prompt", texts.get("prompts", "")), *values]:
                    refuse_unsendable(f"the reward {reward.name}", column, value)
            waiting = self._waiting[id(reward)]
            waiting.append((number, arguments | {name: texts[name] for name in reward.taken(names)}))
            single = not reward.batched
            if single and len(waiting) == (TOGETHER if inspect.iscoroutinefunction(reward.function) else 1):
                self._start(reward)

    def result(self) -> dict[str, dict[int, Score]]:
        """Waits for all scores; returns them by reward name and by the samples' numbers, in ascending order."""
        for reward in self._scorer.rewards:  # those that were waiting for more samples: there are no more
            if self._waiting[id(reward)]:
                self._start(reward)
        self.metrics, self.logged = {}, {}
        scores: dict[str, dict[int, Score]] = {reward.name: {} for reward in self._scorer.rewards}
        for reward, samples, future in self._calls:
            scores[reward.name] |= self._scores(reward, samples, future.result())
        return {name: dict(sorted(by_number.items())) for name, by_number in scores.items()}

    def seconds(self, until: float) -> tuple[float, float]:
        """Seconds of all calls that have ended, before a moment of `time.monotonic` and in total."""
        spans = list(self._spans)
        before = sum((max(min(end, until) - start, 0.0) for start, end in spans), 0.0)
        return before, sum((end - start for start, end in spans), 0.0)

    def _start(self, reward: Reward) -> None:
        """Starts a call of a reward for the samples that wait; one for the whole batch reads it in its order."""
        samples, self._waiting[id(reward)] = self._waiting[id(reward)], []
        samples = sorted(samples, key=lambda sample: sample[0]) if reward.batched else samples
        self._calls.append((reward, samples, self._submit(reward, samples)))

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

    def __init__(self, rewards: Sequence[Reward], count: int) -> None:
        self._rewards = rewards
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
            request = (self._rewards.index(reward), arguments, len(samples), reward.deadline)
            return Answer(*worker.ask(request, reward.deadline, GRACE if together else 0.0))
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
