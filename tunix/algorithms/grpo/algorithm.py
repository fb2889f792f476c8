"""Group Relative Policy Optimisation and its relatives: a prompt's completions are compared with each other.

Axes: P prompts, G group.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from tunix.algorithms.advantages import (
    discounted,
    gdpo,
    group_advantages,
    has_signal,
    length_rewards,
    of_high_covariance,
    whitened,
)
from tunix.algorithms.base import Needs
from tunix.algorithms.episodes import (
    Groups,
    are_scored,
    by_seat,
    lengths_of,
    old_policy_logprobs,
    require_scores,
    rewards_of,
    total_rewards,
)
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.grpo.loss import COVARIANT, grpo_loss
from tunix.algorithms.on_policy import PolicyGradient
from tunix.algorithms.ops import TEACHER, old_logprobs
from tunix.protocols import Client, SamplingClient
from tunix.rollout.types import Rollouts
from tunix.types import LossInputs, LossOutputs, Sequence

MAX_REFILLS = 8
"""Rounds of dynamic sampling in a step at most."""


class GRPO(PolicyGradient):
    """GRPO and its relatives; `GRPOConfig.preset` names published variants."""

    Config = GRPOConfig
    config: GRPOConfig

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        """`[P G]` advantage of each completion: how much better its reward is than the baseline.

        Args:
            rewards_PG: NaN where a sample failed.
        """
        return group_advantages(rewards_PG, self.config.advantage, self.config.std_eps, self.config.std)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """`grpo_loss` by the config, with the KL and entropy terms."""
        config, arrays = self.config, inputs.batch.per_token
        outputs = grpo_loss(
            inputs.logprobs,
            old_logprobs(inputs),
            arrays["advantages"],
            inputs.batch,
            over=config.over(self.sampling.max_tokens),
            ratio=config.ratio,
            surrogate=config.surrogate,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            trust_region=config.trust_bound,
            off_policy_limit=config.off_policy_limit,
            sampler_logprobs=arrays.get("sampler_logprobs"),
            drift=config.drift,
            covariance=config.covariant and config.covariant[0],
            covariant=arrays.get(COVARIANT),
        )
        outputs = self.penalised(outputs, inputs)
        if config.teacher_kl:
            drift = jnp.asarray(old_logprobs(inputs)) - arrays[TEACHER]
            outputs = replace(outputs, metrics={**outputs.metrics, "kl/teacher": drift})
        return outputs

    @property
    def needs(self) -> Needs:
        """Those of policy gradients, and the teacher's log-probs where it is followed."""
        needs = super().needs
        return replace(needs, measured=(*needs.measured, TEACHER)) if self.config.teacher_kl else needs

    def penalties(self, groups: Groups, weights: Mapping[str, float]) -> np.ndarray:
        """`[P G]` the overlong penalty, and what a completion's length is worth among its group's."""
        penalties = super().penalties(groups, weights)
        if not self.config.length_penalty:
            return penalties
        return penalties + self.config.length_penalty * length_rewards(
            total_rewards(groups, weights), lengths_of(groups)
        )

    def signal(self, scores_PG: np.ndarray) -> np.ndarray:
        """`[P]` bool: groups whose scores differ; with `advantage: batch`, whether the whole batch's do."""
        return super().signal(scores_PG) if self.config.advantage == "batch" else has_signal(scores_PG)

    def gather(self, client: SamplingClient, data: Rollouts) -> Groups:
        """Samples one group for each prompt; dynamic sampling replaces groups without signal by further prompts'."""
        if not self.config.dynamic_sampling:
            return super().gather(client, data)
        # Nothing is measured meanwhile: of groups without signal nothing is needed.
        groups = data.collect(client, data.prompts, self.config.group_size)
        require_scores(groups)

        def with_signal(groups: Groups) -> Groups:
            views = by_seat(groups).values()
            signal = np.any([has_signal(self.scores(view, data.weights)) for view in views], axis=0)
            return [group for group, differs in zip(groups, signal, strict=True) if differs]

        kept = with_signal(groups)
        for _ in range(MAX_REFILLS):
            prompts = data.more(len(groups) - len(kept)) if len(kept) < len(groups) else []
            if not prompts:
                break
            kept += with_signal(data.collect(client, prompts, self.config.group_size))
        return kept or groups

    def credit(self, client: Client, groups: Groups, sequences: list[Sequence], data: Rollouts) -> list[Sequence]:
        """The sequences with each completion's advantage at all its tokens, or with `token_returns` one per token."""
        config, penalties = self.config, self.penalties(groups, data.weights)
        counted = [x.loss_mask & (x.weight > 0) for x in sequences]
        if config.token_returns:
            rewards = total_rewards(groups, data.weights) + penalties
            if config.advantage == "mean_batch":
                rewards = group_advantages(rewards, "mean")
            returns = []
            for x, reward in zip(sequences, rewards.ravel(), strict=True):
                # A token's own KL penalty and those of all later ones, and the reward at the last.
                to_come = self.kl_rewards(x)
                to_come[np.flatnonzero(x.loss_mask)[-1:]] += reward
                returns.append(discounted(to_come, x.loss_mask, config.gamma))
            advantages = whitened(returns, counted, config.std_eps, config.std)
        else:
            if config.kl and config.kl_in == "reward":
                kl = np.array([float(self.kl_rewards(x).sum()) for x in sequences])
                penalties = penalties + kl.reshape(penalties.shape)
            if config.normalize_rewards == "each":
                # The penalty counts as one more reward; where it is constant it is normalised away.
                penalty = "overlong penalty"
                named, weights = {**rewards_of(groups), penalty: penalties}, {**data.weights, penalty: 1.0}
                scores = gdpo(named, weights, config.advantage, config.std_eps, config.std, are_scored(groups))
            else:
                scores = self.advantages(total_rewards(groups, data.weights) + penalties)
            of_completions = zip(sequences, np.asarray(scores, np.float32).ravel(), strict=True)
            advantages = [np.where(x.loss_mask, value, np.float32(0)) for x, value in of_completions]
        if config.teacher_kl:
            advantages = [
                values + np.where(x.loss_mask, config.teacher_kl * (x.per_token[TEACHER] - old_policy_logprobs(x)), 0)
                for values, x in zip(advantages, sequences, strict=True)
            ]
        if config.covariant is not None:
            (kind, share), seed = config.covariant, 0
            logprobs = [old_policy_logprobs(x) for x in sequences]
            for x in sequences:  # what is drawn follows from the batch
                seed = zlib.crc32(x.tokens.tobytes(), seed)
            selected = of_high_covariance(logprobs, advantages, counted, kind, share, seed)
            sequences = [
                replace(x, per_token={**x.per_token, COVARIANT: chosen.astype(np.float32)})
                for x, chosen in zip(sequences, selected, strict=True)
            ]
        return [
            replace(x, per_token={**x.per_token, "advantages": values})
            for x, values in zip(sequences, advantages, strict=True)
        ]
