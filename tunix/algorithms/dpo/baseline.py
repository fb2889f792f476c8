"""What rewards are measured from, known before an update: BCO's running mean, and the opposites of AOT's sorted values.

Both are per-sequence values of the whole batch, so that no micro-batch and no row has to see another one.

Axes: B rows, T time, S sequences (2i is chosen, 2i + 1 rejected), P pairs.
"""

from collections.abc import Sequence as List

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from tunix.types import Batch, Metrics

Pairs = Float[np.ndarray, "P"]


class Running:
    """The mean reward of all pairs that were trained on: half the sum of the sides' means, each update by its pairs.

    It stays on the device, so that no step waits for the numbers of the one before.
    """

    def __init__(self) -> None:
        """0, of no pairs: where the policy is the reference, so are all rewards."""
        self.mean: jax.Array | float = 0.0
        self.pairs = 0.0

    def add(self, metrics: Metrics, pairs: float) -> None:
        """Takes an update's `rewards/chosen` and `rewards/rejected` in.

        Args:
            pairs: weight of the update's pairs.
        """
        self.pairs += pairs
        found = 0.5 * (metrics["rewards/chosen"] + metrics["rewards/rejected"])
        self.mean = self.mean + (found - self.mean) * (pairs / self.pairs)

    def baseline(self, size: int) -> jax.Array:
        """`[S]` the mean, for every sequence."""
        return jnp.broadcast_to(jnp.asarray(self.mean, jnp.float32), (size,))


def paired(policy: Pairs, reference: Pairs, here: Bool[np.ndarray, "P"]) -> Float[np.ndarray, "S"]:
    """What the chosen rewards are measured from, so that the difference of a pair's two becomes
    `m_k - n_k`: the k-th smallest margin of the policy over the k-th smallest of the reference.

    AOT, Melnyk et al. 2024, https://arxiv.org/abs/2406.05882, paired.

    Args:
        policy: `beta (log p(chosen) - log p(rejected))`.
        reference: the same under the reference.
        here: pairs that count; the others are not sorted, and have 0.

    Returns:
        For the chosen sequence of pair i, whose margin has rank k, `n_k - n(i)`; for the rejected one 0.
    """
    out = np.zeros(2 * len(policy), np.float32)
    out[::2][here] = _of_same_rank(policy[here], reference[here]) - reference[here]
    return out


def unpaired(chosen: Pairs, rejected: Pairs, here: Bool[np.ndarray, "P"]) -> Float[np.ndarray, "S"]:
    """For each completion the reward of that of the same rank on the other side; see `aot_unpaired`.

    Args:
        chosen: rewards.
        rejected: likewise.
        here: pairs that count; the others are not sorted, and have 0.
    """
    out = np.zeros(2 * len(chosen), np.float32)
    out[::2][here] = _of_same_rank(chosen[here], rejected[here])
    out[1::2][here] = _of_same_rank(rejected[here], chosen[here])
    return out


def laid(values: List[np.ndarray], batch: Batch) -> Float[np.ndarray, "B T"]:
    """Per-token values of the batch's sequences where their tokens lie; 0 in the padding."""
    starts = np.cumsum([0, *map(len, values)])
    places = starts[np.asarray(batch.sequence_ids)] + np.asarray(batch.positions)
    found = np.concatenate(values)[places]
    return np.where(np.asarray(batch.segment_ids) > 0, found, 0).astype(np.float32)


def _of_same_rank(mine: Pairs, others: Pairs) -> Pairs:
    """Of each of mine the one of the others' that has its rank; equal ones in the order of the batch."""
    out = np.empty_like(others)
    out[np.argsort(mine, kind="stable")] = np.sort(others)
    return out
