"""Loops and choices that are known only at run time, with a note for whoever reads the compiled program, and sums in
loops."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jaxtyping import Array, Float, Int

Value = TypeVar("Value")
SCOPE = "usually_"
"""The scope of such a loop is this and its usual number of rounds; `tunix.plan.account` reads it."""
CHOICE = "times_"
"""The scope of such a choice is this and how often each branch is taken, e.g. `times_22_4`."""


def loop(number: jax.Array | int, body: Callable[[jax.Array, Value], Value], start: Value, *, usual: int) -> Value:
    """`jax.lax.fori_loop(0, number, body, start)`.

    Args:
        usual: rounds where rows are full, by which the cost of the program is estimated.
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
