"""Asynchronous rollouts: the next steps' completions are sampled in a thread while the present step is learned from.

A step's sampling begins when weights are published that are at most `max_staleness` steps old by the time it is learned
from. Its calls of the sampler take the newest weights; where completions in flight continue under new ones, a
publication pauses the call, and the next one continues them.

Which weights answered which call, and where a call was paused, is recorded (`Journal`): a line of `replay.jsonl` is
written when a call begins, and one when it is paused or has ended. A run that is started again replays what is
recorded, whatever its clock says, and so ends where the first one would have.

The first step of a run is sampled by the caller: there is nothing to learn from meanwhile.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from tunix.data.types import Accounting, Prompt
from tunix.distributed import processes
from tunix.errors import Doubtful, UserError
from tunix.protocols import Client, Metered, SamplingClient
from tunix.rollout.backlog import episode_of, saved_episode
from tunix.rollout.collect import RolloutStep, RolloutStream
from tunix.rollout.types import Pause, Scored
from tunix.types import Completion, OnDone, Reply, Request, Usage
from tunix.util.atomic_io import MOVE, append_rows, read_rows, reading, write_text_atomic

FILE = "replay.jsonl"
"""In the run folder."""


@dataclass
class Call:
    """One call of the sampler."""

    weights: int
    """Steps that had been learned when its weights were published, e.g. 7."""
    paused: int | None = None
    """Dispatches after which it was paused; None where it was not, as far as is known."""
    ended: bool = False
    """Whether it is known that it was not paused."""
    replayed: bool = False
    """Whether it has begun again."""


class Journal:
    """The calls of a run by (step, number within the step), in a file."""

    def __init__(self, path: Path, about: str):
        """Reads what an earlier start of the same run has recorded.

        Args:
            path: the file.
            about: a digest of the recipe; what another one has recorded is dropped.
        """
        self._path, head = path, {"recipe": about}
        self.calls: dict[tuple[int, int], Call] = {}
        """The calls that are to be replayed, and those since then."""
        first, *rows = read_rows(path) or [head]
        rows = rows if first == head else []
        # Written anew, without a last line that a kill cut short.
        write_text_atomic(path, (json.dumps(row) + "\n" for row in (head, *rows)))
        with reading(path, MOVE):
            for row in rows:
                key = row["step"], row["call"]
                if "weights" in row:
                    self.calls[key] = Call(row["weights"])
                else:
                    self.calls[key].paused, self.calls[key].ended = row["paused"], row["paused"] is None

    def keep(self, steps: range, learned: int = 0) -> None:
        """Leaves out the calls of other steps: their completions are known, or are not wanted. Of these steps the
        records of those that have taken weights of fewer learned ones are deleted: nobody has such weights any more,
        and the step was given up and is sampled anew."""
        self.calls = {key: call for key, call in self.calls.items() if key[0] in steps}
        gone = {step for (step, _), call in self.calls.items() if call.weights < learned}
        if gone:
            self.calls = {key: call for key, call in self.calls.items() if key[0] not in gone}
            rows = [row for row in read_rows(self._path) if row.get("step") not in gone]
            write_text_atomic(self._path, (json.dumps(row) + "\n" for row in rows))

    def needs_before(self, learned: int) -> bool:
        """Whether a call that is still to be replayed wants weights of fewer steps."""
        return any(call.weights < learned and not call.replayed for call in self.calls.values())

    def begun(self, step: int, call: int, weights: int) -> None:
        """Records that a call begins with some weights."""
        if (known := self.calls.get((step, call))) is not None:
            assert known.weights == weights, (known, weights)
            known.replayed = True
            return
        self.calls[step, call] = Call(weights, replayed=True)
        append_rows(self._path, [{"step": step, "call": call, "weights": weights}])

    def ended(self, step: int, call: int, paused: int | None = None) -> None:
        """Records that a call has ended, or is paused after so many dispatches: one that was killed may have been, had
        it gone on. What is recorded of it before stays."""
        known = self.calls[step, call]
        if known.paused is None and not known.ended:
            known.paused, known.ended = paused, paused is None
            append_rows(self._path, [{"step": step, "call": call, "paused": paused}])


@runtime_checkable
class Holding(Protocol):
    """A sampler that goes on with weights which it holds while newer ones are published, and that can be paused."""

    def hold(self) -> Any:
        """The weights that were published last."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether a publication waits until nobody holds the weights before."""
        ...

    def run(
        self,
        requests: List[Request],
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        pause: Pause | None = None,
        held: Any = None,
    ) -> list[Completion]:
        """As `SamplingClient.run`, with held weights; `pause` is asked before each dispatch."""
        ...


class StepSampler(SamplingClient):
    """The sampler as one step of an asynchronous run sees it: its calls take weights that are recorded, go on where
    they were paused, and end in all processes together."""

    def __init__(self, calls: "AsyncRollouts", sampler: Holding, step: int):
        """Calls nothing yet; `calls` decides about each call."""
        self._calls, self._sampler, self._step, self._called = calls, sampler, step, 0
        self.usage: Usage | None = None
        """What the last call of `run` took; None where there was none."""

    def run(
        self, requests: List[Request], reply: Reply | None = None, on_done: OnDone | None = None
    ) -> list[Completion]:
        """See `protocols.SamplingClient.run`."""
        begun, done, left, enough = list(requests), dict[int, Completion](), list[int](), False
        self.usage = None

        def receive(number: int, completion: Completion) -> bool:
            nonlocal enough
            enough |= on_done is not None and on_done(left[number], completion)
            return enough

        while True:  # once even without requests: other processes have some, and a call is one of all processes
            left = [i for i in range(len(begun)) if i not in done]
            for i, completion in zip(left, self._call([begun[i] for i in left], reply, receive), strict=True):
                if completion.finish == "paused" and not enough:
                    begun[i] = replace(begun[i], so_far=completion)
                else:
                    done[i] = completion
            if enough or len(done) == len(begun):
                return [done[i] for i in range(len(begun))]

    def _call(self, requests: List[Request], reply: Reply | None, on_done: OnDone) -> list[Completion]:
        """One call of the sampler, which has ended when it has in all processes."""
        call, self._called = self._called, self._called + 1
        held, pause = self._calls.begin(self._step, call)
        answers: list[Completion] = []

        def sample() -> bytes:
            answers.extend(self._sampler.run(requests, reply, on_done, pause, held))
            return b""

        processes.all_done("call", sample)
        if isinstance(self._sampler, Metered) and (new := self._sampler.usage) is not None:
            self.usage = new if self.usage is None else self.usage + new
        self._calls.end(self._step, call)
        return answers


LOOK = 0.1
"""Seconds after which a wait looks whether the run is to end: a signal's handler can wake nobody."""
ENDING = 10.0
"""Seconds in which what is being sampled ends where it is given up; then what is being scored is ended, too."""
NEVER = 1 << 30
"""Later than all steps."""


class AsyncRollouts:
    """The steps of an asynchronous run, with a position that can be saved; a `run.loop.Stream`."""

    def __init__(
        self,
        inner: RolloutStream,
        client: Client,
        sampler: Holding,
        gather: Callable[[SamplingClient, RolloutStep], list[list[Scored]]],
        journal: Journal,
        *,
        max_staleness: int,
        in_flight: Literal["finish", "continue"] | None,
        total: int,
        stop: threading.Event,
    ):
        """Samples nothing yet.

        Args:
            inner: the prompts of the steps.
            client: learns, and publishes its weights to the sampler.
            sampler: is called in a thread of its own.
            gather: samples and scores a step, e.g. an algorithm's `gather`.
            journal: what an earlier start of this run did.
            max_staleness: steps that the weights of a completion's first token may be older than those that learn from
                it.
            in_flight: what completions do when new weights are published; None: finish.
            total: steps of the run.
            stop: happens when the run is to end, in all processes where it does in one; nothing is waited for then, and
                what is being sampled is given up.
        """
        self._inner, self._client, self._sampler, self._gather = inner, client, sampler, gather
        self._journal, self._max_staleness, self._total, self._in_flight = journal, max_staleness, total, in_flight
        self._before = max_staleness - (inner.like.backlog is not None)
        """Steps before its own that a step may begin: what it leaves to the next one is a step older there."""
        journal.keep(range(1, total))
        self._stop, self._name = stop, f"ahead/{processes.turn_of('ahead')}"
        self._broken = threading.Event()
        """The thread of this process has ended with an error that others do not have, and wait for it."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._spread: threading.Thread | None = None
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
        self._place: dict[str, Any] | None = None
        """The position before the step that is being sampled; None where none is."""
        self._oldest = self._wanted = NEVER
        """The oldest weights that the step being sampled has taken; and the weights that its next call waits for."""
        self._held: Any = None
        """The weights of the call that was begun last."""
        self._calling = self._publishing = self._exhausted = False
        self._error: BaseException | None = None
        self._handed_at = time.monotonic()

    def __next__(self) -> RolloutStep:
        """The next step, sampled, with how old its completions are.

        Raises:
            processes.Stopped: the run is to end.
            Doubtful: a token is older than the bound.
        """
        number = self._asked
        if number == 0:
            self._asked, self._ages = 1, {self._client.publish(): 0}
            return next(self._inner)
        began = time.monotonic()
        with self._changed:
            # A call that is replayed may still want the weights before.
            if self._journal.needs_before(number):
                self._begin_thread()
            self._until(lambda: not self._journal.needs_before(number))
            # From here on no call begins, so that one that has to end first is the last.
            self._publishing = True
            self._until(lambda: not (self._calling and self._sampler.exclusive))
        self._go_on_together()
        with self._changed:
            version = self._client.publish()
            self._published, self._publishing = number, False
            self._ages = {v: at for v, at in self._ages.items() if at >= number - self._max_staleness}
            self._ages[version] = number
            self._changed.notify_all()
        self._begin_thread()
        with self._changed:
            self._until(lambda: number in self._steps or self._exhausted)
        self._go_on_together()
        with self._changed:
            if number not in self._steps:
                raise StopIteration if self._error is None else self._error
            step = self._steps[number]
        self._asked += 1
        waited = time.monotonic() - began
        assert step.sampled is not None
        ages = np.array([self._age(x.completion, number) for group in step.sampled for x in group])
        if ages.size and ages.max() > self._max_staleness:
            raise Doubtful(
                f"rollout.max_staleness: step {number} would learn from tokens whose weights are more than "
                f"{self._max_staleness} step(s) old"
            )
        now = time.monotonic()
        metrics = {"rollout/trainer_waits": waited / max(now - self._handed_at, 1e-9)}
        self._handed_at = now
        if ages.size:
            metrics |= {"rollout/staleness": float(ages.mean()), "rollout/staleness/max": float(ages.max())}
        return replace(step, ahead={**step.ahead, **metrics})

    def mark(self) -> Callable[[], dict[str, Any]]:
        """What returns the position of now, whenever it is called."""
        number = self._asked
        for old in [step for step in self._steps if step < number]:
            del self._steps[old]
        if number == 0:  # the caller is about to move the position itself
            first = self._state(0)
            return lambda: first
        return lambda: self._state(number)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position."""
        self._inner.set_state(state["stream"])
        ahead = state["ahead"]
        self._asked = self._published = ahead["step"]
        self._ages = {int(version): learned for version, learned in ahead["ages"].items()}
        like, sampling, self._steps = self._inner.like, self._inner.like.collector.sampling, {}
        # Without the columns of the rows, which nobody reads once there are rewards.
        prompt = Prompt(np.zeros(0, np.int32), "", {})
        for number, saved in ahead["steps"].items():
            groups = [[episode_of(x, prompt, sampling) for x in group] for group in saved["groups"]]
            prompts, read = [group[0].prompt for group in groups], Accounting(**saved["accounting"])
            self._steps[int(number)] = replace(like, prompts=prompts, first=False, sampled=groups, read=read)
        self._sampled = max([self._asked, 1, *(number + 1 for number in self._steps)])
        self._journal.keep(range(self._sampled, self._total), self._asked)

    def close(self) -> None:
        """Ends the threads, and what the stream reads and scores with."""
        self._stop.set()
        if self._spread is not None:
            self._spread.join(ENDING)  # has told the others by then
        if self._thread is not None:
            self._thread.join(ENDING)
        self._inner.close()  # and with it what is being scored
        if self._thread is not None:
            self._thread.join()

    def begin(self, step: int, call: int) -> tuple[Any, Pause]:
        """The weights of the sampler's next call, and what pauses it. The lead decides which, since a clock does."""
        weights = processes.broadcast("weights", lambda: self._take(step, call))
        if not processes.lead():
            self._take(step, call, weights)
        if processes.number() > 1:
            # Not before all know, since one that is given up meanwhile would never let go. They stay until then:
            # nobody publishes while a call is on its way on servers, which are all that several processes have.
            self._held = self._sampler.hold()
        known = self._journal.calls.get((step, call))
        assert known is not None
        # A call that was killed may be paused yet; `known` changes when it is.
        replayed, at = known.ended or known.paused is not None, known.paused

        def pause(dispatches: int) -> bool:
            if self._stop.is_set():
                return True
            if replayed:
                return dispatches == at
            if self._in_flight != "continue" or self._published == weights:
                return False
            self._journal.ended(step, call, paused=dispatches)
            return True

        return self._held, pause

    def end(self, step: int, call: int) -> None:
        """Records that a call has ended.

        Raises:
            processes.Stopped: the run is to end, and the call was given up.
        """
        with self._changed:
            self._calling = False
            self._changed.notify_all()
        if self._stop.is_set():
            raise processes.Stopped
        self._journal.ended(step, call)

    def _begin_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample_steps, name="rollouts", daemon=True)
            self._thread.start()
            if processes.number() > 1:
                self._spread = threading.Thread(target=processes.spread, args=(self._name, self._stop), daemon=True)
                self._spread.start()

    def _until(self, happened: Callable[[], bool]) -> None:
        """Waits for something, with the lock held; or for the end of the run, or an error of the thread."""
        while not (happened() or self._error is not None or self._stop.is_set()):
            self._changed.wait(LOOK)

    def _go_on_together(self) -> None:
        """Comes back in all processes, or in none.

        Raises:
            processes.Stopped: the run is to end.
        """
        try:
            with processes.scope(f"{self._name}/main", self._broken):
                stopped = processes.any_of("stop", self._stop.is_set() and not self._exhausted)
        except processes.Stopped:
            assert self._error is not None
            raise self._error from None
        if stopped:
            raise processes.Stopped

    def _age(self, completion: Completion, number: int) -> int:
        """How many steps old the oldest token of a completion is where step `number` learns from it; 0 without any."""
        versions = completion.versions[completion.drawn]
        # Weights that are not known any more are older than all that are.
        return max((number - self._ages.get(int(version), -1) for version in np.unique(versions)), default=0)

    def _sample_steps(self) -> None:
        """Samples each step as soon as its weights are not too old; runs in the thread."""
        try:
            with processes.scope(self._name, self._stop):
                while self._sampled < self._total and not self._exhausted:
                    number, began = self._sampled, time.monotonic()
                    with self._changed:
                        self._until(lambda number=number: number - self._published <= self._before)
                        if self._stop.is_set():
                            return
                        self._place, self._oldest = self._inner.get_state(), NEVER
                    waited = time.monotonic() - began
                    step = next(self._inner, None)
                    if step is not None:
                        step = replace(
                            step, due=lambda begun, after=number + 1: self._age(begun, after) > self._max_staleness
                        )
                        groups = self._gather(StepSampler(self, self._sampler, number), step)
                        share = waited / max(time.monotonic() - began, 1e-9)
                        ahead = {**step.ahead, "rollout/sampler_waits": share}
                        step = replace(step, sampled=groups, read=step.accounting, ahead=ahead)
                    with self._changed:
                        self._place, self._oldest, self._exhausted = None, NEVER, step is None
                        if step is not None:
                            self._steps[number], self._sampled = step, number + 1
                        self._changed.notify_all()
        except BaseException as error:  # of whatever kind: the caller raises it
            with self._changed:
                if not self._stop.is_set():  # what is given up may end in many ways
                    self._error = error
                    if not isinstance(error, UserError):  # those are had by all processes
                        self._broken.set()
                self._calling = False
                self._changed.notify_all()

    def _take(self, step: int, call: int, weights: int | None = None) -> int:
        """Takes the weights of a call: those that the lead has taken, or that are recorded, or the newest."""
        with self._changed:
            known = self._journal.calls.get((step, call))
            self._wanted = weights if weights is not None else known.weights if known is not None else 0
            # The lead has ended its calls before it publishes, so that what it has taken may be taken meanwhile.
            free = weights is not None
            self._until(lambda: self._published >= self._wanted and (free or not self._publishing))
            if self._stop.is_set():
                raise processes.Stopped
            self._calling, self._wanted = True, NEVER
            if processes.number() == 1:
                self._held = self._sampler.hold()
            self._oldest = min(self._oldest, self._published)
            self._journal.begun(step, call, self._published)
            self._changed.notify_all()
            return self._published

    def _state(self, number: int) -> dict[str, Any]:
        """The position of a step: the prompts before the first one that is not sampled, and what is sampled from that
        step on.

        A step that is being sampled is not: it can be sampled again, as it is recorded, from the weights that are saved
        with the position. It is waited for where it has taken older ones, but not where the run is to end.
        """
        with self._changed:
            self._until(lambda: self._oldest >= number or NEVER > self._wanted > self._published)
            place = self._inner.get_state() if self._place is None else self._place
            steps = {
                str(sampled): {
                    "groups": [[saved_episode(x) for x in group] for group in step.sampled or ()],
                    "accounting": asdict(step.accounting),
                }
                for sampled, step in self._steps.items()
            }
            ages = {str(version): learned for version, learned in self._ages.items()}
        return {"stream": place, "ahead": {"step": number, "steps": steps, "ages": ages}}
