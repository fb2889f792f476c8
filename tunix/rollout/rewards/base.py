"""What a reward is: a plain function, read once for how it wants to be called, and the score or failure it gives.

    def close(prompt: str, completion: str, answer: str) -> float        # one sample a call
    async def judge(completion: str, question: str) -> float             # likewise, many at a time
    def diverse(prompts: list[str], completions: list[str]) -> list[float]   # the whole batch in one call

The first parameter tells which: `prompt` or `completion` is a sample, `prompts` or `completions` the batch. Every other
parameter is an option of the recipe, or a column of the row by its name; `**columns` takes all the columns. Loads
without jax or numpy, as do all the files here, so that worker processes start at once.
"""

import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunix.errors import UserError, nearest
from tunix.rollout.rewards.config import RewardFunction
from tunix.rollout.rewards.shipped import SHIPPED
from tunix.util.plugins import is_reference, load_object

ONE = ("prompt", "completion")
MANY = ("prompts", "completions")


@dataclass(frozen=True)
class Failure:
    """A sample that a reward has no score for. It is counted and left out, and never is a 0."""

    reason: str
    """A sentence, e.g. `judge took longer than 10 s`."""


Score = float | Failure


@dataclass(frozen=True)
class Reward:
    """A reward function and all that is needed to call it."""

    name: str
    """In metrics and messages, e.g. `exact_match`."""
    function: Callable[..., Any]
    """The function itself."""
    weight: float = 1.0
    """Multiplies its scores in the sum."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with one value for the whole run."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Argument -> column, where they are called differently."""
    source: str | None = None
    """`module:function` or `file.py:function` for a worker process to load; None runs it in a thread of this one."""
    modules: tuple[str, ...] = ()
    """What a worker imports before the first call, so that no deadline pays for it."""
    clip: tuple[float, float] | None = None
    """Bounds of a score, before the weight."""

    def clipped(self, score: float) -> float:
        """The score within its bounds."""
        return score if self.clip is None else min(max(score, self.clip[0]), self.clip[1])

    @property
    def batched(self) -> bool:
        """Whether one call scores the whole batch."""
        return next(iter(inspect.signature(self.function).parameters)) in MANY

    @property
    def asynchronous(self) -> bool:
        """Whether it is `async def`."""
        return inspect.iscoroutinefunction(self.function)

    @property
    def texts(self) -> list[str]:
        """Those of the prompt and the completion that it takes."""
        names = [parameter.name for parameter in _parameters(self.function)]
        return [name for name in _texts(self.batched) if name in names]

    def arguments(self, present: Sequence[str]) -> dict[str, str]:
        """Argument -> column, for a batch with the columns `present`.

        Raises:
            UserError: a column that the function cannot do without is not there.
        """
        arguments: dict[str, str] = {}
        for parameter in _parameters(self.function):
            column = self.columns.get(parameter.name, parameter.name)
            if parameter.name in self.options or parameter.name in _texts(self.batched):
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                reserved = {*self.options, *_texts(self.batched), *self.columns.values()}
                arguments |= {self._argument(name): name for name in present if name not in reserved}
                arguments |= {argument: name for argument, name in self.columns.items() if name in present}
            elif column in present:
                arguments[parameter.name] = column
            elif parameter.default is parameter.empty:
                raise UserError(self._missing(parameter.name, column, present))
        return arguments

    def _argument(self, column: str) -> str:
        return next((argument for argument, name in self.columns.items() if name == column), column)

    def _missing(self, argument: str, column: str, present: Sequence[str]) -> str:
        """The message for a column that is not there."""
        return (
            f"the reward {self.name} wants the column {column!r}; there are {', '.join(map(repr, present)) or 'none'}."
            f"{nearest(column, present)} Name yours in its `columns`, as in {{{argument}: their_name}}, "
            "or give one value for all rows in its `options`"
        )


def read_reward(spec: RewardFunction | Reward | Callable[..., Any], deadline: float) -> Reward:
    """The reward that a recipe's entry or a function stands for, checked as far as it can be before it is called.

    Args:
        spec: a recipe's entry; or a function, which then counts once and is called as it is.
        deadline: seconds of a call, which a shipped reward's own time limit has to keep.

    Raises:
        UserError: no such reward, a signature that tells nothing, an unknown option or one of the wrong type.
    """
    if isinstance(spec, Reward):
        reward = spec
    elif isinstance(spec, RewardFunction):
        reward = _named(spec, deadline)
    else:
        reward = Reward(_name(spec), spec, source=_source(spec))
    _check_signature(reward)
    return reward


def _named(spec: RewardFunction, deadline: float) -> Reward:
    """The reward of a recipe's entry."""
    if spec.name in SHIPPED:
        shipped = SHIPPED[spec.name]
        shipped.check(spec.title, spec.options, deadline)
        source = f"{shipped.function.__module__}:{shipped.function.__name__}"
        own = (spec.options, spec.columns, source, shipped.modules, spec.clip)
        return Reward(spec.title, shipped.function, spec.weight, *own)
    if not is_reference(spec.name):
        raise UserError(
            f"reward.functions has {spec.name!r}, which is not shipped ({', '.join(SHIPPED)}) and is no "
            f"`module:function` or `file.py:function`.{nearest(spec.name, SHIPPED)}"
        )
    function = load_object(spec.name)
    if not callable(function):
        raise UserError(f"reward.functions has {spec.name!r}, which is a {type(function).__name__}, not a function")
    place, _, name = spec.name.rpartition(":")
    source = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else spec.name
    return Reward(spec.title, function, spec.weight, spec.options, spec.columns, source, clip=spec.clip)


def _check_signature(reward: Reward) -> None:
    """Refuses a function that cannot be called with what it asks for, and options that it does not have."""
    parameters = _parameters(reward.function)
    first = parameters[0].name if parameters else None
    if first not in (*ONE, *MANY):
        raise UserError(
            f"the reward {reward.name} begins with the parameter {first!r}: call it `completion` (or `prompt`) for a "
            "function of one sample, `completions` (or `prompts`) for one of the whole batch"
        )
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise UserError(f"the reward {reward.name} is called by keywords; {parameter} cannot be one")
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    open_ended = len(names) < len(parameters)
    for key, given in (("options", reward.options), ("columns", reward.columns)):
        for name in given:
            if name in _texts(reward.batched) or not (name in names or open_ended):
                known = [other for other in names if other not in _texts(reward.batched)]
                raise UserError(
                    f"the reward {reward.name} has no parameter {name!r} for its `{key}`; "
                    f"it has {', '.join(known) or 'none'}.{nearest(name, known)}"
                )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _texts(batched: bool) -> tuple[str, str]:
    return MANY if batched else ONE


def _name(function: Callable[..., Any]) -> str:
    """What a function is called; an object that is called has its class's name."""
    return function.__name__ if hasattr(function, "__name__") else type(function).__name__


def _source(function: Callable[..., Any]) -> str | None:
    """Where a worker process finds the same function; None for one of a notebook's cell, a closure or an object."""
    if not inspect.isfunction(function) or function.__qualname__ != function.__name__:
        return None
    module = sys.modules.get(function.__module__)
    if module is None or vars(module).get(function.__name__) is not function:
        return None
    found = importlib.machinery.PathFinder.find_spec(function.__module__.partition(".")[0])
    return None if found is None or function.__module__ == "__main__" else f"{function.__module__}:{function.__name__}"
