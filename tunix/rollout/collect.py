"""From prompts to scored episodes: the input of each step of an on-policy algorithm.

Completions are decoded, scored and measured as they end, while others are still sampled (`Arrivals`). The prompts of a
step are divided among the processes of a run: each samples and scores its own, and all receive all (`allgathered`).

`RolloutStep` is one step: its prompts, further ones to replace groups with, and `collect`, in which the client samples
completions (over several turns where an environment answers) and the rewards score them as they end. Every random
number follows from the run's seed and the position in the data, so a resumed run samples what an uninterrupted one
would have.

Axes: P prompts, G group, T time.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from tunix.data.examples import prompt_messages
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Accounting, Prompt
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.protocols import SamplingClient
from tunix.rollout.backlog import Backlog, Pending, Race, decoded, encoded, episode_of, saved_episode
from tunix.rollout.environments.base import Episodes
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import ADDED, Score, parted
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import ENVIRONMENT, Clock, Judge, Measure, Scored, sequence_of
from tunix.types import Batch, Begun, Completion, Sampling, Sequence

Found = TypeVar("Found")
Item = TypeVar("Item")


@dataclass(frozen=True)
class LogprobPass:
    """Log-probs and values of completions, computed while others are sampled."""

    measure: Measure
    together: int
    """Completions of a part, e.g. 32."""


class Parts(Generic[Found]):
    """The places 0, 1, ... of completions, divided in their order; work on a part begins when all of its have ended.

    A part has the same completions whatever ended when, so that a run that is killed and resumed computes the same
    bits, and parts have one size, so that one program is compiled.
    """

    def __init__(self, total: int, size: int, begin: Callable[[range], Found]):
        """Nothing has ended.

        Args:
            total: number of places.
            size: places of a part; the last one may have fewer.
            begin: begins the work on the completions of these places.
        """
        self._places = [range(start, min(start + size, total)) for start in range(0, total, size)]
        self._waiting, self._size, self._begin = [len(places) for places in self._places], size, begin
        self.found: dict[range, Found] = {}
        """The places of each part that was begun -> what `begin` returned."""

    def add(self, place: int) -> None:
        """The completion of a place has ended."""
        part = place // self._size
        self._waiting[part] -= 1
        if not self._waiting[part]:
            self.found[self._places[part]] = self._begin(self._places[part])


def columns_of(owners: List[Prompt]) -> list[str]:
    """The columns that rewards of these prompts' completions may read."""
    return list(dict.fromkeys([*(name for owner in owners for name in owner.row), *ADDED]))


def columns(owner: Prompt, completion: Completion) -> dict[str, Any]:
    """The columns that rewards of a completion may read."""
    added = {"completion_ids": completion.tokens.tolist(), "completion_tokens": int(completion.drawn.sum())}
    return {**owner.row, **added}


class Arrivals:
    """The completions of some prompts that have ended so far, by their numbers."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        scorer: Scorer | None,
        owners: List[Prompt],
        total: int | None = None,
        judge: Judge | None = None,
        measuring: LogprobPass | None = None,
    ):
        """Nothing has ended.

        Args:
            tokenizer: decodes the texts; None where there are none.
            scorer: the reward functions; None where there are none.
            owners: the prompt of each number.
            total: how many completions are waited for; None for one of each number.
            judge: a reward model; None where there is none.
            measuring: what is computed for the loss; None for nothing.
        """
        self._tokenizer, self._owners = tokenizer, owners
        self._scoring = None if scorer is None else scorer.open(columns_of(owners))
        self._ended: dict[int, tuple[Completion, str]] = {}
        self._places: dict[int, int] = {}
        """Place of a completion among those that are waited for -> its number."""
        self._sampled = math.inf
        self._judge, self._measuring, self._overlapped = judge, measuring, 0.0
        number = len(owners) if total is None else total
        self._judged = judge and Parts(number, judge.together, self._begin_judging)
        self._measured = measuring and Parts(number, measuring.together, self._begin_measuring)

    def add(self, number: int, completion: Completion, place: int | None = None) -> None:
        """Begins the rewards of a completion, unless they have been.

        Args:
            number: of its request.
            completion: to its end.
            place: its place among those that are waited for; None where it is the number.
        """
        if number in self._ended:
            return
        text = self._tokenizer.decode(completion.tokens, skip_special=True) if self._tokenizer else ""
        self._ended[number] = completion, text
        if self._scoring is not None:
            owner = self._owners[number]
            self._scoring.add(number, owner.text, text, columns(owner, completion), prompt_messages(owner.row))
        self._places[number if place is None else place] = number
        for parts in filter(None, (self._judged, self._measured)):
            parts.add(number if place is None else place)

    def close(self) -> None:
        """Sampling is over: from now on rewards have a time of their own."""
        self._sampled = time.monotonic()

    @property
    def numbers(self) -> list[int]:
        """The numbers that have ended, in order."""
        return sorted(self._ended)

    @property
    def completions(self) -> list[Completion]:
        """The completions, in the order of their numbers."""
        return [self._ended[number][0] for number in self.numbers]

    @property
    def texts(self) -> list[str]:
        """What rewards read of each completion."""
        return [self._ended[number][1] for number in self.numbers]

    def scores(self, clock: Clock) -> dict[str, list[Score]]:
        """Waits for the scores by reward, in the order of the numbers; their time while others were sampled has cost
        nothing."""
        scores: dict[str, list[Score]] = {}
        if self._scoring is not None:
            scores |= self._scoring.result()
            clock.logged |= self._scoring.metrics
            overlapped, total = self._scoring.seconds(self._sampled)
            clock.count(overlapped=overlapped, rewards=total)
        if self._judge is not None and self._judged is not None:
            began = time.monotonic()
            scores[self._judge.name] = self._by_number({places: wait() for places, wait in self._judged.found.items()})
            waited = time.monotonic() - began
            clock.count(overlapped=self._overlapped, rewards=self._overlapped + waited)
        return scores

    @property
    def logged(self) -> list[dict[str, Any]]:
        """What rewards logged of each completion, in the order of the numbers; nothing before `scores`."""
        logged = {} if self._scoring is None else self._scoring.logged
        return [logged.get(number, {}) for number in self.numbers]

    def measured(self, clock: Clock) -> list[dict[str, np.ndarray]]:
        """Waits for what was computed of each completion for the loss, in the order of the numbers."""
        if self._measured is None:
            return [{} for _ in self._ended]
        with clock.part("logprobs"):
            rows = {
                places: [{name: arrays[i] for name, arrays in by_name.items()} for i in range(len(places))]
                for places, by_name in self._measured.found.items()
            }
        return self._by_number(rows)

    def _by_number(self, parts: Mapping[range, List[Any]]) -> list[Any]:
        """What there is of each part, in the order of the numbers."""
        by_number = {
            self._places[place]: x for places, all in parts.items() for place, x in zip(places, all, strict=True)
        }
        return [by_number[number] for number in self.numbers]

    def _begin_judging(self, places: range) -> Callable[[], list[Score]]:
        assert self._judge is not None
        began, ended = time.monotonic(), [self._ended[self._places[place]] for place in places]
        owners = [self._owners[self._places[place]] for place in places]
        later = self._judge.begin(owners, [completion for completion, _ in ended], [text for _, text in ended])
        if self._sampled == math.inf:
            self._overlapped += time.monotonic() - began
        return later

    def _begin_measuring(self, places: range) -> Mapping[str, List[np.ndarray]]:
        assert self._measuring is not None
        numbers = [self._places[place] for place in places]
        sequences = [sequence_of(self._owners[number], self._ended[number][0]) for number in numbers]
        return self._measuring.measure(sequences, self._measuring.together)


def shard(items: List[Item]) -> list[Item]:
    """The shard of this process: every `processes.number()`th."""
    return list(items[processes.index() :: processes.number()])


def allgathered(
    sample: Callable[[], list[list[Scored]]], prompts: List[Prompt], sampling: Sampling, clock: Clock
) -> list[list[Scored]]:
    """Hands this process's groups to all, and returns those of all, in the order of the prompts.

    Args:
        sample: the groups of the prompts in this process's `shard`.
        prompts: of all processes.
        sampling: the settings of the completions.
        clock: its counts become those of all.

    Raises:
        UserError: that of the first process that has none, in all of them.
    """
    if processes.number() == 1:
        return sample()
    parts = _of_all(lambda: [[saved_episode(x) for x in group] for group in sample()], clock)
    rows = [parts[i % len(parts)][i // len(parts)] for i in range(len(prompts))]
    return [[episode_of(x, prompt, sampling) for x in row] for prompt, row in zip(prompts, rows, strict=True)]


def allgathered_race(
    race: Callable[[List[Pending], int], tuple[list[list[Scored]], list[Pending]]],
    prompts: List[Pending],
    wanted: int,
    sampling: Sampling,
    clock: Clock,
) -> tuple[list[list[Scored]], list[Pending]]:
    """The groups that are complete first, and the other prompts with what has been sampled for them; both in the order
    of the prompts.

    Each process races its own prompts for its own share of the groups. So no clock decides which come first, only how
    many processes there are.

    Args:
        race: (prompts, groups to take, at least one) -> the groups and the other prompts of this process.
        prompts: of all processes.
        wanted: groups to take, in all processes together.
        sampling: the settings of the completions.
        clock: its counts become those of all.

    Raises:
        UserError: see `allgathered`.
    """
    if processes.number() == 1:
        return race(prompts, wanted)

    def give() -> dict[str, Any]:
        of_process, share = shard(prompts), len(shard(range(wanted)))
        groups, left = race(of_process, share) if share else ([], of_process)
        begun = {pending.place: [x and encoded(x) for x in pending.so_far] for pending in left}
        return {"groups": [[saved_episode(x) for x in group] for group in groups], "left": begun}

    taken: dict[int, list[Scored]] = {}
    left: dict[int, Pending] = {}
    for process, part in enumerate(_of_all(give, clock)):
        groups = iter(part["groups"])
        for prompt in prompts[process :: processes.number()]:
            begun = part["left"].get(str(prompt.place))
            if begun is None:
                taken[prompt.place] = [episode_of(x, prompt, sampling) for x in next(groups)]
            else:
                so_far = tuple(x and decoded(x, sampling) for x in begun)
                left[prompt.place] = replace(prompt, so_far=so_far)
    order = [prompt.place for prompt in prompts]
    return [taken[place] for place in order if place in taken], [left[place] for place in order if place in left]


def _of_all(give: Callable[[], Any], clock: Clock) -> list[Any]:
    """What each process gives, as JSON values; the clock's counts become those of all.

    Raises:
        UserError: see `allgathered`.
    """
    texts = processes.all_done("groups", lambda: json.dumps({"given": give(), "counted": clock.counted}).encode())
    parts = [json.loads(text) for text in texts]
    names = dict.fromkeys(name for part in parts for name in part["counted"])
    clock.counted = {name: sum(part["counted"].get(name, 0) for part in parts) for name in names}
    return [part["given"] for part in parts]


@dataclass(frozen=True)
class Collector:
    """Samples and scores the episodes of prompts; one for all steps of a run."""

    tokenizer: Tokenizer | None
    sampling: Sampling
    scorer: Scorer | None
    """The reward functions; None where there are none."""
    play: Player | None = None
    """Starts an environment's episodes; None where no environment answers the model."""
    length: int | None = None
    """Tokens of an environment's prompt and all that follows it at most: the prompt has to leave room for an answer.
    Other prompts are cut when they are read."""
    judge: Judge | None = None
    """A reward model; None where there is none."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward in the sum, by its name."""
        environment = {ENVIRONMENT: 1.0} if self.play and self.play.scores else {}
        judged = {self.judge.name: self.judge.weight} if self.judge else {}
        return {**environment, **(self.scorer.weights if self.scorer else {}), **judged}

    @property
    def _scorers(self) -> tuple[Scorer | None, Scorer | None]:
        """The reward functions that are called where completions end, and those that need all of a step."""
        if self.scorer is None or processes.number() == 1:
            return self.scorer, None
        return self.scorer.only(batched=False), self.scorer.only(batched=True)

    def close(self) -> None:
        """Ends the workers of rewards and environments."""
        for workers in (self.scorer, self.play):
            if workers is not None:
                workers.close()

    def collect(
        self,
        sampler: SamplingClient,
        prompts: List[Prompt],
        n: int,
        seed: int,
        clock: Clock | None = None,
        measuring: LogprobPass | None = None,
    ) -> list[list[Scored]]:
        """Samples and scores `n` episodes of each prompt.

        Args:
            seed: for the sampler and the environments.
            clock: receives the seconds of sampling (`rollout`), of scoring (`reward`) and of measuring (`logprobs`).
            measuring: what is computed of each for the loss; None for nothing.
        """
        clock = Clock() if clock is None else clock
        places = shard(range(len(prompts)))

        def sample() -> list[list[Scored]]:
            if places:
                return self._of_these(sampler, [prompts[i] for i in places], n, places, seed, clock, measuring)
            # As often as the processes that have prompts: the sampler's calls may be counted in all of them.
            nothing = sampler.sample([], 1, self.sampling, 0)
            assert not nothing
            return []

        return self.whole(allgathered(sample, prompts, self.sampling, clock), clock)

    def whole(self, groups: list[list[Scored]], clock: Clock) -> list[list[Scored]]:
        """The groups of all processes with the rewards that read the whole batch: the lead calls them, and broadcasts
        what they return and log."""
        scorer = self._scorers[1]

        def score() -> tuple[list[tuple[dict[str, float], dict[str, str], dict[str, Any]]], dict[str, list[float]]]:
            """The rewards of each episode, why some failed and what was logged of it; and the values logged."""
            assert scorer is not None
            episodes = [episode for group in groups for episode in group]
            scoring = scorer.open(columns_of([episode.prompt for episode in episodes]))
            for number, episode in enumerate(episodes):
                prompt, row = episode.prompt, columns(episode.prompt, episode.completion)
                scoring.add(number, prompt.text, episode.text, row, prompt_messages(prompt.row))
            by_name = scoring.result()
            scores = [parted(dict(zip(by_name, row, strict=True))) for row in zip(*by_name.values(), strict=True)]
            logged = [scoring.logged.get(number, {}) for number in range(len(scores))]
            return [(*parts, log) for parts, log in zip(scores, logged, strict=True)], scoring.metrics

        def joined(episode: Scored) -> Scored:
            rewards, failures, logged = next(scores)
            return replace(
                episode,
                rewards={**episode.rewards, **rewards},
                failures={**episode.failures, **failures},
                logged={**episode.logged, **logged},
            )

        with clock.part("reward"):
            if scorer is None:
                return groups
            scored, metrics = processes.broadcast("rewards", score)
            clock.logged |= metrics
            scores = iter(scored)
            return [[joined(episode) for episode in group] for group in groups]

    def _of_these(
        self,
        sampler: SamplingClient,
        prompts: List[Prompt],
        n: int,
        places: List[int],
        seed: int,
        clock: Clock,
        measuring: LogprobPass | None,
    ) -> list[list[Scored]]:
        """As `collect`, for some prompts, of which these are the places among all."""
        owners = [prompt for prompt in prompts for _ in range(n)]
        numbers = [place * n + i for place in places for i in range(n)]
        with clock.part("rollout"):
            played = self.play([owner.row for owner in owners], seed, numbers) if self.play else None
            starts, each, reply = [prompt.tokens for prompt in prompts], n, None
            if played is not None:
                starts, each, reply = [episode.prompt for episode in played.episodes], 1, played.reply
                owners = [self._started(owner, start) for owner, start in zip(owners, starts, strict=True)]
            arrivals = Arrivals(self.tokenizer, self._scorers[0], owners, None, self.judge, measuring)

            def arrive(number: int, completion: Completion) -> bool:
                arrivals.add(number, completion)
                return False

            begun = [
                Begun(seed, number, pictures=owner.pictures) for number, owner in zip(numbers, owners, strict=True)
            ]
            groups = sampler.sample(starts, each, self.sampling, seed, reply, arrive, begun)
            arrivals.close()
            for number, completion in enumerate(itertools.chain.from_iterable(groups)):
                arrivals.add(number, completion)
        clock.meter(sampler)
        episodes = self._scored(owners, arrivals, clock, played)
        return [episodes[i : i + n] for i in range(0, len(episodes), n)]

    def first(
        self,
        sampler: SamplingClient,
        prompts: List[Pending],
        wanted: int,
        n: int,
        seed: int,
        clock: Clock,
        measuring: LogprobPass | None = None,
        due: Callable[[Completion], bool] | None = None,
    ) -> tuple[list[list[Scored]], list[Pending]]:
        """Samples until `wanted` groups are complete, and scores these but for rewards of several processes' batch.

        Args:
            sampler: completes the prompts.
            prompts: with what has been sampled for them before; those of this process.
            wanted: the groups that are complete first, at least one and at most all.
            n: completions of each prompt.
            seed: the run's.
            clock: as in `collect`.
            measuring: as in `collect`.
            due: whether what was begun of a completion cannot wait for another step; None for never.

        Returns:
            The groups, in the order of the prompts; and the other prompts, with what has been sampled for them.
        """
        owners = [prompt for prompt in prompts for _ in range(n)]
        with clock.part("rollout"):
            late = [i for i, x in enumerate(prompts) if due is not None and any(y and due(y) for y in x.so_far)]
            race = Race([list(prompt.so_far) or [None] * n for prompt in prompts], wanted, late)
            arrivals = Arrivals(self.tokenizer, self._scorers[0], owners, race.wanted * n, self.judge, measuring)
            begun = [request for prompt in prompts for request in prompt.requests(n, seed)]
            asked, places = race.missing, itertools.count()

            def arrive(number: int, completion: Completion) -> bool:
                for member, ended in race.add(asked[number], completion):
                    arrivals.add(member, ended, place=next(places))
                return race.over

            for member, ended in race.start():
                arrivals.add(member, ended, place=next(places))
            sampled: list[list[Completion]] = []
            if not race.over:
                starts, requests = [owners[i].tokens for i in asked], [begun[i] for i in asked]
                sampled = sampler.sample(starts, 1, self.sampling, seed, None, arrive, requests)
            arrivals.close()
            for number, (completion,) in enumerate(sampled):
                arrive(number, completion)
        if sampled:
            clock.meter(sampler)
        episodes = self._scored([owners[i] for i in arrivals.numbers], arrivals, clock)
        left = [replace(x, so_far=tuple(race.groups[i])) for i, x in enumerate(prompts) if i not in race.taken]
        return [episodes[i : i + n] for i in range(0, len(episodes), n)], left

    def _scored(
        self, owners: List[Prompt], arrivals: Arrivals, clock: Clock, played: Episodes | None = None
    ) -> list[Scored]:
        """The completions with their scores, for which it waits."""
        completions, texts = arrivals.completions, arrivals.texts
        with clock.part("reward"):
            scores: dict[str, List[Any]] = dict(arrivals.scores(clock))
        measured, logged = arrivals.measured(clock), arrivals.logged
        turns: list[tuple[float, ...]] = [()] * len(owners)
        if played is not None:
            played.finish(completions)
            if ENVIRONMENT in self.weights:
                scores[ENVIRONMENT] = played.scores
            turns = [tuple(reward or 0.0 for reward in episode.rewards) for episode in played.episodes]
        rows = [{name: column[i] for name, column in scores.items()} for i in range(len(owners))]
        return [
            Scored(owner, completion, text, *parted(row), turns[i], measured=measured[i], logged=logged[i])
            for i, (owner, completion, text, row) in enumerate(zip(owners, completions, texts, rows, strict=True))
        ]

    def _started(self, prompt: Prompt, start: np.ndarray) -> Prompt:
        """The prompt with the tokens that the environment starts with.

        Raises:
            UserError: they leave no room for an answer.
        """
        if self.length is not None and len(start) >= self.length:
            raise UserError(
                f"data.max_length: {self.length} leaves no room for an answer to a prompt of {len(start)} tokens, as "
                f"the environment makes it of the row {dict(prompt.row)!s:.100}; raise it, or leave the row out"
            )
        text = self.tokenizer.decode(start, skip_special=True) if self.tokenizer else ""
        return replace(prompt, tokens=start, text=prompt.text or text)


@dataclass
class RolloutStep:
    """One step's prompts, and what samples and scores their completions; see `rollout.types.Rollouts`."""

    prompts: list[Prompt]
    collector: Collector
    stream: Prompts
    size: int
    """Prompts of a full step."""
    seed: int
    """The run's seed."""
    first: bool
    """Whether this is the first step of the run: the policy is still the reference."""
    length: int
    """T: tokens of a packed row."""
    packing: bool
    tolerance: float
    """Largest difference between the trainer's and the sampler's log-probs with which a run goes on."""
    sequences_per_example: int = 1
    """Sequences that are compared with each other and share a row, e.g. 2 where completions are made into pairs."""
    together: int = 1
    """Completions of one prompt that share a row and, in it, the prompt's tokens."""
    multiple: int = 1
    """The number of packed rows is one of it; see `pack`."""
    pictures: int = 0
    """Pictures of a packed row at most; 0 where the model sees none."""
    measured_together: int = 64
    """Completions of which log-probs and values are computed at a time, while others are sampled."""
    shown: int = 1
    """Groups that are written to `samples.jsonl`."""
    clock: Clock = field(default_factory=Clock)
    """Seconds spent in each part of this step."""
    version: int = 0
    """The version of the weights that this step is sampled from, e.g. 3."""
    backlog: Backlog | None = None
    """Where prompts wait that were begun beyond a step's; None where no step begins more than it trains on."""
    spare: int = 0
    """Prompts that a step begins beyond its own."""
    mixed: bool = False
    """Whether tokens may be of earlier weights than a step's own, so that episodes say which are its own."""
    due: Callable[[Completion], bool] | None = None
    """Whether what an earlier step has begun cannot wait for the next one; None where it always can."""
    sampled: list[list[Scored]] | None = None
    """Groups that were sampled while an earlier step was learned from; None where they are still to be."""
    read: Accounting | None = None
    """What had become of all prompts when they were sampled; None where nothing is read ahead."""
    ahead: Mapping[str, float] = field(default_factory=dict)
    """Metrics of what was sampled ahead, by name: how old its weights were, and who waited."""
    _calls: Iterator[int] = field(default_factory=itertools.count)

    @property
    def accounting(self) -> Accounting:
        """What became of all prompts read so far."""
        return self.stream.accounting if self.read is None else self.read

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward in the sum, by its name."""
        return self.collector.weights

    def more(self, number: int) -> list[Prompt]:
        """Takes `number` further prompts; fewer where the data is exhausted."""
        return list((self.backlog or self.stream).take(number))

    def collect(
        self, client: SamplingClient, prompts: List[Prompt], n: int, measure: Measure | None = None
    ) -> list[list[Scored]]:
        """`n` scored episodes of each prompt, or of those that are complete first; see `Collector`."""
        # Programs over all processes' devices have to come in one order, and completions end in many.
        alone = processes.number() == 1
        measuring = LogprobPass(measure, min(self.measured_together, self.size * n)) if measure and alone else None
        if self.backlog is None:
            # From the run's seed, the position in the data and how many calls this step has made, e.g. 2968811710.
            position = [self.seed, self.stream.get_state()["next_index"], next(self._calls)]
            seed = int(np.random.SeedSequence(position).generate_state(1)[0])
            groups = self.collector.collect(client, prompts, n, seed, self.clock, measuring)
            return self._with_version(groups) if self.mixed else groups
        pending = [prompt for prompt in prompts if isinstance(prompt, Pending)]
        assert len(pending) == len(prompts), "a step that oversamples takes prompts of its own, and of `more`"

        def race(prompts: List[Pending], wanted: int) -> tuple[list[list[Scored]], list[Pending]]:
            return self.collector.first(client, prompts, wanted, n, self.seed, self.clock, measuring, self.due)

        asked = [*pending, *self.backlog.take(self.spare)]
        groups, left = allgathered_race(race, asked, len(pending), self.collector.sampling, self.clock)
        self.backlog.put_back(left)
        return self._with_version(self.collector.whole(groups, self.clock))

    def _with_version(self, groups: list[list[Scored]]) -> list[list[Scored]]:
        """The groups with the version of the weights that are this step's."""
        return [[replace(episode, version=self.version) for episode in group] for group in groups]

    def packed(self, sequences: List[Sequence], size: int) -> Batch:
        """Packs up to `size` sequences into rows of this run's length."""
        return pack(
            sequences,
            size,
            self.length,
            self.packing,
            self.sequences_per_example,
            self.together,
            self.multiple,
            self.pictures,
        )


class RolloutStream:
    """The steps of an on-policy run, with a position that can be saved."""

    def __init__(self, like: RolloutStep):
        """Starts at the stream's position.

        Args:
            like: what all steps have in common; its prompts are replaced.
        """
        self.like = like
        """What all steps have in common."""
        self._first = True

    def __iter__(self) -> "RolloutStream":
        return self

    def __next__(self) -> RolloutStep:
        prompts = self.like.more(self.like.size)
        if not prompts:
            raise StopIteration
        first, self._first = self._first, False
        return replace(self.like, prompts=prompts, first=first, clock=Clock(), _calls=itertools.count())

    def mark(self) -> Callable[[], dict[str, Any]]:
        """What returns the position of now, whenever it is called."""
        state = self.get_state()
        return lambda: state

    def get_state(self) -> dict[str, Any]:
        """The position after the last step that was handed out, the further prompts that it took included."""
        return self._position.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned."""
        self._first = False
        self._position.set_state(state)

    @property
    def _position(self) -> Backlog | Prompts:
        return self.like.backlog or self.like.stream

    def close(self) -> None:
        """Ends the threads and processes that read rows, play episodes and score completions."""
        self.like.stream.close()
        self.like.collector.close()
