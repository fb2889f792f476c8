"""`jax.jit` for whatever computes log-probs or the weights behind them: rounded where the text says so, nowhere else.

XLA may leave casts float32 -> bfloat16 -> float32 out ("excess precision"), and does so differently in each program: in
bfloat16 a sampler's log-probs are then not its trainer's. Without that liberty both round at the same places.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

ROUNDS: Mapping[str, bool] = {"xla_allow_excess_precision": False}
"""An option of XLA itself, not of one backend
(https://github.com/openxla/xla/blob/main/xla/xla.proto, `DebugOptions`)."""


def jit(function: Callable[..., Any], *, options: Mapping[str, Any] | None = None, **how: Any) -> Any:
    """`jax.jit(function, **how)` that rounds as its text says. Not for a function that another `jit` calls.

    Args:
        options: more of XLA's, by name.
    """
    return jax.jit(function, **how, compiler_options={**ROUNDS, **(options or {})})
