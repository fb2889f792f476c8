"""The interface of environments, and their episodes as the sampler uses them: token ids in, token ids out.

    class Echo(Environment):
        def reset(self, row, rng): return row["prompt"]
        def step(self, action, tokens): return Step("and again: ", reward=None, done=False)

The sampled tokens are what counts; `action` is their text. An observation is encoded alone and appended to them, so
that a trajectory is extended and never tokenized again. `Episode` is one completion's state, `Episodes` a whole
batch's, whose `reply` is called by `protocols.SamplingClient.run` between the turns. Prompts and observations are
rendered from any of three forms: texts, messages, token ids. In a run the environment of an episode lives in a worker
(`remote.py`), and only what is said between it and the model passes here. Loads without jax.

Axes: T time.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

import numpy as np

from tunix.data.chat import Message, render_continuation, render_prompt
from tunix.data.pictures import IMAGES, parts_of, with_marks
from tunix.data.shapes import TEMPLATE_KWARGS, as_template_kwargs
from tunix.data.tokenizer import Tokenizer
from tunix.data.tool_calls import MARKUPS, ParsedTurn, markup_of
from tunix.errors import UserError
from tunix.rollout.rewards.base import Failure, Score
from tunix.rollout.rewards.calls import as_outcome, raised

if TYPE_CHECKING:
    from tunix.rollout.environments.config import EnvironmentConfig, History
    from tunix.types import Completion, Restart

Observation = str | Sequence[Message] | np.ndarray
"""A text that is encoded as it is (an answer to a turn as its continuation), messages that the tokenizer's template
renders, or token ids."""


def rendered(
    observation: Observation,
    tokenizer: Tokenizer | None,
    template_kwargs: Mapping[str, Any],
    start: Observation | None = None,
    action: np.ndarray | None = None,
) -> np.ndarray:
    """`[T]` int32 ids of a prompt, or of the observation that follows a turn of the model.

    Args:
        observation: a prompt that is a text begins with BOS where the tokenizer's own encoding does; messages that
            follow a turn continue the conversation.
        tokenizer: None where there are token ids only.
        template_kwargs: variables of the chat template.
        start: the episode's prompt; None where this is it.
        action: `[T]` ids of the turn.

    Raises:
        UserError: it cannot be rendered.
    """
    if isinstance(observation, np.ndarray):
        return token_ids(observation)
    if tokenizer is None:
        raise UserError("the model's folder has no tokenizer: the environment has to speak in token ids")
    if start is None or action is None:
        if isinstance(observation, str):
            return np.asarray(tokenizer.encode(observation, bos=tokenizer.adds_bos), np.int32)
        return render_prompt(observation, tokenizer, **template_kwargs).tokens
    if isinstance(observation, str):
        return np.asarray(tokenizer.encode_after(action.tolist(), observation), np.int32)
    if isinstance(start, str | np.ndarray):
        raise UserError("an observation of messages wants a prompt of messages: a text or tokens are no conversation")
    stopped = len(action) > 0 and int(action[-1]) in tokenizer.stop_ids
    return render_continuation(start, observation, tokenizer, stopped, **template_kwargs)


def token_ids(ids: np.ndarray) -> np.ndarray:
    """`[T]` int32 ids that an environment gave as such.

    Raises:
        UserError: they are no vector of whole numbers.
    """
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"token ids are a vector of whole numbers, not {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int32)


Row = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """An environment's answer to one turn of the model."""

    observation: Observation | None = None
    """What the model reads next, e.g. `"higher\\n"`; None ends the episode."""
    reward: SupportsFloat | None = None
    """Reward of the turn, a finite number; None for none. The episode's reward is the sum."""
    done: bool = False
    """Whether the episode is over."""
    seat: int = 0
    """Who took the turn where several players share the transcript, e.g. 1."""
    messages: Sequence[Message] | None = None
    """The conversation that the model reads next in place of all before, such as a shorter one, e.g.
    `[{"role": "user", "content": "..."}]`; None where the observation goes on with it."""
    outcomes: Mapping[int, SupportsFloat] = field(default_factory=dict)
    """At the end, the reward of each seat, e.g. `{0: 1.0, 1: -1.0}`, which is added to that of its last turn."""


class Environment(ABC):
    """One episode; every completion has its own. Constructor and methods run in a worker process, each call within a
    deadline, but for what a process makes first, which may import and load; other completions are sampled meanwhile. An
    episode stays in the process where it began and shares it with others, one call at a time. Everything has to follow
    from the row, the generator and the actions: where another episode hangs or ends the process, this one is replayed
    in a new one, and fails if it answers differently."""

    scores: ClassVar[bool] = True
    """Whether it gives rewards: an episode that was cut short then keeps the sum of its rewards so far, 0 at first.
    False leaves scoring to the reward functions."""
    stop_strings: ClassVar[tuple[str, ...]] = ()
    """Texts that end a turn of the model, in addition to the recipe's and the stop tokens."""
    keeps_special: ClassVar[bool] = False
    """Whether the text of a turn has its special tokens, but for the stop token that ends it."""
    ends_at_limit: ClassVar[bool] = False
    """Whether an episode that has had all of its turns ends and is scored, as one that has had all of its tokens; else
    it has failed."""
    replayable: ClassVar[bool] = True
    """Whether everything follows from the row, the generator and the actions. False for one whose state is elsewhere,
    such as a session of a server: where its process is lost, it fails, and is not begun anew; with `oversample` it is
    refused."""
    deadline: float = 10.0
    """Seconds that each call may take, `rollout.environment.deadline`: set after the constructor. What waits for
    something else gives up after `patience`, so that only this episode fails."""
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    """Variables of the chat template that prompts and observations are rendered with, e.g. `tools`; JSON, and the same
    for all episodes."""

    @classmethod
    def prepare_options(
        cls, options: Mapping[str, Any], config: "EnvironmentConfig", tokenizer: Tokenizer | None
    ) -> dict[str, Any]:
        """The recipe's options as the constructor gets them, which a run asks for before it starts a worker.

        Args:
            options: checked against the constructor's annotations.
            config: the section of the recipe.
            tokenizer: None where the model's folder has none, and where a recipe is checked without its model.

        Raises:
            UserError: they cannot be what the recipe says.
        """
        return dict(options)

    @property
    def patience(self) -> float:
        """Seconds that it may wait for something else: at the deadline nobody could say what it waited for."""
        return 0.8 * self.deadline

    @abstractmethod
    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """Starts the episode; returns the prompt.

        Args:
            row: the dataset's row, the same for all completions of a group: what they share has to come from it.
            rng: this episode's generator, seeded by (seed, step, request): for what may differ between them.
        """

    @abstractmethod
    def step(self, action: str, tokens: np.ndarray) -> Step:
        """Answers a turn of the model.

        Args:
            action: the turn's text, special tokens left out (but see `keeps_special`), a stop string left in.
            tokens: `[T]` the ids that were sampled, stop token included.
        """

    def finish(self) -> SupportsFloat | None:
        """The last reward of an episode, which is over for whatever reason but a failure; None for none."""
        return None

    def close(self) -> None:
        """Lets go of what the episode holds, such as a connection: called once, in the worker, when the episode is over
        or has failed. What it raises is written to the standard error. Where the process is killed it is not called."""
        return


class EpisodeError(Exception):
    """What went wrong with an environment; the text ends a sentence that begins with its name."""


def checked_step(step: Any) -> Step:
    """A step whose reward is a float or None, and whose observation is one that can be read.

    Raises:
        EpisodeError: it is none, or has a reward that is no finite number, or an observation of another form.
    """
    if not isinstance(step, Step):
        raise EpisodeError(f"returned {'None' if step is None else f'a {type(step).__name__}'}, not a Step")
    reward = checked_reward(step.reward)
    outcomes = {seat: checked_reward(outcome) or 0.0 for seat, outcome in step.outcomes.items()}
    if step.messages is not None and step.observation is not None:
        raise EpisodeError("answered with an observation and with messages that replace all before: give one of them")
    if step.messages is not None and not step.done:
        if isinstance(checked_observation(step.messages), str | np.ndarray):
            raise EpisodeError("answered with messages that are none: they are a list of mappings")
        return Step(None, reward, seat=step.seat, messages=step.messages)
    if step.done or step.observation is None:
        return Step(None, reward, done=True, seat=step.seat, outcomes=outcomes)
    return Step(checked_observation(step.observation), reward, seat=step.seat)


def checked_reward(reward: Any) -> float | None:
    """A reward that is a finite number or None.

    Raises:
        EpisodeError: it is something else.
    """
    outcome = None if reward is None else as_outcome(reward)
    if isinstance(outcome, str):
        raise EpisodeError(f"gave a reward that is no number: it {outcome}")
    return outcome


def checked_observation(observation: Any) -> Observation:
    """An observation that is a text, messages or an array.

    Raises:
        EpisodeError: it is something else.
    """
    if isinstance(observation, str | np.ndarray):
        return observation
    wrong = "None" if observation is None else f"a {type(observation).__name__}"
    if isinstance(observation, Sequence) and not isinstance(observation, bytes):
        foreign = [type(message).__name__ for message in observation if not isinstance(message, Mapping)]
        if not foreign:
            return observation
        wrong += f" that holds a {foreign[0]}"
    raise EpisodeError(f"answered with {wrong}: an observation is a text, a list of messages or an array of ids")


class Episode:
    """One environment and the state of its episode."""

    def __init__(
        self,
        environment: Environment,
        row: Row,
        rng: np.random.Generator,
        tokenizer: Tokenizer | None = None,
        turns: int = 16,
        template_kwargs: Mapping[str, Any] | None = None,
        history: "History" = "append",
    ) -> None:
        """Starts the episode by resetting the environment.

        Args:
            environment: a fresh one.
            row: what it is reset with.
            rng: its random numbers.
            tokenizer: for texts and messages; None serves environments of token ids.
            turns: turns of the model at most.
            template_kwargs: variables of the chat template; those of the row's `chat_template_kwargs` take precedence.
            history: what the model reads of earlier turns; see `RolloutConfig.history`.

        Raises:
            UserError: it raised, or its prompt is empty or cannot be rendered.
        """
        self.name = type(environment).__name__
        self.rewards: list[float | None] = []
        """Reward of each turn so far; None for a turn without one."""
        self.seats: list[int] = []
        """Who took each turn; 0 where one player takes all."""
        self.failure: Failure | None = None
        """The environment's failure, which ends the episode without a score; None where there was none."""
        self.done = False
        """Whether the environment has ended the episode."""
        self.on_end: Callable[[Episode], None] = lambda episode: None
        """Called by `Episodes` when it is over, in any thread."""
        self._environment, self._tokenizer, self._turns = environment, tokenizer, turns
        of_row = as_template_kwargs(row.get(TEMPLATE_KWARGS))
        self._template_kwargs = {**(template_kwargs or {}), **of_row, **environment.template_kwargs}
        try:
            self.start = checked_observation(environment.reset(row, rng))
            """The prompt, or the conversation that replaced it."""
        except UserError:
            raise
        except Exception as error:  # the author's own code: only they can fix the prompt of a row
            what = str(error) if isinstance(error, EpisodeError) else raised(error)
            raise UserError(f"the environment {self.name} does not start: it {what}") from error
        reader, pixels = None if tokenizer is None else tokenizer.pictures, np.zeros(0, np.uint8)
        if tokenizer is not None and reader is not None and not isinstance(self.start, np.ndarray):
            # Those of the row, or that the messages hold themselves; marked as in rows that are no environment's.
            name = "prompt" if isinstance(self.start, str) else "messages"
            marked, pixels, reader = with_marks({name: self.start, IMAGES: row.get(IMAGES)}, {}, reader, None)
            self.start, self._tokenizer = marked[name], tokenizer.seeing(reader)
        self.prompt = rendered(self.start, self._tokenizer, self._template_kwargs)
        """`[T]` int32 token ids that the model continues."""
        self.pictures = None if reader is None else reader.pictures(self.prompt, pixels)
        """The pictures of the prompt; None where the model sees none."""
        if history == "template" and isinstance(self.start, str | np.ndarray):
            raise UserError(
                f"rollout.history: template renders messages, and the environment {self.name} starts with "
                f"{'a text' if isinstance(self.start, str) else 'token ids'}: set it to append"
            )
        self._history, self._transcript = history, self.prompt
        self._messages = [] if isinstance(self.start, str | np.ndarray) else [*self.start]
        """The conversation, where it is one, as the template shows it."""
        if not len(self.prompt):
            raise UserError(f"the environment {self.name} starts with an empty prompt: a model needs something to read")

    @property
    def score(self) -> Score | None:
        """The sum of the rewards; a failure where there was one; None where reward functions alone decide."""
        if self.failure is not None:
            return self.failure
        earned = [reward for reward in self.rewards if reward is not None]
        return float(sum(earned)) if earned or self._environment.scores else None

    def turn(self, tokens: np.ndarray, cut: bool = False) -> "np.ndarray | Restart | None":
        """Passes one turn to the environment; returns the observation's tokens, another transcript where what the model
        reads next does not begin with the last, or None where the episode is over.

        Args:
            tokens: `[T]` the ids that were sampled in this turn.
            cut: whether the token limit cut the turn off: it is scored, and nothing can be read after it.
        """
        assert not self.done, "the episode is over"
        assert self.failure is None, "the episode is over"
        try:
            tokenizer, keeps, said = self._tokenizer, self._environment.keeps_special, tokens
            if keeps and tokenizer is not None and len(tokens) and int(tokens[-1]) in tokenizer.stop_ids:
                said = tokens[:-1]
            text = "" if tokenizer is None else tokenizer.decode(said, skip_special=not keeps)
            step = checked_step(self._environment.step(text, np.asarray(tokens)))
            self.rewards.append(None if step.reward is None else float(step.reward))
            self.seats.append(step.seat)
            for seat, outcome in step.outcomes.items():
                if seat in self.seats:  # what a seat has earned that was never asked belongs to no turn
                    last = len(self.seats) - 1 - self.seats[::-1].index(seat)
                    self.rewards[last] = (self.rewards[last] or 0.0) + float(outcome)
            self.done = step.done
            at_limit = self._environment.ends_at_limit and len(self.rewards) == self._turns
            if self.done or at_limit:
                self.done = True
                self.finish()
            if cut or self.done:
                return None
            observation = self._next(step, tokens)
        except Exception as error:  # one broken episode is counted and left out; the run goes on
            return self._fail(str(error) if isinstance(error, EpisodeError) else raised(error))
        if len(self.rewards) == self._turns:
            return self._fail(f"had not ended after {self._turns} turns")
        return observation

    def catch_up(self, completion: "Completion") -> None:
        """Passes on the turns of a completion that have ended and that the environment has not had, as where an earlier
        call of the sampler has paused it; fails where the environment does not answer as it did then."""
        from tunix.types import Restart  # which imports jax

        turns = completion.turns
        for number in range(len(self.rewards), len(turns) - (completion.finish != "stop")):
            if self.done or self.failure is not None:
                return
            (start, end), after = turns[number], None
            if number + 1 < len(turns):
                after = completion.tokens[end : turns[number + 1][0]]
            answer = self.turn(completion.tokens[start:end])
            read = answer.prompt if isinstance(answer, Restart) else answer
            same = read is after if read is None or after is None else np.array_equal(read, after)
            if self.failure is None and not same:
                self._fail(
                    "is not deterministic given row and rng, so that rollout.oversample cannot pause it: when its "
                    "turns were repeated it did not answer as before"
                )

    def _next(self, step: Step, tokens: np.ndarray) -> "np.ndarray | Restart":
        """What the model reads after a turn of these tokens, and the environment's answer to it."""
        from tunix.types import Restart  # which imports jax

        said, tokenizer = step.observation, self._tokenizer
        later = [*(said or ()), *(step.messages or ())] if not isinstance(said, str | np.ndarray) else []
        if self.pictures is not None and (step.messages is not None or parts_of(later)):
            raise EpisodeError("showed pictures, or changed the conversation, after the prompt that has the pictures")
        if step.messages is not None:
            self.start, self._messages = step.messages, [*step.messages]
        elif self._history == "append":
            assert said is not None, "a step that does not end the episode answers"
            new = rendered(said, tokenizer, self._template_kwargs, self.start, tokens)
            if not len(new):
                raise EpisodeError("answered with no tokens")
            self._transcript = np.concatenate([self._transcript, tokens, new])
            return new
        else:
            if said is None or isinstance(said, str | np.ndarray):
                raise EpisodeError("answered with no messages, which rollout.history: template renders")
            assert tokenizer is not None, "messages were rendered by one"
            stopped = len(tokens) > 0 and int(tokens[-1]) in tokenizer.stop_ids
            text = tokenizer.decode(tokens[: len(tokens) - stopped], skip_special=False)
            try:
                parsed = MARKUPS[markup_of(tokenizer)].parse(text)
            except UserError:  # a template of no family that is known: all of it is what was said
                parsed = ParsedTurn(text)
            readable = not any(call.fault for call in parsed.calls)
            turn = parsed.message if readable else {"role": "assistant", "content": text}
            self._messages += [turn, *(message for message in said if message["role"] != "assistant")]
        prompt = rendered(self._messages, tokenizer, self._template_kwargs)
        before = np.concatenate([self._transcript, tokens])
        self._transcript = prompt
        if len(prompt) > len(before) and np.array_equal(prompt[: len(before)], before):
            return prompt[len(before) :]
        return Restart(prompt)

    def finish(self) -> None:
        """Adds the environment's last reward to that of the last turn; once, after which nothing is passed on."""
        try:
            last = checked_reward(self._environment.finish())
        except Exception as error:
            return self._fail(str(error) if isinstance(error, EpisodeError) else raised(error))
        if last is not None:
            self.rewards[-1:] = [last + sum(reward or 0.0 for reward in self.rewards[-1:])]

    def _fail(self, reason: str) -> None:
        self.failure = Failure(f"the environment {self.name} {reason}")


class Failures:
    """Counts how many episodes have failed since one has not, in the order in which they ended."""

    def __init__(self, most: int | None):
        """So many may fail in a row, the last of which ends the run; None for all."""
        self._most, self._number, self._lock = most, 0, threading.Lock()

    def count(self, failure: Failure | None) -> None:
        """Counts an episode, from any thread.

        Raises:
            UserError: too many have failed.
        """
        with self._lock:
            self._number = 0 if failure is None else self._number + 1
            if failure is not None and self._number == self._most:
                raise UserError(
                    f"rollout.stop_after_failures: {self._number} episodes in a row have failed, the last because "
                    f"{failure.reason}. What was trained before is saved: mend the environment, and run the same "
                    "command"
                )


class Episodes:
    """The episodes of a batch: request i of the sampler is episode i."""

    def __init__(
        self,
        episodes: Sequence[Episode | None],
        together: int = 1,
        close: Callable[[], None] = lambda: None,
        logged: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Holds the episodes of a batch.

        Args:
            episodes: in the order of the requests; None where no environment answers.
            together: how many may be called at a time.
            close: lets go of what episodes hold, after the last has ended.
            logged: what `samples.jsonl` is to have of episodes, by their places.
        """
        self.episodes, self.together, self.close, self.logged = episodes, together, close, logged

    def reply(self, request: int, completion: "Completion") -> "np.ndarray | Restart | None":
        """What follows a turn that stopped; called by the sampler (`types.Reply`)."""
        if (episode := self.episodes[request]) is None:
            return None
        if episode.failure is not None:  # before it was continued
            episode.on_end(episode)
            return None
        assert len(completion.turns) == len(episode.rewards) + 1
        observation = episode.turn(completion.tokens[slice(*completion.turns[-1])])
        if observation is None:
            episode.on_end(episode)
        return observation

    def catch_up(self, completions: Mapping[int, "Completion"]) -> None:
        """`Episode.catch_up` for the completions of these episodes."""
        self._with_each(completions, Episode.catch_up)

    def finish(self, completions: Mapping[int, "Completion"]) -> None:
        """Passes turns that their environments have not had, such as last ones that the token limit cut off, so that
        they are scored too; lets go of all episodes."""

        def finish(episode: Episode, completion: "Completion") -> None:
            ended = episode.done or episode.failure is not None or completion.finish == "stop"
            episode.catch_up(completion)
            for start, end in completion.turns[len(episode.rewards) :]:
                if not episode.done and episode.failure is None and end > start:
                    episode.turn(completion.tokens[start:end], cut=True)
            if not episode.done and episode.failure is None:
                episode.finish()
            if not ended:
                episode.on_end(episode)

        self._with_each(completions, finish)
        self.close()

    def _with_each(self, completions: Mapping[int, "Completion"], act: Callable[[Episode, "Completion"], None]) -> None:
        """Acts on each episode that an environment answers, and its completion, as many as may be called at a time."""
        played = {i: episode for i in completions if (episode := self.episodes[i]) is not None}
        with ThreadPoolExecutor(self.together, thread_name_prefix="environment") as threads:
            list(threads.map(act, played.values(), [completions[i] for i in played]))

    @property
    def scores(self) -> list[Score | None]:
        """Score of each episode: a sum of rewards, a failure, or None."""
        return [episode and episode.score for episode in self.episodes]
