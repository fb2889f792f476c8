"""Sampling ahead in several processes on one server: none of them ever samples from other weights than the others.

The server is a fake that has one set of weights; the processes are pretended by threads, and wait as chance has it.
"""

import json
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pretended import pretended
from tests.rollout.test_ahead import LENGTH, SAMPLING, made
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.sources import open_rows
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.protocols import Client
from tunix.rollout.asynchronous import AsyncRollouts, Holding, Journal
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.types import Scored
from tunix.util.atomic_io import read_rows

STEPS, GROUP = 7, 2
Steps = dict[int, list[tuple[int, list[int]]]]
"""Of each step the prompt and the versions of each completion."""


class Server:
    """Has one set of weights."""

    version = 0


class Sampler(Holding):
    """Samples on the server, in as many dispatches as there are tokens."""

    exclusive = True

    def __init__(self, server: Server, before: Callable[[], Any]):
        self.server, self.before = server, before

    def hold(self) -> int:
        return self.server.version

    def run(self, requests, reply=None, on_done=None, pause=None, held=None):
        versions: list[int] = []
        for dispatch in range(LENGTH):
            self.before()
            if pause(dispatch):
                return [made(versions, "paused") for _ in requests]
            assert self.server.version == held, "another process has had other weights loaded"
            versions.append(held)
        return [made(versions, "stop") for _ in requests]


class Learner(Client):
    """Learns nothing; its weights after n steps are version 10 n, which the lead has the server load."""

    def __init__(self, server: Server, learned: int):
        self.server, self.learned = server, learned

    def publish(self) -> int:
        processes.barrier("before")
        if processes.lead():
            self.server.version = 10 * self.learned
        processes.barrier("after")
        self.learned += 1
        return 10 * (self.learned - 1)


def opened(path: Path, size: int, staleness: int, sampler: Sampler, state: dict[str, Any] | None) -> AsyncRollouts:
    """The stream of one process; the record is the lead's."""
    rows = open_rows([{"prompt_ids": [number]} for number in range(STEPS * size)])
    config = DataConfig(train="rows", max_length=32, completion_length=16, shuffle=False)
    prompts = Prompts(Examples(rows, None, config, RowKind.PROMPT), 0, 1)
    common = {"size": size, "seed": 5, "packed": partial(pack, max_length=32), "tolerance": 1e-3}
    stream = RolloutStream(RolloutStep(Collector(None, SAMPLING, None), prompts, **common))
    journal = Journal(path if processes.lead() else path.with_suffix(f".{processes.index()}"), "mine")
    how = {"max_staleness": staleness, "total": STEPS, "in_flight": None, "stop": threading.Event()}

    def gather(client, step: RolloutStep) -> list[list[Scored]]:
        return step.collect(client, step.prompts, GROUP)

    learner = Learner(sampler.server, state["ahead"]["step"] if state else 0)
    ahead = AsyncRollouts(stream, learner, sampler, gather, journal, **how)
    if state is not None:
        ahead.set_state(json.loads(json.dumps(state)))
    return ahead


def taken(ahead: AsyncRollouts, wait: Callable[[], Any], until: int | None = None) -> tuple[Steps, dict[str, Any]]:
    """The steps that a process learns from until it is stopped, which may happen after one of them; and its position.

    As in a run, all processes stop where one does.
    """
    found: Steps = {}
    position = ahead.mark()
    number = position()["ahead"]["step"]
    try:
        step = next(ahead)
        while number < STEPS and not processes.any_of("stop", ahead._stop.is_set()):
            if step.sampled is not None:
                episodes = [x for group in step.sampled for x in group]
                found[number] = [(int(x.prompt.tokens[0]), x.completion.versions.tolist()) for x in episodes]
            wait()
            if number == until:
                threading.Timer(random.random() / 50, ahead._stop.set).start()
            number, position = number + 1, ahead.mark()
            step = next(ahead) if number < STEPS else step
    except processes.Stopped:
        pass
    state = position()
    ahead.close()
    return found, state


def slow(seed: int) -> Callable[[], Any]:
    rng = random.Random(seed)
    return lambda: time.sleep(rng.choice([0, 0, 0.003]))


@pytest.mark.parametrize(("number", "size", "staleness"), [(2, 3, 1), (2, 1, 2), (3, 2, 2)])
def test_all_sample_from_the_same_weights_and_one_process_replays_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, size: int, staleness: int
):
    """Where there are more processes than prompts some have nothing to sample."""
    for seed in range(3):
        path, server = tmp_path / f"{size}{seed}.jsonl", Server()

        def act(index: int, path: Path = path, server: Server = server, seed: int = seed) -> Steps:
            ahead = opened(path, size, staleness, Sampler(server, slow(10 * seed + index)), None)
            return taken(ahead, slow(100 + 10 * seed + index))[0]

        with monkeypatch.context() as patch:
            found, store = pretended(patch, number, act, inherits=True)
        assert all(each == found[0] for each in found)
        assert {step: [prompt for prompt, _ in each] for step, each in found[0].items()} == {
            step: [size * step + i // GROUP for i in range(size * GROUP)] for step in range(1, STEPS)
        }
        assert max(step - versions[0] // 10 for step, each in found[0].items() for _, versions in each) <= staleness
        record, server.version = read_rows(path), 0
        assert act(0) == found[0]
        assert read_rows(path) == record
        assert len(store.values) < 30, "what was exchanged is forgotten"


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_where_one_is_stopped_all_are_at_the_same_step_and_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, who: int
):
    path, server = tmp_path / "replay.jsonl", Server()
    state, found = None, dict[int, Any]()
    for start in range(20):

        def act(index: int, state: Any = state, start: int = start) -> tuple[Steps, dict[str, Any]]:
            ahead = opened(path, 2, 2, Sampler(server, slow(10 * start + index)), state)
            until = (state["ahead"]["step"] if state else 0) + 2
            return taken(ahead, slow(start), until if index == who else None)

        with monkeypatch.context() as patch:
            ended, _ = pretended(patch, 2, act, inherits=True)
        (ours, state), (theirs, other) = ended
        assert ours == theirs
        assert state["ahead"]["step"] == other["ahead"]["step"]
        assert not set(found) & set(ours)
        found |= ours
        if state["ahead"]["step"] == STEPS:
            break
    assert list(found) == list(range(1, STEPS))
    assert start > 0
    server.version = 0
    assert taken(opened(path, 2, 2, Sampler(server, slow(0)), None), slow(0))[0] == found


class Silent(Sampler):
    """Answers nothing from the third step on, until it is given up."""

    def run(self, requests, reply=None, on_done=None, pause=None, held=None):
        while int(requests[0].prompt[0]) >= 4 and not pause(0):
            time.sleep(0.01)
        return super().run(requests, reply, on_done, pause, held)


@pytest.mark.parametrize("who", [0, 1])
def test_all_hear_that_one_is_stopped_while_they_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, who: int):
    server = Server()

    def act(index: int) -> tuple[list[int], int]:
        ahead = opened(tmp_path / "replay.jsonl", 2, 1, Silent(server, slow(index)), None)
        found, state = taken(ahead, slow(index), 0 if index == who else None)
        return list(found), state["ahead"]["step"]

    first, second = pretended(monkeypatch, 2, act, inherits=True)[0]
    assert first == second
    assert first[1] <= 2


def test_an_error_of_one_processs_sampler_is_that_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    server, calls = Server(), [0, 0]

    def act(index: int) -> str:
        def fail() -> None:
            calls[index] += 1
            if index and calls[index] > 2 * LENGTH:
                raise UserError("no server is left")

        ahead = opened(tmp_path / "replay.jsonl", 2, 1, Sampler(server, fail), None)
        with pytest.raises(UserError) as caught:
            taken(ahead, slow(index))
        position = ahead.mark()()
        ahead.close()
        assert position["stream"]["next_index"] == 2 * position["ahead"]["step"], "its prompts are not lost"
        return str(caught.value)

    assert pretended(monkeypatch, 2, act, inherits=True)[0] == ["no server is left"] * 2


def test_a_defect_in_one_process_ends_it_though_the_others_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The others are ended by the watch (`distributed.watch`), which is told; here their coordinator is gone."""
    server, calls = Server(), [0, 0]

    def act(index: int) -> str:
        def fail() -> None:
            calls[index] += 1
            if index and calls[index] > 2 * LENGTH:
                raise ZeroDivisionError

        ahead = opened(tmp_path / "replay.jsonl", 2, 1, Sampler(server, fail), None)
        try:
            with pytest.raises((ZeroDivisionError, UserError)) as caught:
                taken(ahead, slow(index))
            if index:
                processes.store().end()
        finally:
            ahead.close()
        return caught.type.__name__

    assert pretended(monkeypatch, 2, act, inherits=True)[0] == ["UserError", "ZeroDivisionError"]


def test_a_closed_stream_has_told_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """However long the coordinator takes: what is told later could reach another stream."""
    server = Server()

    def act(index: int) -> bool:
        ahead, store = opened(tmp_path / "replay.jsonl", 2, 1, Sampler(server, slow(index)), None), processes.store()
        set_now = store.key_value_set
        store.key_value_set = lambda *given, **how: (time.sleep(0.3), set_now(*given, **how))
        taken(ahead, slow(index))
        return any(key.endswith(f"happened/{index}") for key in store.values)

    assert pretended(monkeypatch, 2, act, inherits=True)[0] == [True, True]


def test_what_a_thread_exchanges_apart_is_not_mixed_with_others(monkeypatch: pytest.MonkeyPatch):
    """Two processes exchange the same name in two threads, in another order."""

    def act(index: int) -> list[list[bytes]]:
        found: dict[str, list[bytes]] = {}

        def apart() -> None:
            with processes.scope("a", threading.Event()):
                time.sleep(0.05 * index)
                found["apart"] = processes.allgathered("name", b"apart")

        thread = threading.Thread(target=apart)
        thread.start()
        time.sleep(0.05 * (1 - index))
        found["main"] = processes.allgathered("name", b"main")
        thread.join()
        return [found["main"], found["apart"]]

    assert pretended(monkeypatch, 2, act, inherits=True)[0] == [[[b"main"] * 2, [b"apart"] * 2]] * 2
