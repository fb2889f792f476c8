"""The `algorithm` section of a recipe for GRPO and its relatives, and the published variants. Loads without jax.

A preset has settings of `GRPOConfig`; keys that the user writes take precedence. What a paper tunes for its task (group
size, learning rate, updates per batch of rollouts) is left to the recipe.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tunix.algorithms.config import Above0, Advantage, NonNegative, PolicyConfig, Rule, Settings, Unit
from tunix.config import Positive

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
    # Gao et al. 2025, https://arxiv.org/abs/2511.20347, eq. 5 to 7, sec. 5 (the temperatures: `loss.SOFT_TAUS`).
    "sapo": {"advantage": "mean_std", "surrogate": "soft", "reduction": "sequences"},
    # Qi et al. 2026, https://arxiv.org/abs/2602.04879, eq. 11 and 12, by total variation; kl is `trust_region: kl`.
    "dppo": {"surrogate": "none", "trust_region": "tv", "reduction": "tokens"},
    # The default loss of https://github.com/PrimeIntellect-ai/prime-rl in 2026: DPPO's mask and Kimi k2.5's squared
    # log-ratio (https://arxiv.org/abs/2602.02276), of which it takes 1e-3 times the whole: 2e-3 times the half.
    "prime_rl": {
        "advantage": "mean",
        "surrogate": "none",
        "trust_region": ("tv", 0.2),
        "drift": 2e-3,
        "reduction": "tokens",
    },
    # Richemond et al. 2024, https://arxiv.org/abs/2405.19107, with the group's mean for the value as in Kimi k1.5
    # (https://arxiv.org/abs/2501.12599, eq. 3) and the squares taken token by token as in Tinker's loss `dro`
    # (https://tinker-docs.thinkingmachines.ai/tinker/losses/dro), whose example has this coefficient.
    "dro": {"advantage": "mean", "surrogate": "log", "drift": 0.05, "reduction": "constant"},
    # Liu et al. 2026, https://arxiv.org/abs/2602.05261, sec. 4.2: GSPO times the length, which is a sum over tokens;
    # divided by a constant as in rloo. Sec. 5.1 (clip).
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
    # Zhao et al. 2025, https://arxiv.org/abs/2507.20673: ratios are clipped at exp(-0.4) and exp(0.4).
    "gmpo": {
        "advantage": "mean_std",
        "surrogate": "geometric",
        "clip_low": 0.3297,
        "clip_high": 0.4918,
        "reduction": "sequences",
    },
    # Shen et al. 2026, https://arxiv.org/abs/2602.10693, with the numbers and the mean of TRL (`loss.GAMMA_WEIGHTS`).
    "vespo": {"advantage": "mean_std", "surrogate": "gamma", "reduction": "tokens"},
    # Cui et al. 2025, https://arxiv.org/abs/2505.22617: beside PPO's clip, and in its place.
    "clip_cov": {"advantage": "mean_std", "covariance": "clip", "reduction": "tokens"},
    "kl_cov": {"advantage": "mean_std", "surrogate": "none", "covariance": "kl", "reduction": "tokens"},
    # GLM-5's loss of agents, 2026, https://arxiv.org/abs/2602.15763, eqs. 3 to 5, which has no bounds in print.
    "glm5": {"advantage": "mean", "surrogate": "mask", "reduction": "tokens"},
}
if TYPE_CHECKING:  # no type checker reads names out of a table
    Preset = str
else:
    Preset = Literal[*PRESETS]

COVARIANT_SHARE = 2e-4
"""Share of the tokens that `covariance` selects, by its authors' configuration in verl."""

TRUST_BOUNDS = {"tv": 0.15, "kl": 0.05}
"""How far a token's probability may have moved in DPPO's trust region, by the divergence that measures it."""

DIVIDES = ("mean_std", "leave_one_out_std", "batch", "mean_batch", "mean_batch_std")
"""Advantages that are divided by a standard deviation."""


class GRPOConfig(PolicyConfig):
    """Several completions of each prompt, compared with their group. Written keys take precedence over the preset's."""

    name: str = "grpo"
    preset: Preset | None = None
    """A published variant: its settings are used for all keys that are not written."""
    group_size: Positive = 8
    """Completions of each prompt."""
    advantage: Advantage = "mean_std"
    """What a reward is compared with: its group's mean (and std, or divided by it: MaxRL,
    https://arxiv.org/abs/2602.02710), the others' mean (and std), the median, the whole batch, or the
    group's mean with the batch's std."""
    normalize_rewards: Literal["summed", "each"] = "summed"
    """With several rewards: advantages of the weighted sum, or of each reward, then summed and normalised over the
    batch (GDPO, https://arxiv.org/abs/2601.05242)."""
    std_eps: Above0 = 1.0e-4
    """Added to the standard deviation, so that equal rewards do not divide by 0. verl and NeMo-RL use 1e-6."""
    length_penalty: NonNegative = 0.0
    """Factor of what a completion's length is worth within its group: 1/2 for the shortest down to -1/2 for the
    longest, of wrong ones (no reward above 0) 0 at most (Kimi k1.5, https://arxiv.org/abs/2501.12599). 0 for none."""
    token_returns: bool = False
    """Whether a token's advantage is the reward less the KL penalties of itself and of later tokens, with mean and
    deviation over all trained tokens (REINFORCE++, as in OpenRLHF)."""
    gamma: Unit = 1.0
    """Discount of those returns per sampled token that is still to come: below 1, early tokens are credited less."""
    ratio: Literal["token", "sequence", "completion"] = "token"
    """The ratio of policy to old policy: of each token, the geometric mean over the completion (GSPO), or the product
    over it, which treats the completion as a single action (RLOO)."""
    surrogate: Literal["clip", "cispo", "mask", "geometric", "soft", "gamma", "none", "log"] = "clip"
    """`clip` stops the gradient of a ratio that moved far enough, `cispo` bounds its weight, `mask` leaves out tokens
    outside of the bounds on either side (GLM-5, https://arxiv.org/abs/2602.15763), `soft` lets it fade (SAPO,
    https://arxiv.org/abs/2511.20347), `none` does neither; `geometric` clips each token's ratio, and then takes the
    geometric mean over the completion (GMPO, https://arxiv.org/abs/2507.20673); `gamma` weights a completion by its
    ratio w as w^k exp(lam (1 - w)), without a clip (VESPO, https://arxiv.org/abs/2602.10693); `log` is advantage times
    log-prob, without a ratio."""
    trust_region: Literal["none", "tv", "kl"] | tuple[Literal["tv", "kl"], Above0] = "none"
    """Leaves out tokens whose update would move them further in a direction in which they have moved too far, by total
    variation or KL of the taken token against all others (DPPO, https://arxiv.org/abs/2602.04879): by 0.15 with tv, by
    0.05 with kl, by another number as [tv, 0.2]."""
    drift: NonNegative = 0.0
    """Coefficient of half the squared log-ratio to the policy that sampled, a penalty on moving away from it (DRO,
    https://arxiv.org/abs/2405.19107; Kimi k1.5, https://arxiv.org/abs/2501.12599). 0 for none."""
    covariance: Literal["none", "clip", "kl"] | tuple[Literal["clip", "kl"], Above0] = "none"
    """Keeps the entropy up by the few tokens whose log-prob and advantage covary most, 2e-4 of all, another share as
    [kl, 0.002]: `clip` leaves random ones of covariance 1 to 5 out of the loss, `kl` adds |log ratio| to that of the
    highest ones (Clip-Cov and KL-Cov, https://arxiv.org/abs/2505.22617)."""
    off_policy_limit: Above0 | None = None
    """Completions with a negative advantage are left out where the sampler's log-probs are higher than the policy's by
    more nats per token than this; 0.5 is a start (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556). Null: none are."""
    teacher_kl: NonNegative = 0.0
    """Coefficient of KL(policy || teacher), which joins the advantages: of each sampled token, by how much its log-prob
    under the `teacher` is above the sampler's (Thinking Machines 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation/). 0 for no teacher."""
    dynamic_sampling: bool = False
    """Whether groups whose rewards are all equal are replaced by groups of further prompts (DAPO), in at most eight
    rounds; after them the step has fewer groups."""

    presets: ClassVar[Mapping[str, Settings]] = PRESETS
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("ratio",),
            lambda s: s["surrogate"] not in ("geometric", "gamma", "log"),
            "with surrogate: log, which has no ratio, geometric, which has the mean of tokens' ratios, or gamma, which "
            "has their product",
        ),
        Rule(
            ("clip_low", "clip_high"),
            lambda s: s["surrogate"] in ("clip", "cispo", "mask", "geometric"),
            "with surrogate: none, soft, gamma or log, which clip nothing",
        ),
        Rule(("dual_clip",), lambda s: s["surrogate"] == "clip", "without surrogate: clip"),
        Rule(
            ("std", "std_eps"),
            lambda s: s["advantage"] in DIVIDES or s["normalize_rewards"] == "each",
            f"where nothing is divided by a deviation: set advantage: {', '.join(DIVIDES)}",
        ),
        Rule(
            ("token_returns",),
            lambda s: s["advantage"] in ("batch", "mean_batch") and s["normalize_rewards"] == "summed",
            "without advantage: batch or mean_batch, of summed rewards: their statistics are the batch's",
        ),
        Rule(("gamma",), lambda s: bool(s["token_returns"]), "without token_returns: true"),
        *PolicyConfig.rules,
    )

    @classmethod
    def usual(cls, settings: Settings) -> Settings:
        clips = {"clip_low": 1.0, "clip_high": 4.0} if settings["surrogate"] == "cispo" else {}
        return {**super().usual(settings), **clips}

    @property
    def learns_from_teacher(self) -> bool:
        return self.teacher_kl > 0

    @property
    def trust_bound(self) -> tuple[Literal["tv", "kl"], float] | None:
        """`trust_region` as the divergence and its bound; None where there is no trust region."""
        if self.trust_region == "none":
            return None
        if isinstance(self.trust_region, tuple):
            return self.trust_region
        return self.trust_region, TRUST_BOUNDS[self.trust_region]

    @property
    def covariant(self) -> tuple[Literal["clip", "kl"], float] | None:
        """What is done with tokens of high covariance, and their share; None where nothing is."""
        if self.covariance == "none":
            return None
        return (self.covariance, COVARIANT_SHARE) if isinstance(self.covariance, str) else self.covariance

    @property
    def sees_pictures(self) -> bool:
        """Always: its log-probs are the sampler's, the step's own and those of the weights it started from."""
        return True

    def conflicts(self) -> list[str]:
        wrong = super().conflicts()
        if self.group_size == 1 and self.advantage != "batch":
            wrong.append(
                f"group_size: a group of one has nothing to be compared with under advantage: {self.advantage}; "
                "take 2 or more, or advantage: batch"
            )
        if self.surrogate in ("geometric", "gamma") and (self.token_returns or self.teacher_kl):
            idle = "token_returns" if self.token_returns else "teacher_kl"
            wrong.append(f"surrogate: {self.surrogate} has one advantage for a completion; leave {idle} out")
        if self.ratio == "completion" and self.reduction == "tokens" and self.surrogate not in ("gamma", "log"):
            wrong.append(
                "ratio: completion takes a completion for one action, which a mean over tokens would count once for "
                "each token; set reduction: sequences or constant"
            )
        if self.group_size == 1 and self.dynamic_sampling:
            wrong.append("dynamic_sampling: in a group of one all rewards are equal, so every group would be replaced")
        if self.length_penalty and self.group_size == 1:
            wrong.append("length_penalty: a group of one has no other length; take group_size: 2 or more")
        if self.length_penalty and self.normalize_rewards == "each":
            wrong.append("normalize_rewards: each would normalise length_penalty away; set normalize_rewards: summed")
        if self.normalize_rewards == "each" and self.kl and self.kl_in == "reward":
            wrong.append("normalize_rewards: each would normalise the KL penalty's coefficient away; set kl_in: loss")
        lowers = self.overlong_buffer or self.length_penalty or (self.kl and self.kl_in == "reward")
        if self.advantage == "mean_relative" and lowers:
            wrong.append(
                "advantage: mean_relative divides by the mean reward, which a penalty would take below 0: "
                "set overlong_buffer: null, length_penalty: 0 and kl_in: loss"
            )
        if self.preset:
            usual, preset = GRPOConfig(), PRESETS[self.preset]
            changes = {key: value for key, value in preset.items() if getattr(usual, key) != value}
            # As in a resolved recipe.
            if all(getattr(self, key) != value for key, value in changes.items()):
                wrong.append(
                    f"preset: all that {self.preset} would change is written too, and takes precedence; clear it"
                )
        return wrong
