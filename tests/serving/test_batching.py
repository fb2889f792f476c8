"""Requests that meet in an engine, which is a fake that goes on when it is told to."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tunix.inference.batcher import Batcher, Ticket
from tunix.rollout.engine.engine import Engine
from tunix.types import Completion, Request, Sampling

SLOTS = 2


class Stepped(Engine):
    """A dispatch gives every request a token, once `go` is released."""

    def __init__(self) -> None:
        self.go, self.calls, self.gone = threading.Semaphore(0), list[list[list[int]]](), list[int]()
        self.published, self.failures = list[Any](), list[Exception]()

    @property
    def slots(self) -> int:
        return SLOTS

    def hold(self) -> Any:
        return "weights"

    def serve(self, pull, on_done, on_progress):
        """Notes the seeds that come before each dispatch, in a list for each call."""
        self.calls.append([])
        had, most, came = dict[int, int](), dict[int, int](), 0
        while (arrivals := pull(not had)) is not None:
            for number in arrivals.gone:
                self.gone.append(number)
                had.pop(number, None)
            for number, request in enumerate(arrivals.requests, start=came):
                had[number], most[number] = 0, request.sampling.max_tokens
            came += len(arrivals.requests)
            self.published += [arrivals.published] if arrivals.published is not None else []
            self.calls[-1].append([request.seed for request in arrivals.requests])
            if not had:
                continue
            assert self.go.acquire(timeout=30)
            if self.failures:
                raise self.failures.pop()
            for number in list(had)[:SLOTS]:
                had[number] += 1
                if had[number] == most[number]:
                    on_done(number, made(had.pop(number), "stop"))
                elif number in arrivals.watched:
                    on_progress(number, made(had[number], "paused"))


def made(length: int, finish: str) -> Completion:
    tokens = np.arange(length, dtype=np.int32)
    return Completion(tokens, -tokens.astype(np.float32), finish, tokens, Sampling(), ((0, length),))


def asked(number: int, length: int, **settings: Any) -> Ticket:
    return Ticket(Request(np.ones(1, np.int32), Sampling(max_tokens=length), seed=number), **settings)


@pytest.fixture
def batches() -> Iterator[tuple[Batcher, Stepped]]:
    engine = Stepped()
    batcher = Batcher(engine, lambda: False)
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


def test_a_request_joins_those_that_run(batches: tuple[Batcher, Stepped]):
    batcher, engine = batches
    first, second, third = asked(1, 9), asked(2, 2), asked(3, 1)
    batcher.submit([first])
    until(lambda: engine.calls == [[[1]]])
    batcher.submit([second, third])
    engine.go.release(2)
    until(lambda: engine.calls == [[[1], [2, 3], []]])
    assert not first.future.done()
    engine.go.release(20)
    assert [len(x.future.result(30).tokens) for x in (first, second, third)] == [9, 2, 1]
    assert len(engine.calls) == 1


def test_what_is_read_as_it_comes(batches: tuple[Batcher, Stepped]):
    batcher, engine = batches
    seen = list[int]()
    ticket = asked(1, 4, on_progress=lambda completion: seen.append(len(completion.tokens)))
    batcher.submit([ticket])
    engine.go.release(20)
    assert len(ticket.future.result(30).tokens) == 4
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("failure", [StopIteration(), MemoryError("full")])
def test_who_asked_an_engine_that_fails_is_told_and_the_next_is_answered(batches, failure):
    """Of a StopIteration asyncio makes no future's error: whoever awaited one would wait for ever."""
    batcher, engine = batches
    engine.failures.append(failure)
    batcher.submit([first := asked(1, 2)])
    engine.go.release(20)

    async def awaited() -> None:
        await asyncio.wait_for(asyncio.wrap_future(first.future), 30)

    with pytest.raises((RuntimeError, MemoryError), match=r"StopIteration|full"):
        asyncio.run(awaited())
    batcher.submit([second := asked(2, 2)])
    assert len(second.future.result(30).tokens) == 2


def test_who_comes_too_late_is_told(batches: tuple[Batcher, Stepped]):
    batcher, engine = batches
    engine.go.release(1000)
    batcher.close()
    batcher.submit([late := asked(1, 1)])
    with pytest.raises(RuntimeError, match="the server ends"):
        late.future.result(30)


def test_adapters_are_replaced_while_others_run(batches: tuple[Batcher, Stepped]):
    """The engine receives them with the requests that came after they were there, and goes on."""
    batcher, engine = batches
    batcher._ready = lambda: True
    batcher.submit([first := asked(1, 3)])
    until(lambda: engine.published == ["weights"])
    batcher.submit([second := asked(2, 1)])
    engine.go.release(20)
    for ticket in (first, second):
        ticket.future.result(30)
    assert engine.published == ["weights"] * 2
    assert len(engine.calls) == 1


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
        batcher.submit([ticket := asked(1, 1)])
        batcher.resume()
        assert not inside.acquire(timeout=0.2), "two replace something at once"
        assert not engine.calls
        out.release(2)
        for one in replacing:
            one.result(30)
        assert len(ticket.future.result(30).tokens) == 1


def test_weights_are_replaced_between_two_calls(batches: tuple[Batcher, Stepped]):
    """What has begun ends before, and the next request begins a call of its own."""
    batcher, engine = batches
    batcher.submit([first := asked(1, 2)])
    until(lambda: engine.calls)
    with ThreadPoolExecutor(1) as pool:

        def replace() -> bool:
            with batcher.idle():
                return first.future.done()

        replaced = pool.submit(replace)
        engine.go.release(2)
        assert replaced.result(30)
    batcher.submit([second := asked(2, 1)])
    engine.go.release(1)
    second.future.result(30)
    assert [call[0] for call in engine.calls] == [[1], [2]]


def test_whoever_has_gone_is_not_answered(batches: tuple[Batcher, Stepped]):
    """One that waits, and one that has begun: the engine is told before the next dispatch."""
    batcher, engine = batches
    batcher.pause()
    waits, other = asked(1, 1), asked(2, 9)
    batcher.submit([waits, other])
    batcher.give_up([waits])
    batcher.resume()
    until(lambda: engine.calls == [[[2]]])
    batcher.give_up([other])
    engine.go.release(1)
    until(lambda: engine.gone == [0])
    assert batcher.load == (0, 0)
