"""The loss of a reward model: arrays in, terms out.

Axes: B rows, T time, S sequences; 2 i is the chosen one of a pair, 2 i + 1 the rejected one.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from tunix.algorithms.ops import per_sequence
from tunix.types import Batch, LossOutputs, Term

MARGIN = "margin"
"""The per-sequence value by which the chosen side should be better."""


def reward_loss(
    values: Float[Array, "B T"],
    batch: Batch,
    *,
    margins: Num[Array | np.ndarray, "S"] | None = None,
    centring: float = 0.0,
) -> LossOutputs:
    """Bradley-Terry loss: the chosen completion wins with probability `sigmoid(r_chosen - r_rejected)`.

    L = mean over pairs of -log sigmoid(r_c - r_r - m) + centring (r_c + r_r)^2

    The first term is that of Ouyang et al. 2022 (https://arxiv.org/abs/2203.02155, eq. 1), with the margin m of Llama 2
    (Touvron et al. 2023, https://arxiv.org/abs/2307.09288, eq. 2) where rows have one. It depends on differences only;
    the second (Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244) fixes the offset, which is free otherwise.

    Args:
        values: of which each sequence's single trained token has its score.
        batch: of pairs.
        margins: m, equal on both sides of a pair; None for 0.
        centring: coefficient of the second term; 0 for none.
    """
    scores = per_sequence(values, batch)
    chosen, rejected = scores[::2], scores[1::2]
    gap = chosen - rejected
    beyond = gap if margins is None else gap - jnp.asarray(margins)[::2]
    terms = {"preference": Term(-jax.nn.log_sigmoid(beyond), "pairs")}
    if centring:
        terms["centring"] = Term(centring * (chosen + rejected) ** 2, "pairs")
    metrics = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margin": gap,
        "rewards/accuracy": jnp.heaviside(gap, 0.5),
    }
    return LossOutputs(terms, {name: Term(array, "pairs") for name, array in metrics.items()})
