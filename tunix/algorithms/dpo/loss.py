"""The loss of DPO and its relatives: log-probs -> a reward for each completion -> a comparison of each pair's rewards.

A completion's reward is its log-probability, or its distance to the reference; the forms below compare a pair's. A
completion's log-probability is the sum over its trained tokens. Arrays in, terms out.

Axes: B rows, T time, S sequences, Pa pairs (2 i is chosen, 2 i + 1 rejected).
"""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from tunix.algorithms.dpo.config import Form
from tunix.algorithms.ops import per_sequence
from tunix.types import Batch, LossOutputs, Term

BASELINE = "baseline"
"""The per-sequence value that some forms subtract from a reward, in its units (`algorithm.py`)."""
POLICY_WEIGHT = "policy_weight"
"""The per-sequence value by which the loss of its pair is multiplied (`algorithm.py`)."""
EXPONENT_LIMIT = 80.0
"""Bound of exponents: exp(89) overflows float32, and the difference of two infinities has no gradient."""
TAU = 0.05
"""DiscoPOP's temperature: how sharply it changes from the logistic to the exponential loss."""
SURE = -1e-6
"""Upper bound of a mean log-prob whose odds are computed: at 0 they are infinite."""

Pairs = Float[Array, "Pa"]


def dpo_loss(
    logprobs: Float[Array, "B T"],
    reference_logprobs: Float[Array | np.ndarray, "B T"] | None,
    batch: Batch,
    *,
    loss: Form | Mapping[Form, float] = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gamma: float = 1.0,
    length_normalized: bool = False,
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl",
    alpha: float = 0.5,
    ld_alpha: float = 1.0,
    baselines: Num[Array | np.ndarray, "S"] | None = None,
    policy_weights: Num[Array | np.ndarray, "S"] | None = None,
    sft_weight: float = 0.0,
    sft_reduction: Literal["sequences", "tokens"] = "sequences",
) -> LossOutputs:
    """`E_pairs[form(r_chosen, r_rejected)] + sft_weight E_pairs[-log p(chosen) / |chosen|]`.

    DPO, Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. 7. The reward r of a completion y is, in the units
    that the forms compare:

        with a reference     beta f'(u), u = p(y) / p_ref(y), f that of the divergence (see `slope`)
        length_normalized    beta log(u) / |y|
        simpo                beta log p(y) / |y| (https://arxiv.org/abs/2405.14734)
        cpo                  beta log p(y) (https://arxiv.org/abs/2401.08417)
        orpo                 log(P / (1 - P)) with log P = log p(y) / |y| (https://arxiv.org/abs/2403.07691, eq. 4)

    The forms, with d = r_chosen - r_rejected and e the label smoothing; formulas stand in the code:

        sigmoid, simpo, orpo, cpo    `logistic`, which has their sources
        robust                       `robust`
        exo          https://arxiv.org/abs/2402.00856    sppo_hard           https://arxiv.org/abs/2405.00675
        ipo          https://arxiv.org/abs/2310.12036    apo_zero, apo_down  https://arxiv.org/abs/2408.06266
        discopop     https://arxiv.org/abs/2406.08414    aot, aot_unpaired   https://arxiv.org/abs/2406.05882
        nca          https://arxiv.org/abs/2402.05369
        hinge        https://arxiv.org/abs/2305.10425 (SLiC-HF), https://arxiv.org/abs/2309.06657 (RSO)

    The second term is that of RPO (Pang et al. 2024, https://arxiv.org/abs/2404.19733); with `sft_reduction: tokens` it
    is the sum of -log p(chosen) over the pairs divided by that of |chosen|.

    Args:
        logprobs: log p of the tokens of pairs.
        reference_logprobs: the same under the reference; None for simpo, cpo and orpo, which have none.
        batch: which tokens are trained, and which of them form a completion.
        loss: the form: how the rewards of a pair are compared; or several with a reference -> weights in their sum.
        beta: scale of the rewards; with ipo its tau, with orpo its lambda, with sppo_hard 1 / eta.
        label_smoothing: e of the forms that have it.
        gamma: simpo's margin.
        length_normalized: whether log-ratios are divided by |y|.
        divergence: f.
        alpha: of the divergence `alpha`.
        ld_alpha: weight of the log-ratios of tokens after as many as the shorter side has; see `tail_weights`.
        baselines: subtracted from each reward, for aot and aot_unpaired; None for 0.
        policy_weights: of each side, multiplied with the pair's loss (WPO, Zhou et al. 2024,
            https://arxiv.org/abs/2406.11827, eq. 2); None for 1.
        sft_weight: weight of the second term.
        sft_reduction: what it is averaged over.
    """
    forms: Mapping[Form, float] = {loss: 1.0} if isinstance(loss, str) else loss
    sums = per_sequence(logprobs, batch)
    metrics: dict[str, Float[Array, "B T"] | Term] = {}
    if "orpo" in forms:
        # -1 for sequences of other micro-batches: the odds of an empty sum are infinite.
        mean = jnp.minimum(per_sequence(logprobs, batch, absent=-1.0) / batch.lengths, SURE)
        rewards = mean - jnp.log(-jnp.expm1(mean))
    elif reference_logprobs is None:
        rewards = beta * (sums / batch.lengths if "simpo" in forms else sums)
    else:
        log_ratios = logprobs - reference_logprobs
        metrics["kl/reference"] = 0.5 * log_ratios**2
        log_u = per_sequence(log_ratios if ld_alpha == 1 else log_ratios * tail_weights(batch, ld_alpha), batch)
        rewards = beta * (log_u / batch.lengths if length_normalized else slope(log_u, divergence, alpha))
    measured = rewards if baselines is None else rewards - jnp.asarray(baselines)
    chosen, rejected = measured[::2], measured[1::2]
    gap = chosen - rejected
    weight_Pa: Pairs | float = 1.0
    if policy_weights is not None:
        sides = jnp.asarray(policy_weights)
        weight_Pa = sides[::2] * sides[1::2]
        metrics["policy/weight"] = Term(weight_Pa, "pairs")
    terms: dict[str, Term] = {}
    for form, factor in forms.items():
        match form:
            case "sigmoid" | "cpo" | "aot":
                compared_Pa = logistic(gap, label_smoothing)
            case "simpo":
                compared_Pa = logistic(gap - gamma, label_smoothing)
            case "orpo":
                compared_Pa = beta * logistic(gap, 0.0)
            case "robust":
                compared_Pa = robust(gap, label_smoothing)
            case "exo":
                # KL(p || q), p = (sigmoid(d), sigmoid(-d)) and q = (1 - e, e): Ji et al. 2024, eq. 16, for two
                # completions. DPO is the KL the other way round; this one seeks the mode. Its minimum is 0, at d =
                # log((1 - e) / e), 6.9 for the paper's e = 0.001.
                right, wrong = jax.nn.log_sigmoid(gap), jax.nn.log_sigmoid(-gap)
                compared_Pa = jnp.exp(right) * (right - np.log1p(-label_smoothing))
                compared_Pa += jnp.exp(wrong) * (wrong - np.log(label_smoothing))
            case "ipo":
                # (h - 1 / (2 tau))^2, h the unscaled difference of the log-ratios: Azar et al. 2023, eq. 17. h is one
                # of sums over completions, as in the paper. Its authors later recommended means over tokens
                # (https://huggingface.co/blog/pref-tuning), which is `length_normalized`.
                compared_Pa = (gap / beta - 1 / (2 * beta)) ** 2
            case "hinge":
                # max(0, 1 - d): Zhao et al. 2023; with a reference as in RSO, Liu et al. 2023.
                compared_Pa = jax.nn.relu(1 - gap)
            case "discopop":
                # (1 - m) (-log sigmoid(d)) + m exp(-d), m = sigmoid(d / tau): exponential where d is large, else
                # logistic; not convex. Lu et al. 2024, eq. 5. One exponent for both factors of m exp(-d): separately
                # they overflow where d is far below 0.
                exponent = jnp.minimum(jax.nn.log_sigmoid(gap / TAU) - gap, EXPONENT_LIMIT)
                compared_Pa = -jax.nn.sigmoid(-gap / TAU) * jax.nn.log_sigmoid(gap) + jnp.exp(exponent)
            case "nca":
                # -log sigmoid(r_c) - (log sigmoid(-r_c) + log sigmoid(-r_r)) / 2: classifies the chosen completion
                # against noise, of which both are samples, so that its likelihood does not fall. Chen et al. 2024, eq.
                # 11 with rewards of 1 and 0 and K = 2.
                noise = jax.nn.log_sigmoid(-chosen) + jax.nn.log_sigmoid(-rejected)
                compared_Pa = -jax.nn.log_sigmoid(chosen) - 0.5 * noise
            case "sppo_hard":
                # (h_c - eta / 2)^2 + (h_r + eta / 2)^2, h the unscaled log-ratio of a completion: Wu et al. 2024, eq.
                # 4.7, where the probability to win is 1 for the chosen completion and 0 for the other; eta is 1 / beta,
                # 1000.
                eta = 1 / beta
                compared_Pa = (chosen / beta - 0.5 * eta) ** 2 + (rejected / beta + 0.5 * eta) ** 2
            case "apo_zero":
                # Raises the chosen completion and lowers the rejected one, independently; for chosen completions that
                # are better than the policy's own. D'Oosterlinck et al. 2024; the constant 1 is ours.
                compared_Pa = 1 - jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected)
            case "apo_down":
                # Lowers the chosen completion too, and the rejected one further; for a policy that is better than the
                # chosen completions. D'Oosterlinck et al. 2024; the constant 1 is ours.
                compared_Pa = jax.nn.sigmoid(chosen) + 1 - jax.nn.sigmoid(chosen - rejected)
            case "aot_unpaired":
                # `logistic` of the k-th smallest chosen reward less the k-th smallest rejected one, for every k of the
                # batch (Melnyk et al. 2024, unpaired). Two sequences that are compared may be in different
                # micro-batches. Each has the other's reward as its baseline, without a gradient: every comparison
                # occurs twice, with half of its value and the full gradient of one side.
                twice = logistic(chosen, label_smoothing) + logistic(-rejected, label_smoothing)
                compared_Pa = twice - 0.5 * jax.lax.stop_gradient(twice)
        name = "preference" if len(forms) == 1 else form
        terms[name] = Term(factor * weight_Pa * compared_Pa, "pairs")
    if sft_weight:
        weights, lengths = jnp.asarray(batch.weights)[::2], jnp.asarray(batch.lengths)[::2]
        if sft_reduction == "tokens":  # the mean length of the whole batch, for a term that is divided by pairs
            trained = jnp.sum(weights)
            lengths = jnp.where(trained > 0, jnp.sum(weights * lengths) / jnp.where(trained > 0, trained, 1.0), 1.0)
        terms["sft"] = Term(-sft_weight * sums[::2] / lengths, "pairs")
    margin = rewards[::2] - rewards[1::2]
    of_pairs = {
        "rewards/chosen": rewards[::2],
        "rewards/rejected": rewards[1::2],
        "rewards/margin": margin,
        "rewards/accuracy": jnp.heaviside(margin, 0.5),
        "logprobs/chosen": sums[::2],
        "logprobs/rejected": sums[1::2],
    }
    return LossOutputs(terms, {**{name: Term(values, "pairs") for name, values in of_pairs.items()}, **metrics})


def tail_weights(batch: Batch, alpha: float) -> Float[Array, "B T"]:
    """`[B T]` 1 at each of a completion's first l trained tokens and alpha at later ones, l the length of the pair's
    shorter side.

    LD-DPO, Liu et al. 2024, https://arxiv.org/abs/2409.06411: of a longer side, what it has more counts less, so
    that length alone is not preferred. Alpha 1 is DPO, 0 compares equal lengths.
    """
    mask, owners = jnp.asarray(batch.loss_mask), jnp.asarray(batch.sequence_ids)
    number = jnp.cumsum(mask, axis=1)  # trained tokens of the row so far
    before = jnp.full(batch.weights.shape, mask.shape[1]).at[owners].min(jnp.where(mask, number - 1, mask.shape[1]))
    lengths = jnp.asarray(batch.lengths)
    shorter = jnp.repeat(jnp.minimum(lengths[::2], lengths[1::2]), 2)
    return jnp.where(number - before[owners] > shorter[owners], alpha, 1.0)


def slope(
    log_u: Float[Array, "S"], divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"], alpha: float = 0.5
) -> Float[Array, "S"]:
    """`f'(u) - f'(1)` of the f-divergence, for u = p / p_ref given as its logarithm; the constant cancels in a pair.

    f-DPO, Wang et al. 2023, https://arxiv.org/abs/2309.16240.

        reverse_kl  f'(u) = log u + 1          -> log u
        forward_kl  f'(u) = -1 / u             -> 1 - 1 / u
        js          f'(u) = log(2u / (1 + u))  -> log(2u / (1 + u))
        alpha       f'(u) = (1 - u^-a) / a     -> (1 - u^-a) / a; a -> 0 is reverse_kl, a = 1 forward_kl
    """
    if divergence == "reverse_kl":
        return log_u
    if divergence == "js":
        return jnp.log(2.0) + jax.nn.log_sigmoid(log_u)
    a = 1.0 if divergence == "forward_kl" else alpha
    return -jnp.expm1(jnp.clip(-a * log_u, -EXPONENT_LIMIT, EXPONENT_LIMIT)) / a


def logistic(gap: Pairs, smoothing: float) -> Pairs:
    """`-(1 - e) log sigmoid(d) - e log sigmoid(-d)`, d the difference of the rewards, e the label smoothing.

    e = 0: DPO's (https://arxiv.org/abs/2305.18290, eq. 7), CPO's (Xu et al. 2024, https://arxiv.org/abs/2401.08417);
    with d less gamma SimPO's (Meng et al. 2024, https://arxiv.org/abs/2405.14734); on log odds and times lambda ORPO's
    (Hong et al. 2024, https://arxiv.org/abs/2403.07691, eq. 7). e > 0: conservative DPO (Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf, eq. 3), whose optimum is a finite d, log((1 - e) / e). On sorted values AOT's.
    """
    return -(1 - smoothing) * jax.nn.log_sigmoid(gap) - smoothing * jax.nn.log_sigmoid(-gap)


def robust(gap: Pairs, smoothing: float) -> Pairs:
    """`(-(1 - e) log sigmoid(d) + e log sigmoid(-d)) / (1 - 2e)`: its mean over labels with a share e flipped is that
    of DPO's loss over the right labels.

    Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409. It has no lower bound.
    """
    right, wrong = jax.nn.log_sigmoid(gap), jax.nn.log_sigmoid(-gap)
    return (-(1 - smoothing) * right + smoothing * wrong) / (1 - 2 * smoothing)
