"""The recipe's section `rollout.environment`. Loads without jax."""

from typing import Any

from tunix.config import Config, Positive


class EnvironmentConfig(Config):
    """What answers the model: one episode of it per completion."""

    name: str = "problem"
    """A shipped one (problem, calculator, guessing), or `module:Class` or `file.py:Class`."""
    options: dict[str, Any] = {}
    """Its settings, such as {guesses: 5}."""
    turns: Positive = 16
    """Answers of the model in an episode at most; an environment that has not ended by then counts as failed."""
