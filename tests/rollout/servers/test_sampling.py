"""Sampling on servers, against stand-ins of vLLM that behave, and that do not.

All samplers ask small Llamas whose log-probs are true; what is sampled is compared with the trainer's own engine.
"""

import logging
import threading
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest

from tests.fake_vllm import FakeVLLM
from tests.marks import slow
from tests.rollout.servers.conftest import PROMPTS, WARM, Policy, engine, flat, scored
from tunix.errors import UserError
from tunix.rollout.servers.protocol import ID, IMPOSSIBLE, Answer, Ask, Expected, Unfit, answered, settings
from tunix.types import Completion, Request, Restart, Sampling, requests_of

# --- What a server samples ------------------------------------------------------------------------------------------


def test_completions_come_back_as_ids_with_the_log_probs_they_were_sampled_by(policy: Policy, start: Any):
    sampler, (fake,) = start()
    sampler.publish(policy.params, 3)
    groups = sampler.sample(PROMPTS, 2, WARM, seed=5)
    assert [len(group) for group in groups] == [2, 2, 2]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            assert one.tokens.dtype == np.int32
            assert one.finish == "length"
            assert one.versions.tolist() == [3] * 8
            assert one.turns == ((0, 8),)
            np.testing.assert_allclose(one.logprobs, scored(policy, prompt, one), atol=1e-5)
    assert sampler.usage is not None
    assert sampler.usage.tokens == 48
    assert len({one.tokens.tobytes() for one in flat(groups)}) == 6
    # Nothing is left to what a server's generation_config.json says.
    assert all(body["ignore_eos"] and body["top_k"] == 0 and body["top_p"] == 1 for body in fake.settings)


def test_draws_follow_from_seed_and_number(policy: Policy, start: Any):
    sampler, _ = start(2)
    sampler.publish(policy.params, 0)
    first, again = (flat(sampler.sample(PROMPTS, 2, WARM, seed=5)) for _ in range(2))
    other = flat(sampler.sample(PROMPTS, 2, WARM, seed=6))
    (one,) = sampler.run([Request(PROMPTS[1], WARM, 5, 3)])
    assert [x.tokens.tolist() for x in first] == [x.tokens.tolist() for x in again]
    assert [x.tokens.tolist() for x in first] != [x.tokens.tolist() for x in other]
    assert one.tokens.tolist() == first[3].tokens.tolist()


def test_stop_ids_and_strings_end_a_completion_and_are_kept(policy: Policy, start: Any):
    sampler, _ = start()
    sampler.publish(policy.params, 0)
    ((plain,),) = sampler.sample(PROMPTS[:1], 1, WARM, seed=5)
    ((stopped,),) = sampler.sample(PROMPTS[:1], 1, replace(WARM, stop_ids=(int(plain.tokens[3]),)), seed=5)
    assert stopped.tokens.tolist() == plain.tokens[:4].tolist()
    assert stopped.finish == "stop"
    letter = next(x for x in map(policy.text, ([int(i)] for i in plain.tokens)) if x.isascii() and x)
    ((cut,),) = sampler.sample(PROMPTS[:1], 1, replace(WARM, stop_strings=(letter,)), seed=5)
    assert cut.finish == "stop"
    assert cut.tokens.tolist() == plain.tokens[: len(cut.tokens)].tolist()
    assert letter in policy.text(cut.tokens)
    assert letter not in policy.text(cut.tokens[:-1])


def test_cuts_and_alternatives_are_those_of_our_own_engine(policy: Policy, start: Any):
    sampler, _ = start()
    sampler.publish(policy.params, 0)
    settings = Sampling(6, temperature=0.0, top_logprobs=3)
    ((found,),), ((own,),) = (one.sample(PROMPTS[:1], 1, settings, 0) for one in (sampler, engine(policy)))
    assert found.tokens.tolist() == own.tokens.tolist()
    assert found.top is not None
    assert own.top is not None
    assert found.top[0].tolist() == own.top[0].tolist()
    np.testing.assert_allclose(found.top[1], own.top[1], atol=1e-5)
    ((cut,),) = sampler.sample(PROMPTS[:1], 1, Sampling(6, top_k=1), 0)
    assert cut.tokens.tolist() == own.tokens.tolist()
    np.testing.assert_allclose(cut.logprobs, 0, atol=1e-6)
    # The ids that a token was drawn from are the same, though another engine draws another of them.
    settings = Sampling(6, top_k=5, top_p=0.03).for_training
    ((found,),), ((own,),) = (one.sample(PROMPTS[:1], 1, settings, 0) for one in (sampler, engine(policy)))
    for drawn in (found, own):
        assert drawn.candidates is not None
        assert all(token in possible for token, possible in zip(drawn.tokens, drawn.candidates, strict=True))
        assert -1 in drawn.candidates
    assert found.candidates[0].tolist() == own.candidates[0].tolist()


def listing(sampled: int, listed: dict[int, float]) -> Answer:
    """What is read of a server's answer: an id that was drawn from the two most likely ones, and what it lists."""
    named = {f"{ID}{token}": log(x) if x else IMPOSSIBLE for token, x in listed.items()}
    choice = {
        "finish_reason": "stop",
        "token_ids": [sampled],
        "logprobs": {"token_logprobs": [log(listed[sampled])], "top_logprobs": [named]},
    }
    asked = settings(Sampling(4, top_k=2).for_training, 4, seed=0)
    return answered({"id": "cmpl-a", "choices": [choice]}, Ask("a", (1,), asked, Expected(9, 8, None, 1.0, 1e-4)))


def test_an_id_as_likely_as_the_last_of_the_set_is_of_the_set():
    """vLLM keeps all ids that are as likely as the one of rank `top_k`, and lists as many as that, and the sampled."""
    for sampled, listed, expected in (
        (7, {5: 0.9, 3: 0.05, 7: 0.05}, {5, 7}),
        (3, {5: 0.9, 3: 0.05, 7: 0.05}, {5, 3}),
        (5, {5: 1.0, 3: 0.0}, {5, 3}),
    ):
        top = listing(sampled, listed).top
        assert top is not None
        assert set(top[0][0].tolist()) == expected
        np.testing.assert_allclose(np.exp(top[1][0]), sorted((listed[x] for x in expected), reverse=True), atol=1e-6)


def test_a_set_of_many_more_ids_than_a_server_lists_is_refused():
    """Three that are equally likely, or log-probs of the whole distribution."""
    with pytest.raises(
        Unfit, match=r"lists the 2 ids .* sum to 0.67: start it with --logprobs-mode processed_logprobs"
    ):
        listing(7, {5: 1 / 3, 3: 1 / 3, 7: 1 / 3})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Sampling(4, min_p=0.1, top_p=0.9), "min_p"),
        (Sampling(4, temperature=0.001), "temperature"),
        (Sampling(0), "max_tokens"),
    ],
)
def test_settings_that_servers_cannot_honour_are_refused_by_name(
    policy: Policy, start: Any, settings: Sampling, named: str
):
    sampler, (fake,) = start()
    sampler.publish(policy.params, 0)
    with pytest.raises(UserError, match=f"sampling: {named} is"):
        sampler.sample(PROMPTS, 1, settings, 0)
    assert not fake.asked


def test_an_environment_answers_between_turns(policy: Policy, start: Any):
    sampler, (fake,) = start()
    sampler.publish(policy.params, 2)
    stops, seen = tuple(range(0, 272, 3)), []

    def reply(number: int, so_far: Completion) -> np.ndarray | None:
        seen.append((number, len(so_far.turns), threading.current_thread().name))
        return np.array([9, 9], np.int32) if len(so_far.turns) < 3 else None

    settings = Sampling(20, temperature=0.7, stop_ids=stops[:16])
    found, other = sampler.run(requests_of(PROMPTS[:2], 1, settings, 5), reply)
    for prompt, one in ((PROMPTS[0], found), (PROMPTS[1], other)):
        drawn = one.drawn
        assert (one.logprobs[~drawn] == 0).all()
        assert (one.tokens[~drawn] == 9).all()
        assert one.versions.tolist() == [2] * len(one.tokens)
        assert drawn.sum() <= 20
        np.testing.assert_allclose(one.logprobs[drawn], scored(policy, prompt, one)[drawn], atol=1e-5)
        if one.finish == "stop":
            assert len(one.turns) == 3
    assert all(name.startswith("environment") for *_, name in seen)
    prompts = [tuple(body["prompt"]) for body in fake.settings]
    assert len(set(prompts)) == len(prompts)


def test_another_transcript_is_asked_for_by_its_own_prompt(policy: Policy, start: Any):
    sampler, (fake,) = start()
    sampler.publish(policy.params, 2)
    again = np.array([5, 9, 6], np.int32)
    settings = Sampling(20, stop_ids=tuple(range(0, 272, 17)))
    (found,) = sampler.run(
        [Request(PROMPTS[0], settings, 5)], lambda _, so_far: Restart(again) if len(so_far.turns) < 3 else None
    )
    assert len(found.turns) > 1
    assert len(found.restarts) == len(found.turns) - 1
    assert [body["prompt"] for body in fake.settings[1:]] == [again.tolist()] * len(found.restarts)
    ends = [*found.restarts[1:], len(found.tokens)]
    for begin, end in zip(found.restarts, ends, strict=True):
        drawn = slice(begin + len(again), end)
        one = replace(found, tokens=found.tokens[drawn], turns=())
        np.testing.assert_allclose(found.logprobs[drawn], scored(policy, again, one), atol=1e-5)


def test_completions_are_handed_on_as_they_end_and_the_call_ends_when_that_is_enough(policy: Policy, start: Any):
    sampler, (fake,) = start()
    sampler.publish(policy.params, 0)
    arrived, caller = [], threading.current_thread()

    def done(number: int, completion: Completion) -> bool:
        assert threading.current_thread() is caller
        arrived.append((number, completion.tokens.tolist()))
        return len(arrived) == 2

    fake.manners.delay = 0.05
    requests = requests_of(PROMPTS, 2, WARM, 5)
    found = sampler.run(requests, on_done=done)
    assert len(arrived) == 2
    for number, tokens in arrived:
        assert found[number].tokens.tolist() == tokens
    left = [one for number, one in enumerate(found) if number not in dict(arrived)]
    assert any(one.finish == "paused" and not len(one.tokens) for one in left)
    fake.manners.delay = 0.0
    begun = [replace(requests[i], so_far=x) for i, x in enumerate(found) if i not in dict(arrived)]
    rest, whole = sampler.run(begun), sampler.run(requests)
    assert [x.tokens.tolist() for x in rest] == [whole[x.index].tokens.tolist() for x in begun]


# --- What goes wrong while it samples -------------------------------------------------------------------------------


def expect(policy: Policy, start: Any) -> list[list[int]]:
    """What servers without faults sample."""
    sampler, _ = start()
    sampler.publish(policy.params, 0)
    return [one.tokens.tolist() for one in flat(sampler.sample(PROMPTS, 4, WARM, 5))]


def misbehave(fake: FakeVLLM, how: str) -> None:
    if how == "hangs":
        fake.manners.hangs.set()
    elif how == "dies":
        fake.manners.dies_after = 2
    elif how == "fails":
        fake.manners.fails = 10**6
    elif how == "sick":
        fake.manners.hangs.set()
        fake.manners.sick = True


@pytest.mark.parametrize("how", ["fails", *slow(["hangs", "dies", "sick"])])
def test_what_a_server_does_not_answer_is_asked_elsewhere_once(
    policy: Policy, start: Any, how: str, caplog: pytest.LogCaptureFixture
):
    whole = expect(policy, start)
    sampler, fakes = start(2, timeout=3.0)
    sampler.publish(policy.params, 0)
    sampler.sample(PROMPTS, 1, WARM, 1)  # both have compiled
    for fake in fakes:
        fake.asked.clear()
    misbehave(fakes[0], how)
    arrived: list[int] = []
    with caplog.at_level(logging.WARNING):
        found = sampler.run(requests_of(PROMPTS, 4, WARM, 5), on_done=lambda i, _: arrived.append(i) or False)
    assert [one.tokens.tolist() for one in found] == whole
    assert sorted(arrived) == list(range(12))
    assert sampler.pool.servers[0].reason is not None
    assert caplog.text.count("is asked no more") == 1
    assert sampler.pool.servers[0].url in caplog.text
    # It is left alone until weights are handed over, and then asked again if it is well.
    fakes[0].manners.hangs.clear()
    fakes[0].manners.sick, fakes[0].manners.fails, fakes[0].manners.dies_after, fakes[0].gone = False, 0, None, False
    sampler.publish(policy.moved(), 1)
    assert sampler.pool.servers[0].reason is None
    fakes[0].asked.clear()
    sampler.sample(PROMPTS, 4, WARM, 5)
    assert fakes[0].asked


def test_a_failure_that_passes_is_repeated_under_the_same_id(policy: Policy, start: Any):
    whole = expect(policy, start)
    sampler, (fake,) = start()
    sampler.publish(policy.params, 0)
    fake.manners.fails = 3
    found = flat(sampler.sample(PROMPTS, 4, WARM, 5))
    assert [one.tokens.tolist() for one in found] == whole
    assert sorted(fake.asked.values(), reverse=True)[0] > 1
    assert len(fake.asked) == 12


@pytest.mark.parametrize("how", ["twice", *slow(["swaps"])])
def test_answers_that_come_twice_or_to_another_request_are_dropped(policy: Policy, start: Any, how: str):
    whole = expect(policy, start)
    sampler, (fake,) = start()
    sampler.publish(policy.params, 0)
    setattr(fake.manners, how, True if how == "twice" else 3)
    for _ in range(2):
        found = flat(sampler.sample(PROMPTS, 4, WARM, 5))
        assert [one.tokens.tolist() for one in found] == whole


def test_where_no_server_is_left_one_error_says_why(policy: Policy, start: Any):
    sampler, fakes = start(2, timeout=3.0)
    sampler.publish(policy.params, 0)
    fakes[0].gone, fakes[1].manners.sick = True, True
    fakes[1].manners.hangs.set()
    with pytest.raises(UserError, match="no server is left") as caught:
        sampler.sample(PROMPTS, 4, WARM, 5)
    assert all(one.url in str(caught.value) for one in sampler.pool.servers)
    assert "run the same command" in str(caught.value)


@pytest.mark.slow
def test_a_server_that_was_started_anew_is_not_asked_with_its_first_weights(policy: Policy, start: Any):
    sampler, fakes = start(2)
    sampler.publish(policy.moved(0.05), 1)
    fakes[0].restart(policy.folder)
    fakes[0].asked.clear()
    found = flat(sampler.sample(PROMPTS, 2, WARM, 5))
    assert not fakes[0].asked
    for prompt, one in zip([x for x in PROMPTS for _ in range(2)], found, strict=True):
        np.testing.assert_allclose(one.logprobs, scored(policy, prompt, one, policy.moved(0.05)), atol=1e-5)
    sampler.publish(policy.moved(0.06), 2)
    sampler.sample(PROMPTS, 2, WARM, 5)
    assert fakes[0].asked


def test_a_callback_that_fails_ends_the_call_with_its_error(policy: Policy, start: Any):
    sampler, _ = start()
    sampler.publish(policy.params, 0)

    def done(*_: Any) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sampler.run(requests_of(PROMPTS, 2, WARM, 5), on_done=done)
    stopping = replace(WARM, max_tokens=40, stop_ids=tuple(range(16)))
    with pytest.raises(KeyError, match="mine"):
        sampler.run(requests_of(PROMPTS * 4, 2, stopping, 5), reply=done)
    assert len(flat(sampler.sample(PROMPTS, 2, WARM, 5))) == 6


def test_many_requests_are_in_flight_at_once(policy: Policy, start: Any):
    sampler, (fake,) = start()
    sampler.publish(policy.params, 0)
    fake.manners.together = 60
    assert len(flat(sampler.sample(PROMPTS, 20, Sampling(1), 0))) == 60
    assert fake.most == 60
