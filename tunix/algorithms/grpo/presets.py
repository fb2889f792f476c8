"""Published variants of GRPO as settings of `GRPOConfig`. Loads without jax.

Keys that the user writes take precedence over the preset's. What a paper tunes for its task (group size, learning rate,
updates per batch of rollouts) is left to the recipe.
"""

from collections.abc import Mapping
from typing import Any, Literal

Preset = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "sapo",
    "dppo",
    "prime_rl",
    "dro",
    "luspo",
    "maxrl",
]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # DeepSeekMath, Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3 and 4, sec. 4.2 (KL coefficient).
    "grpo": {"advantage": "mean_std", "reduction": "sequences", "kl": 0.04, "kl_in": "loss", "kl_estimator": "k3"},
    # Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 8 to 13, sec. 4.1: buffer of 4096 in 20480 tokens.
    "dapo": {
        "advantage": "mean_std",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "reduction": "tokens",
        "dynamic_sampling": True,
        "overlong_buffer": 0.2,
    },
    # Liu et al. 2025, https://arxiv.org/abs/2503.20783, sec. 3.2: no length normalisation, no std.
    "dr_grpo": {"advantage": "mean", "reduction": "constant"},
    # Zheng et al. 2025, https://arxiv.org/abs/2507.18071, eq. 5 to 7, sec. 5.1 (clip).
    "gspo": {
        "advantage": "mean_std",
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "reduction": "sequences",
    },
    # MiniMax-M1, Chen et al. 2025, https://arxiv.org/abs/2506.13585, eq. 4 and 5: no lower bound. The paper does not
    # print the upper one; weights up to 5 are those of ScaleRL, Khatri et al. 2025, https://arxiv.org/abs/2510.13786.
    "cispo": {
        "advantage": "mean_std",
        "surrogate": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "reduction": "tokens",
    },
    # Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, sec. 3: a completion is one action, so its log-probs are
    # summed, and from the second update on its ratio is the product of its tokens'. Divided by a constant, which scales
    # every gradient alike and leaves clip_norm its meaning. The paper tunes the KL coefficient; 0.05 is what TRL takes.
    "rloo": {
        "advantage": "leave_one_out",
        "ratio": "completion",
        "surrogate": "none",
        "reduction": "constant",
        "kl": 0.05,
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    # Hu et al. 2025, https://arxiv.org/abs/2501.03262: PPO's clip; rewards, with the KL in them, are
    # normalised over the batch. The KL coefficient is that of its authors' library, OpenRLHF.
    "reinforce_pp": {
        "advantage": "batch",
        "reduction": "tokens",
        "kl": 0.01,
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    # Gao et al. 2025, https://arxiv.org/abs/2511.20347, eq. 5 to 7, sec. 5 (the two temperatures).
    "sapo": {
        "advantage": "mean_std",
        "surrogate": "soft",
        "soft_positive": 1.0,
        "soft_negative": 1.05,
        "reduction": "sequences",
    },
    # Qi et al. 2026, https://arxiv.org/abs/2602.04879, eq. 11 and 12, by total variation; kl is `trust_region: kl`.
    "dppo": {
        "surrogate": "none",
        "trust_region": "tv",
        "trust_low": 0.15,
        "trust_high": 0.15,
        "reduction": "tokens",
    },
    # The default loss of https://github.com/PrimeIntellect-ai/prime-rl in 2026: DPPO's mask and Kimi k2.5's squared
    # log-ratio (https://arxiv.org/abs/2602.02276), of which it takes 1e-3 times the whole: 2e-3 times the half.
    "prime_rl": {
        "advantage": "mean",
        "surrogate": "none",
        "trust_region": "tv",
        "trust_low": 0.2,
        "trust_high": 0.2,
        "drift": 2e-3,
        "reduction": "tokens",
    },
    # Richemond et al. 2024, https://arxiv.org/abs/2405.19107, with the group's mean for the value as in Kimi k1.5
    # (https://arxiv.org/abs/2501.12599, eq. 3) and the squares taken token by token as in Tinker's loss `dro`
    # (https://tinker-docs.thinkingmachines.ai/tinker/losses/dro), whose example has this coefficient.
    "dro": {"advantage": "mean", "surrogate": "log", "drift": 0.05, "reduction": "constant"},
    # Liu et al. 2026, https://arxiv.org/abs/2602.05261, sec. 4.2: GSPO times the length, which is a sum over tokens;
    # divided by a constant as in rloo (`reduction_length: 1` is the paper's number). Sec. 5.1 (clip).
    "luspo": {
        "advantage": "mean_std",
        "ratio": "sequence",
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
        "reduction": "constant",
    },
    # Tajwar et al. 2026, https://arxiv.org/abs/2602.02710: the advantage over the group's success rate; a completion is
    # one action, so its log-probs are summed.
    "maxrl": {"advantage": "mean_relative", "reduction": "constant"},
}
