"""Groups that a step began and did not need: the next one continues them, and a resumed run does so to the bit.

The sampler is a fake of thirty lines: a token is a function of (seed, request, its index) alone, as are lengths, and a
dispatch gives every request two tokens.
"""

import json
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from itertools import islice

import numpy as np

from tunix.algorithms.episodes import as_sequence, flat
from tunix.algorithms.ops import CURRENT
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.sources import open_rows
from tunix.data.types import Prompt
from tunix.protocols import SamplingClient
from tunix.rollout.backlog import Backlog, Race, episode_of, saved_episode
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.rollout.environments.base import Episode, Episodes
from tunix.rollout.environments.problem import Problem
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import Reward
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import Scored
from tunix.types import Completion, Pictures, Request, Sampling

SAMPLING, LONGEST, DISPATCH, GROUP = Sampling(max_tokens=16), 16, 2, 2


def drawn(request: Request) -> np.ndarray:
    """All tokens of a request: one to sixteen, few of them many."""
    rng = np.random.default_rng([request.seed, request.index])
    return rng.integers(3, 90, min(int(rng.geometric(0.25)), LONGEST)).astype(np.int32)


def scored(tokens: np.ndarray) -> np.ndarray:
    """What stands for the log-probs of tokens."""
    return (-tokens / 7).astype(np.float32)


class Sampler(SamplingClient):
    """Samples all requests side by side."""

    def __init__(self) -> None:
        self.version, self.sampled = 0, 0

    def run(self, requests, reply=None, on_done=None):
        found = [x.so_far or self._made(x, 0, None) for x in requests]
        enough = False
        while not enough and any(x.finish == "paused" for x in found):
            for i, before in enumerate(found):
                if before.finish == "paused":
                    found[i] = self._made(requests[i], len(before.tokens) + DISPATCH, before)
                    if found[i].finish != "paused":
                        enough |= on_done(i, found[i])
        return found

    def _made(self, request: Request, end: int, before: Completion | None) -> Completion:
        every = drawn(request)
        tokens = every[:end]
        versions = np.full(len(tokens), self.version, np.int32)
        if before is not None:
            versions[: len(before.tokens)] = before.versions
            self.sampled += len(tokens) - len(before.tokens)
        finish = "stop" if len(tokens) == len(every) else "paused"
        return Completion(tokens, scored(tokens), finish, versions, sampling=SAMPLING, turns=((0, len(tokens)),))


def stream(rows: int = 11, size: int = 3, spare: int = 2) -> RolloutStream:
    """One epoch of prompts, in steps of `size` for which `spare` more are begun."""
    scorer = Scorer([Reward("sum", lambda completion, completion_ids: float(sum(completion_ids)))])
    given = [{"prompt_ids": [1, 2, number]} for number in range(rows)]
    config = DataConfig(train="rows", max_length=32, completion_length=LONGEST)
    prompts = Prompts(Examples(open_rows(given), None, config, RowKind.PROMPT), seed=5, epochs=1)
    common = {"size": size, "seed": 5, "packed": partial(pack, max_length=32), "tolerance": 1e-3}
    collector, backlog = Collector(None, SAMPLING, scorer), Backlog(prompts, SAMPLING)
    return RolloutStream(RolloutStep(collector, prompts, backlog=backlog, spare=spare, **common))


def step(data: RolloutStep, sampler: Sampler) -> list[list[Scored]]:
    """One step of an algorithm, with newer weights than the last."""
    sampler.version += 1
    data.version = sampler.version
    return data.collect(sampler, data.prompts, GROUP)


def names(groups: list[list[Scored]]) -> list[int]:
    """The number of each group's prompt."""
    return [int(group[0].prompt.tokens[-1]) for group in groups]


def test_every_prompt_is_trained_once_and_every_token_is_sampled_once():
    """Eleven prompts in steps of three are 3, 3, 3 and 2 groups, whatever was begun when."""
    sampler = Sampler()
    with closing(stream()) as steps:
        groups = [step(data, sampler) for data in steps]
    assert [len(each) for each in groups] == [3, 3, 3, 2]
    assert sorted(name for each in groups for name in names(each)) == list(range(11))
    episodes = [episode for each in groups for group in each for episode in group]
    assert sampler.sampled == sum(len(episode.completion.tokens) for episode in episodes)
    versions = [set(episode.completion.versions.tolist()) for episode in episodes]
    assert any(len(mixed) > 1 for mixed in versions)
    for episode in episodes:
        completion = episode.completion
        assert episode.rewards == {"sum": float(completion.tokens.sum())}
        np.testing.assert_array_equal(completion.logprobs, scored(completion.tokens))
        assert all(np.diff(completion.versions) >= 0)
        current = as_sequence(episode).per_token[CURRENT]
        np.testing.assert_array_equal(current[3:], completion.versions == episode.version)


def test_a_step_takes_what_is_complete_first():
    """By hand from the lengths: a group ends with its longer completion, and those that end together in their order."""
    with closing(stream()) as steps:
        data = next(steps)
        assert data.backlog is not None
        spare = data.backlog.take(2)
        data.backlog.put_back(spare)
        ends = []
        for place, prompt in enumerate([*data.prompts, *spare]):
            longest = max(len(drawn(own)) for own in prompt.requests(GROUP, SAMPLING, 5))  # pyright: ignore
            ends.append((-(-longest // DISPATCH), place, int(prompt.tokens[-1])))
        expected = sorted(ends)[:3]
        assert names(step(data, Sampler())) == [name for _, place, name in sorted(expected, key=lambda end: end[1])]


def test_a_resumed_run_continues_what_was_begun():
    """The position goes through JSON; the other half of the run equals that of the whole one bit for bit."""
    sampler = Sampler()
    with closing(stream()) as steps:
        for data in islice(steps, 2):
            step(data, sampler)
        saved = json.loads(json.dumps(steps.get_state()))
        rest = [(step(data, sampler), data.accounting) for data in steps]
    assert any(x and x["finish"] == "paused" for one in saved["begun"] for x in one["so_far"])
    again = Sampler()
    again.version = 2
    with closing(stream()) as steps:
        steps.set_state(saved)
        assert json.loads(json.dumps(steps.get_state())) == saved
        resumed = [(step(data, again), data.accounting) for data in steps]
    assert len(rest) == len(resumed) == 2
    for (mine, counted), (theirs, counted_again) in zip(rest, resumed, strict=True):
        assert counted == counted_again
        for one, other in zip(flat(mine), flat(theirs), strict=True):
            assert (one.prompt.row, one.rewards, one.version) == (other.prompt.row, other.rewards, other.version)
            for name in ("tokens", "logprobs", "versions"):
                a, b = getattr(one.completion, name), getattr(other.completion, name)
                assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


def test_a_replacement_takes_what_was_begun_first():
    """As DAPO's refills do: one more prompt is asked for, and the group that comes is one that was nearly done."""
    sampler = Sampler()
    with closing(stream()) as steps:
        data = next(steps)
        taken = names(step(data, sampler))
        (more,) = data.more(1)
        (group,) = data.collect(sampler, [more], GROUP)
        began = group[0].completion.versions[0]
        assert more.so_far  # pyright: ignore
        assert began == 1
        assert names([group])[0] not in taken


def test_the_pictures_that_an_environment_shows_are_asked_about():
    """Its rows have none of their own: a step that oversampled asked about the episode's prompt without them."""
    pixels, places = np.zeros((1, 4, 2, 2, 3), np.uint8), np.array([0, 1, 0], np.int32)
    pictures = Pictures(pixels, np.array([[1, 1]], np.int32), places)

    class Showing(Player):
        scores = False

        def __init__(self) -> None:
            pass

        def __call__(self, rows, seed, numbers=None) -> Episodes:
            made = [Episode(Problem(), row, np.random.default_rng(0)) for row in rows]
            for episode in made:
                episode.pictures = pictures
            return Episodes(made)

    class Seeing(Sampler):
        def run(self, requests, reply=None, on_done=None):
            assert all(request.pictures is pictures for request in requests)
            return super().run(requests, reply, on_done)

    with closing(stream()) as steps:
        data = next(steps)
        assert len(step(replace(data, collector=replace(data.collector, play=Showing())), Seeing())) == 3


def test_a_race():
    """Two of three groups of two: the second is complete before, the third by its last completion, the first never."""

    def made(finish, tokens=1) -> Completion:
        return Completion(np.ones(tokens, np.int32), np.zeros(tokens), finish, np.ones(tokens), SAMPLING, ())

    done = made("stop")
    race = Race([[None, done], [done, done], [done, made("paused")]], 2)
    assert race.missing == [0, 5]
    assert [number for number, _ in race.start()] == [2, 3]
    assert not race.over
    assert race.add(0, made("paused", tokens=0)) == []
    assert [number for number, _ in race.add(5, done)] == [4, 5]
    assert race.over
    assert race.add(0, done) == []  # it comes too late, and is there for the next step
    assert race.taken == [1, 2]
    assert race.groups[0] == [done, done]


def test_what_comes_back_is_taken_first_in_the_order_of_the_data():
    with closing(stream(rows=9)) as steps:
        backlog = steps.like.backlog
        assert backlog is not None
        one, two, three, four = backlog.take(4)
        backlog.put_back([three])
        backlog.put_back([four, one])
        assert [x.place for x in backlog.take(4)] == [one.place, three.place, four.place, four.place + 1]
        assert two.place == one.place + 1


def test_all_that_an_episode_has_is_saved():
    """But its version and what was measured of it, which the step that takes it knows; no part is at its default."""
    numbers = np.arange(4, dtype=np.int32)
    prompt = Prompt(numbers, text="2 + 2", row={"answer": "4"}, source="sums")
    experts = np.arange(16, dtype=np.int16).reshape(8, 2, 1)
    completion = Completion(numbers, -numbers / 3, "length", numbers + 5, SAMPLING, ((0, 2), (3, 4)), experts=experts)
    episode = Scored(prompt, completion, "4", {"a": 0.1}, {"b": "died"}, (0.1, 0.0), (0, 1), True, logged={"a/n": 3})
    unsaved = {"version", "measured"}
    at_default = {x.name for x in fields(Scored) if getattr(episode, x.name) in (x.default, (), None)}
    assert at_default <= unsaved
    back = episode_of(json.loads(json.dumps(saved_episode(episode))), replace(prompt, tokens=numbers[:1]), SAMPLING)
    assert replace(back, prompt=prompt, completion=completion) == episode
    assert (back.prompt.text, back.prompt.source, back.completion.finish) == ("2 + 2", "sums", "length")
    np.testing.assert_array_equal(back.prompt.tokens, numbers)
    for name in ("tokens", "logprobs", "versions", "experts"):
        np.testing.assert_array_equal(getattr(back.completion, name), getattr(completion, name).astype(np.float32))
    assert back.completion.turns == completion.turns
