"""The loss of KTO: arrays in, terms out.

Axes: B rows, T time, S sequences.
"""

import jax
import jax.numpy as jnp

from tunix.algorithms.kto.config import KTOConfig
from tunix.algorithms.ops import per_sequence
from tunix.data.packing import LABEL
from tunix.types import LossInputs, LossOutputs, Term

BASELINE = "kl"
"""Name of the per-sequence value z0, which is the same for a whole batch."""


def kto_loss(inputs: LossInputs, config: KTOConfig) -> LossOutputs:
    """`E[w_y - v(y)]`, with `r = log p(y) / p_ref(y)`, and w_y the weight of the completion's label.

        desirable    v = w sigmoid(beta (r - z0))
        undesirable  v = w sigmoid(beta (z0 - r))

    KTO, Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, eq. 8. z0 estimates KL(policy || reference) from
    completions to other rows' prompts (`KTO.baseline`) and has no gradient. With `apo_zero` z0 = 0: the two halves of
    APO-zero (D'Oosterlinck et al. 2024, https://arxiv.org/abs/2408.06266), each on separate rows.

    Args:
        inputs: log-probs and reference log-probs `[B T]`, per-sequence `label`, and `kl` except for `apo_zero`.
        config: the section of the recipe.
    """
    batch = inputs.batch
    assert inputs.reference_logprobs is not None
    ratios = inputs.logprobs - inputs.reference_logprobs
    rewards, sums = config.beta * per_sequence(ratios, batch), per_sequence(inputs.logprobs, batch)
    desirable = jnp.asarray(batch.per_sequence[LABEL]) > 0.5
    baseline = 0.0 if config.loss == "apo_zero" else config.beta * jnp.asarray(batch.per_sequence[BASELINE])
    gain = jnp.where(desirable, rewards - baseline, baseline - rewards)
    weight = jnp.where(desirable, config.desirable_weight, config.undesirable_weight)
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
        {"kl/reference": 0.5 * ratios**2, **{name: Term(values, "sequences") for name, values in metrics.items()}},
    )
