"""The loss of supervised fine-tuning: arrays in, terms out.

Axes: B rows, T time.
"""

from jaxtyping import Array, Float

from tunix.types import LossOutputs, Over, Term


def sft_loss(
    logprobs: Float[Array, "B T"],
    over: Over = "tokens",
    *,
    label_smoothing: float = 0.0,
    above_mean: Float[Array, "B T"] | None = None,
) -> LossOutputs:
    """Negative log-likelihood of the trained tokens.

    `tokens`: L = - sum_s w_s sum_t log p(y_st) / sum_s w_s n_s, the mean over all trained tokens of the batch.
    `sequences`: L = - sum_s w_s (1/n_s) sum_t log p(y_st) / sum_s w_s, each sequence counts alike whatever its length.

    With label smoothing e the target is `1 - e` of the token and `e / V` of every id of the vocabulary (Szegedy et al.
    2016, https://arxiv.org/abs/1512.00567, sec. 7): `-(1 - e) log p(y) - e mean_v log p(v)`, which is
    `-log p(y) + e (z(y) - mean_v z(v))` for logits z.

    Args:
        logprobs: of the taken tokens.
        over: what the term is averaged over.
        label_smoothing: e.
        above_mean: `z(y) - mean_v z(v)`; None for no smoothing, as in an evaluation.
    """
    if above_mean is None or not label_smoothing:
        return LossOutputs({"nll": Term(-logprobs, over)})
    return LossOutputs({"nll": Term(label_smoothing * above_mean - logprobs, over)})
