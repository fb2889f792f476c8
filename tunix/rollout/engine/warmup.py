"""Compiles every program that a run's sampling may need, before its first step.

`shapes.py` has the set of shapes. The programs are traced one after the other, and compiled at the same time: a
compiler works outside of the interpreter's lock, and takes minutes for a large model. Then each is called once with
nothing to do, which loads it: a dispatch in which no slot is running returns at once.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from tunix.mesh import compile_on
from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.rollout.engine.holdings import Holdings
from tunix.rollout.engine.pieces import Piece, copies_of
from tunix.rollout.engine.programs import Compiled, State, blank, copy_pages, decode, prefill
from tunix.rollout.engine.shapes import Sizes
from tunix.rollout.engine.slots import Slots


class Call(NamedTuple):
    """A call of a program; the state of the slots is among its arguments, and returned first."""

    program: Compiled[tuple[State, Any]]
    before: tuple[Any, ...]
    """The arguments before the state."""
    after: tuple[Any, ...]
    """Those after it."""

    def lowered(self, state: State) -> jax.stages.Lowered:
        """The program, traced."""
        return self.program.lower(*self.before, state, *self.after)

    def __call__(self, state: State) -> State:
        """Runs the program."""
        return self.program(*self.before, state, *self.after)[0]


@dataclass(frozen=True)
class Warmth:
    """Compiles one engine's programs."""

    model: Model
    weights: Weights
    sizes: Sizes

    def __call__(self) -> None:
        """Compiles every program in every shape, as many at a time as this machine has cores."""
        state, calls = blank(self.model, self.sizes), list(self.calls())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiling = partial(compile_on, jax.sharding.get_mesh())
            for waiting in [pool.submit(compiling, call.lowered(state)) for call in calls]:
                waiting.result()
        for call in calls:
            state = call(state)

    def calls(self) -> Iterator[Call]:
        """Calls of all programs, in all shapes, that leave the state as it is."""
        sizes, nothing = self.sizes, np.int32(0)
        slots = Slots(sizes.slots, sizes.length, sizes.guesses, turns=sizes.turns)
        holdings = Holdings(sizes)
        for width in sizes.widths:
            own = sizes.slots_of_shard
            chosen = np.flatnonzero(np.arange(sizes.slots) % own < width // sizes.shards)
            flow = slots.flow(chosen)
            for numbers in sizes.gathered(width):
                reads = holdings.reads(chosen, numbers)
                yield Call(decode, (self.model, sizes.steps, self.weights), (flow, reads, nothing, nothing))
        for length in sizes.pieces:
            yield Call(prefill, (self.model, self.weights), (Piece(holdings, length).inputs,))
        yield Call(copy_pages, (self.model,), (tuple(copies_of([[]] * sizes.shards) for _ in sizes.windows),))
