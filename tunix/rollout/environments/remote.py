"""Environments that live in workers: each episode stays in the worker where it began, which answers one call at a time.

A call that exceeds its deadline has its worker killed, and one that ends the process ends the worker: that episode
fails. The others that lived there are replayed in a new process when they are next called: reset with the same row and
generator, and the same actions again. Answers have to be those of before.

First the environment that a recipe names, then the worker's side (`prepare`), which holds the episodes that began in it
and calls the one that a request names:

    {"episode": 3, "start": {"row": {...}, "seed": [0, 3]}}   -> {"observation": "1-31\\n"}
    {"episode": 3, "action": "16\\n", "tokens": {...}}         -> {"observation": ..., "reward": 0.5, "done": false,
                                                                  "seat": 0, "messages": null, "outcomes": []}
    {"episode": 3, "finish": true}                            -> {"reward": 1.0}
    {"describe": true}                                        -> {"scores": true, "stop_strings": ["\\n"], ...}

An answer with a `failure` ends the episode. A list `forget` names episodes that are over, whose environments are then
closed. Nothing is pickled: rows are JSON, a generator is its seed.

Axes: T time.
"""

import inspect
import itertools
import json
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np

from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError, nearest
from tunix.rollout.environments.adapters import ADAPTERS, adapter_of
from tunix.rollout.environments.base import (
    Environment,
    Episode,
    EpisodeError,
    Episodes,
    Failures,
    Observation,
    Row,
    Step,
    checked_observation,
    checked_reward,
    checked_step,
    token_ids,
)
from tunix.rollout.environments.calculator import Calculator
from tunix.rollout.environments.config import EnvironmentConfig, History
from tunix.rollout.environments.guessing import Guessing
from tunix.rollout.environments.problem import Problem
from tunix.rollout.environments.tools import Tools
from tunix.rollout.rewards.calls import raised
from tunix.rollout.workers.process import START, Lost, WorkerProcess, WorkerThread, refuse_unsendable
from tunix.util.coded import array_of, coded
from tunix.util.plugins import absolute, check_options, is_reference, load_object

SHIPPED: dict[str, type[Environment]] = {
    "problem": Problem,
    "calculator": Calculator,
    "guessing": Guessing,
    "tools": Tools,
}
"""The environments that come with tunix."""


def read_environment(
    config: EnvironmentConfig, tokenizer: Tokenizer | None = None
) -> tuple[type[Environment], str | None, dict[str, Any]]:
    """Loads and checks the environment that a recipe names; its constructor is not called yet.

    Args:
        config: the section of the recipe.
        tokenizer: that of the model, where there is one.

    Returns:
        Its class, as its author wrote it; `module:Class` or `file.py:Class` for a worker to load, None for a class of a
        notebook's cell; and the options of its constructor.

    Raises:
        UserError: no such environment, or an option that it does not have or that has the wrong type.
    """
    name, what, options = config.name, f"the environment {config.name}", config.options
    if config.agent is not None:
        raise UserError(f"{what} plays the rows of rollout.environment alone, with a model to ask: leave it out here")
    if name in SHIPPED:
        kind = SHIPPED[name]
        check_options(what, kind, options)
        source = f"{kind.__module__}:{kind.__name__}"
    elif adapted := adapter_of(config):
        adapter, options = adapted
        kind, source = load_object(adapter.source), adapter.source
        check_options(what, kind, options)
    elif not is_reference(name):
        hint = nearest(name.partition(":")[0], [*SHIPPED, *ADAPTERS])
        raise UserError(
            f"environment.name is {name!r}, which is not shipped ({', '.join(SHIPPED)}), of no package that is known "
            f"({', '.join(ADAPTERS)}), and no `module:Class` or `file.py:Class`.{hint}"
        )
    else:
        kind = load_object(name)
        if not (isinstance(kind, type) and issubclass(kind, Environment)):
            raise UserError(
                f"{name} is {kind!r:.80}, not a class that extends tunix.rollout.environments.base.Environment"
            )
        source = None if name.startswith("__main__:") else absolute(name)
    parameters = inspect.signature(kind).parameters
    for option in options:
        if option not in parameters:
            raise UserError(
                f"{what} has no option {option!r}; it has {', '.join(parameters) or 'none'}."
                f"{nearest(option, parameters)}"
            )
    return kind, source, kind.prepare_options(options, config, tokenizer)


def prepare(first: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The worker's side: loads the class; returns what answers requests, and holds the episodes that live here.

    Args:
        first: the `kind` of environment, or where it is loaded from, its `options`, and the `deadline` of a call.
    """
    kind = load_object(first["kind"]) if isinstance(first["kind"], str) else first["kind"]
    finishes, living = kind.finish is not Environment.finish, dict[int, Environment]()
    """Whether it has a last reward; and environments by the numbers of their episodes."""

    def end(number: int) -> None:
        try:
            if (environment := living.pop(number, None)) is not None:
                environment.close()
        except BaseException as error:  # the episode has its score, or its failure
            print(f"the environment {kind.__name__}: its close {raised(error)}", file=sys.stderr)

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        for number in request.get("forget", ()):
            end(number)
        number = request.get("episode", -1)
        try:
            if "describe" in request:
                made = living[number] = kind(**first["options"])
                made.deadline = START
                how_played = ("scores", "keeps_special", "ends_at_limit", "replayable")
                facts: dict[str, Any] = {name: bool(getattr(made, name)) for name in how_played}
                facts |= {"stop_strings": [str(text) for text in made.stop_strings]}
                facts |= {"template_kwargs": dict(made.template_kwargs), "finishes": finishes}
                end(number)
                return facts
            if "start" in request:
                environment, start = kind(**first["options"]), request["start"]
                living[number], environment.deadline = environment, first["deadline"]
                observation = environment.reset(start["row"], np.random.default_rng(start["seed"]))
                return {"observation": written(checked_observation(observation))}
            if number < 0:
                return {}
            if "finish" in request:
                reward = checked_reward(living[number].finish())
                end(number)
                return {"reward": reward}
            step = checked_step(living[number].step(request["action"], array_of(request["tokens"])))
            observation = None if step.observation is None else written(step.observation)
            if step.done and not finishes:
                end(number)
            messages = None if step.messages is None else written(step.messages)
            answer = {"observation": observation, "reward": step.reward, "done": step.done, "seat": step.seat}
            return {**answer, "messages": messages, "outcomes": list(step.outcomes.items())}
        except EpisodeError as error:
            failed = {"failure": str(error)}
        except UserError as error:
            failed = {"failure": raised(error), "advice": str(error)}
        except BaseException as error:  # sys.exit in an environment ends its episode, not the worker
            failed = {"failure": raised(error)}
        end(number)
        return failed

    return answer


def written(observation: Observation) -> Any:
    """An observation as JSON values, which `read` reads.

    Raises:
        EpisodeError: its messages hold something that JSON does not have.
        UserError: an array that is no vector of token ids.
    """
    if isinstance(observation, np.ndarray):
        return {"ids": coded(token_ids(observation))}
    if isinstance(observation, str):
        return str(observation)
    messages = [dict(message) for message in observation]
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise EpisodeError(
            f"answered with messages that are no JSON ({error}): only text, numbers, true, false, null and lists or "
            "mappings of these leave a worker"
        ) from error
    return messages


def read(observation: Any) -> Observation:
    """The inverse of `written`."""
    return array_of(observation["ids"]) if isinstance(observation, Mapping) else observation


Answer = dict[str, Any]
"""What a worker answers; see the top of this file."""


class EnvironmentWorker:
    """A worker whose lock is held from one call to its answer."""

    def __init__(
        self, kind: type[Environment], source: str | None, options: Mapping[str, Any], deadline: float
    ) -> None:
        """Starts nothing yet; see `read_environment`."""
        self.lock = threading.Lock()
        self.lost = "ended its process"
        """What happened when a process was last lost, e.g. `took longer than 10 s`."""
        self.facts: Answer = {}
        """What the process says of its environments, after `ready`; see the top of this file."""
        first = {"kind": kind if source is None else source, "options": options, "deadline": deadline}
        self._host: WorkerProcess | WorkerThread = (
            WorkerThread(prepare(first))
            if source is None
            else WorkerProcess(prepare.__module__, first, "an environment")
        )
        self._name, self._deadline, self._closed, self._described = kind.__name__, deadline, False, 0
        self.over: deque[int] = deque()
        """Episodes to let go of with the next call; any thread may add some, at any time."""

    def ready(self) -> int:
        """The number of the process that lives; the lock has to be held.

        Where there is none it is started, and makes an environment, whatever that loads: no deadline includes it.

        Raises:
            Lost: the worker is closed.
            UserError: the process does not start, or the environment cannot be made.
        """
        if self._closed:
            raise Lost("was given up")
        self._host.ensure()
        if self._described != self._host.starts:
            try:
                self.facts = self._host.ask({"describe": True}, max(START, self._deadline))
            except Lost as lost:
                self.facts = {"failure": str(lost)}
            if "failure" in self.facts:
                wrong = f"the environment {self._name} cannot be made: it {self.facts['failure']}"
                raise UserError(self.facts.get("advice", wrong))
            self._described = self._host.starts
        return self._host.starts

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """The answer to a request, after `ready`; the lock has to be held.

        Raises:
            Lost: the environment hung, or ended the process.
        """
        over = [self.over.popleft() for _ in range(len(self.over))]
        try:
            return self._host.ask({**request, "forget": over}, self._deadline)
        except Lost as lost:
            self.lost = str(lost)
            raise

    def let_go(self) -> None:
        """Closes the environments of episodes that are over; one that hangs is lost with its process."""
        with self.lock:
            if self.over and not self._closed and self._host.lives:
                with suppress(Lost):
                    self.ask({})

    def close(self) -> None:
        """Ends the process; a call that still runs in it is lost."""
        self._closed = True
        self._host.kill()
        while not self.lock.acquire(timeout=0.1):
            self._host.kill()
        try:
            self._host.close()
        finally:
            self.lock.release()


class RemoteEnvironment(Environment):
    """An environment that lives in a worker; of each, `Player` makes a class with its name."""

    finishes: ClassVar[bool] = False
    """Whether it has a last reward."""

    def __init__(self, player: "Player", worker: EnvironmentWorker, number: int) -> None:
        """Calls nothing yet.

        Args:
            player: does not end before its episodes.
            worker: where it lives.
            number: of the episode, unlike that of any other in the worker.
        """
        self._player, self._number, self._process = player, number, 0
        self.worker = worker
        self._history: list[tuple[dict[str, Any], Answer]] = []
        """Requests and answers so far."""
        weakref.finalize(self, worker.over.append, number).atexit = False

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """Makes the environment in the worker, and resets it; where that hung or ended the process, once more.

        Raises:
            EpisodeError: it failed, and how.
            UserError: the environment raised one; or a worker does not start, or the row cannot be sent to it.
        """
        for name, value in row.items():
            refuse_unsendable(f"the environment {type(self).__name__}", name, value)
        # The generator is new, and follows from what it was made of.
        seeds = rng.bit_generator.seed_seq
        assert isinstance(seeds, np.random.SeedSequence), "episodes have generators of np.random.default_rng"
        request = {"start": {"row": dict(row), "seed": seeds.entropy}}
        try:
            answer = self._answer(request)
        except EpisodeError:  # a reset that fails ends the run: it may have been what others left in the process
            answer = self._answer(request)
        return read(answer["observation"])

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """The environment's answer to a turn.

        Raises:
            EpisodeError: it failed, and how.
        """
        answer = self._answer({"action": action, "tokens": coded(tokens)})
        observation = None if answer["observation"] is None else read(answer["observation"])
        outcomes = dict(answer["outcomes"])
        return Step(observation, answer["reward"], answer["done"], answer["seat"], answer["messages"], outcomes)

    def finish(self) -> float | None:
        """The last reward, for which only an environment that has one is asked.

        Raises:
            EpisodeError: it failed, and how.
        """
        return self._answer({"finish": True})["reward"] if self.finishes else None

    def _answer(self, request: dict[str, Any]) -> Answer:
        """Asks the worker, in which the episode is replayed first if it has lived in an earlier process.

        Raises:
            EpisodeError: it failed, and how.
            UserError: the environment raised one where it was to start.
        """
        request["episode"] = self._number
        try:
            with self.worker.lock:
                process = self.worker.ready()
                why = self.worker.lost
                if self._history and process != self._process and not self.replayable:
                    raise EpisodeError(
                        f"is lost: another episode of its worker {why}, and what it had begun cannot be replayed"
                    )
                for turn, (earlier, before) in enumerate(self._history if process != self._process else ()):
                    if self.worker.ask(earlier) != before:
                        what = f"the answer to turn {turn}" if turn else "the prompt"
                        raise EpisodeError(
                            f"is not deterministic given row and rng, so that it cannot be replayed: another episode "
                            f"of its worker {why}, and when its actions were repeated in a new one {what} was not "
                            "that of before"
                        )
                self._process = process
                answer = self.worker.ask(request)
        except Lost as lost:
            # Of an environment that calls what the model names, that is what hung.
            called = f" at {request['action']!r:.160}" if self.keeps_special and "action" in request else ""
            raise EpisodeError(f"{lost}{called}") from None
        if "advice" in answer and "start" in request:
            raise UserError(answer["advice"])
        if "failure" in answer:
            raise EpisodeError(answer["failure"])
        self._history.append((request, answer))
        return answer


class Player:
    """Starts the episodes of an environment, each in the next of its workers."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Tokenizer | None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_after: int | None = None,
        history: History = "append",
    ):
        """Loads the environment's class, and makes one in a worker; the others start with their first episodes.

        Args:
            config: the environment, and how its workers are used.
            tokenizer: of the model.
            template_kwargs: variables of the chat template.
            stop_after: how many episodes in a row may fail; None for all of them.
            history: what the model reads of earlier turns, `rollout.history`.

        Raises:
            UserError: see `read_environment`; or a worker cannot import the class, or the constructor fails.
        """
        kind, source, options = read_environment(config, tokenizer)
        count = config.workers or min(8, os.cpu_count() or 1)
        self._begun = partial(
            Episode, tokenizer=tokenizer, turns=config.turns, template_kwargs=template_kwargs, history=history
        )
        self._workers = [EnvironmentWorker(kind, source, options, config.deadline) for _ in range(count)]
        self._numbers = itertools.count()
        self._failures = Failures(stop_after)
        workers = self._workers
        self.close = weakref.finalize(self, lambda: [worker.close() for worker in workers])
        """Ends the workers, as the end of this object does; episodes that have not ended are lost."""
        try:
            with workers[0].lock:
                workers[0].ready()
        except BaseException:
            self.close()
            raise
        facts = workers[0].facts
        self.scores = bool(facts["scores"])
        """Whether the environment gives rewards."""
        self.name = kind.__name__
        """The environment's class."""
        self.replayable = bool(facts["replayable"])
        """Whether an episode can be begun anew, and its turns repeated."""
        self.stop_strings: tuple[str, ...] = tuple(facts["stop_strings"])
        """Texts that end a turn."""
        facts = facts | {"stop_strings": self.stop_strings}
        self._kind: type[RemoteEnvironment] = type(kind.__name__, (RemoteEnvironment,), facts)
        """Stands for the environment's class: has its name and its class variables."""

    def __call__(self, rows: Sequence[Row], seed: int, numbers: Sequence[int] | None = None) -> Episodes:
        """Starts an episode for each row; random numbers follow from the seed and these numbers, or the places.

        Raises:
            UserError: an environment does not start.
        """
        numbers, together = range(len(rows)) if numbers is None else numbers, len(self._workers)
        places = [next(self._numbers) for _ in rows]
        made = [self._kind(self, self._workers[place % together], place) for place in places]

        def start(environment: RemoteEnvironment, number: int, row: Row) -> Episode:
            rng = np.random.default_rng([seed, number])
            episode = self._begun(environment, row, rng)
            episode.on_end = lambda ended: self._failures.count(ended.failure)
            return episode

        with ThreadPoolExecutor(together, thread_name_prefix="environment") as threads:
            episodes = list(threads.map(start, made, numbers, rows))

        def close() -> None:
            for environment, place in zip(made, places, strict=True):
                environment.worker.over.append(place)
            with ThreadPoolExecutor(together, thread_name_prefix="environment") as threads:
                list(threads.map(EnvironmentWorker.let_go, self._workers))

        return Episodes(episodes, together, close)
