"""Estimates over the rows of an evaluation, each with its standard error: means, ratios, pass@k.

Axes: P prompts, G group.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Num


@dataclass(frozen=True)
class Estimate:
    """An estimate with its standard error."""

    value: float
    error: float | None
    """Standard error over the rows; None where there is only one row."""
    count: int
    """Number of rows in the estimate."""


def ratio_of(sums_P: Num[np.ndarray, "P"], counts_P: Num[np.ndarray, "P"]) -> Estimate:
    """The mean over the tokens of rows, `r = sum s / sum c`, with its standard error.

    The tokens of a row are not independent, so the error is over rows (the linearised error of a ratio, Cochran
    1977, Sampling Techniques, 6.3): `sqrt(P / (P - 1) sum (s - r c)^2) / sum c`.
    """
    number, total = len(sums_P), float(counts_P.sum())
    ratio = float(sums_P.sum()) / total
    spread = float(((sums_P - ratio * counts_P) ** 2).sum())
    error = math.sqrt(number / (number - 1) * spread) / total if number > 1 else None
    return Estimate(ratio, error, number)


def mean_of(values_P: Num[np.ndarray, "P"]) -> Estimate:
    """The mean `m = sum x / P` with its standard error `sqrt(sum (x - m)^2 / (P - 1) / P)`."""
    return ratio_of(values_P, np.ones(len(values_P)))


def means_of(values_PG: Num[np.ndarray, "P G"]) -> Float[np.ndarray, "scored"]:
    """The mean of each prompt's samples that are not NaN; prompts that have none are left out."""
    valid = ~np.isnan(values_PG)
    scored = valid.any(axis=1)
    return np.where(valid, values_PG, 0.0).sum(axis=1)[scored] / valid.sum(axis=1)[scored]


def pass_at_k(n_P: Int[np.ndarray, "P"], correct_P: Int[np.ndarray, "P"], k: int) -> Float[np.ndarray, "P"]:
    """The unbiased estimate that at least one of k samples of a problem is correct: `1 - C(n - c, k) / C(n, k)`.

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1. Computed as a product, since the binomials overflow:
    `C(n - c, k) / C(n, k)` is the product over i from n - c + 1 to n of `1 - k / i`.

    Args:
        n_P: samples of each problem, at least k.
        correct_P: how many of them are correct.
        k: samples of which one has to be correct.
    """
    assert (n_P >= k).all(), "a problem has fewer samples than k"
    missed = [
        0.0 if n - c < k else float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
        for n, c in zip(n_P.tolist(), correct_P.tolist(), strict=True)
    ]
    return 1.0 - np.array(missed)


def passes(totals_PG: Num[np.ndarray, "P G"], success: float, ks: Iterable[int]) -> dict[str, Estimate]:
    """`pass@k` of each k, over the prompts that have so many answers with a score; left out where none has.

    Args:
        totals_PG: reward of each answer; NaN without a score.
        success: least reward of a right answer.
        ks: values of k.
    """
    scored_P = (~np.isnan(totals_PG)).sum(axis=1)
    right_P = (totals_PG >= success).sum(axis=1)
    enough = {k: scored_P >= k for k in ks}
    return {
        f"pass@{k}": mean_of(pass_at_k(scored_P[fit_P], right_P[fit_P], k))
        for k, fit_P in enough.items()
        if fit_P.any()
    }
