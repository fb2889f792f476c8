"""Asynchronous rollouts: the next steps' completions are sampled in a thread while the present step is learned from.

A step's sampling begins when weights are published that are at most `staleness` steps old by the time it is learned
from. Its calls of the sampler take the newest weights; where they `go on` under new ones, a publication pauses the
call, and the next one continues its completions. Which weights a call took is recorded, and replayed after a restart.

The first step of a run is sampled by the caller: there is nothing to learn from meanwhile.
"""

import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tunix.data.accounting import Accounting
from tunix.data.types import Prompt
from tunix.errors import Doubtful
from tunix.protocols import Client, Metered, SamplingClient
from tunix.rollout.collect import RolloutStep, RolloutStream
from tunix.rollout.encoded import episode_of, saved_episode
from tunix.rollout.journal import Journal
from tunix.rollout.types import Scored
from tunix.types import Begun, Completion, OnDone, Reply, Sampling, Usage, requests_of

Gather = Callable[[SamplingClient, RolloutStep], list[list[Scored]]]
"""Samples and scores the groups of a step."""


@runtime_checkable
class Holding(Protocol):
    """A sampler that goes on with weights which it holds while newer ones are published, and that can be paused."""

    def hold(self) -> Any:
        """The weights that were published last."""
        ...

    def sample(
        self,
        prompts: List[np.ndarray],
        n: int,
        sampling: Sampling,
        seed: int,
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        begun: List[Begun] | None = None,
        pause: Callable[[int], bool] | None = None,
        held: Any = None,
    ) -> list[list[Completion]]:
        """As `SamplingClient.sample`, with held weights; `pause` is asked before each dispatch."""
        ...


class Ahead:
    """The steps of an asynchronous run, with a position that can be saved; a `run.loop.Stream`."""

    def __init__(
        self,
        inner: RolloutStream,
        client: Client,
        sampler: Holding,
        gather: Gather,
        journal: Journal,
        *,
        staleness: int,
        total: int,
        goes_on: bool,
    ):
        """Samples nothing yet.

        Args:
            inner: the prompts of the steps.
            client: learns, and publishes its weights to the sampler.
            sampler: is called in a thread of its own.
            gather: samples and scores a step, e.g. an algorithm's `gather`.
            journal: what an earlier start of this run did.
            staleness: steps that the weights of a completion's first token may be older than those that learn from it.
            total: steps of the run.
            goes_on: whether completions go on under new weights when these are published.
        """
        self._inner, self._client, self._sampler, self._gather = inner, client, sampler, gather
        self._journal, self._staleness, self._total, self._goes_on = journal, staleness, total, goes_on
        self._before = staleness - (inner.like.backlog is not None)
        """Steps before its own that a step may begin: what it leaves to the next one is a step older there."""
        journal.keep(range(1, total))
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asked = 0
        """Steps that were handed out."""
        self._sampled = 1
        """The next step to sample: the first one is the caller's."""
        self._published = 0
        """Steps that were learned when the present weights were published."""
        self._steps: dict[int, RolloutStep] = {}
        """Steps that are sampled and not learned from, by number."""
        self._ages: dict[int, int] = {}
        """Version of weights -> steps that were learned when they were published."""
        self._busy = self._draining = self._closed = self._exhausted = False
        self._error: BaseException | None = None
        self._handed_at = time.monotonic()

    def __next__(self) -> RolloutStep:
        number = self._asked
        if number == 0:
            self._asked, self._ages = 1, {self._client.publish(): 0}
            return next(self._inner)
        began = time.monotonic()
        if number in self._steps and self._thread is None and self._published == number:
            step = self._steps[number]  # saved by an earlier start, which had published these weights
        else:
            self._publish(number)
            step = self._arrived(number)
        self._asked += 1
        return self._checked(number, step, time.monotonic() - began)

    def mark(self) -> Callable[[], dict[str, Any]]:
        """What returns the position of now, whenever it is called; it waits for the step that is being sampled."""
        number, before = self._asked, self._inner.get_state() if self._thread is None else None
        for old in [one for one in self._steps if one < number]:
            del self._steps[old]
        return lambda: self._state(number, before)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position."""
        self._inner.set_state(state["stream"])
        ahead = state["ahead"]
        self._asked = self._published = ahead["step"]
        self._ages = {int(version): learned for version, learned in ahead["ages"].items()}
        self._steps = {int(number): self._read(saved) for number, saved in ahead["steps"].items()}
        self._sampled = max([self._asked, 1, *(number + 1 for number in self._steps)])
        self._journal.keep(range(self._sampled, self._total))

    def close(self) -> None:
        """Ends the thread, and what the stream reads and scores with."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._inner.close()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample_steps, name="rollouts", daemon=True)
            self._thread.start()

    def _publish(self, learned: int) -> None:
        """Publishes the weights after so many steps, unless a call that is replayed still wants those before."""
        with self._changed:
            if self._journal.needs_before(learned):
                self._begin()
            self._changed.wait_for(lambda: self._error is not None or not self._journal.needs_before(learned))
            version = self._client.publish()
            self._published = learned
            self._ages = {v: at for v, at in self._ages.items() if at >= learned - self._staleness}
            self._ages[version] = learned
            self._changed.notify_all()
        self._begin()

    def _arrived(self, number: int) -> RolloutStep:
        """Waits for a step."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._steps or self._exhausted or self._error is not None)
            if number in self._steps:
                return self._steps[number]
            if self._error is not None:
                raise self._error
            raise StopIteration

    def _checked(self, number: int, step: RolloutStep, waited: float) -> RolloutStep:
        """A step with how old its completions are, as it leaves the buffer.

        Raises:
            Doubtful: older than the bound.
        """
        assert step.sampled is not None
        ages = np.array([self._age(x.completion, number) for group in step.sampled for x in group])
        if ages.size and ages.max() > self._staleness:
            raise Doubtful(
                f"rollout.max_staleness: step {number} would learn from tokens whose weights are more than "
                f"{self._staleness} step(s) old"
            )
        now = time.monotonic()
        waits = {"rollout/trainer_waits": waited / max(now - self._handed_at, 1e-9)}
        self._handed_at = now
        age = {"rollout/staleness": float(ages.mean()), "rollout/staleness/max": float(ages.max())} if ages.size else {}
        return replace(step, ahead={**step.ahead, **age, **waits})

    def _age(self, completion: Completion, number: int) -> int:
        """How many steps old the oldest token of a completion is where step `number` learns from it; 0 without any."""
        versions = completion.versions[completion.drawn]
        # Weights that are not known any more are older than all that are.
        return max((number - self._ages.get(int(version), -1) for version in np.unique(versions)), default=0)

    def _sample_steps(self) -> None:
        """Runs in the thread."""
        try:
            while self._sampled < self._total and self._sample_step(self._sampled):
                pass
        except BaseException as error:  # of whatever kind: the caller raises it
            with self._changed:
                self._error = error
                self._busy = False
                self._changed.notify_all()

    def _sample_step(self, number: int) -> bool:
        """Samples a step as soon as its weights are not too old; whether there was one."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (not self._draining and number - self._published <= self._before)
            )
            if self._closed:
                return False
            self._busy = True
        waited = time.monotonic() - began
        step = next(self._inner, None)
        if step is not None:
            step = replace(step, due=lambda begun: self._age(begun, number + 1) > self._staleness)
            groups = self._gather(_Feeder(self, number), step)
            share = waited / max(time.monotonic() - began, 1e-9)
            step = replace(step, sampled=groups, read=step.accounting, ahead={"rollout/sampler_waits": share})
        with self._changed:
            self._busy, self._exhausted = False, step is None
            if step is not None and not self._closed:
                self._steps[number], self._sampled = step, number + 1
            self._changed.notify_all()
        return step is not None

    def _call(self, step: int, call: int) -> tuple[Any, Callable[[int], bool]]:
        """The weights of the sampler's next call, and what pauses it."""
        with self._changed:
            known = self._journal.recorded(step, call)
            if known is not None:
                self._changed.wait_for(lambda: self._closed or self._published >= known.weights)
            weights, held = self._published, self._sampler.hold()
            self._journal.begun(step, call, weights)
            self._changed.notify_all()

        # A call that was killed may be paused yet; `known` changes when it is.
        recorded = known is not None and (known.ended or known.paused is not None)
        at = known.paused if known is not None else None

        def pause(dispatches: int) -> bool:
            if recorded:
                return self._closed or dispatches == at
            if not self._goes_on or self._published == weights:
                return self._closed
            self._journal.paused(step, call, dispatches)
            return True

        return held, pause

    def _state(self, number: int, before: dict[str, Any] | None) -> dict[str, Any]:
        """The position of a step: the prompts after those that are sampled, and what is sampled from that step on."""
        with self._changed:
            self._draining = True
            self._changed.wait_for(lambda: not self._busy)
            position = before if before is not None and not self._steps else self._inner.get_state()
            steps = {str(one): _saved(step) for one, step in self._steps.items() if one >= number}
            ages = {str(version): learned for version, learned in self._ages.items()}
            self._draining = False
            self._changed.notify_all()
        return {"stream": position, "ahead": {"step": number, "steps": steps, "ages": ages}}

    def _read(self, saved: Mapping[str, Any]) -> RolloutStep:
        """The inverse of `_saved`, but for the columns of the rows, which nobody reads once there are rewards."""
        like, sampling = self._inner.like, self._inner.like.collector.sampling
        groups = [
            [episode_of(x, Prompt(np.zeros(0, np.int32), "", {}), sampling) for x in group] for group in saved["groups"]
        ]
        read = Accounting.from_dict(saved["accounting"])
        prompts = [group[0].prompt for group in groups]
        return replace(like, prompts=prompts, first=False, sampled=groups, read=read)


class _Feeder:
    """The sampler as one step sees it: its calls are recorded, and go on where they were paused."""

    def __init__(self, ahead: Ahead, step: int):
        self._ahead, self._step, self._calls = ahead, step, 0
        self.usage: Usage | None = None

    def sample(
        self,
        prompts: List[np.ndarray],
        n: int,
        sampling: Sampling,
        seed: int,
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        begun: List[Begun] | None = None,
    ) -> list[list[Completion]]:
        """See `protocols.SamplingClient.sample`."""
        requests = requests_of(prompts, n, seed, begun)
        done: dict[int, Completion] = {}
        self.usage, enough = None, False
        while (left := [i for i in range(len(requests)) if i not in done]) and not enough:

            def hear(number: int, completion: Completion, left: list[int] = left) -> bool:
                nonlocal enough
                enough |= on_done is not None and on_done(left[number], completion)
                return enough

            held, pause = self._ahead._call(self._step, self._calls)
            self._calls += 1
            asked, own = zip(*(requests[i] for i in left), strict=True)
            found = self._ahead._sampler.sample(asked, 1, sampling, seed, reply, hear, own, pause, held)
            self._count()
            if self._ahead._closed:
                raise Doubtful("the run has ended")
            self._ahead._journal.ended(self._step, self._calls - 1)
            for i, (completion,) in zip(left, found, strict=True):
                if completion.finish == "paused" and not enough:
                    prompt, one = requests[i]
                    requests[i] = prompt, replace(one, so_far=completion)
                else:
                    done[i] = completion
        return [[done[i * n + j] for j in range(n)] for i in range(len(prompts))]

    def _count(self) -> None:
        sampler = self._ahead._sampler
        if isinstance(sampler, Metered) and (new := sampler.usage) is not None:
            old = self.usage or Usage(0, 0, 0.0)
            self.usage = Usage(old.tokens + new.tokens, old.slot_steps + new.slot_steps, old.bytes + new.bytes)


def _saved(step: RolloutStep) -> dict[str, Any]:
    """A sampled step as JSON values."""
    assert step.sampled is not None
    groups = [[saved_episode(x) for x in group] for group in step.sampled]
    return {"groups": groups, "accounting": step.accounting.to_dict()}
