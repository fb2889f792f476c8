"""Sampling beside learning, with a learner and a sampler that wait as a test tells them to: the bound holds however
slow learning is, a call keeps its weights, and a record is replayed whatever the clocks say.

The sampler is a fake of twenty lines: a dispatch gives a request one token, of the version of its weights then.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.marks import slow
from tests.rollout import test_oversample as oversampled
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.sources import open_rows
from tunix.distributed import processes
from tunix.errors import Doubtful
from tunix.protocols import Client
from tunix.rollout.asynchronous import AsyncRollouts, Holding, Journal
from tunix.rollout.backlog import Pending, Race
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.types import Scored
from tunix.types import Completion, Request, Sampling
from tunix.util.atomic_io import read_rows

SAMPLING, LENGTH, STEPS = Sampling(max_tokens=6), 6, 7


def nothing(*_: int) -> None:
    """Waits for nobody."""


class Sampler(Holding):
    """Completes one prompt at a time, and calls `before` with (prompt, token) before each dispatch."""

    exclusive = False

    def __init__(self, before: Callable[[int, int], None] = nothing):
        self.version, self.before = 0, before

    def hold(self) -> int:
        return self.version

    def run(self, requests, reply=None, on_done=None, pause=None, held=None):
        (request,) = requests
        versions = [] if request.so_far is None else list(request.so_far.versions)
        for dispatches in range(LENGTH - len(versions)):
            self.before(int(request.prompt[0]), len(versions))
            if pause(dispatches):
                return [made(versions, "paused")]
            versions.append(self.version if held is None else held)
        return [made(versions, "stop")]


class Learner(Client):
    """Learns nothing; its weights after n steps are version 10 n."""

    def __init__(self, sampler: Sampler):
        self.sampler, self.learned = sampler, 0

    def publish(self) -> int:
        self.sampler.version, self.learned = 10 * self.learned, self.learned + 1
        return self.sampler.version


def made(versions: list[int], finish: str) -> Completion:
    own = np.array(versions, np.int32)
    turns = ((0, len(own)),) if len(own) else ()
    return Completion(own + 1, -own.astype(np.float32), finish, own, SAMPLING, turns)


def gather(client, step: RolloutStep) -> list[list[Scored]]:
    (prompt,) = step.prompts
    groups = client.sample([prompt.tokens], 1, SAMPLING, 0)
    return [[Scored(prompt, completion, "", {}) for completion in group] for group in groups]


@contextmanager
def run(
    path: Path,
    sampler: Sampler,
    staleness: int,
    in_flight: str | None = None,
    collect=gather,
    state: dict[str, Any] | None = None,
) -> Iterator[AsyncRollouts]:
    """Steps of one prompt each, which is its step's number. The first is sampled by the caller: not here."""
    rows = open_rows([{"prompt_ids": [number]} for number in range(STEPS)])
    config = DataConfig(train="rows", max_length=32, completion_length=16, shuffle=False)
    prompts = Prompts(Examples(rows, None, config, RowKind.PROMPT), 0, 1)
    common = {"size": 1, "seed": 5, "packed": partial(pack, max_length=32), "tolerance": 1e-3}
    stream = RolloutStream(RolloutStep(Collector(None, SAMPLING, None), prompts, **common))
    how = {"max_staleness": staleness, "total": STEPS, "in_flight": in_flight, "stop": threading.Event()}
    learner = Learner(sampler)
    ahead = AsyncRollouts(stream, learner, sampler, collect, Journal(path, "mine"), **how)
    if state is not None:
        ahead.set_state(json.loads(json.dumps(state)))
        learner.learned = state["ahead"]["step"]
    try:
        yield ahead
    finally:
        ahead.close()


def versions(step: RolloutStep) -> list[int]:
    """Of each token, the steps that were learned when its weights were published."""
    assert step.sampled is not None
    return (step.sampled[0][0].completion.versions // 10).tolist()


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_step_begins_with_weights_that_will_be_too_old(tmp_path: Path, staleness: int):
    """However fast sampling is: there is time for all steps while the learner still has the first one."""
    begun: list[int] = []
    sampler = Sampler(lambda prompt, token: begun.append(prompt) if not token else None)
    with run(tmp_path / "replay.jsonl", sampler, staleness) as ahead:
        next(ahead)
        for number in range(1, STEPS):
            step = next(ahead)
            expected = min(number + staleness, STEPS - 1)
            deadline = time.monotonic() + 30
            while (not begun or begun[-1] < expected) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.02)
            assert begun == list(range(1, expected + 1))
            assert set(versions(step)) == {max(1, number - staleness)}
            assert step.ahead["rollout/staleness/max"] == number - max(1, number - staleness)


def test_tokens_that_are_too_old_do_not_leave_the_buffer(tmp_path: Path):
    def late(client, step: RolloutStep) -> list[list[Scored]]:
        """A sampler that has kept its first weights, as is seen at the fifth step."""
        groups = gather(client, step)
        if int(step.prompts[0].tokens[0]) == 5:
            return [[replace(groups[0][0], completion=made([10] * LENGTH, "stop"))]]
        return groups

    with run(tmp_path / "replay.jsonl", Sampler(), 1, collect=late) as ahead:
        for _ in range(5):
            next(ahead)
        with pytest.raises(Doubtful, match=r"step 5 would learn .* more than 1 step\(s\) old"):
            next(ahead)


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_a_call_keeps_its_weights_or_is_continued_under_new_ones(tmp_path: Path, in_flight: str):
    """Newer weights are published after the third token of step 2."""
    three, published = threading.Event(), threading.Event()

    def wait(prompt: int, token: int) -> None:
        if (prompt, token) == (2, 3):
            three.set()
            assert published.wait(30)

    sampler = Sampler(wait)
    with run(tmp_path / "replay.jsonl", sampler, 1, in_flight) as ahead:
        next(ahead)
        assert versions(next(ahead)) == [1] * LENGTH
        assert three.wait(30)
        publish = ahead._client.publish
        ahead._client.publish = lambda: (publish(), threading.Timer(0.05, published.set).start())[0]
        assert versions(next(ahead)) == [1, 1, 1, *[2 if in_flight == "continue" else 1] * 3]


def test_weights_are_not_published_before_a_replayed_call_has_taken_those_before(tmp_path: Path):
    """Step 2 had been begun with the weights of step 1; now it is slow, and the learner is waiting for nothing else."""
    path = tmp_path / "replay.jsonl"
    journal = Journal(path, "mine")
    for step in (1, 2):
        journal.begun(step, 0, weights=1)
        journal.ended(step, 0)

    def slowly(client, step: RolloutStep) -> list[list[Scored]]:
        time.sleep(0.2 if int(step.prompts[0].tokens[0]) == 2 else 0)
        return gather(client, step)

    with run(path, Sampler(), 1, collect=slowly) as ahead:
        steps = [next(ahead) for _ in range(3)]
    assert [versions(step) for step in steps[1:]] == [[1] * LENGTH] * 2


@pytest.mark.parametrize(("staleness", "in_flight"), [(1, "finish"), (1, "continue"), (3, "continue")])
def test_a_record_is_replayed_whatever_the_clocks_say(tmp_path: Path, staleness: int, in_flight: str):
    def tokens(path: Path, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        sampler = Sampler(lambda prompt, token: time.sleep(rng.choice([0, 0, 0.004])))
        with run(path, sampler, staleness, in_flight) as ahead:
            found = [next(ahead)]
            for _ in range(STEPS - 1):
                time.sleep(rng.choice([0, 0.02]))
                found.append(next(ahead))
        return [versions(step) for step in found[1:]]

    path = tmp_path / "replay.jsonl"
    first = tokens(path, 0)
    record = read_rows(path)
    for seed in (1, 2, 3):
        assert tokens(path, seed) == first
        assert read_rows(path) == record


# --- Positions, and the end of a run ----------------------------------------------------------------------------------


class Blocking(Sampler):
    """Waits before one prompt's fourth token, each time until it is told to go on."""

    def __init__(self, prompt: int):
        super().__init__(self._wait)
        self.prompt, self.reached, self.free = prompt, threading.Event(), threading.Event()
        self.dispatches: list[tuple[int, int]] = []

    def _wait(self, prompt: int, token: int) -> None:
        self.dispatches.append((prompt, token))
        if (prompt, token) == (self.prompt, 3):
            self.reached.set()
            assert self.free.wait(30)
            self.free.clear()


def rest(path: Path, staleness: int, state: dict[str, Any] | None = None, collect=gather) -> dict[int, list[int]]:
    """The versions of all steps of a run that goes on from a position, by their prompts; of all but the first."""
    with run(path, Sampler(), staleness, collect=collect, state=state) as ahead:
        steps = [next(ahead) for _ in range(state["ahead"]["step"] if state else 0, STEPS)]
    return {int(step.prompts[0].tokens[0]): versions(step) for step in steps[0 if state else 1 :]}


def in_a_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def keep() -> None:
        try:
            found.append(act())
        except processes.Stopped as stopped:
            found.append(stopped)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    return thread, found


def test_a_position_does_not_wait_for_a_step_that_can_be_sampled_again(tmp_path: Path):
    """Step 2 is being sampled from weights 1, which are those that are saved; it is sampled from them again."""
    path, sampler = tmp_path / "replay.jsonl", Blocking(2)
    with run(path, sampler, 1) as ahead:
        next(ahead)
        position = ahead.mark()
        next(ahead)
        assert sampler.reached.wait(30)
        state = position()
        assert not sampler.free.is_set()
        sampler.free.set()
    assert list(state["ahead"]["steps"]) == ["1"]
    found = rest(path, 1, state)
    assert list(found) == list(range(1, STEPS))
    assert found[2] == [1] * LENGTH
    assert {row["weights"] for row in read_rows(path)[1:] if row["step"] == 2 and "weights" in row} == {1}


@pytest.mark.parametrize("stops", [False, True])
def test_a_step_of_older_weights_is_waited_for_unless_the_run_is_to_end(tmp_path: Path, stops: bool):
    """Step 3 is being sampled from weights 1 when those of two steps are saved: nobody will have weights 1 again."""
    path, sampler = tmp_path / "replay.jsonl", Blocking(3)
    with run(path, sampler, 2) as ahead:
        next(ahead)
        next(ahead)
        assert sampler.reached.wait(30)
        position = ahead.mark()
        assert versions(next(ahead)) == [1] * LENGTH
        if stops:
            ahead._stop.set()
        thread, states = in_a_thread(position)
        thread.join(20 if stops else 0.5)
        assert thread.is_alive() != stops
        sampler.free.set()
        thread.join(20)
    (state,) = states
    # Once step 3 is there, step 4 may be sampled, too, before the position is taken.
    assert list(state["ahead"]["steps"])[:2] == (["2"] if stops else ["2", "3"])
    found = rest(path, 2, state)
    assert list(found) == list(range(2, STEPS))
    assert found[3][0] in ((2, 3) if stops else (1,))
    # What is recorded is what was learned from.
    again = rest(path, 2)
    assert {number: again[number] for number in found} == found


def test_a_step_that_went_on_under_the_present_weights_is_waited_for_all_the_same(tmp_path: Path):
    """The first three tokens of step 3 are from weights 1; it is blocked again when it goes on under weights 2."""
    path, sampler = tmp_path / "replay.jsonl", Blocking(3)
    with run(path, sampler, 2, in_flight="continue") as ahead:
        next(ahead)
        next(ahead)
        assert sampler.reached.wait(30)
        position = ahead.mark()
        next(ahead)
        sampler.reached.clear()
        sampler.free.set()
        assert sampler.reached.wait(30)
        thread, states = in_a_thread(position)
        thread.join(0.5)
        assert thread.is_alive()
        sampler.free.set()
        thread.join(20)
    assert list(states[0]["ahead"]["steps"])[:2] == ["2", "3"]  # and 4, where it was sampled first
    assert rest(path, 2, states[0])[3] == [1] * 3 + [2] * 3


def test_a_learner_that_waits_is_told_that_the_run_is_to_end(tmp_path: Path):
    """The sampler is not asked: it may be blocked for as long as it likes."""
    path, sampler = tmp_path / "replay.jsonl", Blocking(2)
    with run(path, sampler, 1) as ahead:
        next(ahead)
        next(ahead)
        assert sampler.reached.wait(30)
        position = ahead.mark()
        thread, found = in_a_thread(lambda: next(ahead))
        thread.join(0.3)
        assert thread.is_alive()
        ahead._stop.set()
        thread.join(20)
        assert isinstance(found[0], processes.Stopped)
        state = position()
        assert not sampler.free.is_set()
        sampler.free.set()
    assert sampler.dispatches[-1] == (2, 3), "it is given up at the next dispatch"
    assert not [row for row in read_rows(path)[1:] if row["step"] == 2 and "weights" not in row], "it has not ended"
    assert state["ahead"]["step"] == 2
    assert not state["ahead"]["steps"]
    found = rest(path, 1, state)
    assert list(found) == list(range(2, STEPS))
    assert found[2] == [2] * LENGTH, "weights 1 are gone; newer ones are no older than the bound"
    assert {row["weights"] for row in read_rows(path)[1:] if row["step"] == 2 and "weights" in row} == {2}


def test_a_position_does_not_wait_for_a_call_that_waits_for_the_learner(tmp_path: Path):
    """Step 3 has sampled from weights 1, and further prompts from weights 3, which are not there yet."""
    path = tmp_path / "replay.jsonl"
    journal = Journal(path, "mine")
    for step, call, weights in ((1, 0, 1), (1, 1, 1), (2, 0, 1), (2, 1, 1), (3, 0, 1), (3, 1, 3)):
        journal.begun(step, call, weights)
        journal.ended(step, call)

    def twice(client, step: RolloutStep) -> list[list[Scored]]:
        gather(client, step)
        return gather(client, step)

    with run(path, Sampler(), 2, collect=twice) as ahead:
        next(ahead)
        next(ahead)
        position = ahead.mark()
        next(ahead)
        thread, states = in_a_thread(position)
        thread.join(20)
        assert not thread.is_alive()
    assert list(states[0]["ahead"]["steps"]) == ["2"]
    assert list(rest(path, 2, states[0], twice)) == list(range(2, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "in_flight"), [(1, "finish"), (1, "continue"), (2, "finish"), (3, "continue")])
def test_stopped_again_and_again_every_step_is_learned_from_once_and_can_be_replayed(
    tmp_path: Path, staleness: int, in_flight: str
):
    for seed in range(6):
        path, rng = tmp_path / f"{seed}.jsonl", random.Random(seed)
        state, found = None, {}
        while len(found) < STEPS - 1:
            sampler = Sampler(lambda prompt, token, rng=rng: time.sleep(rng.choice([0, 0, 0.004])))
            with run(path, sampler, staleness, in_flight, state=state) as ahead:
                first = state["ahead"]["step"] if state else 0
                number, position = first, ahead.mark()
                while number < STEPS and not ahead._stop.is_set():
                    position = ahead.mark()
                    if number > first:
                        threading.Timer(rng.choice([0, 0.005, 1]), ahead._stop.set).start()
                    try:
                        step = next(ahead)
                    except processes.Stopped:
                        break
                    if number:
                        assert int(step.prompts[0].tokens[0]) == number
                        assert number not in found or number == first
                        found[number] = versions(step)
                    number += 1
                    time.sleep(rng.choice([0, 0.01]))
                else:
                    position = ahead.mark()
                state = position()
        with run(path, Sampler(), staleness, in_flight) as ahead:
            next(ahead)
            assert {number: versions(next(ahead)) for number in range(1, STEPS)} == found


# --- Long completions that do not hold a step up ----------------------------------------------------------------------


class Tailed(Sampler):
    """All requests side by side, two tokens a dispatch; few of them are long. It waits as completions end."""

    def __init__(self, wait: Callable[[], None]):
        super().__init__()
        self.wait, self.inner = wait, oversampled.Sampler()

    def run(self, requests, reply=None, on_done=None, pause=None, held=None):
        def done(number: int, completion: Completion) -> bool:
            self.wait()
            return on_done(number, completion)

        self.inner.version = held
        return self.inner.run(requests, reply, done)


def raced(path: Path, staleness: int, seed: int, stops: bool = False) -> list[list[list[Scored]]]:
    """The groups of each step of a run that takes 3 groups of the 5 that it begins; its clocks follow from the seed.

    It may be stopped after every fourth step, and goes on.
    """
    rng, total = random.Random(seed), 14
    state: dict[str, Any] | None = None
    found: list[list[list[Scored]]] = []
    while len(found) < total:
        sampler, began = Tailed(lambda: time.sleep(rng.choice([0, 0, 0, 0.002]))), len(found)
        ahead = opened(path, staleness, sampler, total, state)
        try:
            for number in range(began, total):
                position = ahead.mark()
                if stops and number == began + 4:
                    threading.Timer(rng.choice([0, 0.001, 0.005, 0.02]), ahead._stop.set).start()
                step = next(ahead)
                found.append(step.sampled or step.collect(First(sampler), step.prompts, oversampled.GROUP))
                assert step.ahead.get("rollout/staleness/max", 0) <= staleness, number
                time.sleep(rng.choice([0, 0.01, 0.03]))
        except processes.Stopped:
            state = position()
        finally:
            ahead.close()
    return found


def opened(path: Path, staleness: int, sampler: Tailed, total: int, state: dict[str, Any] | None) -> AsyncRollouts:
    how = {"max_staleness": staleness, "total": total, "in_flight": None, "stop": threading.Event()}

    def collect(client, step: RolloutStep) -> list[list[Scored]]:
        return step.collect(client, step.prompts, oversampled.GROUP)

    stream, learner = oversampled.stream(rows=3 * total), Learner(sampler)
    stream.like = replace(stream.like, mixed=True)
    ahead = AsyncRollouts(stream, learner, sampler, collect, Journal(path, "mine"), **how)
    if state is not None:
        ahead.set_state(json.loads(json.dumps(state)))
        learner.learned = state["ahead"]["step"]
    return ahead


class First(Client):
    """The caller's own sampling, of the first step."""

    def __init__(self, sampler: Tailed):
        self._sampler = sampler

    def run(self, requests, reply=None, on_done=None):
        return self._sampler.run(requests, reply, on_done, held=self._sampler.version)


@pytest.mark.parametrize(("staleness", "stops"), [*slow([(2, False), (2, True), (4, False)]), (4, True)])
def test_long_completions_go_on_in_the_next_step_within_the_bound(tmp_path: Path, staleness: int, stops: bool):
    """Whatever the clocks say nothing is older than the bound, which is checked, and all prompts are trained on."""
    for seed in range(3):
        steps = raced(tmp_path / f"{seed}.jsonl", staleness, seed, stops)
        groups = [group for step in steps for group in step]
        assert [len(step) for step in steps] == [3] * 14
        assert sorted(oversampled.names(groups)) == list(range(42))
        versions = [set(x.completion.versions.tolist()) for group in groups for x in group]
        assert any(len(mixed) > 1 for mixed in versions), "nothing was carried over"
        for group in groups:
            for episode in group:
                if isinstance(episode.prompt, Pending):  # what was saved does not know its place any more
                    expected = oversampled.drawn(request_of(episode, group))
                    np.testing.assert_array_equal(episode.completion.tokens, expected)
        again = [group for step in raced(tmp_path / f"{seed}.jsonl", staleness, seed + 10) for group in step]
        assert oversampled.names(again) == oversampled.names(groups)
        for name in ("versions", "tokens"):
            ours, theirs = ([[getattr(x.completion, name).tolist() for x in g] for g in all] for all in (groups, again))
            assert ours == theirs


def request_of(episode: Scored, group: list[Scored]) -> Request:
    """An episode's request."""
    place, number = int(episode.prompt.tokens[-1]), [x is episode for x in group].index(True)
    assert isinstance(episode.prompt, Pending)
    assert oversampled.names([group]) == [place]
    return episode.prompt.requests(oversampled.GROUP, SAMPLING, 5)[number]


def test_a_race_with_groups_that_cannot_wait():
    """Of two places one is kept for the group that is due, however late it comes."""
    done = made([0], "stop")
    race = Race([[None], [None], [None]], 2, due=[2])
    assert [number for number, _ in race.add(0, done)] == [0]
    assert not race.add(1, done)
    assert not race.over
    assert [number for number, _ in race.add(2, done)] == [2]
    assert race.over
    assert race.taken == [0, 2]
    assert race.groups[1] == [done], "it is whole, and the next step's"
