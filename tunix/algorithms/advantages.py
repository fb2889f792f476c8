"""From rewards to advantages, in numpy on the host, once per batch of rollouts.

Rewards `[P G]`, NaN where a sample failed -> `weighted_sum`, `overlong_penalty`, `length_rewards`, `kl_rewards` ->
`group_advantages` or `gdpo`. A failed sample is no zero: it is left out of every baseline, its advantage is 0, and the
caller gives it weight 0.

Axes: P prompts, G group, T time.
"""

from collections.abc import Mapping
from collections.abc import Sequence as List
from itertools import accumulate
from typing import Literal, cast

import numpy as np
from jaxtyping import Bool, Float, Num

from tunix.algorithms.config import Advantage, Std
from tunix.algorithms.ops import Estimator, kl_estimate
from tunix.errors import UserError

COVARIANCE_BOUNDS = (1.0, 5.0)
"""Covariances that Clip-Cov leaves out are between these, by its authors' configuration in verl."""

FREEDOM = {"population": 0, "sample": 1}
"""Subtracted from n before it divides the squares, by the kind of standard deviation."""


def group_advantages(
    rewards_PG: Num[np.ndarray, "P G"], kind: Advantage, eps: float = 1e-4, std: Std = "population"
) -> Float[np.ndarray, "P G"]:
    """Advantage of each sample: how much better its reward is than a baseline.

    | kind | A | from |
    |---|---|---|
    | mean | R - mean(group) | Dr. GRPO, Liu et al. 2025, https://arxiv.org/abs/2503.20783 |
    | mean_std | (R - mean(group)) / (std(group) + eps) | GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300 |
    | mean_relative | R / mean(group) - 1, 0 if all are | MaxRL, Tajwar et al. 2026, https://arxiv.org/abs/2602.02710 |
    | leave_one_out | R - mean(the others) | RLOO, Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740 |
    | leave_one_out_std | leave_one_out / (std(others) + eps) | NeMo-RL's default, https://github.com/NVIDIA-NeMo/RL |
    | median | R - median(group) | the robust location in place of the mean |
    | batch | (R - mean(batch)) / (std(batch) + eps) | REINFORCE++, Hu et al. 2025, https://arxiv.org/abs/2501.03262 |
    | mean_batch | R - mean(group), then divided by the batch's std | REINFORCE++-baseline, same paper |
    | mean_batch_std | (R - mean(group)) / (std(batch) + eps) | Lite PPO, 2025, https://arxiv.org/abs/2508.08221 |

    std is the population's (divided by n), so that a group's advantages have variance 1; several libraries use the
    sample's (n - 1), which scales all of them by sqrt((n - 1) / n). Where a group has one valid sample there is nothing
    to compare it with: 0. Under leave_one_out_std a difference to others that are all equal is not divided: a single
    success is 1 above them, and would be thousands of deviations above them.

    Args:
        rewards_PG: NaN where a sample failed.
        kind: a row of the table.
        eps: keeps the quotient finite where all rewards are equal.
        std: divided by n or by n - 1.

    Returns:
        0 where a sample failed.

    Raises:
        UserError: a negative reward under `mean_relative`, whose quotient would change its sign.
    """
    if kind == "batch":
        return batch_normalised(rewards_PG, eps, std)
    valid = ~np.isnan(rewards_PG)
    number = valid.sum(axis=1, keepdims=True)
    rewards = np.where(valid, rewards_PG, 0.0)
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(number, 1)
    centred = np.where(valid, rewards - mean, 0.0)
    if kind == "mean":
        return centred
    if kind == "mean_std":
        variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(number - FREEDOM[std], 1)
        return centred / (np.sqrt(variance) + eps)
    if kind == "mean_relative":
        if (rewards < 0).any():
            raise UserError(
                f"algorithm.advantage: mean_relative divides by the group's mean reward, but one is {rewards.min():g}: "
                "give rewards of 0 and more (1 for success, as in the paper), or take advantage: mean"
            )
        return centred / np.where(mean > 0, mean, 1.0)
    if kind == "mean_batch_std":
        scores = rewards_PG[valid]
        squares = np.square(scores - scores.sum() / max(scores.size, 1)).sum()
        return centred / (np.sqrt(squares / max(scores.size - FREEDOM[std], 1)) + eps)
    if kind == "leave_one_out":
        # R_i - (sum - R_i) / (n - 1) = (R_i - mean) n / (n - 1)
        return centred * number / np.maximum(number - 1, 1)
    if kind == "leave_one_out_std":
        others = np.where(np.eye(rewards.shape[1], dtype=bool), np.nan, rewards_PG[:, None, :])  # [P G G]
        counted = ~np.isnan(others)
        number = counted.sum(axis=2)
        mean = np.where(counted, others, 0.0).sum(axis=2) / np.maximum(number, 1)
        squares = np.where(counted, (others - mean[:, :, None]) ** 2, 0.0).sum(axis=2)
        scale = np.sqrt(squares / np.maximum(number - FREEDOM[std], 1)) + eps
        # Compared directly, since squares need not be 0 where rewards are equal: their mean is rounded.
        differ = np.where(counted, others, -np.inf).max(axis=2) > np.where(counted, others, np.inf).min(axis=2)
        return np.where(valid & (number > 0), rewards_PG - mean, 0.0) / np.where(differ, scale, 1.0)
    if kind == "median":
        # A group without a single valid sample has no median, and numpy would warn.
        median = np.nanmedian(np.where(number > 0, rewards_PG, 0.0), axis=1, keepdims=True)
        return np.where(valid, rewards - median, 0.0)
    return batch_normalised(np.where(valid, centred, np.nan), eps, std)


def batch_normalised(
    values_PG: Num[np.ndarray, "P G"], eps: float = 1e-4, std: Std = "population"
) -> Float[np.ndarray, "P G"]:
    """`(x - mean) / (std + eps)` over all valid samples of the batch; 0 for samples that failed."""
    return whitened([values_PG], [~np.isnan(values_PG)], eps, std)[0]


def gdpo(
    rewards: Mapping[str, Num[np.ndarray, "P G"]],
    weights: Mapping[str, float],
    kind: Advantage = "mean_std",
    eps: float = 1e-4,
    std: Std = "population",
    scored_PG: Bool[np.ndarray, "P G"] | None = None,
) -> Float[np.ndarray, "P G"]:
    """Advantages of several rewards, each compared with its group before they are added.

    `batch_normalised(sum_k w_k A_k)`: GDPO, Liu et al. 2026, https://arxiv.org/abs/2601.05242. If they were summed
    first, rewards (1, 0) and (0, 1) would be the same, and a reward of large spread would hide the others.

    Args:
        rewards: by name; NaN where one failed. A sample that failed in one reward is left out of all.
        weights: by name.
        kind: of each reward's advantage; mean_std in the paper.
        eps: see `group_advantages`.
        std: see `group_advantages`.
        scored_PG: samples with a score; a reward that is NaN at one of them left it out and gives it no advantage, as
            in TRL. None for those whose rewards are all numbers.
    """
    failed = np.isnan(weighted_sum(rewards, weights)) if scored_PG is None else ~scored_PG
    parts = {name: group_advantages(np.where(failed, np.nan, x), kind, eps, std) for name, x in rewards.items()}
    return batch_normalised(np.where(failed, np.nan, weighted_sum(parts, weights)), eps, std)


def weighted_sum(
    values: Mapping[str, Num[np.ndarray, "P G"]], weights: Mapping[str, float]
) -> Float[np.ndarray, "P G"]:
    """`sum_k w_k x_k`; NaN where any x_k is, whatever its weight."""
    return np.stack([weights[name] * x for name, x in values.items()]).sum(axis=0)


def has_signal(rewards_PG: Num[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
    """`[P]` whether two valid rewards of a group differ; the other groups have advantage 0 and no gradient.

    The condition of DAPO's dynamic sampling (Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 11), for rewards
    that need not be 0 or 1.
    """
    valid = ~np.isnan(rewards_PG)
    high = np.where(valid, rewards_PG, -np.inf).max(axis=1)
    low = np.where(valid, rewards_PG, np.inf).min(axis=1)
    return high > low


def overlong_penalty(lengths: Num[np.ndarray, "*shape"], limit: int, buffer: int) -> Float[np.ndarray, "*shape"]:
    """DAPO's soft overlong punishment, added to the reward (Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13).

    0 up to `limit - buffer` tokens, then `(limit - buffer - length) / buffer` down to -1 at `limit`, and -1 beyond.

    Args:
        lengths: sampled tokens of each completion, the stop token included.
        limit: tokens that a completion may have at most.
        buffer: tokens before the limit over which the penalty grows, at least 1.
    """
    return np.clip((limit - buffer - lengths) / buffer, -1.0, 0.0)


def length_rewards(rewards_PG: Num[np.ndarray, "P G"], lengths_PG: Num[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """How short a completion is within its group: `1/2 - (length - shortest) / (longest - shortest)`, and of a
    completion that is wrong that or 0, whichever is less; 0 where all lengths are equal.

    Kimi k1.5, https://arxiv.org/abs/2501.12599, sec. 2.3.3. A reward above 0 counts as right.

    Args:
        rewards_PG: NaN where a sample failed; it has 0, and its length plays no part.
        lengths_PG: sampled tokens.
    """
    valid = ~np.isnan(rewards_PG)
    longest = np.where(valid, lengths_PG, 0).max(axis=1, keepdims=True)
    shortest = np.where(valid, lengths_PG, longest).min(axis=1, keepdims=True)
    short = np.where(longest > shortest, 0.5 - (lengths_PG - shortest) / np.maximum(longest - shortest, 1), 0.0)
    return np.where(valid, np.where(rewards_PG > 0, short, np.minimum(short, 0.0)), 0.0)


def kl_rewards(
    policy_T: Float[np.ndarray, "T"],
    reference_T: Float[np.ndarray, "T"],
    drawn_T: Bool[np.ndarray, "T"],
    coefficient: float,
    estimator: Estimator = "k1",
    limit: float | None = None,
) -> Float[np.ndarray, "T"]:
    """The KL penalty as rewards of the sampled tokens: `-coefficient k(log p_t - log ref_t)`, 0 elsewhere.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593. PPO adds them token by token; the GRPO family, whose reward
    is one number for a completion, adds their sum (as RLOO does, Ahmadian et al. 2024, sec. 3). For `limit` see
    `ops.kl_estimate`.
    """
    difference = np.where(drawn_T, policy_T - reference_T, 0.0)
    return -coefficient * cast(np.ndarray, kl_estimate(difference, estimator, limit))


def discounted(rewards_T: Num[np.ndarray, "T"], drawn_T: Bool[np.ndarray, "T"], gamma: float) -> Float[np.ndarray, "T"]:
    """The return of each sampled token, `R_i = r_i + gamma R_(i+1)` over sampled tokens; 0 elsewhere.

    REINFORCE++, Hu et al. 2025, https://arxiv.org/abs/2501.03262. An environment's tokens between them are no actions,
    and nothing is discounted there.
    """
    returns = np.zeros(len(rewards_T))
    backwards = accumulate(rewards_T[drawn_T][::-1].tolist(), lambda later, reward: reward + gamma * later)
    returns[drawn_T] = list(backwards)[::-1]
    return returns


def of_high_covariance(
    logprobs: List[Num[np.ndarray, "..."]],
    advantages: List[Num[np.ndarray, "..."]],
    masks: List[Bool[np.ndarray, "..."]],
    kind: Literal["clip", "kl"],
    share: float,
    seed: int,
) -> list[Bool[np.ndarray, "..."]]:
    """The tokens whose `(log p - mean log p) (A - mean A)` is high, means over all tokens of the batch: what lowers the
    entropy most.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617. kl: the highest ones (KL-Cov). clip: random ones of those between
    `COVARIANCE_BOUNDS` (Clip-Cov). The paper recomputes them for each update; here they are those of the policy before
    the updates, so that no micro-batch plays a part.

    Args:
        logprobs: of each sequence.
        advantages: of each sequence.
        masks: tokens that count.
        kind: which tokens.
        share: of all tokens, at least one.
        seed: for `clip`.
    """
    p, a = (np.concatenate([x[mask] for x, mask in zip(xs, masks, strict=True)]) for xs in (logprobs, advantages))
    chosen, ends = np.zeros(p.size, bool), np.cumsum([mask.sum() for mask in masks])
    if p.size:
        covariance, number = (p - p.mean()) * (a - a.mean()), max(1, int(share * p.size))
        order = np.argsort(-covariance, kind="stable")
        if kind == "clip":
            low, high = COVARIANCE_BOUNDS
            order = np.random.default_rng(seed).permutation(
                order[(low < covariance[order]) & (covariance[order] < high)]
            )
        chosen[order[:number]] = True
    selected = [np.zeros(mask.shape, bool) for mask in masks]
    for x, mask, part in zip(selected, masks, np.split(chosen, ends[:-1]), strict=True):
        x[mask] = part
    return selected


def whitened(
    values: List[Num[np.ndarray, "..."]],
    masks: List[Bool[np.ndarray, "..."]],
    eps: float = 1e-8,
    std: Std = "population",
) -> list[np.ndarray]:
    """Standardises the masked values of all sequences of a batch: `(x - mean) / (std + eps)`; 0 elsewhere.

    Args:
        values: `[T]` of each sequence, e.g. its advantages.
        masks: `[T]` tokens that count; all False for a failed sample.
        eps: keeps the quotient finite.
        std: the population's deviation (divided by n), or estimated from the sample (by n - 1).
    """
    joined = np.concatenate([x[mask] for x, mask in zip(values, masks, strict=True)])
    if joined.size == 0:
        return [np.zeros(x.shape) for x in values]
    mean = joined.mean()
    scale = float(np.sqrt(((joined - mean) ** 2).sum() / max(joined.size - FREEDOM[std], 1))) + eps
    return [np.where(mask, (x - mean) / scale, 0.0) for x, mask in zip(values, masks, strict=True)]
