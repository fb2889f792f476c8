"""From prompts to scored episodes: the input of each step of an on-policy algorithm.

Completions are decoded, scored and measured as they end, while others are still sampled (`Collector.episodes`). The
prompts of a step are divided among the processes of a run: each samples and scores its own, and all receive all
(`allgathered`).

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
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from tunix.data.examples import prompt_messages
from tunix.data.pipeline import Prompts
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Accounting, Prompt
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.protocols import SamplingClient
from tunix.rollout.backlog import Backlog, Pending, Race, decoded, encoded, episode_of, saved_episode
from tunix.rollout.environments.agents import PlayedEpisode
from tunix.rollout.environments.base import Episode, Episodes, Row
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import ADDED, WORKDIR, Score, parted
from tunix.rollout.rewards.scorer import Scorer, Scoring
from tunix.rollout.types import ENVIRONMENT, Clock, Measure, Scored, sequence_of
from tunix.types import Batch, Completion, Request, Restart, Sampling, Sequence, TeacherView

Item = TypeVar("Item")


@dataclass(frozen=True)
class Judged:
    """What a judge made of a completion."""

    score: Score
    logged: Mapping[str, Any] = field(default_factory=dict)
    """What `samples.jsonl` is to have of it, e.g. `{"judge": {"short": {"score": 1, "reason": "..."}}}`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values of which a step has the means, as `reward/name`, e.g. `{"judge/short": 1.0}`."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """Amounts for the step's clock, e.g. `{"judged": 1}`."""


@dataclass(frozen=True)
class Judge:
    """A reward that is called by this process itself: a reward model, or a language model that reads a rubric."""

    name: str
    """Name in metrics and messages, e.g. `model`."""
    weight: float
    """Factor of its scores in the weighted sum."""
    together: int
    """Completions of a part, e.g. 64."""
    begin: Callable[[List[Prompt], List[Completion], List[str]], Callable[[], list[Judged]]]
    """(prompts, completions, their texts) -> what waits for the score of each completion, or the reason why it has
    none; begins to compute them."""
    compares: bool = False
    """Whether its parts are a prompt's completions, which it compares."""
    close: Callable[[], None] = lambda: None
    """Ends its threads."""


@runtime_checkable
class Agents(Protocol):
    """Programs that play whole episodes, and ask the policy by themselves."""

    scores: bool
    """Whether they give rewards."""
    stop_strings: tuple[str, ...]
    """Texts that end a turn."""

    def play(
        self, sampler: SamplingClient, rows: List[Row], sampling: Sampling, seed: int, numbers: List[int]
    ) -> Episodes:
        """Plays a `PlayedEpisode` for each row to its end; random numbers follow from the seed and these numbers."""
        ...

    def close(self) -> None:
        """Ends what plays."""
        ...


@dataclass(frozen=True)
class LogprobPass:
    """Log-probs and values of completions, computed while others are sampled."""

    measure: Measure
    together: int
    """Completions of a part, e.g. 32."""


class Parts(Generic[Item]):
    """Completions divided by their places 0, 1, ...; work on a part begins when all of its have ended.

    A part has the same places whatever ended when, so that a run that is killed and resumed computes the same bits, and
    parts have one size, so that one program is compiled.
    """

    def __init__(self, total: int, size: int):
        """Nothing has ended.

        Args:
            total: number of places.
            size: places of a part; the last one may have fewer.
        """
        self._numbers = [[-1] * min(size, total - start) for start in range(0, total, size)]
        self._size = size
        self.begun: list[tuple[list[int], Callable[[], List[Item]]]] = []
        """The numbers of the completions of a part, and what waits for the results of the work on it."""

    def add(self, place: int, number: int) -> list[int]:
        """The completion of a place has ended; the numbers of those of its part where all have, else none."""
        part = self._numbers[place // self._size]
        part[place % self._size] = number
        return [] if -1 in part else part

    def results(self) -> dict[int, Item]:
        """Waits for the result of each completion, by its number."""
        return {number: x for numbers, wait in self.begun for number, x in zip(numbers, wait(), strict=True)}


def open_scoring(scorer: Scorer, owners: List[Prompt]) -> Scoring:
    """Begins to score completions of these prompts, with the columns that the rows of their data sets have."""
    columns: dict[str, dict[str, None]] = {}
    for owner in owners:
        columns.setdefault(owner.source, dict.fromkeys(ADDED)).update(dict.fromkeys(owner.row))
    return Scoring(scorer, columns)


def score(scoring: Scoring, number: int, owner: Prompt, completion: Completion, text: str) -> None:
    """Adds a completion, to be scored under a number."""
    added = {"completion_ids": completion.tokens.tolist(), "completion_tokens": int(completion.drawn.sum())}
    added[WORKDIR] = owner.row.get(WORKDIR, "")
    scoring.add(number, owner.text, text, {**owner.row, **added}, prompt_messages(owner.row), owner.source)


def shard(items: List[Item]) -> list[Item]:
    """The shard of this process: every `processes.number()`th."""
    return list(items[processes.index() :: processes.number()])


Outcome = list[Scored] | Pending
"""What became of a prompt: its group, or what has been sampled for it where enough others were complete before."""


def allgathered(
    sample: Callable[[], List[Outcome]], prompts: List[Prompt], sampling: Sampling, clock: Clock
) -> list[Outcome]:
    """Hands what became of this process's prompts to all, and returns that of all, in the order of the prompts.

    Args:
        sample: samples the prompts in this process's `shard`.
        prompts: of all processes.
        sampling: the settings of the completions.
        clock: its counts and what was logged become those of all.

    Raises:
        UserError: that of the first process that has none, in all of them.
    """
    if processes.number() == 1:
        return list(sample())
    # Of this call alone: what earlier ones of the step have added is that of all processes already.
    counted, logged = dict(clock.counted), clock.logged
    clock.counted.clear()
    clock.logged = {}

    def act() -> bytes:
        outcomes = [
            {"begun": [y and encoded(y) for y in x.so_far]}
            if isinstance(x, Pending)
            else {"group": [saved_episode(y) for y in x]}
            for x in sample()
        ]
        return json.dumps({"outcomes": outcomes, "counted": clock.counted, "logged": clock.logged}).encode()

    parts = [json.loads(text) for text in processes.all_done("groups", act)]
    clock.counted.clear()
    clock.counted.update(counted)
    clock.logged = {name: list(values) for name, values in logged.items()}
    for part in parts:
        clock.counted.update(part["counted"])
        for name, values in part["logged"].items():
            clock.logged.setdefault(name, []).extend(values)
    outcomes: list[Outcome] = []
    for i, prompt in enumerate(prompts):
        saved = parts[i % len(parts)]["outcomes"][i // len(parts)]
        if "group" in saved:
            outcomes.append([episode_of(x, prompt, sampling) for x in saved["group"]])
        else:
            assert isinstance(prompt, Pending)
            outcomes.append(replace(prompt, so_far=tuple(x and decoded(x, sampling) for x in saved["begun"])))
    return outcomes


@dataclass(frozen=True)
class Collector:
    """Samples and scores the episodes of prompts; one for all steps of a run."""

    tokenizer: Tokenizer | None
    sampling: Sampling
    scorer: Scorer | None
    """The reward functions; None where there are none."""
    play: Player | Agents | None = None
    """Starts an environment's episodes, or plays them; None where no environment answers the model."""
    length: int | None = None
    """Tokens of an environment's prompt and all that follows it at most: the prompt has to leave room for an answer.
    Other prompts are cut when they are read."""
    judges: tuple[Judge, ...] = ()
    """Rewards that this process calls itself."""
    sources: Mapping[str, "Collector"] = field(default_factory=dict)
    """Data set of a mixture -> what samples its prompts, where it has an environment of its own."""

    def of(self, source: str) -> "Collector":
        """What samples the prompts of a data set."""
        return self.sources.get(source, self)

    @property
    def parts(self) -> "list[Collector]":
        """This one, and those of data sets."""
        return [self, *self.sources.values()]

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward in the sum, by its name."""
        environment = {ENVIRONMENT: 1.0} if any(part.play and part.play.scores for part in self.parts) else {}
        judged = {judge.name: judge.weight for judge in self.judges}
        return {**environment, **(self.scorer.weights if self.scorer else {}), **judged}

    @property
    def greedy(self) -> "Collector":
        """The same at a temperature of 0."""
        sources = {name: part.greedy for name, part in self.sources.items()}
        return replace(self, sampling=replace(self.sampling, temperature=0.0), sources=sources)

    @property
    def scorers(self) -> tuple[Scorer | None, Scorer | None]:
        """The reward functions that are called where completions end, and those that need all of a step."""
        if self.scorer is None or processes.number() == 1:
            return self.scorer, None
        return self.scorer.only(batched=False), self.scorer.only(batched=True)

    def close(self) -> None:
        """Ends the workers of rewards and environments, and the threads of judges."""
        for opened in {*(part.play for part in self.parts), self.scorer, *self.judges} - {None}:
            opened.close()

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

        Raises:
            UserError: an environment's prompt leaves no room for an answer.
        """
        clock = Clock() if clock is None else clock

        def sample() -> List[Outcome]:
            places = shard(range(len(prompts)))
            if not places:
                # As often as the processes that have prompts: the sampler's calls may be counted in all of them.
                sampler.run([])
                return []
            numbers, owners = [place * n + i for place in places for i in range(n)], [prompts[i] for i in places]
            owners = [owner for owner in owners for _ in range(n)]
            requests = [
                Request(owner.tokens, self.of(owner.source).sampling, seed, number)
                for number, owner in zip(numbers, owners, strict=True)
            ]
            episodes = self.episodes(sampler, owners, requests, seed, numbers, clock, measuring)
            return [episodes[i : i + n] for i in range(0, len(episodes), n)]

        groups = allgathered(sample, prompts, self.sampling, clock)
        return self.whole([group for group in groups if not isinstance(group, Pending)], clock)

    def episodes(
        self,
        sampler: SamplingClient,
        owners: List[Prompt],
        requests: List[Request],
        seed: int,
        numbers: List[int],
        clock: Clock,
        measuring: LogprobPass | None,
        race: Race | None = None,
    ) -> list[Scored]:
        """Samples and scores an episode for each request, but for rewards of several processes' batch.

        Args:
            sampler: completes the requests.
            owners: the prompt of each.
            requests: with what has been sampled for them before.
            seed: of the environments, whose random numbers follow from it and `numbers`.
            numbers: that of each request.
            clock: as in `collect`, and so is `measuring`.
            race: their groups, of which those are returned that are complete first; None for all.

        Raises:
            UserError: an environment's prompt leaves no room for an answer.
        """
        with clock.part("rollout"):
            if isinstance(self.play, Agents):
                played = self.play.play(sampler, [x.row for x in owners], self.sampling, seed, numbers)
            else:
                played = self._played(owners, seed, numbers)
            owners = list(owners)
            for i, episode in enumerate(played.episodes if played is not None else ()):
                if episode is None:
                    continue
                start = episode.prompt
                if self.length is not None and len(start) >= self.length:
                    raise UserError(
                        f"data.max_length: {self.length} leaves no room for an answer to a prompt of {len(start)} "
                        f"tokens, as the environment makes it of the row {dict(owners[i].row)!s:.100}; raise it, or "
                        "leave the row out"
                    )
                text = self.tokenizer.decode(start, skip_special=True) if self.tokenizer else ""
                owners[i] = replace(owners[i], tokens=start, text=owners[i].text or text, pictures=episode.pictures)
                if isinstance(episode, PlayedEpisode):
                    owners[i] = replace(owners[i], row={**owners[i].row, WORKDIR: str(episode.folder)})
            requests = [
                replace(request, prompt=owner.tokens, pictures=owner.pictures)
                for request, owner in zip(requests, owners, strict=True)
            ]
            scorer, total = self.scorers[0], len(owners) if race is None else race.wanted * race.size
            scoring = None if scorer is None else open_scoring(scorer, owners)
            judged = [(judge, Parts[Judged](total, judge.together)) for judge in self.judges]
            measured = Parts[dict[str, np.ndarray]](total, measuring.together if measuring else 1)
            ended = dict[int, tuple[Completion, str]]()
            asked, places = range(len(requests)) if race is None else race.missing, itertools.count()
            sampled, overlapped = math.inf, 0.0  # when sampling is over, and what judges took before

            def add(number: int, completion: Completion, place: int) -> None:
                """Begins the rewards of a completion, unless they have been; it has a place in the parts."""
                nonlocal overlapped
                if number in ended:
                    return
                text = self.tokenizer.decode(completion.tokens, skip_special=True) if self.tokenizer else ""
                ended[number] = completion, text
                if scoring is not None:
                    score(scoring, number, owners[number], completion, text)
                for judge, parts in judged:
                    if not (part := parts.add(place, number)):
                        continue
                    began = time.monotonic()
                    completions, texts = zip(*(ended[x] for x in part), strict=True)
                    parts.begun.append((part, judge.begin([owners[x] for x in part], completions, texts)))
                    if sampled == math.inf:
                        overlapped += time.monotonic() - began
                if measuring is not None and (part := measured.add(place, number)):
                    sequences = [sequence_of(owners[x], ended[x][0]) for x in part]
                    by_name = measuring.measure(sequences, measuring.together)
                    indices = range(len(part))
                    measured.begun.append(  # who looks at an array waits for the devices
                        (part, lambda: [{name: arrays[i] for name, arrays in by_name.items()} for i in indices])
                    )

            def arrive(number: int, completion: Completion) -> bool:
                if race is None:
                    add(number, completion, place=number)
                    return False
                for member, whole in race.add(asked[number], completion):
                    add(member, whole, place=next(places))
                return race.over

            def reply(number: int, completion: Completion) -> np.ndarray | Restart | None:
                assert played is not None
                return played.reply(asked[number], completion)

            for member, whole in race.start() if race is not None else ():
                add(member, whole, place=next(places))
            completions: List[Completion] = ()
            if played is not None and isinstance(self.play, Agents):
                # Nothing is scored before all have ended: their requests are sent to the devices by other threads.
                completions = [x.completion for x in played.episodes if isinstance(x, PlayedEpisode)]
            elif race is None or not race.over:
                if played is not None and race is not None:  # its environments have begun anew
                    played.catch_up({i: so_far for i in asked if (so_far := requests[i].so_far) is not None})
                completions = sampler.run([requests[i] for i in asked], played and reply, arrive)
            sampled = time.monotonic()  # from now on rewards have a time of their own
            for number, completion in enumerate(completions):
                arrive(number, completion)
        if completions:
            clock.meter(sampler)
        with clock.part("reward"):
            scores, logged = dict[str, dict[int, Score]](), dict[int, dict[str, Any]]()
            values = dict[str, list[float]]()
            if scoring is not None:
                scores, logged, values = scoring.result(), scoring.logged, scoring.metrics
                before, seconds = scoring.seconds(sampled)
                clock.counted.update(overlapped=before, rewards=seconds)
            began = time.monotonic()
            for judge, parts in judged:
                verdicts = parts.results()
                scores[judge.name] = {number: x.score for number, x in verdicts.items()}
                for number, x in verdicts.items():
                    logged[number] = {**logged.get(number, {}), **x.logged}
                    clock.counted.update(x.counted)
                    for name, value in x.metrics.items():
                        values[name] = [*values.get(name, ()), value]
            clock.logged |= values
            if judged:
                clock.counted.update(overlapped=overlapped, rewards=overlapped + time.monotonic() - began)
        arrays: dict[int, dict[str, np.ndarray]] = {}
        if measuring is not None:
            with clock.part("logprobs"):
                arrays = measured.results()
        if played is not None:
            for number, said in played.logged.items():
                logged[number] = {**logged.get(number, {}), **said}
            played.finish({number: completion for number, (completion, _) in sorted(ended.items())})
        if ENVIRONMENT in self.weights:  # where no prompt of this process is played, its rewards have it too
            scores[ENVIRONMENT] = {} if played is None else dict(enumerate(played.scores))
        episodes = []
        for number, (completion, text) in sorted(ended.items()):
            episode = None if played is None else played.episodes[number]
            rewards, failures = parted({name: by_number.get(number) for name, by_number in scores.items()})
            episodes.append(
                Scored(
                    owners[number],
                    completion,
                    text,
                    rewards,
                    failures,
                    turn_rewards=tuple(reward or 0.0 for reward in episode.rewards) if episode else (),
                    seats=tuple(episode.seats) if episode else (),
                    ended=episode is not None and episode.done,
                    measured=arrays.get(number, {}),
                    logged=logged.get(number, {}),
                )
            )
        return episodes

    def _played(self, owners: List[Prompt], seed: int, numbers: List[int]) -> Episodes | None:
        """Starts the episodes of those prompts that an environment answers; None where there are none of them."""
        episodes: list[Episode | None] = [None] * len(owners)
        together, parts = 0, ExitStack()
        for source in dict.fromkeys(owner.source for owner in owners):
            if isinstance(play := self.of(source).play, Player):
                places = [i for i, owner in enumerate(owners) if owner.source == source]
                begun = play([owners[i].row for i in places], seed, [numbers[i] for i in places])
                together += begun.together
                parts.callback(begun.close)
                for i, episode in zip(places, begun.episodes, strict=True):
                    episodes[i] = episode
        return Episodes(episodes, together, parts.close) if together else None

    def whole(self, groups: list[list[Scored]], clock: Clock) -> list[list[Scored]]:
        """The groups of all processes with the rewards that read the whole batch: the lead calls them, and broadcasts
        what they return and log."""
        if (scorer := self.scorers[1]) is None:
            return groups
        episodes = [episode for group in groups for episode in group]

        def scored() -> tuple[list[tuple[dict[str, float], dict[str, str], dict[str, Any]]], dict[str, list[float]]]:
            """The rewards of each episode, why some failed and what was logged of it; and the values logged."""
            scoring = open_scoring(scorer, [episode.prompt for episode in episodes])
            for number, episode in enumerate(episodes):
                score(scoring, number, episode.prompt, episode.completion, episode.text)
            scores = scoring.result()
            by_number = ({name: x.get(number) for name, x in scores.items()} for number in range(len(episodes)))
            rows = [(*parted(row), scoring.logged.get(number, {})) for number, row in enumerate(by_number)]
            return rows, scoring.metrics

        with clock.part("reward"):
            rows, metrics = processes.broadcast("rewards", scored)
            clock.logged |= metrics
            joined = iter(
                replace(
                    episode,
                    rewards={**episode.rewards, **rewards},
                    failures={**episode.failures, **failures},
                    logged={**episode.logged, **logged},
                )
                for episode, (rewards, failures, logged) in zip(episodes, rows, strict=True)
            )
            return [[next(joined) for _ in group] for group in groups]


@dataclass
class RolloutStep:
    """One step's prompts, and what samples and scores their completions; see `rollout.types.Rollouts`."""

    collector: Collector
    stream: Prompts
    size: int
    seed: int
    """The run's seed."""
    packed: Callable[[List[Sequence], int], Batch]
    """`data.packing.pack` for rows of this run."""
    tolerance: float
    taught: Callable[[Prompt, Mapping[str, str]], TeacherView | None] = lambda *_: None
    """`Examples.taught`, for a teacher that reads a prompt when its completions are there."""
    prompts: list[Prompt] = field(default_factory=list)
    first: bool = True
    measured_together: int = 64
    """Completions of which log-probs and values are computed at a time, while others are sampled."""
    clock: Clock = field(default_factory=Clock)
    version: int = 0
    backlog: Backlog | None = None
    """Where prompts wait that were begun beyond a step's; None where no step begins more than it trains on."""
    spare: int = 0
    """Prompts that a step begins beyond its own."""
    mixed: bool = False
    """Whether tokens may be of earlier weights than a step's own, so that episodes say which are its own."""
    due: Callable[[Completion], bool] | None = None
    """Whether what an earlier step has begun cannot wait for the next one; None where it always can."""
    sampled: list[list[Scored]] | None = None
    read: Accounting | None = None
    """What had become of all prompts when they were sampled; None where nothing is read ahead."""
    ahead: Mapping[str, float] = field(default_factory=dict)
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
            if (curriculum := self.stream.curriculum) is not None:
                weights = self.weights
                for group in groups:
                    scored = (x.rewards for x in group if x.unscored is None)
                    totals = [sum(weights[k] * x for k, x in y.items() if not math.isnan(x)) for y in scored]
                    if totals:
                        rate = sum(total >= curriculum.config.success for total in totals) / len(totals)
                        curriculum.learn(group[0].prompt, rate)
            return self._with_version(groups) if self.mixed else groups
        pending = [prompt for prompt in prompts if isinstance(prompt, Pending)]
        assert len(pending) == len(prompts), "a step that oversamples takes prompts of its own, and of `more`"

        asked = [*pending, *self.backlog.take(self.spare)]

        def race() -> List[Outcome]:
            # Each process has its share of the groups: no clock decides which come first, only how many there are.
            prompts, wanted = shard(asked), len(shard(range(len(pending))))
            if not wanted:
                return list(prompts)
            owners, requests = [prompt for prompt in prompts for _ in range(n)], list[Request]()
            for prompt in prompts:
                requests += prompt.requests(n, self.collector.of(prompt.source).sampling, self.seed)
            numbers, due = [prompt.place * n + i % n for i, prompt in enumerate(owners)], self.due
            late = [i for i, x in enumerate(prompts) if due is not None and any(y and due(y) for y in x.so_far)]
            groups = Race([list(prompt.so_far) or [None] * n for prompt in prompts], wanted, late)
            scored = iter(
                self.collector.episodes(client, owners, requests, self.seed, numbers, self.clock, measuring, groups)
            )
            return [
                [next(scored) for _ in range(n)] if i in groups.taken else replace(x, so_far=tuple(groups.groups[i]))
                for i, x in enumerate(prompts)
            ]

        outcomes = allgathered(race, asked, self.collector.sampling, self.clock)
        self.backlog.put_back([x for x in outcomes if isinstance(x, Pending)])
        groups = [x for x in outcomes if not isinstance(x, Pending)]
        return self._with_version(self.collector.whole(groups, self.clock))

    def _with_version(self, groups: list[list[Scored]]) -> list[list[Scored]]:
        return [[replace(episode, version=self.version) for episode in group] for group in groups]


class RolloutStream:
    """The steps of an on-policy run, with a position that can be saved."""

    def __init__(self, like: RolloutStep):
        """Starts at the stream's position."""
        self.like = like
        """What all steps have in common; each has its own prompts."""
        self._first = True

    def __iter__(self) -> "RolloutStream":
        return self

    def __next__(self) -> RolloutStep:
        prompts = self.like.more(self.like.size)
        if not prompts:
            raise StopIteration
        first, self._first = self._first, False
        curriculum = self.like.stream.curriculum
        ahead = curriculum.metrics(prompts) if curriculum else {}
        return replace(self.like, prompts=prompts, first=first, clock=Clock(), ahead=ahead, _calls=itertools.count())

    def mark(self) -> Callable[[], dict[str, Any]]:
        """What returns the position of now, whenever it is called."""
        state = self.get_state()
        return lambda: state

    def get_state(self) -> dict[str, Any]:
        """The position after the last step that was handed out, the further prompts that it took included."""
        return (self.like.backlog or self.like.stream).get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `get_state` returned."""
        self._first = False
        (self.like.backlog or self.like.stream).set_state(state)

    def close(self) -> None:
        """Ends the threads and processes that read rows, play episodes and score completions."""
        self.like.stream.close()
        self.like.collector.close()
