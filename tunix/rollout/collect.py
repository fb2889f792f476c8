"""From prompts to scored episodes: the input of each step of an on-policy algorithm.

`RolloutStep` is one step: its prompts, further ones to replace groups with, and `collect`, in which the client samples
completions (over several turns where an environment answers) and the rewards score them as they end. Every random
number follows from the run's seed and the position in the data, so a resumed run samples what an uninterrupted one
would have.

Axes: P prompts, G group, T time.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tunix.data.accounting import Accounting
from tunix.data.packing import pack
from tunix.data.pipeline import Prompts
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Prompt
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.protocols import SamplingClient
from tunix.rollout.arrivals import Arrivals
from tunix.rollout.backlog import Backlog, Pending, Race
from tunix.rollout.divided import dealt, scored_as_a_whole, shared, shared_race
from tunix.rollout.environments.base import Episodes
from tunix.rollout.environments.player import Player
from tunix.rollout.parts import Judge, Measure, Measuring
from tunix.rollout.rewards.base import parted
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import ENVIRONMENT, Clock, Scored
from tunix.types import Batch, Begun, Completion, Sampling, Sequence


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
        measuring: Measuring | None = None,
    ) -> list[list[Scored]]:
        """Samples and scores `n` episodes of each prompt.

        Args:
            seed: for the sampler and the environments.
            clock: receives the seconds of sampling (`rollout`), of scoring (`reward`) and of measuring (`logprobs`).
            measuring: what is computed of each for the loss; None for nothing.
        """
        clock = Clock() if clock is None else clock
        mine = dealt(range(len(prompts)))
        own = sampler, [prompts[i] for i in mine], n, mine, seed, clock, measuring
        groups = shared(lambda: self._of_these(*own) if mine else self._of_none(sampler), prompts, self.sampling, clock)
        return self.whole(groups, clock)

    def whole(self, groups: list[list[Scored]], clock: Clock) -> list[list[Scored]]:
        """The groups of all processes with the rewards that read the whole batch."""
        with clock.part("reward"):
            return scored_as_a_whole(groups, self._scorers[1], clock)

    def _of_none(self, sampler: SamplingClient) -> list[list[Scored]]:
        """Calls the sampler as often as the processes that have prompts: its calls may be counted in all of them."""
        found = sampler.sample([], 1, self.sampling, 0)
        assert not found
        return []

    def _of_these(
        self,
        sampler: SamplingClient,
        prompts: List[Prompt],
        n: int,
        places: List[int],
        seed: int,
        clock: Clock,
        measuring: Measuring | None,
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

            own = zip(numbers, owners, strict=True)
            begun = [Begun(seed, number, pictures=owner.pictures) for number, owner in own]
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
        measuring: Measuring | None = None,
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
                for own in race.add(asked[number], completion):
                    arrivals.add(*own, place=next(places))
                return race.over

            for own in race.start():
                arrivals.add(*own, place=next(places))
            given = [owners[i].tokens for i in asked], 1, self.sampling, seed, None, arrive, [begun[i] for i in asked]
            found = [] if race.over else sampler.sample(*given)
            arrivals.close()
            for number, (completion,) in enumerate(found):
                arrive(number, completion)
        if found:
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
        measuring = Measuring(measure, min(self.measured_together, self.size * n)) if measure and alone else None
        if self.backlog is None:
            groups = self.collector.collect(client, prompts, n, self.next_seed(), self.clock, measuring)
            return self._with_version(groups) if self.mixed else groups
        given = [prompt for prompt in prompts if isinstance(prompt, Pending)]
        assert len(given) == len(prompts), "a step that oversamples takes prompts of its own, and of `more`"
        asked = [*given, *self.backlog.take(self.spare)]
        how = {"n": n, "seed": self.seed, "clock": self.clock, "measuring": measuring, "due": self.due}
        race = partial(self.collector.first, client, **how)
        groups, left = shared_race(race, asked, len(given), self.collector.sampling, self.clock)
        self.backlog.put_back(left)
        return self._with_version(self.collector.whole(groups, self.clock))

    def _with_version(self, groups: list[list[Scored]]) -> list[list[Scored]]:
        """The groups with the version of the weights that are this step's."""
        return [[replace(episode, version=self.version) for episode in group] for group in groups]

    def next_seed(self) -> int:
        """A seed for the next call of the sampler, e.g. 2968811710: it follows from the run's seed, the position in the
        data and how many calls this step has made."""
        place = self.stream.get_state()["next_index"]
        return int(np.random.SeedSequence([self.seed, place, next(self._calls)]).generate_state(1)[0])

    def packed(self, sequences: List[Sequence], size: int) -> Batch:
        """Packs up to `size` sequences into rows of this run's length."""
        shared = (self.sequences_per_example, self.together)
        return pack(sequences, size, self.length, self.packing, *shared, self.multiple, self.pictures)


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
