"""What the engine promises beyond right numbers: independence of company, shared prompts, turns, stops, few shapes."""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.marks import slow
from tests.rollout.engine.piped import PipedSampler
from tests.rollout.engine.test_engine_parity import prompts, random_params, small_engine
from tests.tiny_models import one_device
from tests.trainers import PLAIN, RICH
from tunix.errors import UserError
from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.protocols import Sampler
from tunix.rollout.engine import batch as batch_file
from tunix.rollout.engine import engine as engine_file
from tunix.rollout.engine.engine import Engine, warmup_calls
from tunix.rollout.engine.shapes import page_bytes
from tunix.rollout.engine.slots import Slots
from tunix.trainer.perf import Compilations
from tunix.types import Completion, Request, Sampling, Workload, requests_of

MODEL = Model(PLAIN)
VOCAB = PLAIN.vocab_size


def text_of(tokens: Sequence[int]) -> str:
    """A toy tokenizer: id 35 is `#`, 65 is `A`, ..."""
    return "".join(chr(32 + token) for token in tokens)


@pytest.fixture(scope="module")
def params():
    return random_params(MODEL)


def make() -> Engine:
    """The engine of the tests, without weights."""
    return Engine(MODEL, one_device(), slots=3, max_length=64, piece=16, page=8, steps=5, ahead=1, decode=text_of)


@pytest.fixture(scope="module")
def here(params):
    engine = make()
    engine.publish(params, 1)
    return engine


@pytest.fixture(scope="module")
def elsewhere(params):
    with closing(PipedSampler(make)) as sampler:
        sampler.publish(params, 1)
        yield sampler


@pytest.fixture(params=["here", *slow(["elsewhere"])])
def engine(request: pytest.FixtureRequest):
    """The engine in this process; and one in another, which is asked the same over a pipe."""
    return request.getfixturevalue(request.param)


def same(a: Completion, b: Completion) -> None:
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert (a.finish, a.turns) == (b.finish, b.turns)


MIXED = [
    Request(prompt, sampling, seed=7, index=index)
    for index, (prompt, sampling) in enumerate(
        zip(
            prompts(VOCAB, (5, 20, 3, 33, 5, 12)),
            [
                Sampling(max_tokens=9),
                Sampling(max_tokens=25, temperature=0.7, top_k=5),
                Sampling(max_tokens=2),
                Sampling(max_tokens=30, top_p=0.9, top_logprobs=2),
                Sampling(max_tokens=14, temperature=0.0),
                Sampling(max_tokens=17, min_p=0.05, stop_ids=tuple(range(16))),
            ],
            strict=True,
        )
    )
]
"""Every setting beside every other; more requests than slots, of very different lengths."""


@pytest.mark.parametrize(("slots", "steps"), [*slow([(1, 5), (2, 3)]), (8, 32)])
def test_company_slots_and_steps_change_nothing(engine, params, slots, steps):
    alone = [engine.run([request])[0] for request in MIXED]
    other = small_engine(MODEL, params, slots=slots, steps=steps)
    for a, b in zip(alone, other.run(MIXED), strict=True):
        same(a, b)
    for a, b in zip(alone, reversed(other.run(MIXED[::-1])), strict=True):
        same(a, b)


@pytest.mark.parametrize("model", [MODEL, *slow([Model(RICH)])], ids=["plain", "rich"])
def test_requests_that_make_room_for_others_are_continued_as_they_were(model, monkeypatch):
    """Six slots with pages for one and a half of the longest: prompts kept for later go, then the last to come."""
    params = random_params(model)
    given = prompts(VOCAB, (20, 9, 33))
    asked = [Request(given[i % 3], Sampling(max_tokens=30 - i, stop_ids=(5,)), 7, i) for i in range(9)]

    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        return np.array([4, 9, 5], np.int32) if len(so_far.turns) < 2 else None

    ample = small_engine(model, params, slots=6)
    plenty = ample.run(asked, reply)
    suspended = []
    leave = Slots.suspend
    monkeypatch.setattr(
        Slots, "suspend", lambda self, slot, version: suspended.append(slot) or leave(self, slot, version)
    )
    # Eight pages for the longest and four more, each twice, beside all that windows need.
    each = page_bytes(model.config, ample.mesh, ample.sizes)
    pages = [
        12 if window is None else most for window, most in zip(ample.sizes.windows, ample.sizes.pages, strict=True)
    ]
    room = sum(2.0 * size * number for size, number in zip(each, pages, strict=True))
    few = small_engine(model, params, slots=6, room=room, ahead=1)
    assert list(few.sizes.pages) == pages
    for one, expected in zip(few.run(asked, reply), plenty, strict=True):
        same(one, expected)
    assert len(suspended) > 2
    assert any(len(one.turns) > 1 for one in plenty)


@pytest.mark.slow
def test_a_sampler_over_a_pipe_is_the_engine(here, elsewhere):
    """Weights, settings, an environment's replies, completions and errors all cross."""
    assert isinstance(here, Sampler)
    assert isinstance(elsewhere, Sampler)
    elsewhere.warm(Workload(requests=1, prompt_length=6, length=40))

    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        return np.array([4, 5], np.int32) if len(so_far.turns) < 2 else None

    settings = Sampling(max_tokens=12, temperature=3.0, stop_ids=tuple(range(16)))
    asked = requests_of(prompts(VOCAB, (6, 11)), 4, settings, 5)
    ours, theirs = here.run(asked, reply), elsewhere.run(asked, reply)
    for a, b in zip(ours, theirs, strict=True):
        same(a, b)
        np.testing.assert_array_equal(a.versions, b.versions)
    for group in (ours[:4], ours[4:]):
        assert any(len(x.turns) > 1 for x in group)
    with pytest.raises(UserError, match="prompt 0 has no token"):
        elsewhere.sample([np.zeros(0, np.int32)], 1, settings, 0)


def test_requests_of_one_prompt_differ_and_seeds_repeat(engine):
    (group,) = engine.sample(prompts(VOCAB, (6,)), 5, Sampling(max_tokens=12), seed=1)
    assert len({tuple(completion.tokens) for completion in group}) == 5
    (again,) = engine.sample(prompts(VOCAB, (6,)), 5, Sampling(max_tokens=12), seed=1)
    (other,) = engine.sample(prompts(VOCAB, (6,)), 5, Sampling(max_tokens=12), seed=1 << 40)
    for a, b, c in zip(group, again, other, strict=True):
        same(a, b)
        assert tuple(a.tokens) != tuple(c.tokens)


def test_a_groups_prompt_is_computed_once(here, monkeypatch):
    """Seven samples through three slots: the prefix outlives the slots that were filled first."""
    computed = []
    real = batch_file.prefill

    def spy(model, weights, state, piece):
        computed.extend(piece.positions[piece.ids > 0].tolist())
        return real(model, weights, state, piece)

    monkeypatch.setattr(batch_file, "prefill", spy)
    here.sample(prompts(VOCAB, (20, 9)), 7, Sampling(max_tokens=6), seed=0)
    # Requests that enter later compute the last token again, from whose state they sample.
    assert Counter(computed) == Counter([*range(20), *range(9), *[19] * 4, *[8] * 5])


@pytest.mark.slow
def test_prompts_are_computed_before_tokens_unless_somebody_reads_along(params, monkeypatch):
    """Short pieces are of 2 tokens, a long one of 16. Seven prompts of 1 are 4 pieces; one of 40 is more than it."""
    events = []
    for name in ("prefill", "decode"):
        real = getattr(batch_file, name)
        monkeypatch.setattr(batch_file, name, lambda *given, real=real, name=name: events.append(name) or real(*given))
    few = small_engine(MODEL, params, slots=7)
    few.run([Request(prompt, Sampling(max_tokens=9), 7, i) for i, prompt in enumerate(prompts(VOCAB, (1,) * 7))])
    assert events[:5] == ["prefill"] * 4 + ["decode"]
    events.clear()
    asked = [Request(prompt, Sampling(max_tokens=9), 7, i) for i, prompt in enumerate(prompts(VOCAB, (1,) * 6 + (40,)))]
    few.run(asked)
    # 46 tokens are three long pieces. All slots then sample together, nine times each.
    assert events[:4] == ["prefill"] * 3 + ["decode"]
    assert few.usage is not None
    assert few.usage.slot_steps == 9 * 7
    events.clear()
    few.run(asked, on_tokens=lambda number, tokens: None)
    # Who reads tokens as they come waits for a long piece at most.
    assert events[:6] == ["prefill", "decode"] * 3


def test_sampled_frequencies_are_those_of_the_model(engine):
    """The first token of 600 requests against the model's own distribution: top 8, so that each is expected often."""
    from scipy.stats import chisquare

    (prompt,) = prompts(VOCAB, (6,))
    (group,) = engine.sample([prompt], 600, Sampling(max_tokens=1, top_k=8, top_logprobs=8), seed=0)
    ids, logprobs = (x[0] for x in group[0].top)
    assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-5)
    drawn = np.array([completion.tokens[0] for completion in group])
    counts = (drawn[:, None] == ids).sum(axis=0)
    assert counts.sum() == 600
    assert (
        chisquare(counts, 600 * np.exp(logprobs.astype(np.float64)) / np.exp(logprobs.astype(np.float64)).sum()).pvalue
        > 0.01
    )


@pytest.mark.slow
def test_warming_up_compiles_each_program_once(params):
    """In threads, for the mesh of the calls: else each would be compiled again when it is called."""
    engine, compilations = small_engine(MODEL, params, slots=6, max_length=88, page=4, steps=7), Compilations()
    compilations.settled()
    engine.warm(Workload(requests=6, prompt_length=20, length=88))
    with jax.set_mesh(engine.mesh):
        calls = list(warmup_calls(MODEL, engine.hold().weights, engine.sizes.of_requests([88] * 6)))
    # Beside them the empty slots.
    assert compilations.since_warmup == len(calls) + 1


def test_nothing_compiles_after_warm_up(params):
    """Another load of other prompts and settings, with growing caches, refills and a narrow end."""

    def load(seed: int) -> None:
        settings = [
            Sampling(max_tokens=m, temperature=t, top_k=k) for m, t, k in ((30, 1.0, 0), (5, 0.0, 0), (11, 0.5, 4))
        ]
        given = prompts(VOCAB, (5, 20, 30, 130 - seed, 3, 40), seed)[: 6 - seed % 3]
        requests = [Request(p, settings[(i + seed) % 3], seed, i) for i, p in enumerate(given)]
        engine.run(requests, reply=lambda i, so_far: np.array([3, 4, 5], np.int32) if len(so_far.turns) < 2 else None)

    # The cache of 40 + 30 + 3 + 30 tokens is 128 long, that of 200 the longest there is.
    engine = small_engine(MODEL, params, slots=5, max_length=200)
    engine.warm(Workload(requests=6, prompt_length=130, length=200))
    moved = {name: x * 1.5 for name, x in params.items()}
    compilations = Compilations()
    for seed in range(4):
        load(seed)
    engine.publish(moved, 2)
    load(6)
    # One short request needs neither as many slots nor as many pages: it takes what is there.
    engine.run([Request(prompts(VOCAB, (4,), 9)[0], Sampling(max_tokens=3), 9)])
    assert compilations.since_warmup == 0


def first_word(engine, prompt, **settings) -> Completion:
    return engine.run([Request(prompt, Sampling(max_tokens=40, **settings), 5)])[0]


def test_a_stop_id_ends_a_completion_and_stays(engine):
    (prompt,) = prompts(VOCAB, (4,))
    free = first_word(engine, prompt)
    stop = int(free.tokens[10])
    end = int(np.flatnonzero(free.tokens == stop)[0]) + 1
    assert 0 not in free.tokens
    found = first_word(engine, prompt, stop_ids=(0, stop))
    np.testing.assert_array_equal(found.tokens, free.tokens[:end])
    assert found.finish == "stop"
    assert free.finish == "length"
    assert found.turns == ((0, len(found.tokens)),)


@pytest.mark.parametrize("steps", [1, 5, 32])
def test_a_stop_string_cuts_what_is_behind_whatever_the_steps(params, steps):
    engine = small_engine(MODEL, params, steps=steps, decode=text_of)
    (prompt,) = prompts(VOCAB, (4,))
    free = first_word(engine, prompt)
    stop = text_of(free.tokens[11:14])
    assert text_of(free.tokens).index(stop) == 11
    found = first_word(engine, prompt, stop_strings=("never comes", stop))
    np.testing.assert_array_equal(found.tokens, free.tokens[:14])
    np.testing.assert_allclose(found.logprobs, free.logprobs[:14], atol=1e-6)
    assert found.finish == "stop"
    never = first_word(engine, prompt, stop_strings=("never comes",))
    assert never.finish == "length"
    assert len(never.tokens) == 40


def test_the_end_of_the_length(engine):
    (prompt,) = prompts(VOCAB, (60,))
    (completion,) = engine.run([Request(prompt, Sampling(max_tokens=99), 0)])
    assert len(completion.tokens) == 4
    assert completion.finish == "length"


def two_turns(engine, prompt, observation, sampling, seed=2) -> Completion:
    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        assert number == 0
        return observation if len(so_far.turns) == 1 else None

    return engine.run([Request(prompt, sampling, seed)], reply)[0]


@pytest.mark.parametrize("observed", [0, 1, 9, *slow([20])])
@pytest.mark.parametrize("by_text", [False, True], ids=["id", "string"])
def test_a_turn_after_a_reply_is_that_of_the_whole_context(engine, observed, by_text):
    """Greedy, against a fresh request whose prompt is everything so far; a stop string leaves tokens to be undone."""
    (prompt,) = prompts(VOCAB, (7,))
    free = engine.run([Request(prompt, Sampling(max_tokens=6, temperature=0.0), 0)])[0]
    stops = {"stop_strings": (text_of(free.tokens[2:4]),)} if by_text else {"stop_ids": (int(free.tokens[3]),)}
    (observation,) = prompts(VOCAB, (observed,), seed=1)
    sampling = Sampling(max_tokens=16, temperature=0.0, **stops)
    found = two_turns(engine, prompt, observation, sampling)
    (_, end), (start, last) = found.turns
    assert start - end == observed
    np.testing.assert_array_equal(found.tokens[end:start], observation)
    np.testing.assert_array_equal(found.logprobs[end:start], 0)
    np.testing.assert_array_equal(found.drawn, np.r_[[True] * end, [False] * observed, [True] * (last - start)])
    context = np.concatenate([prompt, found.tokens[:start]])
    (whole,) = engine.run([Request(context, Sampling(max_tokens=last - start, temperature=0.0), 0)])
    np.testing.assert_array_equal(found.tokens[start:], whole.tokens)
    np.testing.assert_allclose(found.logprobs[start:], whole.logprobs, atol=1e-4)


def test_the_budget_of_tokens_covers_all_turns(engine):
    (prompt,) = prompts(VOCAB, (7,))
    sampling = Sampling(max_tokens=10, stop_ids=tuple(range(16)))
    asked = []

    def reply(number: int, so_far: Completion) -> np.ndarray:
        asked.append(so_far.finish)
        return np.array([20, 21], np.int32)

    for seed in range(4):
        asked.clear()
        (completion,) = engine.run([Request(prompt, sampling, seed)], reply)
        assert completion.drawn.sum() == 10
        # A turn that ran out of tokens is not answered, and the last one always does.
        assert completion.finish == "length"
        assert set(asked) <= {"stop"}


def test_an_observation_that_does_not_fit_ends_the_episode(engine):
    (prompt,) = prompts(VOCAB, (7,))
    everything = Sampling(max_tokens=10, stop_ids=tuple(range(16)), temperature=3.0)
    completion = two_turns(engine, prompt, np.full(60, 20, np.int32), everything)
    assert completion.finish == "length"
    assert len(completion.turns) == 1


def test_many_episodes_with_replies_share_the_slots(engine):
    """Each of seven episodes is what it is alone, with observations of different lengths."""
    given = prompts(VOCAB, (5, 9, 3, 12, 7, 6, 8))
    sampling = Sampling(max_tokens=12, stop_ids=tuple(range(3, 19)))
    requests = [Request(p, sampling, 4, i) for i, p in enumerate(given)]

    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        return None if len(so_far.turns) == 3 else np.arange(20, 22 + number % 3, dtype=np.int32)

    together = engine.run(requests, reply)
    assert max(len(completion.turns) for completion in together) == 3
    for number, request in enumerate(requests):
        (alone,) = engine.run([request], lambda _, so_far, number=number: reply(number, so_far))
        same(together[number], alone)


def test_an_environment_may_take_its_time_while_others_answer(here):
    """The first answer comes after the last one was given: all are asked at a time, and slots go on."""
    last = threading.Event()

    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        if len(so_far.turns) > 1:
            return None
        if number == 0:
            assert last.wait(60)
        if number == len(given) - 1:
            last.set()
        return np.array([7, 8], np.int32)

    given = prompts(VOCAB, (5, 20, 3, 9, 12))
    every = Sampling(max_tokens=40, stop_strings=tuple(text_of([token]) for token in range(0, VOCAB, 3)))
    asked = [Request(prompt, every, 7, number) for number, prompt in enumerate(given)]
    together = here.run(asked, reply)
    last.set()
    for number, request in enumerate(asked):
        (alone,) = here.run([request], lambda _, so_far, number=number: reply(number, so_far))
        same(alone, together[number])
    assert all(len(completion.turns) == 2 for completion in together)


def test_an_environment_that_breaks_is_heard(here):
    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        raise RuntimeError("the door is locked")

    with pytest.raises(RuntimeError, match="the door is locked"):
        here.run([Request(np.arange(3, dtype=np.int32), Sampling(stop_ids=tuple(range(16))), 7)], reply)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_next_dispatch_is_sent_before_the_last_is_read(params, monkeypatch, ahead):
    events = []
    real_decode, real_take = batch_file.decode, Slots.take
    engine = small_engine(MODEL, params, slots=1, ahead=ahead)
    monkeypatch.setattr(batch_file, "decode", lambda *given: events.append("sent") or real_decode(*given))
    monkeypatch.setattr(Slots, "take", lambda *given: events.append("read") or real_take(*given))
    engine.run([Request(np.arange(3, dtype=np.int32), Sampling(max_tokens=12, temperature=0.0), 7)])
    # 12 tokens in dispatches of 5.
    assert events == (["sent", "sent", "read", "sent", "read", "read"] if ahead else ["sent", "read"] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODEL, Model(RICH)], ids=["plain", "rich"])
def test_short_dispatches_behind_long_ones_have_their_pages(model):
    """A request with stop strings, for which dispatches are short, is admitted while a long one is on its way.

    Of 16 slots one has ended, which ends no dispatch: the next one, sent before that is known, samples 24 tokens too.
    """
    settings = [Sampling(max_tokens=60)] * 15 + [Sampling(max_tokens=3), Sampling(stop_strings=("no text has this",))]
    params, given = random_params(model), prompts(VOCAB, (4,) * len(settings))
    asked = [Request(prompt, x, 7, number) for number, (prompt, x) in enumerate(zip(given, settings, strict=True))]
    one, other = (
        small_engine(model, params, slots=16, piece=64, steps=24, page=4, decode=text_of, ahead=ahead)
        for ahead in (0, 1)
    )
    for a, b in zip(one.run(asked), other.run(asked), strict=True):
        same(a, b)


def test_a_turn_that_ended_takes_no_step_of_the_dispatch_that_was_sent_ahead(params):
    """The device knows of the stop id before the host does."""
    engine = small_engine(MODEL, params, slots=4, ahead=1)
    settings = Sampling(max_tokens=40, stop_ids=tuple(range(0, VOCAB, 6)))
    found = engine.run([Request(prompt, settings, 7, i) for i, prompt in enumerate(prompts(VOCAB, (4, 4, 4, 4)))])
    assert "stop" in {completion.finish for completion in found}
    assert engine.usage is not None
    assert engine.usage.tokens == sum(len(completion.tokens) for completion in found)


@pytest.mark.slow
def test_a_slot_that_waits_for_an_environment_makes_room_for_nobody(params, monkeypatch):
    """It would be sampled on without the answer. The other one leaves, and only then the answer comes."""
    left = threading.Event()
    suspend = Slots.suspend
    monkeypatch.setattr(Slots, "suspend", lambda self, *given: left.set() or suspend(self, *given))

    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        if len(so_far.turns) > 1:
            return None
        assert not scarce or left.wait(60)
        return np.array([7, 8], np.int32)

    texts = tuple(text_of([token]) for token in range(VOCAB))  # the first token of a turn ends it
    settings = [Sampling(max_tokens=50), Sampling(max_tokens=20, stop_strings=texts)]
    given = zip(prompts(VOCAB, (6, 30)), settings, strict=True)
    asked = [Request(prompt, x, 7, number) for number, (prompt, x) in enumerate(given)]
    ample = small_engine(MODEL, params, slots=2, decode=text_of)
    scarce = False
    expected, scarce = ample.run(asked, reply), True
    # Ten pages, each twice: the first request needs seven in the end, the second one holds five.
    (each,) = page_bytes(MODEL.config, ample.mesh, ample.sizes)
    few = small_engine(MODEL, params, slots=2, decode=text_of, room=2.0 * 10 * each)
    for a, b in zip(expected, few.run(asked, reply), strict=True):
        same(a, b)
    assert left.is_set()


def test_a_dispatch_ends_early_where_an_environment_may_go_on(params, monkeypatch):
    """A slot whose turn has ended is asked about at once: it may go on while the others are sampled."""
    enough = []
    real = batch_file.decode
    monkeypatch.setattr(batch_file, "decode", lambda *given: enough.append(int(given[-1])) or real(*given))
    asked = [Request(prompt, Sampling(max_tokens=6), 7, i) for i, prompt in enumerate(prompts(VOCAB, (3, 3, 3, 3, 3)))]
    engine = small_engine(MODEL, params, slots=5)
    engine.run(asked, lambda number, so_far: None)
    with_environment = enough.copy()
    engine.run(asked)
    # All five run in the first dispatch. It ends when one of them has ended, or when a narrower one is enough.
    assert (with_environment[0], enough[len(with_environment)]) == (4, 1)


def test_tokens_are_streamed_in_order(engine):
    heard: dict[int, list[int]] = {}
    found = engine.run(MIXED, on_tokens=lambda number, new: heard.setdefault(number, []).extend(new.tolist()))
    assert heard == {number: completion.tokens.tolist() for number, completion in enumerate(found)}


def test_the_version_is_noted(params):
    engine = small_engine(MODEL, params)
    engine.publish(params, 12)
    assert engine.sample(prompts(VOCAB, (3,)), 1, Sampling(max_tokens=1), 0)[0][0].versions.tolist() == [12]
    assert engine.sample([], 3, Sampling(), 0) == []


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt 0 has no token"),
        (range(64), {}, "prompt 0 has 64 tokens.*length of 64"),
        ([3, 96], {}, "vocabulary, 0 to 95"),
        ([3], {"max_tokens": 0}, "max_tokens is 0"),
        ([3], {"top_k": -1}, "top_k is -1"),
        ([3], {"stop_strings": ("x",)}, "stop_strings"),
    ],
)
def test_bad_input_is_named(params, prompt, settings, message):
    engine = small_engine(MODEL, params)
    with pytest.raises(UserError, match=message):
        engine.sample([np.array(prompt, np.int32)], 1, Sampling(**settings), 0)


def test_sizes_and_weights_that_are_missing(params):
    with pytest.raises(ValueError, match="powers of two"):
        small_engine(MODEL, params, piece=24)
    with pytest.raises(ValueError, match="slots=0"):
        small_engine(MODEL, params, slots=0)
    with pytest.raises(UserError, match="n is 0"):
        small_engine(MODEL, params).sample(prompts(VOCAB, (3,)), 0, Sampling(), 0)
    with pytest.raises(ValueError, match="publish"):
        engine_file.Engine(MODEL, one_device(), slots=1, max_length=8).run([])


def test_one_copy_of_the_weights_lives_at_most(params, monkeypatch: pytest.MonkeyPatch):
    engine = small_engine(MODEL, params)
    old = [weakref.ref(x) for x in jax.tree.leaves(engine.hold().weights)]
    made = engine_file._unstack

    def watched(model: Model, given: dict) -> Weights:
        assert all(one() is None for one in old)
        return made(model, given)

    monkeypatch.setattr(engine_file, "_unstack", watched)
    engine.publish({name: x + 0 for name, x in params.items()}, 2)
    assert engine.hold().version == 2


# --- Ending early ---------------------------------------------------------------------------------------------------


def test_what_is_paused_is_continued_as_it_was(engine):
    """The call ends with the second completion; under other weights' version the rest comes as if nothing had been."""
    whole, done = engine.run(MIXED), []

    def on_done(number: int, completion: Completion) -> bool:
        done.append((number, len(completion.tokens)))
        return len(done) == 2

    first = engine.run(MIXED, on_done=on_done)
    assert [number for number, found in enumerate(first) if found.finish != "paused"] == sorted(n for n, _ in done)
    assert all(len(first[number].tokens) == tokens for number, tokens in done)
    paused = [number for number, found in enumerate(first) if found.finish == "paused"]
    assert any(len(first[number].tokens) for number in paused)
    rest = engine.run([replace(MIXED[number], so_far=first[number]) for number in paused])
    for number, found in zip(paused, rest, strict=True):
        same(whole[number], found)
        if found.top is not None:
            np.testing.assert_allclose(whole[number].top[1], found.top[1], atol=1e-5)


def test_an_episode_is_paused_with_what_its_environment_has_answered(here):
    """The call ends while an environment takes its time: its answer is read, and the next turn is the next call's. Each
    turn is passed on once, and the whole is that of a call that was not ended."""
    asked: list[tuple[int, int]] = []

    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        asked.append((number, len(so_far.turns)))
        if number == 0 and len(so_far.turns) == 1:
            time.sleep(1.0)
        return None if len(so_far.turns) == 3 else np.full(4, 20 + number + len(so_far.turns), np.int32)

    sampling = Sampling(max_tokens=30, stop_ids=tuple(range(0, VOCAB, VOCAB // 16))[:16])
    requests = [Request(prompt, sampling, 11, index) for index, prompt in enumerate(prompts(VOCAB, (5, 9, 4, 7)))]
    whole, once = here.run(requests, reply), sorted(asked)
    asked.clear()
    first = here.run(requests, reply, on_done=lambda *_: True)
    paused = [number for number, found in enumerate(first) if found.finish == "paused"]
    assert 0 in paused
    assert len(first[0].turns) == 2, "the answer is there"
    rest = here.run(
        [replace(requests[number], so_far=first[number]) for number in paused],
        lambda number, so_far: reply(paused[number], so_far),
    )
    for number, found in zip(paused, rest, strict=True):
        same(whole[number], found)
    assert sorted(asked) == once


def test_each_token_has_the_version_that_it_was_sampled_from(params):
    engine = small_engine(MODEL, params, slots=3, steps=5, ahead=1)  # what is on its way when the call ends counts
    prompt = prompts(VOCAB, (6,))
    first = engine.run(requests_of(prompt, 3, Sampling(max_tokens=12), 4), on_done=lambda *_: True)
    assert [found.finish for found in first] == ["length"] * 3  # all ended in one dispatch
    ends = [Sampling(max_tokens=number) for number in (3, 12)]
    requests = [Request(prompt[0], sampling, 4, index) for index, sampling in enumerate(ends)]
    version = engine.hold().version
    _, paused = engine.run(requests, on_done=lambda *_: True)
    engine.publish(params, version + 1)
    (found,) = engine.run([replace(requests[1], so_far=paused)])
    number = len(paused.tokens)
    assert 0 < number < 12
    assert found.versions.tolist() == [version] * number + [version + 1] * (12 - number)
    np.testing.assert_array_equal(found.tokens, first[1].tokens)


@pytest.mark.slow
def test_a_layer_with_a_window_reads_no_more_than_that():
    """Of 5 + 6 tokens the layers with a window of 5 read five a step, from the first on."""
    model = Model(RICH)
    engine = small_engine(model, random_params(model), slots=1)
    engine.run([Request(prompts(VOCAB, (5,))[0], Sampling(max_tokens=6), 0)])
    whole = small_engine(Model(replace(RICH, window=64)), random_params(model), slots=1)
    whole.run([Request(prompts(VOCAB, (5,))[0], Sampling(max_tokens=6), 0)])
    assert RICH.window == 5
    assert engine.usage is not None
    assert whole.usage is not None
    local = sum(kind.window is not None for kind in RICH.kinds)
    each = 2 * RICH.num_kv_heads * RICH.head_dim * 4
    assert whole.usage.bytes - engine.usage.bytes == local * each * sum(seen - 5 for seen in range(6, 12))


def test_what_a_call_takes_is_counted(params):
    """Two slots of three: 3 and 8 tokens of a prompt of 6 in pages; a step reads all weights, and what is held."""
    engine = small_engine(MODEL, params, slots=3, steps=5)
    (prompt,) = prompts(VOCAB, (6,))
    assert engine.usage is None
    engine.run([Request(prompt, Sampling(max_tokens=number), 0, number) for number in (3, 8)])
    usage = engine.usage
    assert usage is not None
    assert (usage.tokens, usage.slot_steps) == (11, 2 * 8)
    read = [x for name, x in params.items() if name != "embed/w" or PLAIN.tied]
    token = PLAIN.num_layers * 2 * PLAIN.num_kv_heads * PLAIN.head_dim * 4
    held = (7 + 8 + 9) + sum(range(7, 15))
    assert usage.bytes == pytest.approx(8 * sum(x.nbytes for x in read) + token * held)


def test_slots_that_need_no_further_page_wait_for_none(params, monkeypatch: pytest.MonkeyPatch):
    """57 + 7 tokens take the eight pages of their prompt to the end: all three slots, and so all pages there are, are
    at work from the start. Seven tokens at five a dispatch are two dispatches."""
    widths, real = list[int](), batch_file.decode
    monkeypatch.setattr(batch_file, "decode", lambda *given: widths.append(len(given[5].request)) or real(*given))
    engine = make()
    engine.publish(params, 1)
    engine.run(
        [Request(prompt, Sampling(max_tokens=7), 0, index) for index, prompt in enumerate(prompts(VOCAB, (57,) * 3))]
    )
    assert widths == [3, 3]
