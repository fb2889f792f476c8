"""The loss of GRPO and its relatives: ratio -> surrogate -> masks. Arrays in, terms out.

Axes: B rows, T time.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tunix.algorithms.ops import (
    Surrogate,
    cispo_surrogate,
    clipped_surrogate,
    gamma_surrogate,
    geometric_surrogate,
    log_ratio,
    outside_trust_region,
    plain_surrogate,
    policy_ratio,
    sequence_mean,
    soft_surrogate,
    surrogate_outputs,
    without,
)
from tunix.types import Batch, LossOutputs, Over

SOFT_TAUS = (1.0, 1.05)
"""How fast `soft` fades where the advantage is positive, and elsewhere: SAPO, https://arxiv.org/abs/2511.20347, sec. 5;
what lowers a token's probability raises all others'."""

COVARIANT = "covariant"
"""The per-token value that is 1 at tokens whose log-prob and advantage covary most, else 0."""

GAMMA_WEIGHTS = ((2.0, 3.0), (3.0, 2.0))
"""Power and decay of `gamma`, where the advantage is not negative and where it is: those of VESPO in TRL 1.16."""


def grpo_loss(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array | np.ndarray, "B T"],
    advantages: Float[Array | np.ndarray, "B T"],
    batch: Batch,
    *,
    over: Over | float = "tokens",
    ratio: Literal["token", "sequence", "completion"] = "token",
    surrogate: Literal["clip", "cispo", "mask", "geometric", "soft", "gamma", "none", "log"] = "clip",
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    dual_clip: float | None = None,
    trust_region: tuple[Literal["tv", "kl"], float] | None = None,
    off_policy_limit: float | None = None,
    sampler_logprobs: Float[Array | np.ndarray, "B T"] | None = None,
    drift: float = 0.0,
    covariance: Literal["clip", "kl"] | None = None,
    covariant: Float[Array | np.ndarray, "B T"] | None = None,
) -> LossOutputs:
    """`E[surrogate(r, A) + drift/2 log^2 r]`, r the ratio of the policy to the old one.

    GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3 without its KL, which is one more term:
    `.add("kl", 0.04 * ops.kl_loss(logprobs, reference_logprobs, batch), over)`. `config.py` names the relatives, the
    README has the formula of each setting. The advantage is that of the whole completion, at each of its tokens.

    Args:
        logprobs: log p of the batch's tokens.
        old_logprobs: the same under the policy before the updates.
        advantages: A.
        batch: which tokens are trained, and which of them form a completion; see `tunix.pack`.
        over: what the terms are averaged over.
        ratio: r of each token, the geometric mean over the completion, or the product over it.
        surrogate: which function of r and A.
        clip_low: of `clip`, `cispo`, `mask` and `geometric`: r counts as no less than 1 - clip_low.
        clip_high: of `clip`, `cispo`, `mask` and `geometric`: r counts as no more than 1 + clip_high.
        dual_clip: of `clip`: bounds the loss where A < 0 at this many times A.
        trust_region: leaves out tokens that have moved further than the number, by total variation or KL.
        off_policy_limit: leaves out completions with A < 0 that the sampler found likelier by this many nats per token.
        sampler_logprobs: log-probs under the sampler, for that limit; None where they are the old ones.
        drift: coefficient of half the squared log-ratio.
        covariance: what becomes of the tokens of high covariance (Cui et al. 2025,
            https://arxiv.org/abs/2505.22617): `clip` leaves them out, `kl` adds `|log r|` to their loss.
        covariant: 1 at these tokens; see `advantages.of_high_covariance`.
    """
    log_ratios = log_ratio(logprobs, old_logprobs, batch)
    ratios = policy_ratio(log_ratios, batch, ratio)
    if surrogate == "none":
        policy = plain_surrogate(ratios, advantages)
    elif surrogate == "log":  # the policy's term of DRO (see `GRPOConfig.drift`)
        policy = Surrogate(-logprobs * advantages, None)
    elif surrogate == "gamma":
        positive, negative = GAMMA_WEIGHTS
        policy = gamma_surrogate(logprobs, log_ratios, advantages, batch, positive, negative)
    elif surrogate == "soft":
        for_positive, for_negative = SOFT_TAUS
        policy = soft_surrogate(ratios, advantages, for_positive, for_negative)
    else:
        assert clip_low is not None
        assert clip_high is not None
        if surrogate in ("cispo", "mask"):
            policy = cispo_surrogate(logprobs, ratios, advantages, clip_low, clip_high, surrogate == "mask")
        elif surrogate == "geometric":
            policy = geometric_surrogate(log_ratios, advantages, batch, clip_low, clip_high)
        else:
            policy = clipped_surrogate(ratios, advantages, clip_low, clip_high, dual_clip)
    if trust_region is not None:
        kind, bound = trust_region
        policy = without(policy, outside_trust_region(logprobs, old_logprobs, advantages, kind, bound))
    if off_policy_limit is not None:
        # DeepSeek-V3.2's mask, https://arxiv.org/abs/2512.02556, eqs. 8 and 9: training on bad answers that the policy
        # would not give any more brings little and can destabilise it.
        sampler = old_logprobs if sampler_logprobs is None else sampler_logprobs
        distance = -sequence_mean(jax.lax.stop_gradient(log_ratio(logprobs, sampler, batch)), batch)
        policy = without(policy, (jnp.asarray(advantages) < 0) & (distance > off_policy_limit))
    if covariance == "clip" and covariant is not None:
        policy = without(policy, jnp.asarray(covariant) > 0)
    if ratio == "completion" and not isinstance(over, str):
        # So that the sum over tokens counts a completion, which is one action, once.
        policy = policy._replace(loss=policy.loss / jnp.asarray(batch.lengths)[batch.sequence_ids])
    outputs = surrogate_outputs(policy, ratios, log_ratios, over)
    if covariance == "kl" and covariant is not None:
        outputs = outputs.add("covariance", jnp.abs(log_ratios) * covariant, over)
    return outputs.add("drift", 0.5 * drift * log_ratios**2, over) if drift else outputs
