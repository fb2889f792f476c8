"""The losses of PPO, the policy's and the critic's: arrays in, terms out. Then, in numpy on the host, what they read:
advantages and returns of an episode, the next KL coefficient, and how well the critic explains the returns.

Axes: B rows, T time.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

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


def adapted_kl(coefficient: float, kl: float, target: float) -> float:
    """The next KL coefficient: `coefficient (1 + 0.1 clip(kl / target - 1, -0.2, 0.2))`.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593: a proportional controller in log-space.

    Args:
        coefficient: the present one.
        kl: measured `KL(policy || reference)`, in nats of a whole completion.
        target: the KL to reach, in the same unit.
    """
    return coefficient * (1.0 + 0.1 * float(np.clip(kl / target - 1.0, -0.2, 0.2)))


def gae(
    rewards_T: Num[np.ndarray, "T"],
    values_T: Num[np.ndarray, "T"],
    drawn_T: Bool[np.ndarray, "T"],
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> tuple[Float[np.ndarray, "T"], Float[np.ndarray, "T"]]:
    """Generalised advantage estimation over the sampled tokens i = 0..n-1 of one episode.

    `delta_i = r_i + gamma V_(i+1) - V_i`, `A_i = delta_i + gamma lam A_(i+1)`, `V_n = bootstrap`, `A_n = 0`, and the
    return `A_i + V_i`. Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16.

    An environment's tokens are no actions: the successor of a turn's last token is the first token of the next turn,
    and neither gamma nor lam is applied in between.

    Args:
        rewards_T: a completion's reward is at its last sampled token, a turn's at the turn's last one.
        values_T: V at t, the value of the state before token t is sampled.
        drawn_T: tokens that the policy sampled.
        gamma: discount per token; 1 is usual for language.
        lam: 1 is the return minus the value, 0 the one-step error.
        bootstrap: value of the state after the last token where the episode was cut short; 0 where it ended.

    Returns:
        Advantages and returns, 0 where nothing was sampled.

    Raises:
        ValueError: a reward is at a token that was not sampled, where it would be lost.
    """
    if np.any(rewards_T[~drawn_T]):
        place = int(np.flatnonzero((rewards_T != 0) & ~drawn_T)[0])
        raise ValueError(f"the reward {rewards_T[place]:g} at token {place} belongs to a token that the policy sampled")
    advantages, returns = np.zeros(len(rewards_T)), np.zeros(len(rewards_T))
    following, advantage = float(bootstrap), 0.0
    for t in np.flatnonzero(drawn_T)[::-1]:
        delta = float(rewards_T[t]) + gamma * following - float(values_T[t])
        advantage = delta + gamma * lam * advantage
        following = float(values_T[t])
        advantages[t], returns[t] = advantage, advantage + following
    return advantages, returns


def explained_variance(returns: Float[np.ndarray, "n"], values: Float[np.ndarray, "n"]) -> float:
    """`1 - Var(returns - values) / Var(returns)`: 1 for a perfect critic, 0 for one that only knows the mean.

    NaN where the returns do not vary.
    """
    variance = float(np.var(returns))
    return 1.0 - float(np.var(returns - values)) / variance if variance > 0 else float("nan")
