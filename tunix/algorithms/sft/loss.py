"""The loss of supervised fine-tuning: arrays in, terms out.

Axes: B rows, T time.
"""

from tunix.types import LossInputs, LossOutputs, Over, Term


def sft_loss(inputs: LossInputs, over: Over) -> LossOutputs:
    """Negative log-likelihood of the trained tokens.

    `tokens`: L = - sum_s w_s sum_t log p(y_st) / sum_s w_s n_s, the mean over all trained tokens of the batch.
    `sequences`: L = - sum_s w_s (1/n_s) sum_t log p(y_st) / sum_s w_s, each sequence counts alike whatever its length.

    Args:
        inputs: log-probs `[B T]` of the taken tokens.
        over: what the term is averaged over.
    """
    return LossOutputs({"nll": Term(-inputs.logprobs, over)})
