"""The losses of distillation: arrays in, terms out.

`distill_loss` is for given text and for the student's own completions, `sampled_loss` for the latter alone.

Axes: B rows, T time.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tunix.algorithms.ops import log_ratio, plain_surrogate, policy_ratio
from tunix.types import Batch, Compared, LossOutputs, Over, Term


def distill_loss(
    compared: Compared,
    logprobs: Float[Array, "B T"],
    over: Over = "tokens",
    *,
    temperature: float = 1.0,
    sft_weight: float = 0.0,
) -> LossOutputs:
    """Divergence of teacher and student at every trained token, over the whole vocabulary or the teacher's top k.

    L = tau^2 mean_t D(q_t, p_t) + w mean_t -log p(y_t), with q the teacher's distribution and p the student's, both at
    temperature tau, and D as `types.Divergence` says. The square keeps the size of the gradient, which falls with it
    (Hinton, Vinyals and Dean 2015, https://arxiv.org/abs/1503.02531, sec. 2); the second term, at temperature 1, is
    theirs too. On text that the student wrote this is generalised knowledge distillation (GKD, Agarwal et al. 2023,
    https://arxiv.org/abs/2306.13649) with lambda 1, and with the reverse KL the single-step part of MiniLLM's gradient
    (Gu et al. 2023, https://arxiv.org/abs/2306.08543, sec. 2.2). The text counts as given: there is no gradient through
    the sampling, as in GKD.

    Args:
        compared: teacher and student at each token.
        logprobs: log p of the tokens, at temperature 1; read where there is a `sft_weight`.
        over: what the terms are averaged over.
        temperature: tau of the divergence.
        sft_weight: w; 0 for no such term.
    """
    terms = {"distill": Term(temperature**2 * compared.divergence, over)}
    if sft_weight:
        terms["sft"] = Term(-sft_weight * logprobs, over)
    metrics = {
        "distill/divergence": compared.divergence,
        "distill/agreement": compared.agreement,
        "distill/teacher_logprob": compared.teacher_logprobs,
    }
    return LossOutputs(terms, metrics)


def sampled_loss(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array | np.ndarray, "B T"],
    teacher_logprobs: Float[Array | np.ndarray, "B T"],
    batch: Batch,
    over: Over = "tokens",
    *,
    weights: Float[Array | np.ndarray, "B T"] | float = 1.0,
) -> LossOutputs:
    """Policy gradient whose advantage is the teacher's minus the student's log-prob of each sampled token.

    L = mean_t -r_t A_t, with A_t = log q(y_t) - log p_old(y_t) and r_t = p(y_t) / p_old(y_t): the negative reverse KL
    of every token as its own reward, without discounting of later ones (Thinking Machines 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation/). p and q are at the temperature that was sampled with.
    `p_old` is the sampler's; at the single update of a step r is 1, and the expected gradient at each state is that of
    `KL(p || q)` there. The effect of a token on the divergence of later ones is left out; MiniLLM (Gu et al. 2023,
    https://arxiv.org/abs/2306.08543) has it.

    Args:
        logprobs: log p of the tokens.
        old_logprobs: log p_old.
        teacher_logprobs: log q.
        batch: which tokens are trained.
        over: what the term is averaged over.
        weights: what the advantage of each token is multiplied by, e.g. `prefix_weights`.
    """
    old, teacher = jnp.asarray(old_logprobs), jnp.asarray(teacher_logprobs)
    ratio = policy_ratio(log_ratio(logprobs, old, batch), batch)
    surrogate = plain_surrogate(ratio, weights * (teacher - old))
    metrics = {"distill/divergence": old - teacher, "distill/teacher_logprob": teacher, "policy/ratio": ratio}
    return LossOutputs({"distill": Term(surrogate.loss, over)}, metrics)


def prefix_weights(gaps: Float[np.ndarray, "T"], gamma: float) -> Float[np.ndarray, "T"]:
    """Weights of a completion's tokens that fall as what was sampled before them departs from the teacher.

    w_t = 1 + gamma (1 - sum_{k < t} |A_k| / sum_k |A_k|): 1 + gamma at the first token. IW-OPD, Xie et al. 2026,
    https://arxiv.org/abs/2606.22600, which takes gamma = 0.5, with the denominator of TRL's `IWOPDTrainer`.

    Args:
        gaps: A, the teacher's minus the sampler's log-prob of each sampled token; 0 at all others.
        gamma: how much more the first token counts than one without a weight.
    """
    sizes = np.abs(gaps)
    return 1 + gamma * (1 - (np.cumsum(sizes) - sizes) / max(sizes.sum(), np.float32(1e-8)))
