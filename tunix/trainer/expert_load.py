"""How evenly a mixture's experts are used in a step: its metrics, and the loss that evens it out.

Each layer returns how many rows every expert had, and its term `load_balance` (`models/moe.py`). Rows are summed over
micro-batches and devices before anything is divided, so that the metrics are those of the whole batch.

Axes: L layers, E experts.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.models.blocks import Auxiliary
from tunix.models.moe import BALANCE, ROWS

COUNTS = f"moe/{ROWS}"
"""Where the sums of a step hold the rows of each expert `[L E]`, until `load_metrics` replaces them."""


def load_sums(auxiliary: Auxiliary, share: Float[Array, ""], coefficient: float) -> dict[str, jax.Array]:
    """One micro-batch's part of the metrics, and of the loss as `loss/router_aux` where it counts.

    Empty without experts. The loss is `coefficient` times the mean of the layers' `load_balance`. Its shares of the
    experts are those of the micro-batch, as in other trainers: those of the whole batch are known only at its end.

    Args:
        auxiliary: the layers' terms, stacked over layers.
        share: the micro-batch's part of the batch's real tokens.
        coefficient: of the loss; 0 for none.
    """
    if ROWS not in auxiliary:
        return {}
    balance = jnp.mean(auxiliary[BALANCE]) * share
    sums = {COUNTS: auxiliary[ROWS], f"moe/{BALANCE}": balance}
    return sums | ({"loss/router_aux": coefficient * balance} if coefficient else {})


def load_metrics(sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The sums with the rows of each expert replaced by metrics; as they are without experts.

    `moe/largest_share` is E times the share of a layer's rows that its most used expert has, 1 where all are used alike
    and E where one has all, in the mean of the layers; `moe/largest_share_max` is that of the most uneven layer.
    `moe/unused` is the share of experts without a row.
    """
    scalars = dict(sums)
    if COUNTS in scalars:
        rows = scalars.pop(COUNTS)
        shares = rows / jnp.maximum(jnp.sum(rows, axis=-1, keepdims=True), 1.0)
        largest = rows.shape[-1] * jnp.max(shares, axis=-1)
        scalars |= {
            "moe/largest_share": jnp.mean(largest),
            "moe/largest_share_max": jnp.max(largest),
            "moe/unused": jnp.mean((rows == 0).astype(jnp.float32)),
        }
    return scalars
