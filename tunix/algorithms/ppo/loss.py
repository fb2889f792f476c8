"""The losses of PPO: the policy's and the critic's. Arrays in, terms out.

Axes: B rows, T time.
"""

import jax.numpy as jnp

from tunix.algorithms.loss import old_log_ratio, policy_outputs
from tunix.algorithms.ops import clipped_surrogate, token_ratio
from tunix.algorithms.ppo.config import PPOConfig
from tunix.types import LossInputs, LossOutputs, Over, Term


def ppo_loss(inputs: LossInputs, config: PPOConfig, over: Over | float) -> LossOutputs:
    """`policy_loss` and `value_loss` together: PPO, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 9.

    Args:
        inputs: what the two read.
        config: the section of the recipe.
        over: `config.over(completion_length)`, for the policy's terms.
    """
    policy, value = policy_loss(inputs, config, over), value_loss(inputs, config)
    return LossOutputs({**policy.terms, **value.terms}, {**policy.metrics, **value.metrics}, policy.peaks)


def policy_loss(inputs: LossInputs, config: PPOConfig, over: Over | float) -> LossOutputs:
    """The clipped surrogate `-min(r_t A_t, clip(r_t) A_t)` with its KL and entropy terms.

    Args:
        inputs: per-token `advantages` and `old_logprobs`, and what `loss.policy_outputs` reads; with `kl_target` and
            `kl_in: loss` also per-sequence `kl_coefficient`, which changes from step to step.
        config: the section of the recipe.
        over: `config.over(completion_length)`.
    """
    batch = inputs.batch
    ratio = token_ratio(old_log_ratio(inputs))
    assert config.clip_low is not None
    assert config.clip_high is not None
    surrogate = clipped_surrogate(
        ratio, batch.per_token["advantages"], config.clip_low, config.clip_high, config.dual_clip
    )
    kl = config.kl
    if config.kl_target and config.kl_in == "loss":
        kl = inputs.per_token(jnp.asarray(batch.per_sequence["kl_coefficient"]))
    return policy_outputs(inputs, config, over, surrogate, ratio, kl)


def value_loss(inputs: LossInputs, config: PPOConfig) -> LossOutputs:
    """`value_coefficient / 2 max((V - R)^2, (V_clip - R)^2)` with `V_clip = V_old + clip(V - V_old, +-value_clip)`.

    The clip is that of OpenAI's PPO2, not of the paper; it may not help (Andrychowicz et al. 2021,
    https://arxiv.org/abs/2006.05990, C.1), and `value_clip: null` leaves it out. Always a mean over trained tokens,
    however the policy's terms are averaged. Alone, it is the loss of a separate critic.

    Args:
        inputs: `values`, and per-token `returns` and `old_values`.
        config: the section of the recipe.
    """
    assert inputs.values is not None
    assert config.value_coefficient is not None
    returns, old = (jnp.asarray(inputs.batch.per_token[name]) for name in ("returns", "old_values"))
    squares = (inputs.values - returns) ** 2
    metrics = {"value/mean": inputs.values, "value/error": squares}
    if config.value_clip is not None:
        moved = jnp.clip(inputs.values - old, -config.value_clip, config.value_clip)
        bound = (old + moved - returns) ** 2
        metrics["value/clipped"] = (bound > squares).astype(jnp.float32)
        squares = jnp.where(bound > squares, bound, squares)
    return LossOutputs({"value": Term(0.5 * config.value_coefficient * squares, "tokens")}, metrics)
