"""Direct Preference Optimisation and its relatives: of two completions the better one becomes likelier.

Pairs are given, or made (`online`): the policy answers each prompt several times, and the best and the worst answer, by
the rewards, are the prompt's pair.

Axes: P prompts, G group.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from tunix.algorithms.advantages import weighted_sum
from tunix.algorithms.base import Algorithm, Update
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.dpo.loss import REFERENCE, dpo_loss
from tunix.algorithms.loss import compared_with_sampler
from tunix.algorithms.policy import Groups, as_sequence, gate, notes, report, rewards_of, row
from tunix.client import Client
from tunix.rollout.collect import Rollouts, require_scores
from tunix.types import Loss, LossInputs, LossOutputs, Metrics, Sequence

Ranks = list[tuple[int, int] | None]
"""Of each group the places of the best and of the worst completion, or None where nothing tells them apart."""


class DPO(Algorithm):
    """The family; see `DPOConfig` for its members."""

    Config = DPOConfig
    config: DPOConfig

    members = 2

    answers: Callable[[Sequence], np.ndarray] | None = None
    """`[T]` log-probs of the reference, asked before the first step where the recipe says so."""

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `dpo_loss`."""
        return dpo_loss(inputs, self.config)

    def gated_loss(self, inputs: LossInputs) -> LossOutputs:
        """The loss with the sampler's mismatch measured."""
        return compared_with_sampler(
            self.loss(inputs), inputs.batch, inputs.logprobs, inputs.batch.per_token["old_logprobs"]
        )

    @property
    def train_on(self) -> Literal["pairs", "prompt"]:
        """Both completions of a row; or its prompt alone, where the policy writes them."""
        return "prompt" if self.config.online else "pairs"

    @property
    def needs_reference(self) -> bool:
        """As the form does; not where it was asked beforehand."""
        return self.config.has_reference and not self.precomputes

    @property
    def reference_path(self) -> str | None:
        """As the recipe says."""
        return self.config.reference_path

    @property
    def precomputes(self) -> bool:
        """Whether the reference is asked once for all rows."""
        return self.config.reference == "precompute"

    def prepared(self, sequence: Sequence) -> Sequence:
        """The sequence with the reference's log-probs, where they were asked beforehand."""
        if self.answers is None:
            return sequence
        return replace(sequence, per_token={**sequence.per_token, REFERENCE: self.answers(sequence)})

    @property
    def objective(self) -> Loss:
        """The loss; of completions that the policy drew, on the distribution that they were drawn from."""
        if self.config.online:
            return Loss(self.gated_loss, reference=self.needs_reference, temperature=self.sampling.temperature)
        return Loss(self.loss, reference=self.needs_reference)

    def update(self, client: Client, data: Any) -> Update:
        """One update, of a batch of pairs, or of those that the policy writes first."""
        return self.update_online(client, data) if self.config.online else super().update(client, data)

    def update_online(self, client: Client, data: Rollouts) -> Update:
        """Sample from the current policy, score, rank, and update on the pairs; without a pair nothing is updated.

        Raises:
            UserError: none of the completions could be scored.
            Doubtful: see `gate`.
        """
        client.publish()
        groups = data.collect(client, data.prompts, self.config.group_size)
        require_scores(groups)
        ranks = ranked(weighted_sum(rewards_of(groups), data.weights))
        sides = [as_sequence(group[i]) for group, rank in zip(groups, ranks, strict=True) for i in rank or ()]
        signal = np.array([rank is not None for rank in ranks])
        numbers: dict[str, Any] = report(groups, data.weights, signal)
        batches = (data.packed(sides, 2 * data.size),) if sides else ()
        for batch in batches:
            with data.clock.part("update"):
                metrics: Metrics = client.step(batch, self.objective)
                gate(metrics, batch, data, self.needs_reference and self.reference_path is None)
            numbers |= metrics
        numbers |= {f"perf/{part}_seconds": seconds for part, seconds in data.clock.items()}
        return Update(numbers, batches, rows(groups, ranks, data.shown), notes(groups, data.weights, signal))


def ranked(scores_PG: np.ndarray) -> Ranks:
    """The best and the worst of each group, the first ones where several are equal.

    Args:
        scores_PG: NaN where a reward failed; such completions are left out.
    """

    def one(scores: np.ndarray) -> tuple[int, int] | None:
        if np.isnan(scores).all() or np.nanmax(scores) == np.nanmin(scores):
            return None
        return int(np.nanargmax(scores)), int(np.nanargmin(scores))

    return [one(scores) for scores in scores_PG]


def rows(groups: Groups, ranks: Ranks, number: int) -> tuple[dict[str, Any], ...]:
    """The first groups for `samples.jsonl`: what was drawn, what it earned, which side of the pair it is."""
    return tuple(
        {**row(place, episode), "side": ("chosen", "rejected")[rank.index(i)] if rank and i in rank else None}
        for place, (group, rank) in enumerate(zip(groups[:number], ranks, strict=False))
        for i, episode in enumerate(group)
    )
