"""Environments of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers), played inside a worker's process.

A taskset holds tasks; a task has a prompt, hooks and rewards; an `Env` says how it is played, once or turn by turn with
a user that it plays itself. Where verifiers starts a harness, a program that asks a model's endpoint, a `Seat` stands
here: it has of `verifiers.v1.Agent` what `Env.run` calls, and its turns are those of the episode. `Env.run` is a
coroutine that goes on until it asks the seat for a turn; at its end the task has scored the trace. What only a harness
can do (tools, skills) is refused.
"""

import asyncio
import inspect
import itertools
import json
import os
import pkgutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import numpy as np

from tunix.errors import UserError, nearest
from tunix.rollout.environments.adapters import SIZE, row_number
from tunix.rollout.environments.base import Environment, EpisodeError, Observation, Row, Step
from tunix.rollout.rewards.calls import raised


class Verifiers(Environment):
    """An episode of a verifiers environment."""

    def __init__(self, env: str, config: dict[str, Any] | None = None, size: int = SIZE) -> None:
        """Loads the environment, once in a process.

        Args:
            env: its taskset, a package that is installed or in the current folder, e.g. `arith-v1`.
            config: verifiers' `EnvConfig` without the taskset's id, e.g. `{"taskset": {"num_tasks": 100}}`.
            size: rows that it makes where the recipe names none; a row's `index` is a task, modulo their number.

        Raises:
            UserError: no such environment, a setting that it does not have, or one that needs a harness.
        """
        self._world = _world(env, json.dumps(config or {}, sort_keys=True))
        self._seat = Seat(self._world)
        self._play: asyncio.Task[float] | None = None

    def reset(self, row: Row, rng: np.random.Generator) -> Observation:
        """Plays the task of a row as far as its first turn.

        Raises:
            UserError: the row has no `index`, or the task needs a harness.
        """
        self._play = _loop().create_task(self._seat.play(self._world.task(row_number(row, "index"))))
        if (prompt := self._advance().observation) is None:
            raise EpisodeError("ended before its first turn")
        return prompt

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """What the coroutine answers a turn with, or the reward where it has ended."""
        self._seat.said.put_nowait(action)
        return self._advance()

    def close(self) -> None:
        """Ends the coroutine, and its runtime with it."""
        if self._play is not None and not self._play.done():
            self._play.cancel()
            _loop().run_until_complete(asyncio.wait([self._play]))

    def _advance(self) -> Step:
        assert self._play is not None
        asked = _loop().create_task(self._seat.asked.get())
        _loop().run_until_complete(asyncio.wait([self._play, asked], return_when=asyncio.FIRST_COMPLETED))
        if asked.done():
            return Step(asked.result())
        asked.cancel()
        return Step(reward=self._play.result(), done=True)


class Seat:
    """The seat of an `Env` that the model plays, and its one conversation; has of verifiers' classes what envs call."""

    trainable = True

    def __init__(self, world: "World") -> None:
        """Nothing has been asked yet."""
        self.asked: asyncio.Queue[list[dict[str, str]]] = asyncio.Queue()
        """Messages for the model to answer."""
        self.said: asyncio.Queue[str] = asyncio.Queue()
        """Its answers."""
        self.trace: Any = None
        self._task: Any = None
        self._world, self._messages = world, list[Any]()

    async def play(self, task: Any) -> float:
        """Plays a task to its end; returns the sum of its weighted rewards."""
        from verifiers.v1 import Agents, Episode, TraceTask

        env = self._world.env
        agents = Agents(env.config, lambda name, spec: self)
        await env.setup(agents)
        await env.run(task, agents)
        episode = Episode(task=TraceTask(type=type(task).__name__, data=task.data))
        episode.traces += [self.trace] if self.trace else []
        await env.finalize(task, episode)
        if not (rewards := self.trace.rewards if self.trace else {}) or None in rewards.values():
            raise EpisodeError(f"has rewards without a score: {', '.join(rewards) or 'none was given'}")
        return float(self.trace.reward)

    async def run(self, task: Any) -> Any:
        """Plays a task of one turn; returns its trace."""
        async with self.interaction(task):
            await self.turn()
        return self.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator["Seat"]:
        """The conversation about a task, which is scored at its end."""
        from verifiers.v1 import AgentInfo, Trace, TraceTask
        from verifiers.v1.runtimes import make_runtime
        from verifiers.v1.state import state_cls
        from verifiers.v1.utils.compile import resolve_runtime_config
        from verifiers.v1.utils.decorators import invoke

        if self.trace is not None:
            raise EpisodeError("begins a second conversation, and a model plays one in an episode")
        world, self._task = self._world, task
        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=world.spec, name=world.seat)
        self.trace = trace = Trace(task=about, state=state_cls(type(task))(), agent=agent)
        runtime = make_runtime(resolve_runtime_config(world.spec.runtime, task)) if world.has_runtime else None
        try:
            if runtime is not None:
                runtime.env = dict(task.runtime_env())
                await runtime.start()
                await runtime.prepare_setup()
            await invoke(task.setup, {"trace": trace, "runtime": runtime})
            yield self
            trace.stop("user_closed")
            await invoke(task.finalize, {"trace": trace, "runtime": runtime})
            await task.score(trace, runtime)
            trace.ok = True
        finally:
            if runtime is not None:
                await runtime.stop()

    async def turn(self, message: Any = None) -> Any:
        """One turn: the prompt or a user's message, and the model's answer as a `Segment`; one that is `terminated`
        where the conversation is over."""
        from verifiers.v1 import AssistantMessage, Request, Response, Segment, SystemMessage, Trace, UserMessage
        from verifiers.v1.dialects import parse_message
        from verifiers.v1.graph import prepare_turn
        from verifiers.v1.session import call_hook, hook_boundary
        from verifiers.v1.types import content_text

        async def over(kind: Any, value: Any) -> bool:
            available = {Trace: self.trace, kind: value}
            for stop in self._task.hooks("stop") if self.trace.stop_condition is None else ():
                if hook_boundary(stop, allow_trace=True) in available and await call_hook(stop, available):
                    self.trace.stop(stop.__name__)
            return self.trace.stop_condition is not None

        data, most = self._task.data, self._world.spec.max_turns
        first = data.prompt if message is None and not self._messages else message
        if first is None:
            raise EpisodeError("asks for a turn without a prompt or a message")
        asked = [UserMessage(content=first)] if isinstance(first, str) else first
        asked = [parse_message(x) if isinstance(x, dict) else x for x in asked]
        if not self._messages and data.system_prompt is not None:
            asked = [SystemMessage(content=data.system_prompt), *asked]
        self._messages += asked
        kinds = {kind for x in asked for kind in ([y.type for y in x.content] if isinstance(x.content, list) else [])}
        kinds |= {"tool" for x in asked if x.role == "tool" or (x.role == "assistant" and x.tool_calls)}
        if kinds - {"text"}:
            raise EpisodeError(
                f"asks with {max(kinds - {'text'})!r}: only texts of a system, a user or an assistant are read"
            )
        if most is not None and self.trace.num_turns >= most:
            self.trace.stop("max_turns")
        if await over(Request, Request(messages=self._messages)):
            return Segment(messages=[], terminated=True)
        self.asked.put_nowait([{"role": x.role, "content": content_text(x.content)} for x in asked])
        reply = AssistantMessage(content=await self.said.get())
        response = Response(id=self.trace.id, created=0, model="policy", message=reply, finish_reason="stop")
        prepare_turn(self.trace, self._messages).commit(response)
        self._messages.append(reply)
        await over(Response, response)
        return Segment(messages=[reply])


class World:
    """A verifiers `Env` and its tasks."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        """Loads it; see `Verifiers`."""
        from pydantic import ValidationError
        from verifiers.v1 import tasksets
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders

        self._what = f"rollout.environment: verifiers: {name}"
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            loaders.taskset_class(name)
            taskset = {**config.get("taskset", {}), "id": name}
            self.env = loaders.load_environment(loaders.resolve_env_config({**config, "taskset": taskset}))
        except ValidationError as error:
            wrong = error.errors()[0]
            raise UserError(f"{self._what}: config.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
        except Exception as error:  # it imports the author's code
            module = name.replace("-", "_")
            known = {x.name for x in pkgutil.iter_modules([os.getcwd(), *tasksets.__path__])} - {module}
            raise UserError(f"{self._what}: {raised(error)}{nearest(module, known)}") from error
        seats = agent_config_fields(self.env.config)
        self.seat, self.spec = next(iter(seats.items()))
        """The seat's name, and its `AgentConfig`."""
        self.has_runtime = "runtime" in self.spec.model_fields_set
        """Whether the recipe names a runtime, in which hooks of tasks run programs."""
        harness = self.spec.harness.id if self.spec.harness else loaders.default_harness_id(name)
        if len(seats) > 1:
            raise UserError(f"{self._what} has the seats {', '.join(seats)}: only an environment of one can be played")
        if harness not in ("bash", "null"):
            raise UserError(
                f"{self._what} needs the harness {harness!r}, a program that asks an OpenAI endpoint for each turn: "
                "only what is played without one can be trained on"
            )
        unread = {*config} & {"retries", "timeout", "interception", "max_concurrent_agents"}
        unread |= {f"{self.seat}.{x}" for x in self.spec.model_fields_set - {"harness", "runtime", "max_turns"}}
        if unread:
            raise UserError(
                f"{self._what}: config.{min(unread)} is of verifiers' own runner, and nothing reads it here"
            )
        _loop().run_until_complete(self.env.start())
        self._stream, self._tasks = iter(self.env.taskset), list[Any]()

    def task(self, index: int) -> Any:
        """The task of a number, modulo how many there are.

        Raises:
            UserError: there is none, or it needs what only a harness or a runtime has.
        """
        from verifiers.v1.task import Task
        from verifiers.v1.utils.decorators import discover_decorated

        self._tasks += itertools.islice(self._stream, max(0, index + 1 - len(self._tasks)))
        if not self._tasks:
            raise UserError(f"{self._what} has no tasks")
        task, taskset = self._tasks[index % len(self._tasks)], self.env.taskset
        needs = {
            "tools": [*taskset.toolsets(taskset.config), *task.toolsets(task.config)],
            "skills": task.data.skills,
            "interceptors": discover_decorated(task, "intercept"),
        }
        if unmet := [need for need, there in needs.items() if there]:
            raise UserError(
                f"{self._what}: task {task.data.idx} has {unmet[0]}, which only a harness can give to a model"
            )
        hooks = [*task.hooks("reward"), *task.hooks("metric")]
        hooks += [getattr(task, x) for x in ("setup", "finalize") if getattr(type(task), x) is not getattr(Task, x)]
        wanted = ((hook.__name__, inspect.signature(hook).parameters.get("runtime")) for hook in hooks)
        wanting = [name for name, parameter in wanted if parameter and parameter.default is parameter.empty]
        if not self.has_runtime and (wanting or task.NEEDS_CONTAINER or task.data.image):
            raise UserError(
                f"{self._what}: task {task.data.idx} wants a runtime{f' for its {wanting[0]}' if wanting else ''}: "
                f"name one, as in options: {{config: {{{self.seat}: {{runtime: {{type: subprocess}}}}}}}}"
            )
        return task


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The process's event loop, which runs while a call to the worker does."""
    return asyncio.new_event_loop()


@cache
def _world(name: str, config: str) -> World:
    """That of a taskset's name and of settings as JSON, once in a process."""
    return World(name, json.loads(config))
