"""The loss of supervised fine-tuning: arrays in, terms out.

Axes: B rows, T time.
"""

from jaxtyping import Array, Float

from tunix.types import LossOutputs, Over, Term


def sft_loss(logprobs: Float[Array, "B T"], over: Over = "tokens") -> LossOutputs:
    """Negative log-likelihood of the trained tokens.

    `tokens`: L = - sum_s w_s sum_t log p(y_st) / sum_s w_s n_s, the mean over all trained tokens of the batch.
    `sequences`: L = - sum_s w_s (1/n_s) sum_t log p(y_st) / sum_s w_s, each sequence counts alike whatever its length.

    Args:
        logprobs: of the taken tokens.
        over: what the term is averaged over.
    """
    return LossOutputs({"nll": Term(-logprobs, over)})
