"""Proximal Policy Optimisation: a critic estimates the value of each state, so that every token has an advantage.

Axes: T time.
"""

from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from tunix.algorithms.advantages import adapted_kl, explained_variance, gae, length_lambda, whitened
from tunix.algorithms.base import Update
from tunix.algorithms.episodes import Credited, Groups, flat, grouped, old_policy_logprobs, with_tokens
from tunix.algorithms.on_policy import Experience, PolicyGradient
from tunix.algorithms.ppo.config import PPOConfig
from tunix.algorithms.ppo.loss import policy_loss, ppo_loss, value_loss
from tunix.protocols import Client
from tunix.rollout.types import ENVIRONMENT, Rollouts, Scored
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Metrics, Sampling, Sequence


class PPO(PolicyGradient):
    """PPO with a separate critic, or with a value head on the policy's trunk."""

    Config = PPOConfig
    config: PPOConfig

    extra_tokens = 1
    """The state after a completion that was cut off has a value too: one token more than was sampled."""

    def __init__(self, config: PPOConfig, sampling: Sampling | None = None):
        super().__init__(config, sampling)
        self._steps = 0
        self._kl = config.kl
        self._measured: dict[str, float] = {}

    @property
    def critic(self) -> Literal["own", "shared"]:
        """The recipe's `critic`: a separate model, or a head on the policy's trunk."""
        return self.config.critic

    @property
    def reference_before_update(self) -> bool:
        """Whether there is a reference: its KL over completions is measured, and the coefficient may follow it."""
        return self.needs_reference

    @property
    def objective(self) -> Loss:
        """The policy's loss; with a shared trunk also that of the values."""
        return replace(super().objective, values=self.config.critic == "shared")

    @property
    def value_objective(self) -> Loss:
        """The loss of a separate critic."""
        return Loss(self.value_loss, logprobs=False, values=True)

    @property
    def reads_entropy(self) -> bool:
        """Whether there is an entropy bonus, or a subclass has a custom loss, which may read the entropy."""
        return bool(self.config.entropy_bonus) or type(self).loss is not PPO.loss

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `ppo_loss` and `policy_loss`."""
        loss = policy_loss if self.config.critic == "own" else ppo_loss
        return loss(inputs, self.config, self.config.over(self.sampling.max_tokens))

    def value_loss(self, inputs: LossInputs) -> LossOutputs:
        """See `loss.value_loss`."""
        return value_loss(inputs, self.config)

    def learn(self, client: Client, experience: Experience) -> Update:
        """Makes the updates on an experience; the KL coefficient then follows the measured KL."""
        update = super().learn(client, experience)
        self._steps += 1
        metrics = {**update.metrics, **self._measured}
        if self.config.kl_target:
            metrics["kl/coefficient"] = self._kl
            self._kl = adapted_kl(self._kl, self._measured["kl/completion"], self.config.kl_target)
        return replace(update, metrics=metrics)

    def step(self, client: Client, batch: Batch) -> Metrics:
        """Makes one update of the policy, and of the critic where it is a separate model."""
        if self.config.critic == "shared":
            return client.step(batch, self.objective)
        logged = client.step(batch, self.value_objective, of="critic")
        critic = {f"critic/{n.removeprefix('train/')}" if n.startswith("train/") else n: x for n, x in logged.items()}
        if self._steps < self.config.critic_warmup:
            return critic
        return {**client.step(batch, self.objective), **critic}

    @property
    def measures(self) -> tuple[str, ...]:
        """The critic's values too."""
        return (*super().measures, "values")

    def measure(self, client: Client, sequences: List[Sequence], size: int) -> dict[str, List[np.ndarray]]:
        """As for every policy gradient, and the values of all states, `[T + 1]` with that after the last token."""
        values = client.values([longer(sequence) for sequence in sequences], size)
        return {**super().measure(client, sequences, size), "values": values}

    def credit(self, client: Client, groups: Groups, sequences: Credited, data: Rollouts) -> Credited:
        """The sequences with generalised advantages, returns and values of every sampled token."""
        episodes, listed = flat(groups), flat(sequences)
        penalties = self.penalties(groups).ravel()
        values, after = values_of(episodes)
        rewards = [
            token_rewards(episode, data.weights, penalty) + self.kl_rewards(sequence, self._kl)
            for episode, sequence, penalty in zip(episodes, listed, penalties, strict=True)
        ]
        pairs = [
            self._estimated(r, v, x.loss_mask, bootstrap)
            for r, v, x, bootstrap in zip(rewards, values, listed, after, strict=True)
        ]
        counted = [x.loss_mask & (x.weight > 0) for x in listed]
        advantages = [advantage for advantage, _ in pairs]
        if self.config.whiten:
            advantages = whitened(advantages, counted, std=self.config.std)
        self._measure(listed, [returns for _, returns in pairs], values, counted)
        for name, arrays in (
            ("advantages", advantages),
            ("returns", [returns for _, returns in pairs]),
            ("old_values", values),
        ):
            sequences = with_tokens(sequences, name, grouped(arrays, sequences))
        if self.config.kl_target and self.config.kl_in == "loss":
            added = {"kl_coefficient": self._kl}
            sequences = [[replace(x, per_sequence={**x.per_sequence, **added}) for x in group] for group in sequences]
        return sequences

    def get_state(self) -> dict[str, Any]:
        """The number of steps done and the present KL coefficient."""
        return {"steps": self._steps, "kl": self._kl}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the number of steps and the KL coefficient."""
        self._steps, self._kl = state["steps"], state["kl"]

    def _estimated(
        self, rewards: np.ndarray, values: np.ndarray, drawn: np.ndarray, bootstrap: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """`[T]` advantages with the policy's lambda, and returns with the critic's."""
        config = self.config

        def at(lam: float) -> tuple[np.ndarray, np.ndarray]:
            return gae(rewards, values, drawn, config.gamma, lam, bootstrap)

        lam = config.lam if config.lam_length is None else length_lambda(int(drawn.sum()), config.lam_length)
        advantages, returns = at(lam)
        return advantages, returns if config.lam_critic is None else at(config.lam_critic)[1]

    def _measure(
        self, listed: list[Sequence], returns: list[np.ndarray], values: list[np.ndarray], counted: list[np.ndarray]
    ) -> None:
        """Remembers metrics of this step: how well the critic explains the returns, and the KL of completions."""
        returns_n = np.concatenate([x[mask] for x, mask in zip(returns, counted, strict=True)])
        values_n = np.concatenate([x[mask] for x, mask in zip(values, counted, strict=True)])
        self._measured = {}
        if returns_n.size:
            self._measured["value/explained_variance"] = explained_variance(returns_n, values_n)
        if self.config.kl:
            drift = [
                float((old_policy_logprobs(x) - x.per_token["reference_logprobs"])[x.loss_mask].sum()) for x in listed
            ]
            self._measured["kl/completion"] = float(np.mean(drift))


def longer(sequence: Sequence) -> Sequence:
    """The sequence with one token more: the value at t is of the state before token t, and any token can follow the
    last."""
    experts = sequence.experts
    if experts is not None:  # the router chooses those of the token that is no token
        experts = np.concatenate([experts, np.full_like(experts[:1], -1)])
    tokens, mask = np.append(sequence.tokens, np.int32(0)), np.append(sequence.loss_mask, True)
    return Sequence(tokens, mask, experts=experts)


def values_of(episodes: list[Scored]) -> tuple[list[np.ndarray], list[float]]:
    """The critic's values `[T]` of each sequence, and of the state after it where it was cut short, else 0."""
    # Cut short is where rewards were still to come, as in a game that the token limit cut off. A completion that reward
    # functions score has its whole reward, cut off or not. If the critic's value were added, not to stop would pay more
    # than to answer: a policy that learned to sort then had a third of its answers cut off.
    cut_short = [episode.truncated and list(episode.rewards) == [ENVIRONMENT] for episode in episodes]
    values = [episode.measured["values"] for episode in episodes]
    after = [float(v[-1]) if cut else 0.0 for v, cut in zip(values, cut_short, strict=True)]
    return [v[:-1] for v in values], after


def token_rewards(episode: Scored, weights: dict[str, float], penalty: float) -> np.ndarray:
    """`[T]` rewards of tokens: a turn's reward at its last token, all others at the completion's last sampled token.

    Args:
        episode: one whose rewards failed has 0 everywhere.
        weights: weight of each reward, by name.
        penalty: added to the completion's reward, e.g. for its length.
    """
    start, completion = len(episode.prompt.tokens), episode.completion
    rewards = np.zeros(start + len(completion.tokens))
    if not completion.turns or episode.unscored:
        return rewards
    if ENVIRONMENT in weights:  # else the environment leaves scoring to the functions
        for (_, end), reward in zip(completion.turns, episode.turn_rewards, strict=False):
            rewards[start + end - 1] += weights[ENVIRONMENT] * reward
    scored = {name: reward for name, reward in episode.rewards.items() if not np.isnan(reward)}
    total = sum(weights[name] * reward for name, reward in scored.items() if name != ENVIRONMENT)
    rewards[start + completion.turns[-1][1] - 1] += total + penalty
    return rewards
