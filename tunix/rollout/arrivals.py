"""Completions as they end: their texts are decoded, and their rewards begin, while others are still sampled.

Axes: T time.
"""

import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Any

from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Prompt
from tunix.rollout.rewards.base import Score
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import Clock
from tunix.types import Completion

ADDED = ("completion_ids", "completion_tokens")
"""Columns that a rollout adds to the row's own for the rewards: the token ids, and the number of sampled tokens."""


class Arrivals:
    """The completions of some prompts that have ended so far, by their numbers."""

    def __init__(self, tokenizer: Tokenizer | None, scorer: Scorer | None, owners: List[Prompt]):
        """Nothing has ended.

        Args:
            tokenizer: decodes the texts; None where there are none.
            scorer: the reward functions; None where there are none.
            owners: the prompt of each number.
        """
        self._tokenizer, self._owners = tokenizer, owners
        names = dict.fromkeys(name for owner in owners for name in owner.row)
        self._scoring = None if scorer is None else scorer.open([*dict.fromkeys([*names, *ADDED])])
        self._ended: dict[int, tuple[Completion, str]] = {}
        self._sampled = math.inf

    def add(self, number: int, completion: Completion) -> None:
        """Begins the rewards of a completion, unless they have been."""
        if number in self._ended:
            return
        text = self._tokenizer.decode(completion.tokens, skip_special=True) if self._tokenizer else ""
        self._ended[number] = completion, text
        if self._scoring is not None:
            owner = self._owners[number]
            counted: Mapping[str, Any] = {
                "completion_ids": completion.tokens.tolist(),
                "completion_tokens": int(completion.drawn.sum()),
            }
            self._scoring.add(number, owner.text, text, {**owner.row, **counted})

    def close(self) -> None:
        """Sampling is over: from now on rewards have a time of their own."""
        self._sampled = time.monotonic()

    @property
    def numbers(self) -> list[int]:
        """The numbers that have ended, in order."""
        return sorted(self._ended)

    @property
    def completions(self) -> list[Completion]:
        """The completions, in the order of their numbers."""
        return [self._ended[number][0] for number in self.numbers]

    @property
    def texts(self) -> list[str]:
        """What rewards read of each completion."""
        return [self._ended[number][1] for number in self.numbers]

    def scores(self, clock: Clock) -> dict[str, list[Score]]:
        """Waits for the scores of the reward functions; their time while others were sampled has cost nothing."""
        if self._scoring is None:
            return {}
        scores = self._scoring.result()
        overlapped, total = self._scoring.seconds(self._sampled)
        clock.count(overlapped=overlapped, rewards=total)
        return scores
