"""Orders that are counted, not sorted: a TPU's compiler takes seconds for each sort.

Axes: B rows, T time.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def needed_first(needed: Bool[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """The order of each row's places that has the needed ones first, and the index of each place in it.

    Among the needed ones, and among the others, the order stays.
    """
    rows, length = needed.shape
    before = jnp.cumsum(needed, axis=1, dtype=jnp.int32)
    others = before[:, -1:] + jnp.cumsum(~needed, axis=1, dtype=jnp.int32)
    back = jnp.where(needed, before, others) - 1
    order = jnp.zeros_like(back).at[jnp.arange(rows)[:, None], back].set(jnp.arange(length, dtype=jnp.int32))
    return order, back
