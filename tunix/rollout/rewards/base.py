"""A reward is a plain function: how its signature is read, how it is called, and its score or failure.

    def close(prompt: str, completion: str, answer: str) -> float        # one sample a call
    async def judge(completion: str, question: str) -> float             # one sample a call, many calls at a time
    def diverse(prompts: list[str], completions: list[str]) -> list[float]   # the whole batch in one call

The name of the first parameter decides: `prompt` or `completion` is a sample, `prompts` or `completions` the batch.
Every other parameter is an option of the recipe, or the row's column of that name; `**columns` takes all the columns.
With `style: trl` a function is called as TRL's GRPOTrainer calls it: the batch, with messages as they are.
All files of this folder load without jax or numpy, so that worker processes start quickly.
"""

import importlib.machinery
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tunix.errors import Failure, Score, UserError, nearest
from tunix.rollout.rewards.config import RewardFunction
from tunix.rollout.rewards.shipped import MODULES, SHIPPED, check_shipped
from tunix.util.plugins import absolute, is_reference, load_object

ONE = ("prompt", "completion")
MANY = ("prompts", "completions")
WORKDIR = "workdir"
ADDED = ("completion_ids", "completion_tokens", WORKDIR)
"""Columns that a rollout adds to the row's own for the rewards: the token ids, the number of sampled tokens, and the
folder of an agent's episode, empty in other runs."""
VERL = {"ground_truth": "reward_model.ground_truth"}
"""Arguments of verl's reward functions whose columns have other names in its rows."""
SOLUTION = "solution_str"
"""The completion, as verl's reward functions call it."""
LOGS = ("log_metric", "log_extra")
"""Functions that TRL gives to a reward."""
ABSENT = ("trainer_state", "environments")
"""Arguments that TRL gives to a reward and tunix does not: no score depends on when it is computed."""


def parted(scores: Mapping[str, Score]) -> tuple[dict[str, float], dict[str, str]]:
    """`(rewards, failures)`: the scores of a completion by the names of their rewards, NaN where one failed or left it
    out; and of those that failed the reasons."""
    failures = {name: score.reason for name, score in scores.items() if isinstance(score, Failure)}
    rewards = {name: math.nan if isinstance(x, Failure) or x is None else float(x) for name, x in scores.items()}
    return rewards, failures


@dataclass(frozen=True)
class Reward:
    """A reward function with everything needed to call it."""

    name: str
    """Name in metrics and messages, e.g. `exact_match`."""
    function: Callable[..., Any]
    """The function, as its author wrote it."""
    weight: float = 1.0
    """Factor of its scores in the weighted sum."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with one value for the whole run, e.g. `{"strip": False}`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Argument -> column, where their names differ, e.g. `{"answer": "solution"}`."""
    source: str | None = None
    """`module:function` or `file.py:function` for a worker process to load; None runs it in a thread here."""
    modules: tuple[str, ...] = ()
    """Modules that a worker imports before the first call, so that no deadline includes their import."""
    style: Literal["tunix", "trl", "verl"] = "tunix"
    """How the function is called; see `RewardFunction.style`."""
    deadline: float = 0.0
    """Seconds that a call may take; 0 for those of its scorer."""
    data_set: str = ""
    """The data set whose completions it scores, e.g. `sums`; empty for all that have no rewards of their own."""

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """Those of the function."""
        return list(inspect.signature(self.function).parameters.values())

    @property
    def batched(self) -> bool:
        """Whether one call scores the whole batch."""
        return self.style == "trl" or (self.style == "tunix" and self.parameters[0].name in MANY)

    @property
    def reserved(self) -> set[str]:
        """Names of parameters that are no columns."""
        trl = (*ONE, *LOGS, *ABSENT) if self.style == "trl" else ()
        return {*self.options, *self.texts, *trl}

    @property
    def texts(self) -> tuple[str, str]:
        """Names of the arguments that are the prompt and the completion, or the batch's."""
        return ("prompt", SOLUTION) if self.style == "verl" else MANY if self.batched else ONE

    def taken(self, names: Sequence[str]) -> list[str]:
        """Those of the names that it has as parameters; `**kwargs` in TRL's style has all."""
        parameters = self.parameters
        every = self.style == "trl" and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        return [name for name in names if every or name in [parameter.name for parameter in parameters]]

    def arguments(self, present: Sequence[str], strict: bool = True) -> dict[str, str]:
        """The column for each argument, in a batch with the columns `present`; a dotted name is there where its column
        is, unless `strict` and names within that are listed too.

        Raises:
            UserError: a column that the function requires is missing.
        """
        arguments: dict[str, str] = {}
        columns = {**(VERL if self.style == "verl" else {}), **self.columns}

        def is_there(column: str) -> bool:
            head = column.partition(".")[0]
            listed = strict and any(name.startswith(f"{head}.") for name in present)
            return column in present or (head in present and not listed)

        for parameter in self.parameters:
            column = columns.get(parameter.name, parameter.name)
            if parameter.name in self.reserved:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                reserved = self.reserved | {*self.columns.values()}
                arguments |= {name: name for name in present if name not in reserved}
                arguments |= {argument: name for argument, name in self.columns.items() if is_there(name)}
            elif is_there(column):
                arguments[parameter.name] = column
            elif parameter.name in (*LOGS, *ABSENT) and parameter.default is parameter.empty:
                raise UserError(
                    f"the reward {self.name} wants {parameter.name}, which TRL gives to its reward functions: if it is "
                    "one of those, say `style: trl`"
                )
            elif parameter.default is parameter.empty:
                raise UserError(
                    f"the reward {self.name} wants the column {column!r}; there are "
                    f"{', '.join(map(repr, present)) or 'none'}.{nearest(column, present)} Name yours in its "
                    f"`columns`, as in {{{parameter.name}: their_name}}, or give one value for all rows in its "
                    "`options`"
                )
        return arguments


def read_reward(spec: RewardFunction | Reward | Callable[..., Any], deadline: float) -> Reward:
    """Loads and checks the reward that a recipe's entry names, or that a function is.

    Args:
        spec: a recipe's entry; or a function, with weight 1 and no options.
        deadline: seconds of a call; a shipped reward's own time limit has to be shorter.

    Raises:
        UserError: no such reward, a first parameter of another name, an unknown option or one of the wrong type.
    """
    if isinstance(spec, Reward):
        reward = spec
    elif isinstance(spec, RewardFunction):
        modules: tuple[str, ...] = ()
        if spec.name in SHIPPED:
            check_shipped(spec.name, spec.title, spec.options, deadline)
            if spec.style != "tunix":
                raise UserError(f"the reward {spec.title} is tunix's own: leave `style: {spec.style}` out")
            function, modules = SHIPPED[spec.name], MODULES.get(spec.name, ())
            source = f"{function.__module__}:{function.__name__}"
        elif not is_reference(spec.name):
            raise UserError(
                f"reward.functions has {spec.name!r}, which is not shipped ({', '.join(SHIPPED)}) and is no "
                f"`module:function` or `file.py:function`.{nearest(spec.name, SHIPPED)}"
            )
        else:
            function, source = load_object(spec.name), absolute(spec.name)
        if not callable(function):
            raise UserError(f"reward.functions has {spec.name!r}, which is a {type(function).__name__}, not a function")
        reward = Reward(spec.title, function, spec.weight, spec.options, spec.columns, source, modules, spec.style)
    else:  # a callable object has its class's name
        name = spec.__name__ if hasattr(spec, "__name__") else type(spec).__name__
        reward = Reward(name, spec, source=_source(spec))
    parameters = reward.parameters
    first = parameters[0].name if parameters else None
    if reward.style == "trl":
        for parameter in parameters:
            if parameter.name in ABSENT and parameter.default is parameter.empty:
                raise UserError(
                    f"the reward {reward.name} requires {parameter.name}, which only TRL's trainer has: give it a "
                    "default"
                )
    elif reward.style == "verl":
        if SOLUTION not in [parameter.name for parameter in parameters]:
            raise UserError(
                f"the reward {reward.name} has no parameter {SOLUTION}, as verl's have: it has "
                f"{', '.join(parameter.name for parameter in parameters) or 'none'}"
            )
    elif first not in (*ONE, *MANY):
        raise UserError(
            f"the reward {reward.name} begins with the parameter {first!r}: call it `completion` (or `prompt`) for a "
            "function of one sample, `completions` (or `prompts`) for one of the whole batch"
        )
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise UserError(f"the reward {reward.name} is called by keywords; {parameter} cannot be one")
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    open_ended = len(names) < len(parameters)
    for key, named in (("options", reward.options), ("columns", reward.columns)):
        for name in named:
            if name in reward.reserved - {*reward.options} or not (name in names or open_ended):
                known = [other for other in names if other not in reward.reserved - {*reward.options}]
                raise UserError(
                    f"the reward {reward.name} has no parameter {name!r} for its `{key}`; "
                    f"it has {', '.join(known) or 'none'}.{nearest(name, known)}"
                )
    return reward if reward.deadline else replace(reward, deadline=deadline)


def _source(function: Callable[..., Any]) -> str | None:
    """Where a worker process can import the function; None for one of a notebook's cell, a closure or an object."""
    if not inspect.isfunction(function) or function.__qualname__ != function.__name__:
        return None
    module = sys.modules.get(function.__module__)
    if module is None or vars(module).get(function.__name__) is not function:
        return None
    spec = importlib.machinery.PathFinder.find_spec(function.__module__.partition(".")[0])
    return None if spec is None or function.__module__ == "__main__" else f"{function.__module__}:{function.__name__}"
