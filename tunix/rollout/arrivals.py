"""Completions as they end: they are decoded, scored and measured while others are still sampled.

Axes: T time.
"""

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from tunix.data.rendered import prompt_messages
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Prompt
from tunix.rollout.parts import Judge, Measuring, Parts, sequence_of
from tunix.rollout.rewards.base import ADDED, Score
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.types import Clock
from tunix.types import Completion


def columns_of(owners: List[Prompt]) -> list[str]:
    """The columns that rewards of these prompts' completions may read."""
    return list(dict.fromkeys([*(name for owner in owners for name in owner.row), *ADDED]))


def columns(owner: Prompt, completion: Completion) -> dict[str, Any]:
    """The columns that rewards of a completion may read."""
    added = {"completion_ids": completion.tokens.tolist(), "completion_tokens": int(completion.drawn.sum())}
    return {**owner.row, **added}


class Arrivals:
    """The completions of some prompts that have ended so far, by their numbers."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        scorer: Scorer | None,
        owners: List[Prompt],
        total: int | None = None,
        judge: Judge | None = None,
        measuring: Measuring | None = None,
    ):
        """Nothing has ended.

        Args:
            tokenizer: decodes the texts; None where there are none.
            scorer: the reward functions; None where there are none.
            owners: the prompt of each number.
            total: how many completions are waited for; None for one of each number.
            judge: a reward model; None where there is none.
            measuring: what is computed for the loss; None for nothing.
        """
        self._tokenizer, self._owners = tokenizer, owners
        self._scoring = None if scorer is None else scorer.open(columns_of(owners))
        self._ended: dict[int, tuple[Completion, str]] = {}
        self._places: dict[int, int] = {}
        """Place of a completion among those that are waited for -> its number."""
        self._sampled = math.inf
        self._judge, self._measuring, self._overlapped = judge, measuring, 0.0
        number = len(owners) if total is None else total
        self._judged = judge and Parts(number, judge.together, self._begin_judging)
        self._measured = measuring and Parts(number, measuring.together, self._begin_measuring)

    def add(self, number: int, completion: Completion, place: int | None = None) -> None:
        """Begins the rewards of a completion, unless they have been.

        Args:
            number: of its request.
            completion: to its end.
            place: its place among those that are waited for; None where it is the number.
        """
        if number in self._ended:
            return
        text = self._tokenizer.decode(completion.tokens, skip_special=True) if self._tokenizer else ""
        self._ended[number] = completion, text
        if self._scoring is not None:
            owner = self._owners[number]
            self._scoring.add(number, owner.text, text, columns(owner, completion), prompt_messages(owner.row))
        self._places[number if place is None else place] = number
        for parts in filter(None, (self._judged, self._measured)):
            parts.add(number if place is None else place)

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
        """Waits for the scores by reward, in the order of the numbers; their time while others were sampled has cost
        nothing."""
        scores: dict[str, list[Score]] = {}
        if self._scoring is not None:
            scores |= self._scoring.result()
            clock.logged |= self._scoring.metrics
            overlapped, total = self._scoring.seconds(self._sampled)
            clock.count(overlapped=overlapped, rewards=total)
        if self._judge is not None and self._judged is not None:
            began = time.monotonic()
            found = self._by_number({places: ended() for places, ended in self._judged.found.items()})
            waited = time.monotonic() - began
            clock.count(overlapped=self._overlapped, rewards=self._overlapped + waited)
            scores[self._judge.name] = found
        return scores

    @property
    def logged(self) -> list[dict[str, Any]]:
        """What rewards logged of each completion, in the order of the numbers; nothing before `scores`."""
        logged = {} if self._scoring is None else self._scoring.logged
        return [logged.get(number, {}) for number in self.numbers]

    def measured(self, clock: Clock) -> list[dict[str, np.ndarray]]:
        """Waits for what was computed of each completion for the loss, in the order of the numbers."""
        if self._measured is None:
            return [{} for _ in self._ended]
        with clock.part("logprobs"):
            rows = {
                places: [{name: arrays[i] for name, arrays in found.items()} for i in range(len(places))]
                for places, found in self._measured.found.items()
            }
        return self._by_number(rows)

    def _by_number(self, found: Mapping[range, List[Any]]) -> list[Any]:
        """What was found for each part, in the order of the numbers."""
        by_number = {
            self._places[place]: x for places, all in found.items() for place, x in zip(places, all, strict=True)
        }
        return [by_number[number] for number in self.numbers]

    def _begin_judging(self, places: range) -> Callable[[], list[Score]]:
        assert self._judge is not None
        began, ended = time.monotonic(), [self._ended[self._places[place]] for place in places]
        owners = [self._owners[self._places[place]] for place in places]
        later = self._judge.begin(owners, [completion for completion, _ in ended], [text for _, text in ended])
        if self._sampled == math.inf:
            self._overlapped += time.monotonic() - began
        return later

    def _begin_measuring(self, places: range) -> Mapping[str, List[np.ndarray]]:
        assert self._measuring is not None
        numbers = [self._places[place] for place in places]
        sequences = [sequence_of(self._owners[number], self._ended[number][0]) for number in numbers]
        return self._measuring.measure(sequences, self._measuring.together)
