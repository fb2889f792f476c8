"""The losses of PPO: the policy's and the critic's. Arrays in, terms out.

Axes: B rows, T time.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tunix.algorithms.ops import clipped_surrogate, log_ratio, policy_ratio, surrogate_outputs
from tunix.types import Batch, LossOutputs, Over, Term


def ppo_loss(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array | np.ndarray, "B T"],
    advantages: Float[Array | np.ndarray, "B T"],
    batch: Batch,
    *,
    over: Over | float = "tokens",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossOutputs:
    """The policy's loss: the clipped surrogate `-min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)`.

    PPO, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7, with r_t = p(y_t) / p_old(y_t).

    Args:
        logprobs: log p of the batch's tokens.
        old_logprobs: the same under the policy before the updates.
        advantages: A of each token.
        batch: which tokens are trained.
        over: what the term is averaged over.
        clip_low: r counts as no less than 1 - clip_low.
        clip_high: r counts as no more than 1 + clip_high.
        dual_clip: bounds the loss where A < 0 at this many times A; see `ops.clipped_surrogate`.
    """
    log_ratios = log_ratio(logprobs, old_logprobs, batch)
    ratios = policy_ratio(log_ratios, batch)
    surrogate = clipped_surrogate(ratios, advantages, clip_low, clip_high, dual_clip)
    return surrogate_outputs(surrogate, ratios, log_ratios, over)


def value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array | np.ndarray, "B T"],
    returns: Float[Array | np.ndarray, "B T"],
    *,
    coefficient: float = 1.0,
    clip: float | None = 0.2,
) -> LossOutputs:
    """`coefficient / 2 max((V - R)^2, (V_clip - R)^2)` with `V_clip = V_old + clip(V - V_old, +-clip)`.

    The clip is that of OpenAI's PPO2, not of the paper; it may not help (Andrychowicz et al. 2021,
    https://arxiv.org/abs/2006.05990, C.1), and None leaves it out. Always a mean over trained tokens, however the
    policy's terms are averaged. Alone, it is the loss of a separate critic.

    Args:
        values: V, of the state before each token.
        old_values: V_old, from before the updates.
        returns: R.
        coefficient: 0.5 where the critic shares the policy's trunk is usual.
        clip: bound of a value's change since the rollout, used where it makes the loss larger.
    """
    returns, old = jnp.asarray(returns), jnp.asarray(old_values)
    squares = (values - returns) ** 2
    metrics = {"value/mean": values, "value/error": squares}
    if clip is not None:
        bound = (old + jnp.clip(values - old, -clip, clip) - returns) ** 2
        metrics["value/clipped"] = (bound > squares).astype(jnp.float32)
        squares = jnp.where(bound > squares, bound, squares)
    return LossOutputs({"value": Term(0.5 * coefficient * squares, "tokens")}, metrics)
