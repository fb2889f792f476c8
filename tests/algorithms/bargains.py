"""Environments of the tests of on-policy algorithms: workers import them from here, without jax."""

from typing import Any

import numpy as np

from tunix.rollout.environments.base import Environment, Step


class Bargain(Environment):
    """Pays the number of each turn, and asks for `more` until it hears a 0."""

    def reset(self, row: Any, rng: np.random.Generator) -> str:
        return row["prompt"]

    def step(self, action: str, tokens: np.ndarray) -> Step:
        return Step("more", reward=float(action), done=float(action) == 0)


class Judged(Bargain):
    """Says nothing about what a turn is worth."""

    scores = False

    def step(self, action: str, tokens: np.ndarray) -> Step:
        return Step("more", done="." in action)
