"""A loop whose number of rounds is known only at run time, with a note for whoever reads the compiled program."""

from collections.abc import Callable
from typing import TypeVar

import jax

Value = TypeVar("Value")
SCOPE = "usually_"
"""The scope of such a loop is this and its usual number of rounds; `tunix.plan.account` reads it."""


def loop(number: jax.Array | int, body: Callable[[jax.Array, Value], Value], start: Value, *, usual: int) -> Value:
    """`jax.lax.fori_loop(0, number, body, start)`.

    Args:
        usual: rounds where rows are full, by which the cost of the program is estimated.
    """
    with jax.named_scope(f"{SCOPE}{usual}"):
        return jax.lax.fori_loop(0, number, body, start)
