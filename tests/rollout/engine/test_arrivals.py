"""Requests that come and go while an engine answers: the same tokens as alone, what is kept of sequences that have
ended, and no work for whom nobody waits."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.marks import slow
from tests.rollout.engine.test_engine_parity import prompts, random_params
from tests.tiny_models import one_device
from tests.trainers import PLAIN, RICH
from tunix.models.attention.decoding import BY_NAME
from tunix.models.model import Model
from tunix.rollout.engine import batch as batch_file
from tunix.rollout.engine import engine as engine_file
from tunix.rollout.engine.batch import Arrivals
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.page_tables import PageTables
from tunix.types import Completion, Request, Sampling

PAGE, LENGTH = 8, 64
GREEDY = Sampling(max_tokens=6, temperature=0.0)


def made(config: object = PLAIN, **settings: Any) -> Engine:
    model = Model(config)
    sizes: dict[str, Any] = {"slots": 3, "max_length": LENGTH, "piece": 16, "page": PAGE, "steps": 5, "ahead": 1}
    engine = Engine(model, one_device(), **sizes | settings)
    engine.publish(random_params(model), 1)
    return engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return made()


def serve(
    engine: Engine,
    rounds: Sequence[Sequence[Request]],
    gone: Mapping[int, Collection[int]] | None = None,
    watched: Collection[int] = (),
) -> tuple[dict[int, Completion], list[bool], dict[int, list[int]]]:
    """The completions of requests that come round by round; whether nothing was left to do at each round; and how long
    what is watched was each time. An empty round is waited out."""
    done, idle, grown = dict[int, Completion](), list[bool](), dict[int, list[int]]()

    def pull(is_idle: bool) -> Arrivals | None:
        number = len(idle)
        if number >= len(rounds) and is_idle:
            return None
        idle.append(is_idle)
        new = rounds[number] if number < len(rounds) else ()
        return Arrivals(new, (gone or {}).get(number, ()), watched)

    def finished(number: int, completion: Completion) -> bool:
        done[number] = completion
        return False

    engine.serve(pull, finished, lambda number, x: grown.setdefault(number, []).append(len(x.tokens)))
    return done, idle, grown


def alone(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    return [engine.run([request])[0] for request in requests]


def same(ones: Sequence[Completion], others: Sequence[Completion]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.finish == other.finish


def test_whoever_comes_when_is_answered_as_alone(engine: Engine):
    """Eight requests for three slots, in rounds of which some are empty; two have one prompt."""
    all_prompts = [*prompts(PLAIN.vocab_size, (5, 20, 3, 33, 5, 12, 9)), prompts(PLAIN.vocab_size, (5,))[0]]
    requests = [Request(prompt, Sampling(max_tokens=28 - 3 * i), 7, i) for i, prompt in enumerate(all_prompts)]
    done, _, grown = serve(engine, [requests[:2], (), requests[2:3], requests[3:], ()], watched=(3,))
    same([done[i] for i in range(8)], alone(engine, requests))
    assert list(done) != sorted(done), "some overtook others"
    assert grown.keys() == {3}
    assert grown[3] == sorted(grown[3])
    assert grown[3][-1] < len(done[3].tokens), "the last tokens come with the completion"


def test_whom_nobody_waits_for_is_given_up_between_two_dispatches(engine: Engine):
    """One that has begun, and one that waits for a slot: nothing is left to do two rounds later."""
    (prompt,) = prompts(PLAIN.vocab_size, (5,))
    requests = [Request(prompt, Sampling(max_tokens=50), 7, i) for i in range(5)]
    done, idle, _ = serve(engine, [requests, (), (), (), ()], gone={2: range(5)})
    assert not done
    assert idle[0]
    assert not any(idle[1:3])
    assert idle[4]
    (after,) = serve(engine, [requests[:1]])[0].values()
    same([after], alone(engine, requests[:1]))


def test_a_request_that_goes_leaves_those_that_share_its_prompt(engine: Engine):
    (prompt,) = prompts(PLAIN.vocab_size, (30,))
    requests = [Request(prompt, Sampling(max_tokens=9), 7, i) for i in range(3)]
    done, _, _ = serve(engine, [requests, ()], gone={1: [0]})
    assert done.keys() == {1, 2}
    same([done[1], done[2]], alone(engine, requests[1:]))


def turns(engine: Engine, number: int, new: int = 3) -> tuple[list[Completion], list[int], list[Request]]:
    """The answers of a conversation, the tokens that were computed of each turn's prompt, and what was asked."""
    rng, prompt, at = np.random.default_rng(3), prompts(engine.model.config.vocab_size, (5,))[0], []
    completions, requests = list[Completion](), list[Request]()

    def pull(is_idle: bool) -> Arrivals | None:
        nonlocal prompt
        if not is_idle:
            return Arrivals()
        at.append(engine.prefilled)
        if completions:
            said = rng.integers(0, engine.model.config.vocab_size, new)
            prompt = np.concatenate([prompt, completions[-1].tokens, said]).astype(np.int32)
        if len(completions) == number:
            return None
        requests.append(Request(prompt, GREEDY, 1))
        return Arrivals(requests[-1:])

    def finished(_: int, completion: Completion) -> bool:
        completions.append(completion)
        return False

    engine.serve(pull, finished, lambda *_: None)
    return completions, np.diff(at).tolist(), requests


@pytest.mark.parametrize("config", [PLAIN, *slow([RICH])])
def test_a_conversation_computes_what_is_new(config: object):
    """Six turns of 6 sampled and 3 new tokens: of a prompt, only what no turn before had is computed."""
    engine = made(config)
    completions, computed, requests = turns(engine, 6)
    assert computed == [5, *[3] * 5]
    same(completions, alone(engine, requests))


def test_another_ending_begins_with_what_is_the_same(engine: Engine):
    """A sequence of 20 + 6 tokens, then its first 11 with others: 11 are there, in a page and a part of one."""
    (long,) = prompts(PLAIN.vocab_size, (20,))
    fork = np.concatenate([long[:11], (long[11:18] + 1) % PLAIN.vocab_size]).astype(np.int32)
    requests = [Request(prompt, GREEDY, 1) for prompt in (long, fork, long)]
    before = engine.prefilled
    done: list[Completion] = []
    left = list(requests)

    def pull(is_idle: bool) -> Arrivals | None:
        if not is_idle:
            return Arrivals()
        return Arrivals([left.pop(0)]) if left else None

    engine.serve(pull, lambda _, completion: bool(done.append(completion)), lambda *_: None)
    assert engine.prefilled - before == 20 + (18 - 11) + 1
    same(done, alone(engine, requests))


def test_what_several_begin_with_is_copied_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Three conversations go on together: one call copies their begun pages."""
    copied, real = list[int](), batch_file.copy_pages

    def copy_pages(*arguments: Any) -> Any:
        copied.append(int(np.sum(arguments[-1][0].targets < 100)))
        return real(*arguments)

    tables, make = list[PageTables](), batch_file.PageTables
    monkeypatch.setattr(batch_file, "copy_pages", copy_pages)
    monkeypatch.setattr(batch_file, "PageTables", lambda sizes: tables.append(make(sizes)) or tables[-1])
    firsts = [Request(prompt, GREEDY, 1) for prompt in prompts(PLAIN.vocab_size, (11, 12, 13))]
    told = alone(engine, firsts)
    seconds = [
        replace(request, prompt=np.concatenate([request.prompt, completion.tokens, [7, 8]]).astype(np.int32))
        for request, completion in zip(firsts, told, strict=True)
    ]
    done, _, _ = serve(engine, [firsts, *[[]] * 2, seconds])
    assert copied == [3]
    for ended in list(tables[-1]._ended):
        tables[-1]._let_go(ended)
    assert len(tables[-1]._pools[0][0].free) == tables[-1].sizes.pages[0], "no page is held for good"
    same([done[i] for i in range(6)], [*told, *alone(engine, seconds)])


@pytest.mark.slow
def test_what_is_kept_makes_room(engine: Engine):
    """Many sequences through few pages: each is answered as alone."""
    tight = made(slots=2, room=45_000.0)
    for served in (engine, tight):
        requests = [
            Request(prompt, replace(GREEDY, max_tokens=20), 1)
            for prompt in prompts(PLAIN.vocab_size, tuple(9 + 3 * i for i in range(10)))
        ]
        done, _, _ = serve(served, [[request] for request in requests] + [requests])
        same([done[i] for i in range(20)], [*alone(served, requests)] * 2)


def test_other_weights_begin_anew():
    engine = made()
    (prompt,) = prompts(PLAIN.vocab_size, (20,))
    first = serve(engine, [[Request(prompt, GREEDY, 1)]])[0][0]
    before = engine.prefilled
    engine.publish({name: x * 1.5 for name, x in random_params(Model(PLAIN)).items()}, 2)
    second = serve(engine, [[Request(prompt, GREEDY, 1)]])[0][0]
    assert engine.prefilled - before == 20
    assert first.tokens.tolist() != second.tokens.tolist()
    same([second], alone(engine, [Request(prompt, GREEDY, 1)]))


@pytest.mark.parametrize(
    ("watched", "first"),
    [((), ["prefill"] * 3 + ["decode"]), ((0,), ["prefill"] * 2 + ["decode", "prefill"])],
)
def test_prompts_wait_for_tokens_only_where_somebody_reads_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, watched: tuple[int, ...], first: list[str]
):
    """Three prompts of 16 tokens are a long piece each. After the second one most slots are at work: whoever watches
    gets tokens before the third."""
    events = list[str]()
    for name in ("prefill", "decode"):
        real = getattr(batch_file, name)
        monkeypatch.setattr(batch_file, name, lambda *x, real=real, name=name: events.append(name) or real(*x))
    asked = [Request(prompt, GREEDY, 0, i) for i, prompt in enumerate(prompts(PLAIN.vocab_size, (16,) * 3))]
    serve(engine, [asked], watched=watched)
    assert events[:4] == first


@pytest.mark.parametrize(("number", "most"), [(2, batch_file.SHORT), (3, 12)])
def test_who_comes_to_a_free_slot_waits_for_a_short_dispatch(monkeypatch: pytest.MonkeyPatch, number: int, most: int):
    """Of three slots: with two at work a dispatch is short, with all of them it is whole."""
    sent, real = list[int](), batch_file.decode
    monkeypatch.setattr(batch_file, "decode", lambda *x: sent.append(int(x[-2])) or real(*x))
    served = made(steps=12, ahead=0)
    asked = [Request(x, replace(GREEDY, max_tokens=12), 0) for x in prompts(PLAIN.vocab_size, (16,) * number)]
    serve(served, [asked])
    assert sent[0] == most


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["triton", "gathered"])
def test_kept_sequences_make_room_wherever_pages_are_read(monkeypatch, reader):
    """Ten sequences of three pages come one by one, and eight pages are there: kept ones go, the first ones first."""
    monkeypatch.setattr(engine_file, "reader_here", lambda spec, mesh: BY_NAME[reader])
    engine, rng = made(slots=2, page=16), np.random.default_rng(0)
    assert engine.sizes.in_place == (reader == "triton")
    asked = [Request(rng.integers(0, 96, 40).astype(np.int32), GREEDY, seed) for seed in range(10)]
    done, _, _ = serve(engine, [[request] for request in asked])
    same([done[number] for number in range(10)], alone(engine, asked))


@pytest.mark.parametrize("first", [*slow([12, 15]), 16])
def test_a_group_keeps_of_its_prompt_what_a_window_sees(first):
    """A prompt whose last piece begins within a page: slots that share it hold no pages before the window of 5."""
    engine, rng = made(RICH), np.random.default_rng(first)
    lengths = (first, 33, 33)
    of_length = {length: rng.integers(0, 96, length).astype(np.int32) for length in lengths}
    asked = [Request(of_length[length], GREEDY, 0, index) for index, length in enumerate(lengths)]
    same(engine.run(asked), alone(engine, asked))
