"""From prompts to scored episodes: what an on-policy algorithm is given each step.

`Rollouts` stands for one step: its prompts, further ones where groups are to be replaced, and `collect`, which has the
client answer them (an environment going on with each answer, where there is one) and the rewards score the answers.
Every draw follows from the run's seed and the position in the data, so a run that goes on draws what it would have.

Axes: P prompts, G group, T time.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tunix.data.accounting import Accounting
from tunix.data.packing import pack
from tunix.data.pipeline import Prompt, Prompts
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.protocols import Client, Sampler
from tunix.rollout.environments.base import Episode, Episodes
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.shipped import read_environment
from tunix.rollout.rewards.base import Failure, Score
from tunix.rollout.rewards.scorer import Scorer
from tunix.types import Batch, Completion, Sampling, Sequence

ADDED = ("completion_ids", "completion_tokens")
"""Columns that a rollout gives to rewards beside the row's own: the ids, and the number of drawn tokens."""
ENVIRONMENT = "environment"
"""The name of the reward that an environment gives."""


@dataclass(frozen=True)
class Scored:
    """One completion and what it is worth."""

    prompt: Prompt
    completion: Completion
    text: str
    """The completion as rewards read it: without special tokens; empty where there is no tokenizer."""
    rewards: Mapping[str, float]
    """By name; NaN where it failed."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Reward -> why it failed."""
    turn_rewards: tuple[float, ...] = ()
    """What the environment gave for each turn; their sum is its reward."""

    @property
    def truncated(self) -> bool:
        """Whether the limit cut it off."""
        return self.completion.finish == "length"


class Clock(dict[str, float]):
    """Seconds by the name of what was done."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time of what is inside."""
        began = time.monotonic()
        yield
        self[name] = self.get(name, 0.0) + time.monotonic() - began


class Player:
    """Makes the episodes of an environment."""

    def __init__(
        self, config: EnvironmentConfig, tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any] | None = None
    ):
        """Reads the environment.

        Raises:
            UserError: as `read_environment`.
        """
        self._make, self._turns = read_environment(config), config.turns
        self._tokenizer, self._template_kwargs = tokenizer, template_kwargs or {}
        first = self._make()
        self.scores: bool = first.scores
        """Whether it gives rewards."""
        self.stop_strings: tuple[str, ...] = first.stop_strings
        """Texts that end a turn."""

    def __call__(self, rows: List[Mapping[str, Any]], seed: int) -> Episodes:
        """An episode for each row; the randomness of the i-th follows from (seed, i)."""
        return Episodes(
            [
                Episode(
                    self._make(),
                    row,
                    np.random.default_rng([seed, index]),
                    self._tokenizer,
                    self._turns,
                    self._template_kwargs,
                )
                for index, row in enumerate(rows)
            ]
        )


@dataclass(frozen=True)
class Judge:
    """A reward in this process that is given tokens, such as a reward model."""

    name: str
    """In metrics and messages."""
    weight: float
    """Multiplies its scores in the sum."""
    scores: Callable[[List[Prompt], List[Completion], List[str]], list[Score]]
    """Of prompts, completions and their texts: a score of each, or why it has none."""


@dataclass(frozen=True)
class Collector:
    """How prompts become episodes; the same for all steps of a run."""

    tokenizer: Tokenizer | None
    sampling: Sampling
    scorer: Scorer | None
    """None where no function says what an episode is worth."""
    play: Player | None = None
    """Makes an environment's episodes, where one answers the model."""
    length: int | None = None
    """Tokens of an environment's prompt and all that follows, which it has to leave room in; other prompts are cut when
    they are read."""
    judge: Judge | None = None
    """A reward model, where there is one."""

    @property
    def weights(self) -> dict[str, float]:
        """Of each reward in the sum."""
        own = {ENVIRONMENT: 1.0} if self.play and self.play.scores else {}
        judged = {self.judge.name: self.judge.weight} if self.judge else {}
        return {**own, **(self.scorer.weights if self.scorer else {}), **judged}

    def collect(
        self, sampler: Sampler, prompts: List[Prompt], n: int, seed: int, clock: Clock | None = None
    ) -> list[list[Scored]]:
        """`n` episodes of each prompt.

        Args:
            seed: of the draws and of the environments.
            clock: is told how long sampling (`rollout`) and scoring (`reward`) took.
        """
        clock = Clock() if clock is None else clock
        owners = [prompt for prompt in prompts for _ in range(n)]
        with clock.part("rollout"):
            played = self.play([owner.row for owner in owners], seed) if self.play else None
            if played is None:
                groups = sampler.sample([prompt.tokens for prompt in prompts], n, self.sampling, seed)
            else:
                starts = [episode.prompt for episode in played.episodes]
                owners = [self._started(owner, start) for owner, start in zip(owners, starts, strict=True)]
                groups = sampler.sample(starts, 1, self.sampling, seed, played.reply)
        completions = list(itertools.chain.from_iterable(groups))
        with clock.part("reward"):
            texts = [self._text(completion) for completion in completions]
            scores = self._scores(owners, completions, texts)
            if self.judge is not None:
                scores[self.judge.name] = self.judge.scores(owners, completions, texts)
        turns: list[tuple[float, ...]] = [()] * len(owners)
        if played is not None:
            played.finish(completions)
            if ENVIRONMENT in self.weights:
                scores[ENVIRONMENT] = played.scores
            turns = [tuple(reward or 0.0 for reward in episode.rewards) for episode in played.episodes]
        episodes = [
            _episode(owner, completion, text, {name: column[i] for name, column in scores.items()}, turns[i])
            for i, (owner, completion, text) in enumerate(zip(owners, completions, texts, strict=True))
        ]
        return [episodes[i : i + n] for i in range(0, len(episodes), n)]

    def _scores(self, owners: List[Prompt], completions: List[Completion], texts: List[str]) -> dict[str, list]:
        if self.scorer is None:
            return {}
        names = dict.fromkeys(name for owner in owners for name in owner.row)
        columns: dict[str, list[Any]] = {name: [owner.row.get(name) for owner in owners] for name in names}
        columns["completion_ids"] = [completion.tokens.tolist() for completion in completions]
        columns["completion_tokens"] = [int(completion.drawn.sum()) for completion in completions]
        return dict(self.scorer.score([owner.text for owner in owners], list(texts), columns))

    def _started(self, prompt: Prompt, start: np.ndarray) -> Prompt:
        """The prompt as the environment says it.

        Raises:
            UserError: it leaves no room for an answer.
        """
        if self.length is not None and len(start) >= self.length:
            raise UserError(
                f"data.max_length: {self.length} leaves no room for an answer to a prompt of {len(start)} tokens, as "
                f"the environment makes it of the row {dict(prompt.row)!s:.100}; raise it, or leave the row out"
            )
        text = self.tokenizer.decode(start, skip_special=True) if self.tokenizer else ""
        return replace(prompt, tokens=start, text=prompt.text or text)

    def _text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.tokens, skip_special=True) if self.tokenizer else ""


@dataclass
class Rollouts:
    """One step's prompts, and the means to make episodes of them."""

    prompts: list[Prompt]
    collector: Collector
    stream: Prompts
    size: int
    """Prompts of a full step."""
    seed: int
    """Of the run."""
    first: bool
    """Whether this is the first step of the run: the policy is still the reference."""
    length: int
    """T of packed rows."""
    packing: bool
    tolerance: float
    """The largest difference between the trainer's and the sampler's log-probs that is let pass."""
    members: int = 1
    """Sequences that are compared with each other, and share a row: 2 where completions are made pairs."""
    together: int = 1
    """Completions of a prompt that share a row, and the prompt there."""
    shown: int = 1
    """Groups that are written to `samples.jsonl`."""
    clock: Clock = field(default_factory=Clock)
    """How long the parts of this step took."""
    _calls: Iterator[int] = field(default_factory=itertools.count)

    @property
    def accounting(self) -> Accounting:
        """Of all prompts read so far."""
        return self.stream.accounting

    @property
    def weights(self) -> dict[str, float]:
        """Of each reward in the sum."""
        return self.collector.weights

    def more(self, number: int) -> list[Prompt]:
        """Further prompts; fewer where the data gives out."""
        return self.stream.take(number)

    def collect(self, client: Client, prompts: List[Prompt], n: int) -> list[list[Scored]]:
        """`n` scored episodes of each prompt; see `Collector.collect`."""
        place = self.stream.get_state()["next_index"]
        draws = np.random.SeedSequence([self.seed, place, next(self._calls)]).generate_state(1)
        return self.collector.collect(client, prompts, n, int(draws[0]), self.clock)

    def packed(self, sequences: List[Sequence], size: int) -> Batch:
        """A batch of up to `size` sequences in rows of this run's length."""
        return pack(sequences, size, self.length, self.packing, self.members, self.together)


class RolloutStream:
    """The steps of an on-policy run, with a position that can be saved."""

    def __init__(self, like: Rollouts):
        """Args:
        like: what all steps have in common; its prompts are replaced.
        """
        self._like, self._first = like, True

    def __iter__(self) -> "RolloutStream":
        return self

    def __next__(self) -> Rollouts:
        prompts = self._like.stream.take(self._like.size)
        if not prompts:
            raise StopIteration
        first, self._first = self._first, False
        return replace(self._like, prompts=prompts, first=first, clock=Clock(), _calls=itertools.count())

    def get_state(self) -> dict[str, Any]:
        """The position after the last step handed out and the prompts it took beyond its own."""
        return self._like.stream.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position."""
        self._first = False
        self._like.stream.set_state(state)

    def close(self) -> None:
        """The stream ends here."""
        self._like.stream.close()


def _episode(
    prompt: Prompt, completion: Completion, text: str, scores: Mapping[str, Any], turns: tuple[float, ...]
) -> Scored:
    failures = {name: score.reason for name, score in scores.items() if isinstance(score, Failure)}
    rewards = {name: math.nan if name in failures else float(score) for name, score in scores.items()}
    return Scored(prompt, completion, text, rewards, failures, turns)


def require_scores(groups: List[List[Scored]]) -> None:
    """Refuses a step of which not one sample was scored.

    Raises:
        UserError: why the first one failed.
    """
    failures = [episode.failures for group in groups for episode in group]
    if all(failures):
        reason = next(iter(failures[0].values()))
        raise UserError(
            f"reward: none of the {len(failures)} samples of a step could be scored, the first because {reason}. What "
            "was trained before is saved: mend the reward and run the same command."
        )
