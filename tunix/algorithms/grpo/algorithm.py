"""Group Relative Policy Optimisation and its relatives: several answers to a prompt, each compared with the others.

Axes: P prompts, G group.
"""

import numpy as np

from tunix.algorithms.advantages import gdpo, group_advantages, has_signal, kl_rewards, weighted_sum
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.grpo.loss import grpo_loss
from tunix.algorithms.loss import kl_clamp
from tunix.algorithms.policy import Credited, Groups, PolicyGradient, drawn_with, rewards_of, spread, with_tokens
from tunix.client import Client
from tunix.rollout.collect import Rollouts
from tunix.types import LossInputs, LossOutputs, Sequence


class GRPO(PolicyGradient):
    """The family; see `GRPOConfig` for its members."""

    Config = GRPOConfig
    config: GRPOConfig

    @property
    def reads_entropy(self) -> bool:
        """Where there is a bonus; and a subclass that has another loss may read it."""
        return bool(self.config.entropy_bonus) or type(self).loss is not GRPO.loss

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        """`[P G]` how much better each completion is than its baseline."""
        return group_advantages(rewards_PG, self.config.advantage)

    def signal(self, scores_PG: np.ndarray) -> np.ndarray:
        """`[P]` bool: groups in which scores differ; of the whole batch where that is compared."""
        return super().signal(scores_PG) if self.config.advantage == "batch" else has_signal(scores_PG)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `grpo_loss`."""
        return grpo_loss(inputs, self.config, self.config.over(self.sampling.max_tokens))

    def gather(self, client: Client, data: Rollouts) -> Groups:
        """One group for each prompt; with dynamic sampling, groups without signal are replaced by further prompts'."""
        groups = super().gather(client, data)
        if not self.config.dynamic_sampling:
            return groups
        kept = self._with_signal(groups, data)
        for _ in range(self.config.max_refills or 0):
            prompts = data.more(len(groups) - len(kept)) if len(kept) < len(groups) else []
            if not prompts:
                break
            kept += self._with_signal(data.collect(client, prompts, self.config.group_size), data)
        return kept or groups

    def credit(self, client: Client, groups: Groups, sequences: Credited, data: Rollouts) -> Credited:
        """Each completion's advantage on all of its tokens."""
        penalties, named = self.penalties(groups), rewards_of(groups)
        if self.config.kl_in == "reward" and self.config.kl:
            penalties = penalties + self._kl_penalties(sequences)
        if self.config.normalize_rewards == "each":
            # A penalty is one more reward; as a constant it is normalised away.
            penalty = "overlong penalty"
            advantages = gdpo({**named, penalty: penalties}, {**data.weights, penalty: 1.0}, self.config.advantage)
        else:
            advantages = self.advantages(weighted_sum(named, data.weights) + penalties)
        pairs = zip(sequences, advantages, strict=True)
        return with_tokens(
            sequences, "advantages", ([spread(x, a) for x, a in zip(own, row, strict=True)] for own, row in pairs)
        )

    def _with_signal(self, groups: Groups, data: Rollouts) -> Groups:
        """The groups in which rewards differ."""
        kept = has_signal(self.scores(groups, data.weights))
        return [group for group, keep in zip(groups, kept, strict=True) if keep]

    def _kl_penalties(self, sequences: Credited) -> np.ndarray:
        """`[P G]` the KL penalty of each completion, the sum of its tokens'."""

        clamp = kl_clamp(self.config)

        def one(x: Sequence) -> float:
            reference, estimator = x.per_token["reference_logprobs"], self.config.kl_estimator or "k1"
            penalties = kl_rewards(drawn_with(x), reference, x.loss_mask, self.config.kl, estimator, clamp)
            return float(penalties.sum())

        return np.array([[one(x) for x in group] for group in sequences])
