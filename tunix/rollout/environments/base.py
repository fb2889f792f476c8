"""What an environment is, and one episode of it as the sampler meets it: token ids in, token ids out.

    class Echo(Environment):
        def reset(self, row, rng): return row["prompt"]
        def step(self, action, tokens): return Step("and again: ", reward=None, done=False)

The drawn tokens are the truth; `action` is their text. An observation is encoded alone and put behind them, so that a
trajectory is extended and never tokenized again. `Episode` keeps the account of one completion, `Episodes` of a whole
batch, and its `reply` is what `client.sample` asks between the turns. Loads without jax.

Axes: T time.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

import numpy as np

from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.rollout.environments.render import Observation, render_observation, render_start
from tunix.rollout.rewards.base import Failure, Score
from tunix.rollout.rewards.calls import as_outcome, raised

if TYPE_CHECKING:
    from tunix.types import Completion

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """What an environment answers to one turn."""

    observation: Observation | None = None
    """What the model reads next; None where there is nothing more to read, which ends the episode."""
    reward: SupportsFloat | None = None
    """What the turn earned, a finite number; None for nothing said. A trajectory is worth the sum."""
    done: bool = False
    """Whether the episode is over."""


class Environment(ABC):
    """One episode, made anew for each completion. Its methods run in the trainer's process, so they should be quick."""

    scores: ClassVar[bool] = True
    """Whether it gives rewards: an episode that was cut short is then worth what it has earned so far, 0 at first.
    False leaves the verdict to the reward functions."""
    stop_strings: ClassVar[tuple[str, ...]] = ()
    """Texts that end a turn of the model, besides the recipe's own and the stop tokens."""

    @abstractmethod
    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """The prompt.

        Args:
            row: of the dataset, the same for all completions of a group: what they have in common belongs here.
            rng: the episode's own, from (seed, step, request): what may differ between them.
        """

    @abstractmethod
    def step(self, action: str, tokens: np.ndarray) -> Step:
        """The answer to a turn of the model.

        Args:
            action: the turn's text, special tokens left out, a stop string left in.
            tokens: `[T]` the ids that were drawn, stop token included.
        """


class Episode:
    """One environment and what has happened in it."""

    def __init__(
        self,
        environment: Environment,
        row: Row,
        rng: np.random.Generator,
        tokenizer: Tokenizer | None = None,
        turns: int = 16,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Resets the environment.

        Args:
            environment: a fresh one.
            row: what it is reset with.
            rng: its own generator.
            tokenizer: for texts and messages; None serves environments of token ids.
            turns: turns of the model at most.
            template_kwargs: variables of the chat template.

        Raises:
            UserError: it raised, or its prompt is empty or cannot be rendered.
        """
        self.name = type(environment).__name__
        self.rewards: list[float | None] = []
        """What each turn so far has earned."""
        self.failure: Failure | None = None
        """What went wrong in the environment; the episode is then over, and not scored."""
        self.done = False
        """Whether the environment ended it."""
        self._environment, self._tokenizer, self._turns = environment, tokenizer, turns
        self._template_kwargs = template_kwargs or {}
        try:
            self.start = environment.reset(row, rng)
        except UserError:
            raise
        except Exception as error:  # the author's own code: the prompt of a row is theirs to mend
            raise UserError(f"the environment {self.name} does not start: it {raised(error)}") from error
        self.prompt = render_start(self.start, tokenizer, self._template_kwargs)
        """`[T]` int32 token ids that the model goes on from."""
        if not len(self.prompt):
            raise UserError(f"the environment {self.name} starts with an empty prompt: a model needs something to read")

    @property
    def score(self) -> Score | None:
        """The sum of the rewards; a failure where there was one; None where reward functions alone decide."""
        if self.failure is not None:
            return self.failure
        earned = [reward for reward in self.rewards if reward is not None]
        return float(sum(earned)) if earned or self._environment.scores else None

    def turn(self, tokens: np.ndarray, cut: bool = False) -> np.ndarray | None:
        """Takes the tokens of one turn; the observation's tokens, or None where the episode is over.

        Args:
            tokens: `[T]` the ids that were drawn in this turn.
            cut: whether the token limit cut it off: it is judged, and nothing can be read after it.
        """
        assert not self.done, "the episode is over"
        assert self.failure is None, "the episode is over"
        try:
            step = self._environment.step(self._text(tokens), np.asarray(tokens))
            reward = None if step.reward is None else as_outcome(step.reward)
            if isinstance(reward, str):
                return self._fail(f"gave a reward that is no number: it {reward}")
            self.rewards.append(reward)
            self.done = step.done or step.observation is None
            if cut or step.done or step.observation is None:
                return None
            observation = render_observation(
                self.start, step.observation, tokens, self._tokenizer, self._template_kwargs
            )
        except Exception as error:  # one broken episode is counted and left out; the run goes on
            return self._fail(raised(error))
        if len(self.rewards) == self._turns:
            return self._fail(f"had not ended after {self._turns} turns")
        return observation if len(observation) else self._fail("answered with no tokens")

    def _fail(self, reason: str) -> None:
        self.failure = Failure(f"the environment {self.name} {reason}")

    def _text(self, tokens: np.ndarray) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special=True)


class Episodes:
    """The episodes of a batch: request i of the sampler is episode i."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        """In the order of the requests."""
        self.episodes = episodes

    def reply(self, request: int, completion: "Completion") -> np.ndarray | None:
        """What `client.sample` asks after each turn that stopped (`types.Reply`)."""
        episode = self.episodes[request]
        assert len(completion.turns) == len(episode.rewards) + 1
        return episode.turn(completion.tokens[slice(*completion.turns[-1])])

    def finish(self, completions: Sequence["Completion"]) -> None:
        """Tells each episode of a last turn that the token limit cut off, so that it is judged too."""
        for episode, completion in zip(self.episodes, completions, strict=True):
            for start, end in completion.turns[len(episode.rewards) :]:
                if not episode.done and episode.failure is None and end > start:
                    episode.turn(completion.tokens[start:end], cut=True)

    @property
    def scores(self) -> list[Score | None]:
        """What each episode is worth."""
        return [episode.score for episode in self.episodes]
