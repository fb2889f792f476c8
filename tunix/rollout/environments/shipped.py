"""Loads the environment that a recipe names, and the table of those that come with tunix."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunix.errors import UserError, nearest
from tunix.rollout.environments.base import Environment
from tunix.rollout.environments.calculator import Calculator
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.guessing import Guessing
from tunix.rollout.environments.problem import Problem
from tunix.util.plugins import absolute, check_options, is_reference, load_object

SHIPPED: dict[str, type[Environment]] = {"problem": Problem, "calculator": Calculator, "guessing": Guessing}


@dataclass(frozen=True)
class EnvironmentMaker:
    """Makes a new environment for each episode."""

    kind: type[Environment]
    """Its class, as its author wrote it."""
    options: Mapping[str, Any]
    """Arguments of its constructor, e.g. `{"guesses": 5}`."""
    source: str | None
    """`module:Class` or `file.py:Class` for a worker process to load; None for a class of a notebook's cell."""

    def __call__(self) -> Environment:
        """A new environment."""
        return self.kind(**self.options)


def read_environment(config: EnvironmentConfig) -> EnvironmentMaker:
    """Loads and checks the environment that a recipe names; its constructor is not called yet.

    Raises:
        UserError: no such environment, or an option that it does not have or that has the wrong type.
    """
    name, what = config.name, f"the environment {config.name}"
    if name in SHIPPED:
        kind = SHIPPED[name]
        check_options(what, kind, config.options)
        source = f"{kind.__module__}:{kind.__name__}"
    elif not is_reference(name):
        raise UserError(
            f"environment.name is {name!r}, which is not shipped ({', '.join(SHIPPED)}) and is no `module:Class` or "
            f"`file.py:Class`.{nearest(name, SHIPPED)}"
        )
    else:
        kind = load_object(name)
        if not (isinstance(kind, type) and issubclass(kind, Environment)):
            raise UserError(
                f"{name} is {kind!r:.80}, not a class that extends tunix.rollout.environments.base.Environment"
            )
        source = None if name.startswith("__main__:") else absolute(name)
    parameters = inspect.signature(kind).parameters
    for option in config.options:
        if option not in parameters:
            raise UserError(
                f"{what} has no option {option!r}; it has {', '.join(parameters) or 'none'}."
                f"{nearest(option, parameters)}"
            )
    return EnvironmentMaker(kind, config.options, source)
