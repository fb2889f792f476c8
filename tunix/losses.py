"""The pure losses by name: arrays and numbers in, per-token terms out, without models, meshes, loops or configs.

`tunix.losses.grpo_loss(logprobs, old_logprobs, advantages, batch, clip_high=0.28)` is the function that a run
differentiates; `tunix.losses.ops` has their parts (ratios, KL estimators, surrogates). Each docstring has the equation
and the paper.
"""

from tunix.algorithms import ops
from tunix.algorithms.distill.loss import distill_loss, prefix_weights, sampled_loss
from tunix.algorithms.dpo.loss import dpo_loss
from tunix.algorithms.grpo.loss import grpo_loss
from tunix.algorithms.kto.loss import kto_loss
from tunix.algorithms.ppo.loss import ppo_loss, value_loss
from tunix.algorithms.reward.loss import reward_loss
from tunix.algorithms.sft.loss import sft_loss

__all__ = [
    "distill_loss",
    "dpo_loss",
    "grpo_loss",
    "kto_loss",
    "ops",
    "ppo_loss",
    "prefix_weights",
    "reward_loss",
    "sampled_loss",
    "sft_loss",
    "value_loss",
]
