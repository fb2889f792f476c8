"""Environments written for TRL 1.16 (`environment_factory` of its GRPOTrainer); a recipe says `trl:file.py:Class`.

`reset(**row)` returns None or a text, which is appended to the prompt. Public methods are tools: they need type hints
and docstrings. `get_reward()` and reward functions that receive `environments` score the episode once it is over. One
instance plays one episode. What the model reads of results and exceptions is what TRL would have shown it; a call whose
markup is broken is answered, where TRL would end the episode. The package itself is not needed.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix.data.chat import Message
from tunix.data.tokenizer import Tokenizer
from tunix.data.tool_calls import MarkupName
from tunix.errors import UserError
from tunix.rollout.environments.base import EpisodeError, Row
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.tools import Schema, Tools, joined, schema_of, settled
from tunix.util.plugins import absolute, is_reference, load_object

RESET, REWARD = "reset", "get_reward"
"""Methods that are no tools."""
UNKNOWN = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL's trainer gives to reward functions and no environment has."""


class TRL(Tools):
    """A class of the user's whose methods the model calls."""

    def __init__(
        self,
        source: str,
        rewards: list[str] | None = None,
        template: str | None = None,
        system: str | None = None,
        markup: MarkupName | None = None,
        instructions: str | None = None,
        prepared: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes an instance of the class.

        Args:
            source: the class, as `file.py:Class`.
            rewards: functions that receive `environments`, each as `file.py:function`; their rewards are added.
            template: see `Tools`, as the others.
        """
        super().__init__(template, system, markup, instructions, prepared)
        self._world = load_object(source)()
        self._functions |= {name: getattr(self._world, name) for name in tools_of(type(self._world))}
        self._rewards = {name: load_object(name) for name in rewards or ()}

    @property
    def scores(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the class or functions score; else the recipe's reward functions do."""
        return bool(self._rewards) or hasattr(self._world, REWARD)

    @classmethod
    def prepare_options(
        cls, options: Mapping[str, Any], config: EnvironmentConfig, tokenizer: Tokenizer | None
    ) -> dict[str, Any]:
        """See `Tools.prepare_options`; a file has its whole path, since workers may have another folder."""
        done = super().prepare_options(options, config, tokenizer)
        return done | {"source": absolute(done["source"]), "rewards": [*map(absolute, done.get("rewards") or ())]}

    @classmethod
    def own_schemas(cls, options: Mapping[str, Any]) -> dict[str, Schema]:
        """The schemas of the class's methods; checks the class and the reward functions.

        Raises:
            UserError: it is no class with a method `reset`, a method cannot be a tool, or a reward function wants what
                only TRL's trainer has.
        """
        source = options["source"]
        kind = load_object(source) if is_reference(source) else None
        if not isinstance(kind, type) or not inspect.isfunction(getattr(kind, RESET, None)):
            raise UserError(f"the environment trl:{source}: write trl:file.py:Class, whose class has a method `reset`")
        for name in options.get("rewards") or ():
            function = load_object(name) if is_reference(name) else None
            if not callable(function):
                raise UserError(f"environment.options.rewards has {name!r}, which is no `file.py:function`")
            for parameter in inspect.signature(function).parameters.values():
                if parameter.name in UNKNOWN and parameter.default is parameter.empty:
                    raise UserError(f"the reward {name} wants {parameter.name}, which only TRL's trainer has")
        return {name: schema_of(getattr(kind, name), f"{source}.{name}") for name in tools_of(kind)}

    def reset(self, row: Row, rng: np.random.Generator) -> list[Message]:
        """The row's prompt, with what the class's `reset` returns at its end."""
        self._row = row
        prompt = super().reset({**row, "prompt": "" if row.get("prompt") is None else row["prompt"]}, rng)
        said = settled(self._world.reset(**row))
        if not isinstance(said, str | list | None):
            raise EpisodeError(f"has a reset that returned {said!r:.80}, not a text or None")
        if said is not None:
            prompt[-1] = {**prompt[-1], "content": joined(prompt[-1]["content"], said)}
        self._prompt = prompt
        return prompt

    def finish(self) -> float | None:
        """The sum of what `get_reward` and the reward functions return; None where there are none.

        Raises:
            EpisodeError: all of them left the episode out.
        """
        columns = {name: [value] for name, value in self._row.items() if name != "prompt"}
        batch = {"prompts": [self._prompt], "completions": [self.messages], "environments": [self._world], **columns}
        scores = [settled(self._world.get_reward())] if hasattr(self._world, REWARD) else []
        for name, function in self._rewards.items():
            parameters = inspect.signature(function).parameters
            every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            values = settled(function(**{key: x for key, x in batch.items() if every or key in parameters}))
            if not isinstance(values, Sequence) or len(values) != 1:
                raise EpisodeError(f"has the reward {name}, which returned {values!r:.80}, not a list of one reward")
            scores += values
        if scores and all(score is None for score in scores):
            raise EpisodeError("was left without a reward: all that it has returned None")
        return sum(float(score) for score in scores if score is not None) if scores else None

    def _error(self, text: str, error: Exception | None = None) -> str:
        return str({"error": text if error is None else str(error)})


def tools_of(kind: type) -> list[str]:
    """The names of the methods that are tools, in TRL's order."""
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in (RESET, REWARD)]
