"""Group Relative Policy Optimisation and its relatives: a prompt's completions are compared with each other.

Axes: P prompts, G group.
"""

import numpy as np

from tunix.algorithms.advantages import (
    gdpo,
    group_advantages,
    has_signal,
    to_come,
    whitened,
)
from tunix.algorithms.episodes import (
    Credited,
    Groups,
    are_scored,
    flat,
    grouped,
    rewards_of,
    spread,
    total_rewards,
    with_tokens,
)
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.grpo.loss import grpo_loss
from tunix.algorithms.on_policy import PolicyGradient
from tunix.protocols import Client, SamplingClient
from tunix.rollout.types import Measure, Rollouts
from tunix.types import LossInputs, LossOutputs


class GRPO(PolicyGradient):
    """GRPO and its relatives; `GRPOConfig.preset` names published variants."""

    Config = GRPOConfig
    config: GRPOConfig

    @property
    def reads_entropy(self) -> bool:
        """Whether there is an entropy bonus, or a subclass has a custom loss, which may read the entropy."""
        return bool(self.config.entropy_bonus) or type(self).loss is not GRPO.loss

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        """`[P G]` advantage of each completion: how much better its reward is than the baseline.

        Args:
            rewards_PG: NaN where a sample failed.
        """
        return group_advantages(rewards_PG, self.config.advantage, self.config.std_eps, self.config.std)

    def signal(self, scores_PG: np.ndarray) -> np.ndarray:
        """`[P]` bool: groups whose scores differ; with `advantage: batch`, whether the whole batch's do."""
        return super().signal(scores_PG) if self.config.advantage == "batch" else has_signal(scores_PG)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `grpo_loss`."""
        return grpo_loss(inputs, self.config, self.config.over(self.sampling.max_tokens))

    def measuring(self, client: Client) -> Measure | None:
        """None with dynamic sampling too: of groups without signal nothing is needed."""
        return None if self.config.dynamic_sampling else super().measuring(client)

    def gather(self, client: SamplingClient, data: Rollouts) -> Groups:
        """Samples one group for each prompt; dynamic sampling replaces groups without signal by further prompts'."""
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
        """The sequences with each completion's advantage at all its tokens, or with `token_returns` one per token."""
        penalties = self.penalties(groups)
        if self.config.token_returns:
            rewards = total_rewards(groups, data.weights) + penalties
            return with_tokens(sequences, "advantages", grouped(self._token_returns(sequences, rewards), sequences))
        if self.config.kl_in == "reward" and self.config.kl:
            penalties = penalties + np.array([[float(self.kl_rewards(x).sum()) for x in group] for group in sequences])
        if self.config.normalize_rewards == "each":
            # The penalty counts as one more reward; where it is constant it is normalised away.
            penalty = "overlong penalty"
            named, weights = {**rewards_of(groups), penalty: penalties}, {**data.weights, penalty: 1.0}
            kind, eps, std = self.config.advantage, self.config.std_eps, self.config.std
            advantages = gdpo(named, weights, kind, eps, std, are_scored(groups))
        else:
            advantages = self.advantages(total_rewards(groups, data.weights) + penalties)
        pairs = zip(sequences, advantages, strict=True)
        return with_tokens(
            sequences, "advantages", ([spread(x, a) for x, a in zip(group, row, strict=True)] for group, row in pairs)
        )

    def _with_signal(self, groups: Groups, data: Rollouts) -> Groups:
        """The groups in which rewards differ."""
        kept = has_signal(self.scores(groups, data.weights))
        return [group for group, keep in zip(groups, kept, strict=True) if keep]

    def _token_returns(self, sequences: Credited, rewards_PG: np.ndarray) -> list[np.ndarray]:
        """`[P G][T]` return of each token, normalised over the tokens that count."""
        if self.config.advantage == "mean_batch":
            rewards_PG = group_advantages(rewards_PG, "mean")
        listed = flat(sequences)
        returns = [
            spread(x, reward) + to_come(self.kl_rewards(x), x.loss_mask)
            for x, reward in zip(listed, rewards_PG.ravel(), strict=True)
        ]
        counted = [x.loss_mask & (x.weight > 0) for x in listed]
        return whitened(returns, counted, self.config.std_eps, self.config.std)
