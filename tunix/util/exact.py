"""`jax.jit` that rounds exactly where the code says so, for everything that computes log-probs or weights.

XLA may leave out casts float32 -> bfloat16 -> float32 ("excess precision"), and does so differently in each program: in
bfloat16 the sampler's log-probs then differ from the trainer's. Without that option both round at the same places.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

ROUNDS: Mapping[str, bool] = {"xla_allow_excess_precision": False}
"""An option of XLA itself, not of one backend
(https://github.com/openxla/xla/blob/main/xla/xla.proto, `DebugOptions`)."""


def jit(function: Callable[..., Any], *, options: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """`jax.jit(function, **arguments)` that rounds as the code says. Not for a function that another `jit` calls.

    Args:
        function: a pure function of arrays.
        options: further XLA options by name.
        arguments: passed to `jax.jit`, e.g. `donate_argnums`.
    """
    return jax.jit(function, **arguments, compiler_options={**ROUNDS, **(options or {})})


def once(function: Callable[..., Any], static: Sequence[str] = ()) -> Any:
    """The function, traced and lowered once for all calls of a program that differ in their arrays alone.

    For what costs much of that, such as a kernel that every layer of an unrolled decoder calls. Within `jit` alone,
    whose options hold for it too: XLA puts its body where it is called.

    Args:
        function: a pure function of arrays, and of what `static` names.
        static: names of its arguments that are no arrays.
    """
    return jax.jit(function, static_argnames=tuple(static))
