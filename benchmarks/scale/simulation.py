"""Long-tailed rollouts on many slots, event by event: which share of the slots and of the learner is in use.

An answer takes a slot for its length, in units of the mean; a step has as many answers as there are slots. Step m is
begun when m - staleness steps have been learned, and finishes under those weights (`in_flight: finish`). Steps are
sampled one by one, as `tunix.rollout.asynchronous` has them, or free slots are refilled with answers of the next steps.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.scale.arithmetic import (
    Lengths,
    log_normal,
    most_used_one_by_one,
    most_used_refilled,
    used_beside,
    used_in_turns,
)

SLOTS = (64, 512, 4096)
SIGMAS = (0.5, 1.0)
STALENESS = (0, 1, 4, 8)
LEARNING = (1.0, 4.0)
"""Durations of learning from a step: what its answers take if no slot is ever idle, and four times that."""
OVERSAMPLE, GROUP = 1.2, 8
WARM = 20
"""First steps that are left out of what is measured."""


class Used(NamedTuple):
    """What was in use, as a share of the time."""

    slots: float
    """Of the slots, e.g. 0.24."""
    learner: float
    """Of the learner, e.g. 0.24."""
    steps: float
    """Steps in a unit of time, e.g. 0.24."""
    late: float = 0.0
    """With oversampling: steps between the one that begins an answer and the one that learns from it; their mean."""
    latest: int = 0
    """The most such steps."""


def simulate(lengths: np.ndarray, learning: np.ndarray, slots: int, staleness: int, *, refill: bool = False) -> Used:
    """Simulates a run.

    Args:
        lengths: `[steps, answers]` of the answers. The last `staleness` steps are sampled and never learned from, so
            that slots have work until the end.
        learning: `[steps]` what learning from each step takes.
        slots: answers that are sampled at once.
        staleness: steps that the weights of an answer may be older than those that learn from it.
        refill: whether free slots begin answers of the next step before all of the present one have ended.
    """
    steps, answers = lengths.shape
    last = steps - staleness
    assert last > WARM, f"{last} steps are none after a warm-up of {WARM}"
    left = np.full(steps, answers)
    events: list[tuple[float, int, bool]] = []
    """When, which step, and whether it has been learned from; else one of its answers has ended."""
    now = busy = since = busy_since = 0.0
    free, begun, learned, learns = slots, 0, 0, False
    while True:
        while free and begun < steps * answers:
            step = begun // answers
            own = step == 0 or begun % answers > 0 or refill or left[step - 1] == 0
            # As of `AsyncRollouts`, nothing is sampled beside the first step's learning, which its caller had sampled.
            if step - learned > staleness or (step and not learned) or not own:
                break
            heapq.heappush(events, (now + lengths[step, begun % answers], step, False))
            free, begun = free - 1, begun + 1
        if not learns and left[learned] == 0:
            heapq.heappush(events, (now + learning[learned], learned, True))
            learns = True
        before = now
        now, step, done = heapq.heappop(events)
        busy += (slots - free) * (now - before)
        if not done:
            free, left[step] = free + 1, left[step] - 1
            continue
        learned, learns = learned + 1, False
        if learned == WARM:
            since, busy_since = now, busy
        if learned == last:
            break
    time = now - since
    return Used((busy - busy_since) / slots / time, float(learning[WARM:last].sum()) / time, (last - WARM) / time)


def simulate_oversampled(
    lengths: Lengths, slots: int, learning: float, steps: int, seed: int = 0, oversample: float = OVERSAMPLE
) -> Used:
    """Simulates a run in turns whose steps begin more groups than they train on, and end when enough are complete.

    The others keep their slots, and go on in the next step. Begun groups fill all slots, and learning takes as much
    less as there are fewer groups to learn from.
    """
    rng, groups = np.random.default_rng(seed), slots // GROUP
    trained = int(groups / oversample)
    lasts = learning * trained / groups
    left = lengths.draw(rng, (groups, GROUP))
    busy = time = 0.0
    began, late = np.zeros(groups, int), []
    for step in range(steps + WARM):
        ends = left.max(axis=1)
        taken = np.argsort(ends, kind="stable")[:trained]
        took = float(ends[taken[-1]])
        if step >= WARM:
            busy, time = busy + float(np.minimum(left, took).sum()), time + took + lasts
            late.append(step - began[taken])
        left = np.maximum(left - took, 0.0)
        left[taken], began[taken] = lengths.draw(rng, (trained, GROUP)), step + 1
    ages = np.array(late)
    return Used(busy / slots / time, steps * lasts / time, steps / time, float(ages.mean()), int(ages.max()))


def simulated(
    lengths: Lengths, slots: int, learning: float, staleness: int, steps: int, *, refill: bool = False, seed: int = 0
) -> Used:
    """Simulates a run of random answers that is measured over so many steps; as many answers to a step as slots."""
    number = steps + WARM + staleness
    drawn = lengths.draw(np.random.default_rng(seed), (number, slots))
    return simulate(drawn, np.full(number, learning), slots, staleness, refill=refill)


def column(lengths: Lengths, slots: int, learning: float, steps: int) -> dict[str, str]:
    """Each way to run -> the shares of slots and learner in use; what arithmetic says of the slots stands below."""

    def both(used: Used) -> str:
        return f"{used.slots:.3f} / {used.learner:.3f}"

    found = {f"k = {k}": both(simulated(lengths, slots, learning, k, steps)) for k in STALENESS}
    found["  arithmetic, k = 0"] = f"{used_in_turns(lengths, slots, learning):.3f}"
    found["  arithmetic, k = 1"] = f"{used_beside(lengths, slots, learning):.3f}"
    found["  at most, any k"] = f"{most_used_one_by_one(lengths, slots, learning):.3f}"
    for k in STALENESS[1:]:
        found[f"refilled, k = {k}"] = both(simulated(lengths, slots, learning, k, steps, refill=True))
    for k in STALENESS[1:]:
        found[f"  at most, k = {k}"] = f"{most_used_refilled(lengths, slots, learning, k):.3f}"
    more = simulate_oversampled(lengths, slots, learning, steps)
    found[f"k = 0, oversample {OVERSAMPLE:g}"] = both(more)
    found["  steps late, mean, most"] = f"{more.late:.2f}, {more.latest}"
    return found


def table(learning: float, sizes: Sequence[int], sigmas: Sequence[float], steps: int) -> Table:
    """A column of shares in use for each number of slots and each width of the distribution."""
    cases = [(sigma, slots) for sigma in sigmas for slots in sizes]
    columns = [column(log_normal(sigma), slots, learning, steps) for sigma, slots in cases]
    heads = [f"{slots}, sigma {sigma:g}" for sigma, slots in cases]
    found = Table("slots", *heads, title=f"slots / learner in use; learning from a step takes {learning:g}")
    for name in columns[0]:
        found.add_row(name, *(one[name] for one in columns))
    return found


def show(console: Console, steps: int = 100, sizes: Sequence[int] = SLOTS, sigmas: Sequence[float] = SIGMAS) -> None:
    """Simulates and prints."""
    for learning in LEARNING:
        console.print(table(learning, sizes, sigmas, steps))
