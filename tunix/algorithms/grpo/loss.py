"""The loss of GRPO and its relatives: ratio -> surrogate -> masks -> terms. Arrays in, terms out.

Axes: B rows, T time.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.loss import old_log_ratio, old_logprobs, policy_outputs, sampler_logprobs
from tunix.algorithms.ops import (
    Surrogate,
    cispo_surrogate,
    clipped_surrogate,
    completion_ratio,
    log_ratio,
    log_surrogate,
    off_policy,
    outside_trust_region,
    plain_surrogate,
    sequence_ratio,
    soft_surrogate,
    token_ratio,
    without,
)
from tunix.types import LossInputs, LossOutputs, Over


def grpo_loss(inputs: LossInputs, config: GRPOConfig, over: Over | float) -> LossOutputs:
    """`E[surrogate(r, A) + drift/2 log^2 r] + kl KL - entropy_bonus H`, r the ratio of the policy to the old one.

    GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3; `config.py` names the relatives, and the README
    has the formula of each setting. The advantage is that of the whole completion, at each of its tokens.

    Args:
        inputs: the batch's per-token `advantages` and `old_logprobs`, and what `loss.policy_outputs` reads.
        config: the section of the recipe.
        over: `config.over(completion_length)`.
    """
    log_ratios = old_log_ratio(inputs)
    if config.ratio == "sequence":
        ratio = sequence_ratio(log_ratios, inputs.batch)
    else:
        ratio = completion_ratio(log_ratios, inputs.batch) if config.ratio == "completion" else token_ratio(log_ratios)
    surrogate = _trusted(_surrogate(inputs, ratio, config), inputs, config)
    if config.ratio == "completion" and config.reduction == "constant":
        # So that the sum over tokens counts a completion, which is one action, once.
        surrogate = surrogate._replace(
            loss=surrogate.loss / jnp.asarray(inputs.batch.lengths)[inputs.batch.sequence_ids]
        )
    outputs = policy_outputs(inputs, config, over, surrogate, ratio, config.kl)
    return outputs.add("drift", 0.5 * config.drift * log_ratios**2, over) if config.drift else outputs


def _surrogate(inputs: LossInputs, ratio: Float[Array, "B T"], config: GRPOConfig) -> Surrogate:
    """The surrogate that `config.surrogate` names."""
    advantages = inputs.batch.per_token["advantages"]
    if config.surrogate == "none":
        return plain_surrogate(ratio, advantages)
    if config.surrogate == "log":
        return log_surrogate(inputs.logprobs, advantages)
    if config.surrogate == "soft":
        assert config.soft_positive is not None
        assert config.soft_negative is not None
        return soft_surrogate(ratio, advantages, config.soft_positive, config.soft_negative)
    assert config.clip_low is not None
    assert config.clip_high is not None
    if config.surrogate == "cispo":
        return cispo_surrogate(inputs.logprobs, ratio, advantages, config.clip_low, config.clip_high)
    return clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)


def _trusted(surrogate: Surrogate, inputs: LossInputs, config: GRPOConfig) -> Surrogate:
    """The surrogate without tokens outside of the trust region, and without completions that are off-policy."""
    batch = inputs.batch
    advantages = batch.per_token["advantages"]
    if config.trust_region != "none":
        assert config.trust_low is not None
        assert config.trust_high is not None
        low, high = config.trust_low, config.trust_high
        others = old_logprobs(inputs)
        outside = outside_trust_region(inputs.logprobs, others, advantages, config.trust_region, low, high)
        surrogate = without(surrogate, outside)
    if config.off_policy_limit is not None:
        current = log_ratio(inputs.logprobs, sampler_logprobs(inputs), batch)
        surrogate = without(surrogate, off_policy(current, advantages, batch, config.off_policy_limit))
    return surrogate
