"""Requests that meet in an engine, which is a fake that goes on when it is told to."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tunix.rollout.engine.engine import Engine
from tunix.serving.service import Batcher
from tunix.types import Completion, Request, Sampling

SLOTS = 2


class Stepped(Engine):
    """A dispatch gives every request a token, once `go` is released."""

    def __init__(self) -> None:
        self.go, self.calls = threading.Semaphore(0), list[list[tuple[int, int]]]()

    @property
    def slots(self) -> int:
        return SLOTS

    def run(self, requests, reply=None, on_tokens=None, on_done=None, pause=None, held=None):
        found = [0 if x.so_far is None else len(x.so_far.tokens) for x in requests]
        self.calls.append([(x.seed, had) for x, had in zip(requests, found, strict=True)])
        most, dispatches = [x.sampling.max_tokens for x in requests], 0
        while (left := [i for i, had in enumerate(found) if had < most[i]]) and not pause(dispatches):
            assert self.go.acquire(timeout=30)
            dispatches += 1
            for i in left:
                found[i] += 1
                if found[i] == most[i]:
                    on_done(i, made(found[i], "stop"))
        return [made(had, "stop" if had == end else "paused") for had, end in zip(found, most, strict=True)]


def made(length: int, finish: str) -> Completion:
    tokens = np.arange(length, dtype=np.int32)
    return Completion(tokens, -tokens.astype(np.float32), finish, tokens, Sampling(), ((0, length),))


def request(number: int, length: int) -> Request:
    return Request(np.ones(1, np.int32), Sampling(max_tokens=length), seed=number)


@pytest.fixture
def batches() -> Iterator[tuple[Batcher, Stepped]]:
    engine = Stepped()
    batcher = Batcher(engine, lambda: None)
    yield batcher, engine
    engine.go.release(1000)
    batcher.close()


def until(holds) -> None:
    waited = threading.Event()
    for _ in range(3000):
        if holds():
            return
        waited.wait(0.01)
    raise AssertionError("it did not come to that")


def test_a_request_joins_those_that_run_where_a_slot_is_empty(batches: tuple[Batcher, Stepped]):
    batcher, engine = batches
    first = batcher.submit(request(1, 9))
    until(lambda: engine.calls)
    second = batcher.submit(request(2, 2))
    third = batcher.submit(request(3, 1))  # waits with the second, since both are there when the call is paused
    engine.go.release(2)
    until(lambda: len(engine.calls) == 2)
    assert engine.calls == [[(1, 0)], [(1, 1), (2, 0), (3, 0)]]
    assert third.result(30).finish == "stop"
    assert not first.done()
    engine.go.release(20)
    assert len(first.result(30).tokens) == 9
    assert len(second.result(30).tokens) == 2


def test_one_waits_where_no_slot_is_empty(batches: tuple[Batcher, Stepped]):
    batcher, engine = batches
    futures = [batcher.submit(request(number, 3)) for number in (1, 2)]
    until(lambda: engine.calls)
    futures.append(batcher.submit(request(3, 1)))
    engine.go.release(20)
    assert [len(one.result(30).tokens) for one in futures] == [3, 3, 1]
    assert engine.calls == [[(1, 0), (2, 0)], [(3, 0)]]


def test_what_is_told_while_weights_are_replaced_holds_afterwards(batches: tuple[Batcher, Stepped]):
    """A pause and a resumption, and two who replace something, whoever ends first."""
    batcher, engine = batches
    engine.go.release(20)
    inside, out = threading.Semaphore(0), threading.Semaphore(0)

    def replace() -> None:
        with batcher.idle():
            inside.release()
            assert out.acquire(timeout=30)

    with ThreadPoolExecutor(2) as pool:
        batcher.pause()
        replacing = [pool.submit(replace) for _ in range(2)]
        assert inside.acquire(timeout=30)
        waiting = batcher.submit(request(1, 1))
        batcher.resume()
        assert not inside.acquire(timeout=0.2), "two replace something at once"
        assert not engine.calls
        out.release(2)
        for one in replacing:
            one.result(30)
        assert len(waiting.result(30).tokens) == 1


def test_whoever_has_gone_is_not_answered(batches: tuple[Batcher, Stepped]):
    batcher, engine = batches
    batcher.pause()
    gone, here = batcher.submit(request(1, 1)), batcher.submit(request(2, 1))
    assert gone.cancel()
    engine.go.release(5)
    batcher.resume()
    assert len(here.result(30).tokens) == 1
    assert engine.calls == [[(2, 0)]]
