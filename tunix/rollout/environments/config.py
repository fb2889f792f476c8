"""The recipe's section `rollout.environment`. Loads without jax."""

from typing import Annotated, Any

from pydantic import Field

from tunix.config import Config, Positive


class EnvironmentConfig(Config):
    """The environment that answers the model; every completion is an episode of it."""

    name: str = "problem"
    """A shipped environment (problem, calculator, guessing), or `module:Class` or `file.py:Class`."""
    options: dict[str, Any] = {}
    """Arguments of its constructor, such as {guesses: 5}."""
    turns: Positive = 16
    """Turns of the model in an episode at most; an environment that has not ended by then counts as failed."""
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Seconds that a call of its constructor, reset or step may take; after that the episode counts as failed, and its
    worker is replaced."""
    workers: Positive | None = None
    """Worker processes for environments, each of which answers one call at a time; null: as many as there are cores, at
    most 8. More, up to 32, where a step waits for something else, such as a search. Never changes a result."""
