"""Baselines of rewards, known before an update: BCO's running mean, and for AOT the values of equal rank.

Both are per-sequence values of the whole batch, so that no micro-batch and no row depends on another one.

Axes: B rows, T time, S sequences, Pa pairs (2 i is chosen, 2 i + 1 rejected).
"""

from collections.abc import Sequence as List

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from tunix.types import Batch, Metrics

Pairs = Float[np.ndarray, "Pa"]


class Running:
    """Running mean reward of all pairs trained on: half the sum of the two sides' means, weighted by pairs.

    It stays on the device, so that no step waits for the numbers of the one before.
    """

    def __init__(self) -> None:
        """Starts at 0, which all rewards are where the policy is the reference."""
        self.mean: jax.Array | float = 0.0
        self.pairs = 0.0

    def add(self, metrics: Metrics, pairs: float) -> None:
        """Adds an update's `rewards/chosen` and `rewards/rejected` to the mean.

        Args:
            metrics: the update's metrics.
            pairs: sum of the weights of the update's pairs.
        """
        self.pairs += pairs
        reward = 0.5 * (metrics["rewards/chosen"] + metrics["rewards/rejected"])
        self.mean = self.mean + (reward - self.mean) * (pairs / self.pairs)

    def baseline(self, size: int) -> jax.Array:
        """`[S]` the mean, for every sequence."""
        return jnp.broadcast_to(jnp.asarray(self.mean, jnp.float32), (size,))


def paired(policy: Pairs, reference: Pairs, here: Bool[np.ndarray, "Pa"]) -> Float[np.ndarray, "S"]:
    """Baselines with which the difference of a pair's rewards becomes `m_k - n_k`: the k-th smallest margin of the
    policy less the k-th smallest of the reference.

    AOT, Melnyk et al. 2024, https://arxiv.org/abs/2406.05882, paired.

    Args:
        policy: `beta (log p(chosen) - log p(rejected))`.
        reference: the same margin under the reference.
        here: pairs of positive weight; the others are not sorted, and have 0.

    Returns:
        For the chosen sequence of pair i, whose margin has rank k, `n_k - n(i)`; for the rejected one 0.
    """
    out = np.zeros(2 * len(policy), np.float32)
    out[::2][here] = _of_same_rank(policy[here], reference[here]) - reference[here]
    return out


def unpaired(chosen: Pairs, rejected: Pairs, here: Bool[np.ndarray, "Pa"]) -> Float[np.ndarray, "S"]:
    """Baseline of each completion: the reward of equal rank on the other side; see `loss.aot_unpaired`.

    Args:
        chosen: rewards of the chosen completions.
        rejected: rewards of the rejected completions.
        here: pairs of positive weight; the others are not sorted, and have 0.
    """
    out = np.zeros(2 * len(chosen), np.float32)
    out[::2][here] = _of_same_rank(chosen[here], rejected[here])
    out[1::2][here] = _of_same_rank(rejected[here], chosen[here])
    return out


def in_rows(values: List[np.ndarray], batch: Batch) -> Float[np.ndarray, "B T"]:
    """Per-token values of sequences at the places of their tokens in the batch's rows; 0 in the padding."""
    starts = np.cumsum([0, *map(len, values)])
    places = starts[np.asarray(batch.sequence_ids)] + np.asarray(batch.positions)
    at_places = np.concatenate(values)[places]
    return np.where(np.asarray(batch.segment_ids) > 0, at_places, 0).astype(np.float32)


def _of_same_rank(mine: Pairs, others: Pairs) -> Pairs:
    """For each value the other one that has its rank; equal ones rank in the order of the batch."""
    out = np.empty_like(others)
    out[np.argsort(mine, kind="stable")] = np.sort(others)
    return out
