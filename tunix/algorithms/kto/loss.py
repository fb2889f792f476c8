"""The loss of KTO: arrays in, terms out.

Axes: B rows, T time, S sequences.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from tunix.algorithms.ops import per_sequence
from tunix.types import Batch, LossOutputs, Term

BASELINE = "kl"
"""Name of the per-sequence value z0, which is the same for a whole batch."""


def kto_loss(
    logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array, "B T"],
    labels: Num[Array | np.ndarray, "S"],
    batch: Batch,
    *,
    baseline: Num[Array | np.ndarray, "S"] | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossOutputs:
    """`E[w_y - v(y)]`, with `r = log p(y) / p_ref(y)`, and w_y the weight of the completion's label.

        desirable    v = w sigmoid(beta (r - z0))
        undesirable  v = w sigmoid(beta (z0 - r))

    KTO, Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, eq. 8. z0 estimates KL(policy || reference) from
    completions to other rows' prompts (`KTO.prepare_batch`) and has no gradient. With z0 = 0 these are the two halves
    of APO-zero (D'Oosterlinck et al. 2024, https://arxiv.org/abs/2408.06266), each on separate rows.

    Args:
        logprobs: log p of the batch's tokens.
        reference_logprobs: the same under the reference.
        labels: 1 for desirable completions, 0 for others.
        batch: which tokens are trained, which of them form a completion, and the number of desirable ones.
        baseline: z0.
        beta: scale of the rewards.
        desirable_weight: w of desirable completions.
        undesirable_weight: w of the others.
    """
    ratios = logprobs - reference_logprobs
    rewards, sums = beta * per_sequence(ratios, batch), per_sequence(logprobs, batch)
    desirable, baseline = jnp.asarray(labels) > 0.5, beta * jnp.asarray(baseline)
    gain = jnp.where(desirable, rewards - baseline, baseline - rewards)
    weight = jnp.where(desirable, desirable_weight, undesirable_weight)
    metrics = {"rewards/accuracy": jnp.heaviside(gain, 0.5)}
    for side, on_side, count in (
        ("chosen", desirable, batch.counts["desirable"]),
        ("rejected", ~desirable, batch.counts["sequences"] - batch.counts["desirable"]),
    ):
        # A mean over one side alone: the framework divides by all sequences.
        share = jnp.where(on_side, batch.counts["sequences"] / jnp.maximum(count, 1e-6), 0.0)
        metrics |= {f"rewards/{side}": share * rewards, f"logprobs/{side}": share * sums}
    metrics["rewards/margin"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return LossOutputs(
        {"preference": Term(weight * jax.nn.sigmoid(-gain), "sequences")},
        {"kl/reference": 0.5 * ratios**2, **{name: Term(array, "sequences") for name, array in metrics.items()}},
    )
