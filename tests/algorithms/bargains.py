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


class Duel(Environment):
    """Two seats take turns, and who says `w` wins one from the other."""

    def reset(self, row: Any, rng: np.random.Generator) -> str:
        self._turn = -1
        return row["prompt"]

    def step(self, action: str, tokens: np.ndarray) -> Step:
        self._turn += 1
        seat = self._turn % 2
        if action == "w":
            return Step(seat=seat, done=True, outcomes={seat: 1.0, 1 - seat: -1.0})
        return Step("more", seat=seat)
