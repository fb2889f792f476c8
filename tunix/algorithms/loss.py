"""What losses share: the terms of GRPO and PPO besides the surrogate (KL, entropy, correction), and their metrics.

The framework passes a loss's inputs through `trained_only`; the loss of a policy then computes its surrogate from
`old_log_ratio`, from which `policy_outputs` makes terms and metrics.

Axes: B rows, T time.
"""

import math
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from tunix.algorithms.config import Level, PolicyConfig
from tunix.algorithms.ops import (
    LOG_RATIO_LIMIT,
    Clamp,
    Estimator,
    Surrogate,
    clamped_kl,
    importance_weight,
    kl_estimate,
    log_ratio,
    sequence_sum,
    weighted_kl,
)
from tunix.types import Batch, LossInputs, LossOutputs, Over, Term

REFERENCE = "reference_logprobs"
"""The per-token value in place of `LossInputs.reference_logprobs` where these were computed before the step."""

CURRENT = "of_current_weights"
"""The per-token value that is 1 for tokens of the weights that the step was sampled from, 0 for those of earlier ones;
only where there can be any."""


def trained_only(inputs: LossInputs) -> LossInputs:
    """The inputs with 0 wherever nothing is trained: outside of the mask, and in sequences of weight 0.

    The framework gives every loss such inputs, custom ones included. It also masks what a loss returns, but that alone
    does not remove a NaN, whose gradient is 0 x NaN in every product. Both sides of a pair count where one does.
    """
    batch = inputs.batch
    counted = jnp.asarray(batch.weights) > 0
    if "pairs" in batch.counts:
        counted = jnp.repeat(counted.reshape(-1, 2).any(axis=1), 2)
    mask = jnp.asarray(batch.loss_mask) & counted[batch.sequence_ids]

    def masked(values: Num[Array | np.ndarray, "B T"]) -> Num[Array, "B T"]:
        return jnp.where(mask, values, 0)

    per_sequence = {name: jnp.where(counted, values, 0) for name, values in batch.per_sequence.items()}
    per_token = {name: masked(values) for name, values in batch.per_token.items()}
    return replace(
        inputs,
        batch=replace(batch, per_token=per_token, per_sequence=per_sequence),
        logprobs=masked(inputs.logprobs),
        entropy=None if inputs.entropy is None else masked(inputs.entropy),
        values=None if inputs.values is None else masked(inputs.values),
        reference_logprobs=None if inputs.reference_logprobs is None else masked(inputs.reference_logprobs),
        compared=None if inputs.compared is None else jax.tree.map(masked, inputs.compared),
    )


def old_logprobs(inputs: LossInputs) -> Float[Array | np.ndarray, "B T"]:
    """Log-probs under the policy before the updates on this batch of rollouts.

    Where they would be recomputed for a single update, the batch may leave them out: they are the current ones, without
    a gradient, and cost no further forward pass.
    """
    return inputs.batch.per_token.get("old_logprobs", jax.lax.stop_gradient(inputs.logprobs))


def sampler_logprobs(inputs: LossInputs) -> Float[Array | np.ndarray, "B T"]:
    """Log-probs under the sampler, as it reported them with the tokens."""
    per_token = inputs.batch.per_token
    return per_token["sampler_logprobs"] if "sampler_logprobs" in per_token else per_token["old_logprobs"]


def reference_logprobs(inputs: LossInputs) -> Float[Array | np.ndarray, "B T"]:
    """Log-probs under the reference, which were computed in the step or before it."""
    in_step = inputs.reference_logprobs
    return inputs.batch.per_token[REFERENCE] if in_step is None else in_step


def old_log_ratio(inputs: LossInputs) -> Float[Array, "B T"]:
    """`log p - log p_old` of each token."""
    return log_ratio(inputs.logprobs, old_logprobs(inputs), inputs.batch)


def policy_outputs(
    inputs: LossInputs,
    config: PolicyConfig,
    over: Over | float,
    surrogate: Surrogate,
    ratio: Float[Array, "B T"],
    kl: float | Float[Array, "B T"],
) -> LossOutputs:
    """The terms `policy`, `kl` and `entropy` of a policy's loss, and its metrics.

    Args:
        inputs: the reference's log-probs are read where `config.kl` is not 0, `sampler_logprobs` with
            `old_logprobs: recompute`, the entropy where there is a bonus.
        config: the section of the recipe.
        over: what every term is averaged over, except the entropy with `entropy_over: tokens`.
        surrogate: the policy's loss per token.
        ratio: the ratio that the surrogate clips.
        kl: coefficient of the KL term, for `kl_in: loss`.
    """
    batch, current = inputs.batch, old_log_ratio(inputs)
    metrics = {"policy/ratio": ratio, "kl/old": _estimate(-current, "k3")}
    if surrogate.clipped is not None:
        metrics["policy/clipped"] = surrogate.clipped.astype(jnp.float32)
    policy = surrogate.loss
    if config.high_entropy is not None:
        policy = policy * batch.per_token["high_entropy"]
    if config.correction != "none":
        low, high = config.correction_low or 0.0, config.correction_high or 1.0
        log_weights = _log_weights(inputs, config.correction_level or "token")
        importance = importance_weight(log_weights, config.correction, low, high)
        policy = policy * importance.weight
        metrics["mismatch/corrected"] = importance.changed.astype(jnp.float32)
    if config.geometric_mask is not None:
        low, high = config.geometric_mask
        weights = _log_weights(inputs, "geometric")
        masked = (weights < math.log(low)) | (weights > math.log(high))
        policy = jnp.where(masked, 0.0, policy)
        metrics["mismatch/masked"] = masked.astype(jnp.float32)
    terms = {"policy": Term(policy, over)}
    if config.kl:
        reference = log_ratio(inputs.logprobs, reference_logprobs(inputs), batch)
        metrics["kl/reference"] = _estimate(reference, "k3")
        if config.kl_in == "loss":
            terms["kl"] = Term(kl * _kl(inputs, config), over)
    if inputs.entropy is not None:
        metrics["policy/entropy"] = inputs.entropy
        if config.entropy_bonus:
            terms["entropy"] = Term(
                -config.entropy_bonus * inputs.entropy, "tokens" if config.entropy_over == "tokens" else over
            )
    return with_mismatch(LossOutputs(terms, metrics), inputs, config)


def _kl(inputs: LossInputs, config: PolicyConfig) -> Float[Array, "B T"]:
    """KL(policy || reference) of each token, clamped; with `kl_weighted` times the ratio to the sampler."""
    batch, estimator, clamp = inputs.batch, config.kl_estimator or "k3", kl_clamp(config)
    ratios = log_ratio(inputs.logprobs, reference_logprobs(inputs), batch, clamp.input)
    if not config.kl_weighted:
        return cast(Array, clamped_kl(ratios, estimator, clamp))
    # Not the old log-probs: where these are recomputed, they are the trainer's.
    return weighted_kl(log_ratio(inputs.logprobs, sampler_logprobs(inputs), batch), ratios, estimator, clamp)


def kl_clamp(config: PolicyConfig) -> Clamp:
    """The bounds of the KL estimate that a section sets."""
    return Clamp(config.kl_input_clamp or LOG_RATIO_LIMIT, config.kl_output_clamp)


def _estimate(log_ratios: Float[Array, "B T"], estimator: Estimator) -> Float[Array, "B T"]:
    return cast(Array, kl_estimate(log_ratios, estimator))


def _log_weights(inputs: LossInputs, level: Level) -> Float[Array, "B T"]:
    """Log of trainer over sampler before the updates: of each token, or of its sequence."""
    batch = inputs.batch
    weights = log_ratio(jnp.asarray(old_logprobs(inputs)), batch.per_token["sampler_logprobs"], batch)
    if level == "token":
        return weights
    total = sequence_sum(weights, batch)
    return total / jnp.asarray(batch.lengths)[batch.sequence_ids] if level == "geometric" else total


def with_mismatch(outputs: LossOutputs, inputs: LossInputs, config: PolicyConfig) -> LossOutputs:
    """The outputs with metrics of the mismatch of trainer and sampler; see `compared_with_sampler`.

    Where the sampler's log-probs are the old ones, later updates of a step include the policy's movement: read the
    first one's.
    """
    per_token = inputs.batch.per_token
    if config.old_logprobs == "recompute":
        return compared_with_sampler(
            outputs, inputs.batch, jnp.asarray(old_logprobs(inputs)), per_token["sampler_logprobs"]
        )
    return compared_with_sampler(outputs, inputs.batch, inputs.logprobs, per_token["old_logprobs"])


def compared_with_sampler(
    outputs: LossOutputs, batch: Batch, trainer: Float[Array, "B T"], sampler: Float[Array | np.ndarray, "B T"]
) -> LossOutputs:
    """The outputs with metrics of `trainer log-prob - sampler log-prob` over the sampled tokens, and its maximum.

    `mismatch/mean`: mean absolute difference. `mismatch/k3`: estimate of KL(sampler || trainer). `mismatch/max`: the
    largest absolute difference. On tokens of earlier weights, where the policy has moved, the difference counts as 0.
    """
    trainer = jax.lax.stop_gradient(trainer)
    if CURRENT in batch.per_token:
        trainer = jnp.where(jnp.asarray(batch.per_token[CURRENT]) > 0, trainer, sampler)
    distance = jnp.abs(trainer - sampler)
    k3 = _estimate(log_ratio(jnp.asarray(sampler), trainer, batch), "k3")
    metrics = {**outputs.metrics, "mismatch/mean": distance, "mismatch/k3": k3}
    return replace(outputs, metrics=metrics, peaks={**outputs.peaks, "mismatch/max": distance})
