"""Loads the environment that a recipe names, and the table of those that come with tunix."""

import functools
import inspect
from collections.abc import Callable

from tunix.errors import UserError, nearest
from tunix.rollout.environments.base import Environment
from tunix.rollout.environments.calculator import Calculator
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.guessing import Guessing
from tunix.rollout.environments.problem import Problem
from tunix.util.plugins import check_options, is_reference, load_object

SHIPPED: dict[str, type[Environment]] = {"problem": Problem, "calculator": Calculator, "guessing": Guessing}


def read_environment(config: EnvironmentConfig) -> Callable[[], Environment]:
    """A function that makes a new environment for each episode.

    Raises:
        UserError: no such environment, or an option that it does not have or that has the wrong type.
    """
    kind = _kind(config.name)
    what = f"the environment {config.name}"
    if config.name in SHIPPED:
        check_options(what, kind, config.options)
    parameters = inspect.signature(kind).parameters
    for option in config.options:
        if option not in parameters:
            raise UserError(
                f"{what} has no option {option!r}; it has {', '.join(parameters) or 'none'}."
                f"{nearest(option, parameters)}"
            )
    make = functools.partial(kind, **config.options)
    make()  # an error of its constructor is raised before the first rollout
    return make


def _kind(name: str) -> type[Environment]:
    if name in SHIPPED:
        return SHIPPED[name]
    if not is_reference(name):
        raise UserError(
            f"environment.name is {name!r}, which is not shipped ({', '.join(SHIPPED)}) and is no `module:Class` or "
            f"`file.py:Class`.{nearest(name, SHIPPED)}"
        )
    kind = load_object(name)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise UserError(f"{name} is {kind!r:.80}, not a class that extends tunix.rollout.environments.base.Environment")
    return kind
