"""The loss of the GRPO family: ratio -> surrogate -> terms. Arrays in, terms out.

Axes: B rows, T time.
"""

from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.loss import old_log_ratio, policy_outputs, trained_only
from tunix.algorithms.ops import cispo_surrogate, clipped_surrogate, plain_surrogate, sequence_ratio, token_ratio
from tunix.types import LossInputs, LossOutputs, Over


def grpo_loss(inputs: LossInputs, config: GRPOConfig, over: Over | float) -> LossOutputs:
    """`E[surrogate(r, A)] + kl KL - entropy_bonus H`, with r the policy over the policy that drew.

    GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3; `presets.py` names the relatives. The README says
    which settings make which formula. The advantage is that of the whole completion, on each of its tokens.

    Args:
        inputs: the batch's per-token `advantages` and `old_logprobs`, and what `loss.policy_outputs` reads.
        config: the section of the recipe.
        over: `config.over(completion_length)`.
    """
    inputs = trained_only(inputs)
    advantages = inputs.batch.per_token["advantages"]
    log_ratios = old_log_ratio(inputs)
    ratio = sequence_ratio(log_ratios, inputs.batch) if config.ratio == "sequence" else token_ratio(log_ratios)
    if config.surrogate == "none":
        surrogate = plain_surrogate(ratio, advantages)
    else:
        assert config.clip_low is not None
        assert config.clip_high is not None
        low, high = config.clip_low, config.clip_high
        if config.surrogate == "cispo":
            surrogate = cispo_surrogate(inputs.logprobs, ratio, advantages, low, high)
        else:
            surrogate = clipped_surrogate(ratio, advantages, low, high, config.dual_clip)
    return policy_outputs(inputs, config, over, surrogate, ratio, config.kl)
