"""The recipe's section `rollout.environment`. Loads without jax."""

from typing import Any

from tunix.config import Config, Positive


class EnvironmentConfig(Config):
    """The environment that answers the model; every completion is an episode of it."""

    name: str = "problem"
    """A shipped environment (problem, calculator, guessing), or `module:Class` or `file.py:Class`."""
    options: dict[str, Any] = {}
    """Arguments of its constructor, such as {guesses: 5}."""
    turns: Positive = 16
    """Turns of the model in an episode at most; an environment that has not ended by then counts as failed."""
