"""The `algorithm` section of a recipe for GRPO and its relatives. Loads without jax."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from tunix.algorithms.config import PolicyConfig, Rule, Settings
from tunix.algorithms.grpo.presets import PRESETS, Preset
from tunix.config import Positive


class GRPOConfig(PolicyConfig):
    """Several completions of each prompt, each compared with its group. Written keys go before the preset's."""

    name: str = "grpo"
    preset: Preset | None = None
    """A published member of the family: its settings, wherever a key is not written."""
    group_size: Positive = 8
    """Completions of each prompt."""
    advantage: Literal["mean", "mean_std", "leave_one_out", "median", "batch", "mean_batch"] = "mean_std"
    """What a reward is compared with: its group's mean (and std), the others' mean, the median, the whole batch."""
    normalize_rewards: Literal["summed", "each"] = "summed"
    """Of several rewards: advantages of the weighted sum, or of each, then summed and normalised over the batch (GDPO,
    https://arxiv.org/abs/2601.05242)."""
    ratio: Literal["token", "sequence"] = "token"
    """Policy over old policy: of each token, or the geometric mean over the completion (GSPO)."""
    surrogate: Literal["clip", "cispo", "none"] = "clip"
    """`clip` stops the gradient of a ratio that moved far enough, `cispo` bounds its weight, `none` does neither."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are replaced by groups of further prompts (DAPO)."""
    max_refills: Positive | None = None
    """Rounds of replacement per update at most; then it goes on with fewer groups. Null: 8."""

    presets: ClassVar[Mapping[str, Settings]] = PRESETS
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("clip_low", "clip_high"), lambda s: s["surrogate"] != "none", "with surrogate: none"),
        Rule(("dual_clip",), lambda s: s["surrogate"] not in ("cispo", "none"), "without surrogate: clip"),
        Rule(("max_refills",), lambda s: bool(s["dynamic_sampling"]), "without dynamic_sampling: true"),
        *PolicyConfig.rules,
    )

    @classmethod
    def usual(cls, settings: Settings) -> Settings:
        """What null stands for, given the other settings."""
        clips = {"clip_low": 1.0, "clip_high": 4.0} if settings["surrogate"] == "cispo" else {}
        return {**super().usual(settings), **clips, "max_refills": 8}

    def conflicts(self) -> list[str]:
        """What is wrong between settings that are all read; one sentence each."""
        found = super().conflicts()
        if self.group_size == 1 and self.advantage != "batch":
            found.append(
                f"group_size: a group of one has nothing to be compared with under advantage: {self.advantage}; "
                "take 2 or more, or advantage: batch"
            )
        if self.group_size == 1 and self.dynamic_sampling:
            found.append("dynamic_sampling: in a group of one all rewards are equal, so every group would be replaced")
        if self.normalize_rewards == "each" and self.kl and self.kl_in == "reward":
            found.append("normalize_rewards: each would normalise the KL penalty's coefficient away; set kl_in: loss")
        if self.preset and self._overruled(PRESETS[self.preset]):
            found.append(f"preset: all that {self.preset} would change is written too, and goes before it; clear it")
        return found

    def _overruled(self, preset: Settings) -> bool:
        """Whether nothing that a preset changes is left, as where a resolved recipe is given another one."""
        usual = GRPOConfig()
        return all(getattr(self, key) != value for key, value in preset.items() if getattr(usual, key) != value)
