"""Loops and choices that are known only at run time, with a note for whoever reads the compiled program, sums in loops,
and orders that are counted, not sorted: a TPU's compiler takes seconds for each sort.

Axes: B rows, T time.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Value = TypeVar("Value")
SCOPE = "usually_"
"""The scope of such a loop is this and its usual number of rounds; `benchmarks/programs.py` reads it."""
CHOICE = "times_"
"""The scope of such a choice is this and how often each branch is taken, e.g. `times_22_4`."""


def loop(number: jax.Array | int, body: Callable[[jax.Array, Value], Value], start: Value, *, usual: int) -> Value:
    """`jax.lax.fori_loop(0, number, body, start)`.

    Args:
        usual: rounds where rows are full, by which tests count what the program runs.
    """
    with jax.named_scope(f"{SCOPE}{usual}"):
        return jax.lax.fori_loop(0, number, body, start)


def switch(index: jax.Array, branches: Sequence[Callable[..., Value]], *operands: Any, times: Sequence[int]) -> Value:
    """`jax.lax.switch(index, branches, *operands)`.

    Args:
        times: how often each branch is taken, e.g. in a scan over 26 layers 22 and 4 times.
    """
    with jax.named_scope(CHOICE + "_".join(map(str, times))):
        return jax.lax.switch(index, branches, *operands)


def add_at(sums: Float[Array, "number ..."], index: Int[Array, ""], new: Float[Array, "..."]) -> jax.Array:
    """Sums with one more for an index. Not `.at[index].add`: that is a scatter, which reads and writes them all."""
    return jax.lax.dynamic_update_index_in_dim(sums, sums[index] + new, index, 0)


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
