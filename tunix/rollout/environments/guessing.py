"""A game that a tiny model can learn: guess a number in a few tries, each answered with `higher` or `lower`.

    1-31          the prompt
    16            a guess, ended by a new line
    higher        the answer: the number is higher
    24            ... and so on; five guesses are enough for 31 numbers, if they are good ones

A guess that is no number of the range loses the game. The model's text is read as a guess and as nothing else, so that
it cannot write the environment's answers itself.
"""

from typing import ClassVar

import numpy as np

from tunix.errors import UserError
from tunix.rollout.environments.base import Environment, Row, Step

HIGHER, LOWER = "higher\n", "lower\n"


class Guessing(Environment):
    """1 for a number found within the guesses, else 0."""

    stop_strings: ClassVar[tuple[str, ...]] = ("\n",)

    def __init__(self, highest: int = 31, guesses: int = 5) -> None:
        """Sets the rules of the game.

        Args:
            highest: the largest number; the smallest is 1.
            guesses: guesses that the model has.
        """
        if highest < 1 or guesses < 1:
            raise UserError(f"the environment guessing has highest {highest} and guesses {guesses}: 1 is the least")
        self.highest, self._left = highest, guesses

    def reset(self, row: Row, rng: np.random.Generator) -> str:
        """The range of numbers. The one to guess is the row's `secret`, the same for all its completions, or random."""
        self._secret = int(row["secret"]) if "secret" in row else int(rng.integers(1, self.highest + 1))
        if not 1 <= self._secret <= self.highest:
            raise ValueError(f"the secret {self._secret} is not between 1 and {self.highest}")
        return f"1-{self.highest}\n"

    def step(self, action: str, tokens: np.ndarray) -> Step:
        """Higher or lower, or the end of the game."""
        text = action.removesuffix("\n")
        legal = text.isascii() and text.isdigit() and len(text) <= len(str(self.highest))
        if not legal or not 1 <= int(text) <= self.highest:
            return Step(reward=0.0, done=True)
        self._left -= 1
        guess = int(text)
        if guess == self._secret or self._left == 0:
            return Step(reward=float(guess == self._secret), done=True)
        return Step(HIGHER if guess < self._secret else LOWER)


def secrets(count: int = 3100, highest: int = 31) -> list[dict[str, int]]:
    """Rows with every `secret` in turn. For `data.train`."""
    return [{"secret": i % highest + 1} for i in range(count)]
