"""How evenly a mixture's experts are used in a step: its metrics, and the loss that evens it out.

Each layer returns how many rows every expert had, and how many its probabilities lead to expect (`models/moe.py`). Both
are summed over micro-batches and devices before anything is divided, so that metrics and loss are those of the whole
batch, however it is split.

Axes: L layers, E experts.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.models.blocks import Auxiliary
from tunix.models.moe import EXPECTED, ROWS

COUNTS, MEANS = f"moe/{ROWS}", f"moe/{EXPECTED}"
"""Where the sums of a step hold the rows of each expert `[L E]`, and the expected ones, until `load_metrics` replaces
them."""


def load_balance(rows: Float[Array, "L E"], expected: Float[Array, "L E"]) -> Float[Array, ""]:
    """E times the sum over experts of the share of choices and the mean probability, in the mean of the layers.

    1 where all experts are used alike, E where one is used alone (Fedus et al. 2021, https://arxiv.org/abs/2101.03961,
    equation 4). The choices have no gradient; the probabilities have. With the rows of a whole batch, the expected ones
    of its micro-batches have values, and gradients, that add up to those of the batch.
    """
    all_rows = jnp.maximum(jnp.sum(rows, axis=-1), 1.0)
    return rows.shape[-1] * jnp.mean(jnp.sum(rows * expected, axis=-1) / all_rows**2)


def load_sums(auxiliary: Auxiliary, rows: Float[Array, "L E"] | None, coefficient: float) -> dict[str, jax.Array]:
    """One micro-batch's part of the metrics, and of the loss as `loss/router_aux` where it counts.

    Empty without experts. The loss is `coefficient` times `load_balance` of the whole batch; other trainers take the
    shares of each micro-batch.

    Args:
        auxiliary: the layers' terms, stacked over layers.
        rows: of each expert in the whole batch; None where the micro-batch is the whole.
        coefficient: of the loss; 0 for none.
    """
    if ROWS not in auxiliary:
        return {}
    sums = {COUNTS: auxiliary[ROWS], MEANS: auxiliary[EXPECTED]}
    if coefficient:
        balance = load_balance(auxiliary[ROWS] if rows is None else rows, auxiliary[EXPECTED])
        sums["loss/router_aux"] = coefficient * balance
    return sums


def load_metrics(sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The sums with the rows of each expert replaced by metrics; as they are without experts.

    `moe/load_balance` is what its function says.

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
            "moe/load_balance": load_balance(rows, scalars.pop(MEANS)),
            "moe/largest_share": jnp.mean(largest),
            "moe/largest_share_max": jnp.max(largest),
            "moe/unused": jnp.mean((rows == 0).astype(jnp.float32)),
        }
    return scalars
