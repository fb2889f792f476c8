"""The arithmetic of losses: ratios, KL estimates, surrogates, importance weights, masks. Pure jax, per token.

Log-probs -> `log_ratio` -> `policy_ratio` -> `clipped_surrogate`, `cispo_surrogate` or `plain_surrogate` ->
`surrogate_outputs`, times `importance_weight` where the sampler's log-probs are not the trainer's.
Nothing here divides by a count: `types.Term` names what a loss is averaged over, and the framework divides once. It
passes a loss's inputs through `trained_only`, and what a loss returns through `compared_with_sampler` where the policy
sampled the tokens.

Axes: B rows, T time, S sequences.
"""

from dataclasses import replace
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

from tunix.algorithms.config import Estimator
from tunix.config import OBSERVED
from tunix.types import Batch, LossInputs, LossOutputs, Over, Term

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20: exp(89) overflows float32, and an infinity that a clip hides has NaN gradients."""

TEACHER = "teacher_logprobs"
"""Name of the teacher's log-probs among the arrays of a sequence."""
REFERENCE = "reference_logprobs"
"""The per-token value in place of `LossInputs.reference_logprobs` where these were computed before the step."""

CURRENT = "of_current_weights"
"""The per-token value that is 1 for tokens of the weights that the step was sampled from, 0 for those of earlier ones;
only where there can be any."""


class Surrogate(NamedTuple):
    """A policy's loss per token, and where it is clipped."""

    loss: Float[Array, "B T"]
    """The loss of each token, to be minimised."""
    clipped: Bool[Array, "B T"] | None
    """Tokens that the clip binds; None where nothing clips."""


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
    read = mask
    if OBSERVED in batch.per_token:
        read |= (jnp.asarray(batch.per_token[OBSERVED]) > 0) & counted[batch.sequence_ids]

    def masked(values: Num[Array | np.ndarray, "B T"]) -> Num[Array, "B T"]:
        return jnp.where(mask, values, 0)

    per_sequence = {name: jnp.where(counted, values, 0) for name, values in batch.per_sequence.items()}
    per_token = {name: masked(values) for name, values in batch.per_token.items()}
    return replace(
        inputs,
        batch=replace(batch, per_token=per_token, per_sequence=per_sequence),
        logprobs=jnp.where(read, inputs.logprobs, 0),
        # None, a tree without leaves, stays None.
        entropy=jax.tree.map(masked, inputs.entropy),
        whole_logprobs=jax.tree.map(masked, inputs.whole_logprobs),
        above_mean=jax.tree.map(masked, inputs.above_mean),
        values=jax.tree.map(masked, inputs.values),
        reference_logprobs=jax.tree.map(masked, inputs.reference_logprobs),
        compared=jax.tree.map(masked, inputs.compared),
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


def compared_with_sampler(outputs: LossOutputs, inputs: LossInputs) -> LossOutputs:
    """The outputs with metrics of `trainer log-prob - sampler log-prob` over the sampled tokens, and its maximum.

    `mismatch/mean`: mean absolute difference. `mismatch/k3`: estimate of KL(sampler || trainer). `mismatch/max`: the
    largest absolute difference. On tokens of earlier weights, where the policy has moved, the difference counts as 0.

    The trainer's are those from before the updates where the batch has both. Else the sampler's are the old ones, and
    later updates of a step include the policy's movement: read the first one's.
    """
    batch, per_token = inputs.batch, inputs.batch.per_token
    recomputed = "sampler_logprobs" in per_token
    trainer = jax.lax.stop_gradient(jnp.asarray(old_logprobs(inputs)) if recomputed else inputs.logprobs)
    sampler = sampler_logprobs(inputs)
    if CURRENT in per_token:
        trainer = jnp.where(jnp.asarray(per_token[CURRENT]) > 0, trainer, sampler)
    distance = jnp.abs(trainer - sampler)
    k3 = cast(Array, kl_estimate(log_ratio(jnp.asarray(sampler), trainer, batch), "k3"))
    metrics = {**outputs.metrics, "mismatch/mean": distance, "mismatch/k3": k3}
    return replace(outputs, metrics=metrics, peaks={**outputs.peaks, "mismatch/max": distance})


def surrogate_outputs(
    surrogate: Surrogate, ratio: Float[Array, "B T"], log_ratios: Float[Array, "B T"], over: Over | float
) -> LossOutputs:
    """The term `policy` of a surrogate, with metrics of how far the policy has moved.

    Args:
        surrogate: the policy's loss per token.
        ratio: the ratio that the surrogate clips.
        log_ratios: `log p - log p_old` of each token.
        over: what the term is averaged over.
    """
    metrics = {"policy/ratio": ratio, "kl/old": cast(Array, kl_estimate(-log_ratios, "k3"))}
    if surrogate.clipped is not None:
        metrics["policy/clipped"] = surrogate.clipped.astype(jnp.float32)
    return LossOutputs({"policy": Term(surrogate.loss, over)}, metrics)


def log_ratio(
    logprobs: Float[Array, "B T"],
    others: Float[Array | np.ndarray, "B T"],
    batch: Batch,
) -> Float[Array, "B T"]:
    """`log p - log q` of the taken tokens, clamped to +-20; 0 outside of the mask, whatever the inputs are."""
    return jnp.clip(jnp.where(batch.loss_mask, logprobs - others, 0.0), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_sum(values: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """`[B T]` at every token the sum of its sequence's values over trained tokens.

    A sequence is never split between micro-batches, so that all its tokens are here.
    """
    return per_sequence(values, batch)[batch.sequence_ids]


def sequence_mean(values: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """`[B T]` at every token the mean of its sequence's values over trained tokens."""
    return sequence_sum(values, batch) / jnp.asarray(batch.lengths)[batch.sequence_ids]


def per_sequence(values: Float[Array, "B T"], batch: Batch, absent: float = 0.0) -> Float[Array, "S"]:
    """`[S]` the sum of each sequence's values over its trained tokens.

    Args:
        values: per token.
        batch: where the sequences' tokens are.
        absent: the value for sequences without a trained token here, such as those of other micro-batches. It does not
            matter, but its gradient has to be a number.
    """
    masked, owners = jnp.where(batch.loss_mask, values, 0.0), jnp.asarray(batch.sequence_ids)
    sums = jnp.zeros(batch.weights.shape, values.dtype).at[owners].add(masked)
    present = jnp.zeros(batch.weights.shape, bool).at[owners].max(batch.loss_mask)
    return jnp.where(present, sums, absent)


def policy_ratio(
    log_ratios: Float[Array, "B T"], batch: Batch, level: Literal["token", "sequence", "completion"] = "token"
) -> Float[Array, "B T"]:
    """The ratio of p to q at each token, from `log_ratio`.

        token       r_t = p(y_t) / q(y_t)                              PPO, https://arxiv.org/abs/1707.06347
        sequence    (p(y) / q(y))^(1/|y|) = exp(mean_t log r_t)        GSPO, https://arxiv.org/abs/2507.18071, eq. 7
        completion  p(y) / q(y) = prod_t r_t, y as a single action     RLOO, https://arxiv.org/abs/2402.14740, sec. 3

    `|y|` counts trained tokens, so that an environment's tokens between them do not change the mean. The logarithm of
    the product is clamped to +-`LOG_RATIO_LIMIT` too.
    """
    if level == "sequence":
        log_ratios = sequence_mean(log_ratios, batch)
    elif level == "completion":
        log_ratios = jnp.clip(sequence_sum(log_ratios, batch), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.exp(log_ratios)


def kl_estimate(
    log_ratios: Float[Array | np.ndarray, "*shape"], estimator: Estimator, limit: float | None = None
) -> Float[Array | np.ndarray, "*shape"]:
    """Estimates `KL(p || q)` from samples of p, with `d = log p - log q` at each, clamped to +-`LOG_RATIO_LIMIT`.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d (Schulman 2020, http://joschu.net/blog/kl-approx.html). k1 and k3 are
    unbiased, k3 is never negative, k2 is biased by third-order terms. All are 0 where p = q.

    What a value estimates is not what its gradient estimates. With p the policy, and samples from p, the expected
    gradient of each as a loss is (Tang and Munos 2025, https://arxiv.org/abs/2506.09477):

        k1: 0                k2: that of KL(p || q)                 k3: that of KL(q || p), the other direction
        r k1, r k3: that of KL(p || q), where r is p over the policy that sampled, also after p has been updated
        (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 7)

    As a penalty in the reward, k1 has the gradient of KL(p || q). k3+ is k3 with the gradient of k2 (straight through,
    as verl's `low_var_kl+`); of numpy arrays it is k3.

    Args:
        log_ratios: d, of any shape; numpy in, numpy out.
        estimator: the name.
        limit: the result is clamped to +- it, as in NeMo-RL and verl; where anything is clamped there is no gradient.
    """
    numpy = log_ratios.__array_namespace__()
    d = numpy.clip(log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        estimate = d
    elif estimator == "k2":
        estimate = 0.5 * d**2
    else:
        estimate = numpy.expm1(-d) + d
        if estimator == "k3+" and isinstance(d, jax.Array):
            k2 = 0.5 * d**2
            estimate = k2 + jax.lax.stop_gradient(estimate - k2)
    return estimate if limit is None else numpy.clip(estimate, -limit, limit)


def kl_loss(
    logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array | np.ndarray, "B T"],
    batch: Batch,
    *,
    estimator: Estimator = "k3",
    limit: float | None = None,
    sampler_logprobs: Float[Array | np.ndarray, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """The estimate of `KL(p || ref)` at each token, for a term of the loss: `kl_estimate`, or, weighted, `w k(d)`.

    d is the log-ratio to the reference, w = p / q, q the policy that sampled. The weighted estimate's gradient is that
    of `KL(p || ref)`, whichever policy sampled (see `kl_estimate`). d and then the product are clamped, as in NeMo-RL.

    Where the estimate is clamped there is no gradient at all, not even the weight's: times a large constant, it would
    lower w, which is the wrong direction. The gradient of `w k3` is `w (k3 + 1 - exp(-d)) grad log p = w d grad log p`;
    as the gradient of a product, float32 subtracts two numbers of 4e8 at d = -19.9 and gets -32.

    Args:
        logprobs: log p of the batch's tokens.
        reference_logprobs: the same under the reference.
        batch: which tokens are trained.
        estimator: the name; see `kl_estimate` for the gradients. Weighted, k1 or k3.
        limit: bound of the estimate, e.g. 10; None for none.
        sampler_logprobs: log q; None for no weight.
    """
    log_ratios = log_ratio(logprobs, reference_logprobs, batch)
    if sampler_logprobs is None:
        return cast(Array, kl_estimate(log_ratios, estimator, limit))
    weight = jnp.exp(log_ratio(logprobs, sampler_logprobs, batch))
    clamped, stopped = jnp.clip(log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), jax.lax.stop_gradient
    value = cast(Array, kl_estimate(clamped, estimator))
    product, outside = weight * value, jnp.abs(log_ratios) >= LOG_RATIO_LIMIT
    if estimator == "k3":
        half = 0.5 * clamped**2  # whose gradient is d
        product = stopped(weight) * (stopped(value - half) + half)
    if limit is not None:
        outside |= jnp.abs(product) >= limit
        product = jnp.clip(product, -limit, limit)
    return jnp.where(outside, stopped(product), product)


def clipped_surrogate(
    ratio: Float[Array, "B T"],
    advantages: Float[Array | np.ndarray, "B T"],
    low: float | Float[Array, ""],
    high: float | Float[Array, ""],
    dual: float | None = None,
) -> Surrogate:
    """`-min(r A, clip(r, 1 - low, 1 + high) A)`, and with `dual`: `-max(that minimum, dual A)` where A < 0.

    PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7); low < high is DAPO's (Yu et al. 2025,
    https://arxiv.org/abs/2503.14476, eq. 10). The minimum leaves `r A` unbounded below where A < 0 and r is large;
    the dual clip (Ye et al. 2020, https://arxiv.org/abs/1912.09729) bounds it.

    Args:
        ratio: r, per token or per sequence.
        advantages: A.
        low: the ratio counts as no less than 1 - low.
        high: the ratio counts as no more than 1 + high.
        dual: above 1; 3 is usual.
    """
    advantages = jnp.asarray(advantages)
    plain, bound = ratio * advantages, jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantages
    # where, not minimum: on a tie, which is every unclipped token, a minimum's gradient is half of each side's.
    clipped = plain > bound
    objective = jnp.where(clipped, bound, plain)
    if dual is not None:
        floored = (advantages < 0) & (objective < dual * advantages)
        objective = jnp.where(floored, dual * advantages, objective)
        clipped |= floored
    return Surrogate(-objective, clipped)


def cispo_surrogate(
    logprobs: Float[Array, "B T"],
    ratio: Float[Array, "B T"],
    advantages: Float[Array | np.ndarray, "B T"],
    low: float | Float[Array, ""],
    high: float | Float[Array, ""],
    masked: bool = False,
) -> Surrogate:
    """`-sg(clip(r, 1 - low, 1 + high)) A log p`: the weight is clipped, and no token loses its gradient.

    CISPO, MiniMax-M1, Chen et al. 2025, https://arxiv.org/abs/2506.13585, eqs. 4 and 5. Masked, the weight is r within
    the bounds and 0 outside: GLM-5's loss of agents, https://arxiv.org/abs/2602.15763, eqs. 3 to 5.

    Args:
        logprobs: log p of the taken tokens.
        ratio: r.
        advantages: A.
        low: 1 for no lower bound, as in the paper.
        high: the weight is at most 1 + high.
        masked: whether tokens outside have no weight.
    """
    outside = (ratio < 1.0 - low) | (ratio > 1.0 + high)
    weight = jnp.where(outside, 0.0, ratio) if masked else jnp.clip(ratio, 1.0 - low, 1.0 + high)
    return Surrogate(-jax.lax.stop_gradient(weight) * advantages * logprobs, outside)


def plain_surrogate(ratio: Float[Array, "B T"], advantages: Float[Array | np.ndarray, "B T"]) -> Surrogate:
    """`-r A`: the importance-weighted policy gradient.

    On-policy r = 1, and its gradient is `-A grad log p` (REINFORCE, Williams 1992,
    https://doi.org/10.1007/BF00992696).
    """
    return Surrogate(-ratio * advantages, None)


def soft_surrogate(
    ratio: Float[Array, "B T"], advantages: Float[Array | np.ndarray, "B T"], positive: float, negative: float
) -> Surrogate:
    """`-(4 / tau) sigmoid(tau (r - 1)) A`: instead of a clip, the gradient fades as r moves away from 1.

    SAPO, Gao et al. 2025, https://arxiv.org/abs/2511.20347, eqs. 5 to 7. The gradient's weight is
    `4 p (1 - p) r A` with p the sigmoid: that of `-r A` at r = 1, falling on both sides of it. The value at r = 1 is
    `-2 A / tau`; only its gradient means something.

    Args:
        ratio: r.
        advantages: A.
        positive: tau where A > 0.
        negative: tau elsewhere; with a larger tau the gradient fades sooner.
    """
    advantages = jnp.asarray(advantages)
    tau = jnp.where(advantages > 0, positive, negative)
    return Surrogate(-4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages, None)


def geometric_surrogate(
    log_ratios: Float[Array, "B T"],
    advantages: Float[Array | np.ndarray, "B T"],
    batch: Batch,
    low: float,
    high: float,
) -> Surrogate:
    """`-A exp(mean_t log r_t)`, where each token's ratio is clipped before the mean: at 1 + high where A > 0, at
    1 - low where A < 0.

    GMPO, Zhao et al. 2025, https://arxiv.org/abs/2507.20673: of PPO's minimum at each token the geometric mean
    over the completion. GSPO clips that mean; here one token that has moved far is clipped alone.

    Args:
        log_ratios: log r of each token.
        advantages: A of the completion, at each of its tokens.
        batch: which tokens form a completion.
        low: a ratio counts as no less than 1 - low where A < 0.
        high: a ratio counts as no more than 1 + high where A > 0.
    """
    advantages = jnp.asarray(advantages)
    bound = jnp.where(advantages > 0, jnp.log1p(high), jnp.log1p(-low))
    clipped = jnp.where(advantages > 0, log_ratios > bound, (advantages < 0) & (log_ratios < bound))
    mean = sequence_mean(jnp.where(clipped, bound, log_ratios), batch)
    return Surrogate(-jnp.exp(mean) * advantages, clipped)


def gamma_surrogate(
    logprobs: Float[Array, "B T"],
    log_ratios: Float[Array, "B T"],
    advantages: Float[Array | np.ndarray, "B T"],
    batch: Batch,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Surrogate:
    """`-sg(phi(w)) A log p`, w the completion's ratio, a product over tokens: `phi(w) = w^k exp(lam (1 - w))`.

    VESPO, Shen et al. 2026, https://arxiv.org/abs/2602.10693, as in TRL: the weight is 1 where the policy has not
    moved, highest at `w = k / lam`, and fades on both sides of that without a clip.

    Args:
        logprobs: log p of the taken tokens.
        log_ratios: log r of each token.
        advantages: A of the completion, at each of its tokens.
        batch: which tokens form a completion.
        positive: k and lam where A >= 0.
        negative: k and lam where A < 0.
    """
    advantages = jnp.asarray(advantages)
    k, lam = (jnp.where(advantages >= 0, x, y) for x, y in zip(positive, negative, strict=True))
    log_w = jnp.clip(sequence_sum(jax.lax.stop_gradient(log_ratios), batch), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return Surrogate(-jnp.exp(k * log_w - lam * jnp.expm1(log_w)) * advantages * logprobs, None)


IMPORTANCE_BOUNDS = {"truncate": (0.0, 2.0), "mask": (0.5, 5.0)}
"""The smallest and the largest importance weight of each kind, which are its authors'; see `importance_weight`."""


def importance_weight(
    log_weights: Float[Array, "B T"], kind: Literal["truncate", "mask"], low: float, high: float
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Importance weights `w = p(y) / q(y)` for tokens that q sampled and that train p.

    truncate: `clip(w, low, high)` (TIS, Yao et al. 2025, https://fengyao.notion.site/off-policy-rl, after Ionides 2008,
    with low = 0; OpenRLHF clips from below too).
    mask: w where `low <= w <= high`, else 0 (IcePop, Ling team 2025, https://arxiv.org/abs/2510.18855).

    Args:
        log_weights: log p - log q of each token.
        kind: truncate or mask.
        low: the smallest weight.
        high: the largest.

    Returns:
        The weights, without a gradient, and which of them were truncated or masked.
    """
    weight = jnp.exp(jnp.clip(jax.lax.stop_gradient(log_weights), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    outside = (weight < low) | (weight > high)
    return jnp.clip(weight, low, high) if kind == "truncate" else jnp.where(outside, 0.0, weight), outside


SURE = 1e-7
"""Lower bound of probabilities in a logarithm, so that it is finite."""


def without(surrogate: Surrogate, masked: Bool[Array, "B T"]) -> Surrogate:
    """The surrogate with loss 0 and no gradient where `masked`; these tokens count as clipped."""
    clipped = masked if surrogate.clipped is None else surrogate.clipped | masked
    return Surrogate(jnp.where(masked, 0.0, surrogate.loss), clipped)


def outside_trust_region(
    logprobs: Float[Array, "B T"],
    others: Float[Array | np.ndarray, "B T"],
    advantages: Float[Array | np.ndarray, "B T"],
    kind: Literal["tv", "kl"],
    bound: float,
) -> Bool[Array, "B T"]:
    """Tokens whose update would move p further away from the sampler q, where it is too far away already.

    DPPO, Qi et al. 2026, https://arxiv.org/abs/2602.04879, eq. 12: masked where `A > 0, p > q, D > bound` or
    `A < 0, p < q, D > bound`. D compares only the taken token with all others (the paper's binary approximation, a
    lower bound): tv is `|p - q|`, kl `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`, finite also where p or q is 0 or
    1. A rare token may change its ratio a lot before D notices; a common one may not.

    Args:
        logprobs: log p of the taken tokens.
        others: log q.
        advantages: A.
        kind: which D.
        bound: the largest D.
    """
    advantages = jnp.asarray(advantages)
    p, q = (jnp.exp(jax.lax.stop_gradient(jnp.asarray(x))) for x in (logprobs, others))
    if kind == "tv":
        divergence = jnp.abs(p - q)
    else:
        taken, rest = (
            a * (jnp.log(jnp.maximum(a, SURE)) - jnp.log(jnp.maximum(b, SURE))) for a, b in ((q, p), (1.0 - q, 1.0 - p))
        )
        divergence = taken + rest
    rising = (advantages > 0) & (p > q) & (divergence > bound)
    return rising | ((advantages < 0) & (p < q) & (divergence > bound))
