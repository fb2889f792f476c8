"""Compiles every program that a run's sampling may need, before its first step.

`shapes.py` has the set of shapes. Each program is called once with nothing to do: the call compiles it, and a dispatch
in which no slot is running returns at once.

Axes: B rows, C tokens at a time, St decode steps.
"""

from dataclasses import dataclass

import numpy as np

from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.rollout.engine.programs import State, blank, decode, prefill, put, resize, take
from tunix.rollout.engine.shapes import ROWS, Sizes, narrowed
from tunix.rollout.engine.slots import Slots
from tunix.types import Workload


@dataclass(frozen=True)
class Warmth:
    """Compiles one engine's programs for a workload."""

    model: Model
    weights: Weights
    sizes: Sizes
    steps: int
    """St: tokens that a slot samples in one dispatch at most."""
    work: Workload

    def __call__(self) -> None:
        """Calls every program once in every shape."""
        widths = self.sizes.widths(self.work.requests)
        # An environment's answers come from as many slots as there are.
        most = max(widths[0], self.work.prompts) if self.work.replies else self.work.prompts
        for length in self.sizes.lengths(self.work.length):
            for width in widths:
                self._decode(width, length)
            for rows in (rows for rows in ROWS if rows <= most):
                self._fill(rows, [width for width in widths if width >= rows], length)

    def _decode(self, width: int, length: int) -> None:
        """Compiles a dispatch, and the changes from its shape to the next ones."""
        nothing = np.int32(0)
        state = self._blank(width, length)
        state, _ = decode(self.model, self.steps, self.weights, state, Slots(width, 1).flow(), nothing, nothing)
        if width > 1:
            self._resize(state, narrowed(width), length)
        self._lengthen(state, width, length)

    def _fill(self, rows: int, widths: list[int], length: int) -> None:
        """Compiles the prefill of rows and the copy into slots, for prompts and for an environment's answers."""
        filled = self._prefilled(
            self._blank(rows, length), rows, self.sizes.prompt_cuts(self.work.prompt_length, length)
        )
        self._lengthen(filled, rows, length)
        for width in widths:
            state = put(self._blank(width, length), filled, np.full(width, -1, np.int32))
            if self.work.replies:
                taken = take(state, np.zeros(rows, np.int32))
                taken = self._prefilled(taken, rows, self.sizes.cuts(min(self.work.length, length)))
                put(state, taken, np.full(width, -1, np.int32))

    def _prefilled(self, state: State, rows: int, sizes: list[int]) -> State:
        """The rows after a prefill of each of these sizes."""
        none, one = np.zeros(rows, np.int32), np.ones(rows, np.int32)
        for size in sizes:
            state, _ = prefill(self.model, self.weights, state, np.zeros((rows, size), np.int32), none, one, none)
        return state

    def _lengthen(self, state: State, width: int, length: int) -> None:
        if length < self.sizes.bucket(self.work.length):
            self._resize(state, width, self.sizes.bucket(length + 1))

    def _resize(self, state: State, width: int, length: int) -> None:
        resize(self.model, state, np.zeros(width, np.int32), length, self.sizes.piece)

    def _blank(self, rows: int, length: int) -> State:
        return blank(self.model, rows, length, self.sizes.piece, self.sizes.dtype)
