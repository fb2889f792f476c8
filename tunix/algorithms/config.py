"""How the settings of an `algorithm` section are resolved, and the keys that GRPO and PPO share. Loads without jax.

The section as written takes precedence over the preset's settings -> nulls are replaced by the defaults of what was
chosen -> the fields are checked -> settings that have no effect given the others are refused. A `Rule` names keys that
have an effect only under a condition; subclasses add theirs.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from tunix.config import TINY_BATCH, TINY_COMPLETION, TINY_GROUP, AlgorithmConfig, Positive, RowKind
from tunix.errors import UserError

Settings = Mapping[str, Any]
NonNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Unit = Annotated[float, Field(ge=0, le=1)]
Advantage = Literal[
    "mean",
    "mean_std",
    "mean_relative",
    "leave_one_out",
    "leave_one_out_std",
    "median",
    "batch",
    "mean_batch",
    "mean_batch_std",
]
Estimator = Literal["k1", "k2", "k3", "k3+"]
Std = Literal["population", "sample"]
REFERENCE_PATH_GONE = (
    "the reference is what the run starts from, or the base under an adapter: train from that model, or put the stages "
    "into one recipe"
)


class Rule(NamedTuple):
    """Keys that have an effect only under a condition on other settings."""

    keys: tuple[str, ...]
    read: Callable[[Settings], bool]
    """The condition; it is called before the values are checked, so it compares and never computes."""
    why: str
    """The rest of the message `KEY changes nothing ...`: the cause and what to do."""


class RuledConfig(AlgorithmConfig):
    """A section with presets and rules, which each algorithm defines."""

    presets: ClassVar[Mapping[str, Settings]] = {}
    """Settings by the preset's name; keys that the user writes take precedence over them."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """One rule at most for each key. They are resolved in this order: a rule may read what earlier ones filled in."""

    @classmethod
    def usual(cls, settings: Settings) -> Settings:
        """The value that null becomes for each key, given the other settings, unchecked as for a rule."""
        return {}

    def conflicts(self) -> list[str]:
        """Messages about settings that contradict each other, one sentence each."""
        return []

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, written: Any) -> Any:
        """Fills in presets and usual values where the user wrote nothing."""
        if not isinstance(written, Mapping):
            return written
        defaults = {name: field.get_default() for name, field in cls.model_fields.items() if not field.is_required()}
        chosen = written.get("preset")
        preset = cls.presets.get(chosen, {}) if isinstance(chosen, str) else {}
        settings = {**defaults, **preset, **written}
        ruled = {key for rule in cls.rules for key in rule.keys}
        always = Rule(tuple(key for key in defaults if key not in ruled), lambda _: True, "")
        for rule in (always, *cls.rules):
            for key in rule.keys:
                if not rule.read(settings):
                    # A preset's setting that has no effect given what the user chose.
                    settings[key] = written.get(key, defaults[key])
                elif settings[key] is None:
                    settings[key] = cls.usual(settings).get(key)
        return settings

    @model_validator(mode="after")
    def _read(self) -> "RuledConfig":
        settings, fields = dict(self), type(self).model_fields
        complaints = []
        unread = [(key, rule.why) for rule in self.rules for key in rule.keys if not rule.read(settings)]
        for key, why in unread:
            default = fields[key].get_default()
            if settings[key] != default:
                shown = default if isinstance(default, str) else json.dumps(default)  # as written in YAML
                complaints.append(f"{key} is {settings[key]!r}, which changes nothing {why}; or leave it at {shown}")
        if complaints := complaints or list(self.conflicts()):
            raise ValueError("\n".join(complaints))
        return self


class PolicyConfig(RuledConfig):
    """Keys of policy gradients on rollouts, shared by GRPO and PPO."""

    # A buffer below 1 is a share of the completion, and stays.
    tiny_caps: ClassVar[Mapping[str, int]] = {
        "group_size": TINY_GROUP,
        "updates": TINY_BATCH,
        "overlong_buffer": TINY_COMPLETION,
    }

    clip_low: Unit | None = None
    """The ratio counts as no less than 1 - clip_low. Null: 0.2; with `surrogate: cispo` 1, no lower bound."""
    clip_high: NonNegative | None = None
    """The ratio counts as no more than 1 + clip_high; above clip_low, unlikely tokens can rise. Null: 0.2; with
    `surrogate: cispo` 4."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the loss of tokens with a negative advantage at this many times it; 3 is usual, null for no bound."""
    reduction: Literal["tokens", "sequences", "constant"] = "tokens"
    """Mean over all trained tokens, mean of each completion's token mean, or sum over a completion divided by the most
    tokens that one may have."""
    kl: NonNegative = 0.0
    """Coefficient of KL(policy || reference). 0: no reference model is loaded."""
    kl_in: Literal["loss", "reward"] | None = None
    """Whether the penalty is a term of the loss or part of the reward. Null: `loss` for GRPO, `reward` for PPO."""
    kl_estimator: Estimator | None = None
    """Estimator of the KL. Null: k3 in the loss, k1 in the reward. As a loss, k2 has the gradient of
    KL(policy || reference), k3 that of KL(reference || policy); k3+ has the value of k3 and the gradient of k2."""
    kl_weighted: bool = False
    """Whether the estimate in the loss is multiplied by the token's ratio to the policy that sampled, so that k1 and k3
    have the gradient of KL(policy || reference), after several updates too (DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556). With `old_logprobs: recompute` that is still the sampler, not the trainer."""
    kl_output_clamp: Annotated[float, Field(gt=0)] | None = None
    """The estimate counts as no larger than this, beyond which it has no gradient. NeMo-RL and verl (for k3) use 10;
    null for no bound, as in the papers and TRL. Log-ratios count as no larger than 20 in any case."""
    entropy_bonus: NonNegative = 0.0
    """Coefficient of the policy's entropy, which is raised; 0 for none."""
    entropy_target: Above0 | None = None
    """Entropy in nats per token that is held: the coefficient, at first `entropy_bonus`, rises by 0.005 after a step
    whose completions had less, falls by as much after others, and counts only where they had less (Skywork-OR1,
    https://arxiv.org/abs/2505.22312, with a target of 0.2). Null: the coefficient is constant."""
    penalties_over: Literal["set", "whole"] = "set"
    """What KL estimates and the entropy are over where `rollout.top_k` and others cut ids off: the `set` that each
    token was drawn from, or all ids, the `whole`. Surrogates are over the set always."""
    observation_weight: NonNegative = 0.0
    """Weight of the negative log-likelihood of what an environment wrote, such as tools' outputs, the mean over these
    tokens: the policy learns what its actions lead to (ECHO, https://arxiv.org/abs/2605.24517). 0 for none."""
    std: Std = "population"
    """The standard deviation of advantages: the population's (by n), or n - 1 as in TRL, verl and NeMo-RL."""
    old_logprobs: Literal["sampler", "recompute"] = "sampler"
    """The ratio's denominator: the sampler's log-probs, or those of the trainer's forward pass before the updates."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Importance weights of tokens for a sampler that differs from the trainer: `truncate` lowers those above 2 (TIS),
    `mask` leaves those below 0.5 and above 5 out (IcePop)."""
    geometric_mask: tuple[Above0, Above0] | None = None
    """Completions are left out of the loss where the geometric mean of their weights lies outside, such as
    [0.99, 1.01]: verl's seq_mean_k1; with `correction: truncate` NeMo-RL's seq-mask-tis. Null: none are left out."""
    mismatch_limit: Annotated[float, Field(gt=1)] | None = None
    """Completions are left out of the update, and of its denominators, where the mean of exp|trainer - sampler| over
    their tokens' log-probs is above this, such as 2 (NeMo-RL's seq_logprob_error_threshold). Null: none are left
    out."""
    overlong_buffer: Annotated[float, Field(gt=0)] | None = None
    """DAPO's soft penalty: over this many last tokens before the limit, the reward falls by up to 1. Below 1
    it is a share of the limit; null for no penalty."""
    mask_truncated: bool = False
    """Whether completions that were cut off at the limit are left out of the loss; baselines still count them."""
    updates: Positive = 1
    """Optimizer updates per batch of rollouts: the prompts are split into this many parts."""
    epochs: Positive = 1
    """Passes over a batch of rollouts."""

    group_size: Positive = 1
    """Completions of each prompt."""

    gone: ClassVar[Mapping[str, str]] = {
        "reduction_length": "the constant of reduction: constant is the most tokens that a completion may have",
        "kl_input_clamp": "log-ratios count as no larger than 20",
        "entropy_over": "the entropy is averaged as reduction says",
        "correction_level": "a correction weighs tokens; geometric_mask leaves completions out",
        "correction_low": "correction: truncate has no lower bound, mask 0.5",
        "correction_high": "correction: truncate is at most 2, mask 5",
        "high_entropy": "all trained tokens have a policy loss",
        "overlong_coefficient": "the reward falls by up to 1; a reward's weight scales it against that",
        "soft_positive": "surrogate: soft fades with 1 where the advantage is positive",
        "soft_negative": "surrogate: soft fades with 1.05 where the advantage is negative",
        "trust_low": "write trust_region: [tv, 0.2], one number for both directions",
        "trust_high": "write trust_region: [tv, 0.2], one number for both directions",
        "max_refills": "dynamic_sampling takes at most eight rounds",
        "lam_length": "write lam",
        "lam_critic": "the critic learns the returns of lam",
        "value_coefficient": "it is 1, and 0.5 with critic: shared",
        "whiten": "advantages are standardised; a subclass may override PPO.advantages",
    }
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("kl_in", "kl_estimator", "kl_output_clamp"), lambda s: bool(s["kl"]), "while kl is 0: set kl"),
        Rule(
            ("kl_weighted",),
            lambda s: bool(s["kl"]) and s["kl_in"] != "reward",
            "without a KL term in the loss: set kl and kl_in: loss",
        ),
        Rule(
            ("penalties_over",),
            lambda s: bool(s["kl"] or s["entropy_bonus"]),
            "without a KL or an entropy bonus: set kl or entropy_bonus",
        ),
        Rule(
            ("correction", "geometric_mask", "mismatch_limit"),
            lambda s: s["old_logprobs"] != "sampler",
            "with old_logprobs: sampler, whose ratio already starts at the sampler: set old_logprobs: recompute",
        ),
    )

    @classmethod
    def usual(cls, settings: Settings) -> Settings:
        return {
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_in": "loss",
            "kl_estimator": "k1" if settings["kl_in"] == "reward" else "k3",
        }

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a step: parts of a batch of rollouts, times the epochs over it."""
        return self.updates * self.epochs

    @property
    def reference_before_update(self) -> bool:
        """Whether the reference's log-probs are computed before the update: where rewards include the KL, and once for
        several epochs over the same rollouts. Else they are computed in the update itself, on the same rows."""
        return bool(self.kl) and (self.kl_in == "reward" or self.epochs > 1)

    @property
    def reads(self) -> RowKind:
        return RowKind.PROMPT

    @property
    def learns_from_rewards(self) -> bool:
        return True

    @property
    def samples_per_prompt(self) -> int:
        return self.group_size

    def sequences_per_update(self, batch_size: int) -> int:
        """Sequences of one update: those of the largest part of the batch."""
        return math.ceil(batch_size / self.updates) * self.group_size

    def tiny(self, batch_size: int) -> dict[str, Any]:
        """The section for a `--tiny` run, with no more parts of a batch than it has prompts."""
        values = super().tiny(batch_size)
        return values | {"updates": min(values["updates"], batch_size)}

    def complaints(self, batch_size: int) -> Iterator[str]:
        """A message where there are more updates than prompts: each part of the batch needs a prompt."""
        if self.updates > batch_size:
            yield f"algorithm.updates: {self.updates} parts of {batch_size} prompts (batch_size)"

    def conflicts(self) -> list[str]:
        wrong = []
        if self.kl and self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_weighted:
            wrong.append(
                "kl_estimator: the gradient of k1 as a loss is 0 in expectation: set kl_weighted, kl_in: reward, or k2"
            )
        if self.kl_estimator == "k3+" and self.kl_in == "reward":
            wrong.append("kl_estimator: k3+ differs from k3 in its gradient, and a reward has none: take k3")
        if self.penalties_over == "whole" and self.kl and self.kl_in == "reward":
            wrong.append(
                "penalties_over: whole, and the KL of kl_in: reward is one of the sampler's log-probs, which are over "
                "the set: set kl_in: loss"
            )
        if self.penalties_over == "whole" and self.entropy_target:
            wrong.append("entropy_target: holds the entropy of what is sampled, the set: leave penalties_over out")
        if self.geometric_mask and not self.geometric_mask[0] < 1 < self.geometric_mask[1]:
            wrong.append(f"geometric_mask: 1, where trainer and sampler agree, is outside of {self.geometric_mask}")
        if self.kl_weighted and self.kl_estimator in ("k2", "k3+"):
            unweighted = f"{self.kl_estimator} has the gradient of KL(policy || reference) unweighted"
            wrong.append(f"kl_weighted: {unweighted}; weight k1 or k3")
        if self.overlong_buffer and self.overlong_buffer > 1 and self.overlong_buffer % 1:
            wrong.append(f"overlong_buffer: {self.overlong_buffer:g} is neither a share below 1 nor a number of tokens")
        return wrong

    def over(self, completion_length: int) -> Literal["tokens", "sequences"] | float:
        """What the terms of the loss are averaged over, in the values of `types.Term`.

        Args:
            completion_length: tokens that a completion may have at most.
        """
        if self.reduction == "constant":
            return float(completion_length)
        return self.reduction

    def overlong_tokens(self, completion_length: int) -> int | None:
        """The buffer of the soft overlong penalty in tokens, or None where there is no penalty.

        Args:
            completion_length: tokens that a completion may have at most.

        Raises:
            UserError: the buffer is longer than a completion.
        """
        if self.overlong_buffer is None:
            return None
        share = self.overlong_buffer < 1
        tokens = max(1, round(self.overlong_buffer * completion_length if share else self.overlong_buffer))
        if tokens > completion_length:
            raise UserError(
                f"algorithm.overlong_buffer: {tokens} tokens do not fit into a completion's {completion_length}; "
                "below 1 it is a share of them"
            )
        return tokens
