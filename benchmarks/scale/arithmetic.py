"""What of long-tailed rollouts can be computed without simulating: expected longest ones, and bounds of what is used.

Lengths are in units of their mean, and so is time: a slot that is never idle completes one answer in 1. A step has as
many answers as there are slots, and is learned from in `learning`; the longest of its answers takes `M`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

POINTS = 40_001
SMALLEST, LARGEST = -20.0, 12.0
"""Logarithms of the shortest and the longest length that integrals reach."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of the lengths of answers, of mean 1."""

    name: str
    """How it is called, e.g. `log-normal, sigma 1`."""
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    """(random numbers, shape) -> lengths."""
    cdf: Callable[[np.ndarray], np.ndarray]
    """Share of the answers that are no longer."""


def log_normal(sigma: float) -> Lengths:
    """Lengths whose logarithms are normal, with this standard deviation."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.lognormal(-(sigma**2) / 2, sigma, shape)

    def cdf(x: np.ndarray) -> np.ndarray:
        scores = (np.log(x) + sigma**2 / 2) / (sigma * math.sqrt(2))
        return np.array([math.erfc(-score) / 2 for score in scores])

    return Lengths(f"log-normal, sigma {sigma:g}", draw, cdf)


def exponential() -> Lengths:
    """Lengths that end with the same probability at every token; the longest of n takes 1 + 1/2 + ... + 1/n."""
    return Lengths("exponential", lambda rng, shape: rng.exponential(1.0, shape), lambda x: -np.expm1(-x))


def constant() -> Lengths:
    """Lengths that are all the same."""
    return Lengths("constant", lambda rng, shape: np.ones(shape), lambda x: (x >= 1).astype(float))


def expected_longest(lengths: Lengths, number: int, least: float = 0.0) -> float:
    """The expected length of the longest of so many answers, or of `least` where that is longer.

    `E[max(M, least)] = least + integral from least of P(M > x)`, where `P(M > x) = 1 - F(x)^number`; the integral is
    taken over the logarithm of x.
    """
    x = np.exp(np.linspace(math.log(least) if least else SMALLEST, LARGEST, POINTS))
    longer = -np.expm1(number * np.log(np.maximum(lengths.cdf(x), 1e-300)))
    return float(x[0] + np.trapezoid(longer, x))


def used_in_turns(lengths: Lengths, slots: int, learning: float) -> float:
    """Share of the slots in use where sampling and learning take turns (staleness 0): `1 / (E[M] + learning)`."""
    return 1 / (expected_longest(lengths, slots) + learning)


def used_beside(lengths: Lengths, slots: int, learning: float) -> float:
    """Share of the slots in use where the next step is sampled beside learning (staleness 1).

    Both begin together, as soon as both have ended: `1 / E[max(M, learning)]`.
    """
    return 1 / expected_longest(lengths, slots, learning)


def most_used_one_by_one(lengths: Lengths, slots: int, learning: float) -> float:
    """Bound of the share in use for any staleness, where a step's sampling ends before the next one's begins."""
    return 1 / max(expected_longest(lengths, slots), learning)


def most_used_refilled(lengths: Lengths, slots: int, learning: float, staleness: int) -> float:
    """Bound of the share in use where free slots begin the next steps' answers.

    A step is sampled with weights that have learned from the one `staleness + 1` steps before it, and is learned from
    `M + learning` later at least.
    """
    return min(1.0, 1 / learning, (staleness + 1) / (expected_longest(lengths, slots) + learning))
