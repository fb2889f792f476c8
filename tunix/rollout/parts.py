"""What is computed of completions on the device, in parts: one begins as soon as all of its completions have ended.

A part has the same completions whatever ended when, so that a run that is killed and resumed computes the same bits,
and parts have one size, so that one program is compiled.

Axes: T time.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from tunix.data.seen import followed
from tunix.data.types import Prompt
from tunix.rollout.rewards.base import Score
from tunix.types import Completion, Sequence

Found = TypeVar("Found")

Measure = Callable[[List[Sequence], int], Mapping[str, List[np.ndarray]]]
"""What a loss reads of single sequences, such as log-probs: (sequences, number that the work is shaped for) -> by name
an array for each sequence, on their way from the devices."""


@dataclass(frozen=True)
class Judge:
    """A reward that reads tokens and runs in this process, such as a reward model."""

    name: str
    """Name in metrics and messages, e.g. `model`."""
    weight: float
    """Factor of its scores in the weighted sum."""
    together: int
    """Completions of a part, e.g. 64."""
    begin: Callable[[List[Prompt], List[Completion], List[str]], Callable[[], list[Score]]]
    """(prompts, completions, their texts) -> what waits for the score of each completion, or the reason why it has
    none; begins to compute them."""


@dataclass(frozen=True)
class Measuring:
    """Log-probs and values of completions, computed while others are sampled."""

    measure: Measure
    together: int
    """Completions of a part, e.g. 32."""


class Parts(Generic[Found]):
    """The places 0, 1, ... of completions, divided in their order."""

    def __init__(self, total: int, size: int, begin: Callable[[range], Found]):
        """Nothing has ended.

        Args:
            total: number of places.
            size: places of a part; the last one may have fewer.
            begin: begins the work on the completions of these places.
        """
        self._places = [range(start, min(start + size, total)) for start in range(0, total, size)]
        self._waiting, self._size, self._begin = [len(places) for places in self._places], size, begin
        self.found: dict[range, Found] = {}
        """The places of each part that was begun -> what `begin` returned."""

    def add(self, place: int) -> None:
        """The completion of a place has ended."""
        part = place // self._size
        self._waiting[part] -= 1
        if not self._waiting[part]:
            self.found[self._places[part]] = self._begin(self._places[part])


def sequence_of(prompt: Prompt, completion: Completion) -> Sequence:
    """A prompt and its completion, of which the sampled tokens are trained, with the experts that they used."""
    return Sequence(
        tokens=np.concatenate([prompt.tokens, completion.tokens]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(len(prompt.tokens), bool), completion.drawn]),
        pictures=followed(prompt.pictures, len(completion.tokens)),
        experts=completion.experts,
    )
