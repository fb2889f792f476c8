"""Compiles every program that a run's sampling may need, before its first step.

`shapes.py` has the set of shapes. Each program is called once with nothing to do: the call compiles it, and a dispatch
in which no slot is running returns at once.
"""

from dataclasses import dataclass

import numpy as np

from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.rollout.engine.holdings import Holdings
from tunix.rollout.engine.pieces import Piece
from tunix.rollout.engine.programs import blank, decode, prefill
from tunix.rollout.engine.shapes import Sizes
from tunix.rollout.engine.slots import Slots


@dataclass(frozen=True)
class Warmth:
    """Compiles one engine's programs."""

    model: Model
    weights: Weights
    sizes: Sizes

    def __call__(self) -> None:
        """Calls every program once in every shape."""
        sizes, nothing = self.sizes, np.int32(0)
        state, slots, holdings = blank(self.model, sizes), Slots(sizes.slots, 1), Holdings(sizes)
        for width in sizes.widths:
            own = sizes.slots_of_shard
            chosen = np.flatnonzero(np.arange(sizes.slots) % own < width // sizes.shards)
            flow = slots.flow(chosen)
            for numbers in sizes.gathered(width):
                reads = holdings.reads(chosen, numbers)
                state, _ = decode(self.model, sizes.steps, self.weights, state, flow, reads, nothing, nothing)
        for length in sizes.pieces:
            state, _ = prefill(self.model, self.weights, state, Piece(holdings, length).inputs)
