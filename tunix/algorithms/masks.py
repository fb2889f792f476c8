"""Masks of tokens and sequences that the surrogate leaves out: too far from the sampler, or too certain.

Masks that a loss computes (`outside_trust_region`, `off_policy`) are jax arrays and do not change any denominator;
masks from before an update (`most_uncertain`, `mismatch`) are numpy, over the whole batch of rollouts, so that packing
and micro-batches cannot change them.

Axes: B rows, T time.
"""

from collections.abc import Sequence as List
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from tunix.algorithms.ops import Surrogate, sequence_sum
from tunix.types import Batch

SURE = 1e-7
"""Lower bound of probabilities in a logarithm, so that it is finite."""


def without(surrogate: Surrogate, masked: Bool[Array, "B T"]) -> Surrogate:
    """The surrogate with loss 0 and no gradient where `masked`; these tokens count as clipped."""
    clipped = masked if surrogate.clipped is None else surrogate.clipped | masked
    return Surrogate(jnp.where(masked, 0.0, surrogate.loss), clipped)


def outside_trust_region(
    logprobs: Float[Array, "B T"],
    others: Float[Array | np.ndarray, "B T"],
    advantages: Float[Array | np.ndarray, "B T"],
    kind: Literal["tv", "kl"],
    low: float,
    high: float,
) -> Bool[Array, "B T"]:
    """Tokens whose update would move p further away from the sampler q, where it is too far away already.

    DPPO, Qi et al. 2026, https://arxiv.org/abs/2602.04879, eq. 12: masked where `A > 0, p > q, D > high` or
    `A < 0, p < q, D > low`. D compares only the taken token with all others (the paper's binary approximation, a lower
    bound): tv is `|p - q|`, kl `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`. A rare token may change its ratio a lot
    before D notices; a common one may not.

    Args:
        logprobs: log p of the taken tokens.
        others: log q.
        advantages: A.
        kind: which D.
        low: bound where the probability falls.
        high: bound where it rises.
    """
    advantages = jnp.asarray(advantages)
    p, q = (jnp.exp(jax.lax.stop_gradient(jnp.asarray(x))) for x in (logprobs, others))
    divergence = jnp.abs(p - q) if kind == "tv" else bernoulli_kl(q, p)
    rising = (advantages > 0) & (p > q) & (divergence > high)
    return rising | ((advantages < 0) & (p < q) & (divergence > low))


def bernoulli_kl(q: Float[Array, "B T"], p: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """`q log(q / p) + (1 - q) log((1 - q) / (1 - p))`, finite also where p or q is 0 or 1."""

    def summand(a: jax.Array, b: jax.Array) -> jax.Array:
        return a * (jnp.log(jnp.maximum(a, SURE)) - jnp.log(jnp.maximum(b, SURE)))

    return summand(q, p) + summand(1.0 - q, 1.0 - p)


def off_policy(
    log_ratios: Float[Array, "B T"], advantages: Float[Array | np.ndarray, "B T"], batch: Batch, limit: float
) -> Bool[Array, "B T"]:
    """Tokens with A < 0 of sequences that were far likelier under the sampler: `mean_t(log q - log p) > limit`.

    DeepSeek-V3.2's off-policy sequence mask, https://arxiv.org/abs/2512.02556, eqs. 8 and 9. Training on bad answers
    that the policy would not give any more brings little and can destabilise it.

    Args:
        log_ratios: log p - log q, p the current policy, q the sampler.
        advantages: A.
        batch: the batch of these tokens.
        limit: nats per token, e.g. 0.5.
    """
    distance = -sequence_sum(jax.lax.stop_gradient(log_ratios), batch) / jnp.asarray(batch.lengths)[batch.sequence_ids]
    return (jnp.asarray(advantages) < 0) & (distance > limit)


def most_uncertain(
    entropies: List[Float[np.ndarray, "_"]], masks: List[Bool[np.ndarray, "_"]], share: float
) -> list[Bool[np.ndarray, "_"]]:
    """Masks of the `share` of all masked tokens with the highest entropy: at least the quantile `1 - share`.

    Wang et al. 2025, "Beyond the 80/20 rule", https://arxiv.org/abs/2506.01939, eq. 5. Where entropies are equal, more
    than that share may be kept.

    Args:
        entropies: `[T]` of each sequence of the batch, in nats.
        masks: `[T]` tokens that count; all False for a failed sample.
        share: above 0, below 1.
    """
    joined = np.concatenate([x[mask] for x, mask in zip(entropies, masks, strict=True)])
    least = np.quantile(joined, 1.0 - share) if joined.size else np.inf
    return [mask & (x >= least) for x, mask in zip(entropies, masks, strict=True)]


def mismatch(
    trainer_T: Float[np.ndarray, "T"], sampler_T: Float[np.ndarray, "T"], drawn_T: Bool[np.ndarray, "T"]
) -> float:
    """`mean_t exp|log p - log q|` of a sequence: 1 where trainer and sampler agree; 1 where nothing was sampled.

    NeMo-RL's `seq_logprob_error_threshold` (https://github.com/NVIDIA-NeMo/RL) compares this number.
    """
    distances = np.abs(trainer_T - sampler_T)[drawn_T].astype(np.float64)
    return float(np.exp(distances).mean()) if distances.size else 1.0
