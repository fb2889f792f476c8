"""Proximal Policy Optimisation: a critic estimates the value of each state, so that every token has an advantage.

Axes: T time.
"""

from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any

import numpy as np

from tunix.algorithms.advantages import whitened
from tunix.algorithms.base import Needs, Update
from tunix.algorithms.episodes import VALUES, Groups, flat, old_policy_logprobs
from tunix.algorithms.on_policy import Experience, PolicyGradient
from tunix.algorithms.ops import REFERENCE, old_logprobs
from tunix.algorithms.ppo.config import PPOConfig
from tunix.algorithms.ppo.loss import adapted_kl, explained_variance, gae, ppo_loss, value_loss
from tunix.protocols import Client
from tunix.rollout.types import ENVIRONMENT, Rollouts, Scored
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Metrics, Sampling, Sequence

VALUE_COEFFICIENT = {"own": 1.0, "shared": 0.5}
"""Weight of the value loss: with a shared trunk its gradients reach the policy (c1 of the paper's eq. 9, as OpenAI's
PPO2 sets it)."""


class PPO(PolicyGradient):
    """PPO with a separate critic, or with a value head on the policy's trunk."""

    Config = PPOConfig
    config: PPOConfig

    extra_tokens = 1
    """The state after a completion that was cut off has a value too: one token more than was sampled."""

    def __init__(self, config: PPOConfig, sampling: Sampling | None = None):
        super().__init__(config, sampling)
        self._steps = 0
        self._measured: list[dict[str, float]] = []
        """What `credit` measured, of each seat of an environment's players."""

    @property
    def needs(self) -> Needs:
        """As for every policy gradient, and the critic's values, before the updates too."""
        needs = super().needs
        return replace(needs, values=self.config.critic, measured=(*needs.measured, VALUES))

    @property
    def value_objective(self) -> Loss:
        """The loss of a separate critic."""
        return Loss(self.value_loss, logprobs=False, values=True)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """`ppo_loss` by the config, with the KL and entropy terms; with a shared trunk also `value_loss` (eq. 9)."""
        config = self.config
        assert config.clip_low is not None
        assert config.clip_high is not None
        outputs = ppo_loss(
            inputs.logprobs,
            old_logprobs(inputs),
            inputs.batch.per_token["advantages"],
            inputs.batch,
            over=config.over(self.sampling.max_tokens),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        outputs = self.penalised(outputs, inputs)
        if config.critic == "own":
            return outputs
        value = self.value_loss(inputs)
        return LossOutputs({**outputs.terms, **value.terms}, {**outputs.metrics, **value.metrics})

    def value_loss(self, inputs: LossInputs) -> LossOutputs:
        """`ppo.loss.value_loss` by the config."""
        assert inputs.values is not None
        arrays = inputs.batch.per_token
        return value_loss(
            inputs.values,
            arrays["old_values"],
            arrays["returns"],
            coefficient=VALUE_COEFFICIENT[self.config.critic],
            clip=self.config.value_clip,
        )

    def learn(self, client: Client, experience: Experience) -> Update:
        """Makes the updates on an experience; the KL coefficient then follows the measured KL."""
        update = super().learn(client, experience)
        self._steps += 1
        parts, self._measured = self._measured, []
        names = dict.fromkeys(name for part in parts for name in part)
        measured = {name: float(np.mean([part[name] for part in parts if name in part])) for name in names}
        if "kl/completion" in measured:  # a completion is the turns of all seats
            measured["kl/completion"] *= len(parts)
        metrics = {**update.metrics, **measured}
        if self.config.kl_target:
            metrics["kl/coefficient"] = self.kl_coefficient
            self.kl_coefficient = adapted_kl(self.kl_coefficient, measured["kl/completion"], self.config.kl_target)
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

    def measure(self, client: Client, sequences: List[Sequence], size: int) -> dict[str, List[np.ndarray]]:
        """As for every policy gradient, and the values of all states, `[T + 1]` with that after the last token."""
        states = []
        for x in sequences:
            # One token more: the value at t is of the state before token t, and any token can follow the last.
            tokens, mask, experts = np.append(x.tokens, np.int32(0)), np.append(x.loss_mask, True), x.experts
            if experts is not None:  # the router chooses those of the token that is no token
                experts = np.concatenate([experts, np.full_like(experts[:1], -1)])
            states.append(Sequence(tokens, mask, experts=experts, restarts=x.restarts))
        return {VALUES: client.values(states, size), **super().measure(client, sequences, size)}

    def advantages(self, estimates: list[np.ndarray], counted: list[np.ndarray]) -> list[np.ndarray]:
        """The advantages that the loss reads: the estimates with mean 0 and deviation 1 over all trained tokens.

        Args:
            estimates: `[T]` generalised advantages of each sequence.
            counted: `[T]` bool, the tokens that are trained; none where a sample failed.
        """
        return whitened(estimates, counted, std=self.config.std)

    def credit(self, client: Client, groups: Groups, sequences: list[Sequence], data: Rollouts) -> list[Sequence]:
        """The sequences with generalised advantages, returns and values of every sampled token."""
        config, advantages, returns = self.config, [], []
        values = [episode.measured[VALUES][:-1] for episode in flat(groups)]
        penalties = self.penalties(groups, data.weights).ravel()
        for episode, x, values_T, penalty in zip(flat(groups), sequences, values, penalties, strict=True):
            rewards = token_rewards(episode, data.weights, penalty) + self.kl_rewards(x)
            # Cut short is where rewards were still to come, as in a game that the token limit cut off. A completion
            # that reward functions score, or whose environment has judged it and is at its end, has its whole reward,
            # cut off or not. If the critic's value were added, not to stop would pay more than to answer: a policy that
            # learned to sort then had a third of its answers cut off, and in problems of a single turn all of them.
            cut_short = episode.truncated and not episode.ended and list(episode.rewards) == [ENVIRONMENT]
            after = float(episode.measured[VALUES][-1]) if cut_short else 0.0
            advantage, target = gae(rewards, values_T, x.loss_mask, config.gamma, config.lam, bootstrap=after)
            advantages.append(advantage)
            returns.append(target)
        counted = [x.loss_mask & (x.weight > 0) for x in sequences]
        advantages = self.advantages(advantages, counted)
        # Metrics of this step: how well the critic explains the returns, and the KL of completions.
        measured: dict[str, float] = {}
        returns_n, values_n = (
            np.concatenate([x[mask] for x, mask in zip(arrays, counted, strict=True)]) for arrays in (returns, values)
        )
        if returns_n.size:
            measured["value/explained_variance"] = explained_variance(returns_n, values_n)
        if config.kl:
            drift = [float((old_policy_logprobs(x) - x.per_token[REFERENCE])[x.loss_mask].sum()) for x in sequences]
            measured["kl/completion"] = float(np.mean(drift))
        self._measured.append(measured)
        adapted = {"kl_coefficient": self.kl_coefficient} if config.kl_target and config.kl_in == "loss" else {}
        return [
            replace(
                x,
                per_token={**x.per_token, "advantages": advantage, "returns": target, "old_values": values_T},
                per_sequence={**x.per_sequence, **adapted},
            )
            for x, advantage, target, values_T in zip(sequences, advantages, returns, values, strict=True)
        ]

    def get_state(self) -> dict[str, Any]:
        """The number of steps done and the present coefficients."""
        return {**super().get_state(), "steps": self._steps, "kl": self.kl_coefficient}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._steps, self.kl_coefficient = state["steps"], state["kl"]


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
