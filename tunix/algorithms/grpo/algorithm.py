"""Group Relative Policy Optimisation and its relatives: several answers to a prompt, each compared with the others.

Axes: P prompts, G group.
"""

import numpy as np

from tunix.algorithms.advantages import (
    gdpo,
    group_advantages,
    has_signal,
    kl_rewards,
    to_come,
    weighted_sum,
    whitened,
)
from tunix.algorithms.grpo.config import GRPOConfig
from tunix.algorithms.grpo.loss import grpo_loss
from tunix.algorithms.loss import kl_clamp
from tunix.algorithms.on_policy import (
    Credited,
    Groups,
    PolicyGradient,
    drawn_with,
    flat,
    grouped,
    rewards_of,
    spread,
    with_tokens,
)
from tunix.protocols import Client
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
        return group_advantages(rewards_PG, self.config.advantage, self.config.std_eps, self.config.std)

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
        """Each completion's advantage on all of its tokens; with `token_returns`, each token's own."""
        penalties, named = self.penalties(groups), rewards_of(groups)
        if self.config.token_returns:
            rewards = weighted_sum(named, data.weights) + penalties
            return with_tokens(sequences, "advantages", grouped(self._token_returns(sequences, rewards), sequences))
        if self.config.kl_in == "reward" and self.config.kl:
            penalties = penalties + self._kl_penalties(sequences)
        if self.config.normalize_rewards == "each":
            # A penalty is one more reward; as a constant it is normalised away.
            penalty = "overlong penalty"
            how = (self.config.advantage, self.config.std_eps, self.config.std)
            advantages = gdpo({**named, penalty: penalties}, {**data.weights, penalty: 1.0}, *how)
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

    def _token_returns(self, sequences: Credited, rewards_PG: np.ndarray) -> list[np.ndarray]:
        """`[P G][T]` what is still to come at each token, normalised over the tokens that count."""
        if self.config.advantage == "mean_batch":
            rewards_PG = group_advantages(rewards_PG, "mean")
        listed = flat(sequences)
        returns = [
            spread(x, reward) + to_come(self._kl_rewards(x), x.loss_mask)
            for x, reward in zip(listed, rewards_PG.ravel(), strict=True)
        ]
        counted = [x.loss_mask & (x.weight > 0) for x in listed]
        return whitened(returns, counted, self.config.std_eps, self.config.std)

    def _kl_penalties(self, sequences: Credited) -> np.ndarray:
        """`[P G]` the KL penalty of each completion, the sum of its tokens'."""
        return np.array([[float(self._kl_rewards(x).sum()) for x in group] for group in sequences])

    def _kl_rewards(self, sequence: Sequence) -> np.ndarray:
        """`[T]` the KL penalty of each drawn token, where it stands in the reward."""
        if not self.config.kl or self.config.kl_in != "reward":
            return np.zeros(len(sequence.tokens))
        reference, estimator = sequence.per_token["reference_logprobs"], self.config.kl_estimator or "k1"
        drawn, clamp = drawn_with(sequence), kl_clamp(self.config)
        return kl_rewards(drawn, reference, sequence.loss_mask, self.config.kl, estimator, clamp)
