"""Direct Preference Optimisation and its relatives: of two completions the better one becomes likelier.

Pairs are given, or made (`online`): the policy answers each prompt several times, and the best and the worst answer, by
the rewards, are the prompt's pair.

Axes: P prompts, G group.
"""

from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from tunix.algorithms.advantages import weighted_sum
from tunix.algorithms.base import Algorithm, Update
from tunix.algorithms.dpo.baseline import Running, laid, paired, unpaired
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.dpo.loss import BASELINE, dpo_loss
from tunix.algorithms.loss import REFERENCE, compared_with_sampler
from tunix.algorithms.on_policy import Groups, as_sequence, gate, notes, report, rewards_of, row
from tunix.data.pipeline import Packed
from tunix.protocols import Client
from tunix.rollout.collect import Rollouts, require_scores
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Metrics, Sampling, Sequence

Ranks = list[tuple[int, int] | None]
"""Of each group the places of the best and of the worst completion, or None where nothing tells them apart."""


class DPO(Algorithm):
    """The family; see `DPOConfig` for its members."""

    Config = DPOConfig
    config: DPOConfig

    members = 2

    def __init__(self, config: DPOConfig, sampling: Sampling | None = None):
        """See `Algorithm`."""
        super().__init__(config, sampling)
        self._mean = Running()

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
        # Where values are sorted, the reference has been asked before: see `measured`.
        reference = self.needs_reference and not self.config.sorts
        if self.config.online:
            return Loss(self.gated_loss, reference=reference, temperature=self._temperature)
        return Loss(self.loss, reference=reference)

    @property
    def _temperature(self) -> float:
        """Of the log-probs: the sampler's where the policy draws."""
        return self.sampling.temperature if self.config.online else 1.0

    def update(self, client: Client, data: Any) -> Update:
        """One update, of a batch of pairs, or of those that the policy writes first."""
        if self.config.online:
            return self.update_online(client, data)
        batch = self.measured(client, data.batch, data.sequences)
        return Update(self._step(client, batch), (batch,))

    def evaluate(self, client: Client, held_out: List[Packed]) -> dict[str, float]:
        """The loss over all the batches; pairs are sorted within each."""
        batches = [self.measured(client, packed.batch, packed.sequences) for packed in held_out]
        return client.evaluate(batches, self.held_out_objective)

    def measured(self, client: Client, batch: Batch, sequences: List[Sequence]) -> Batch:
        """The batch with the baselines of its rewards, where the form has some.

        Args:
            sequences: of the batch.
        """
        if self.config.shifts:
            baseline = self._mean.baseline(len(batch.weights))
            return replace(batch, per_sequence={**batch.per_sequence, BASELINE: baseline})
        return self._sorted(client, batch, sequences) if self.config.sorts else batch

    def _sorted(self, client: Client, batch: Batch, sequences: List[Sequence]) -> Batch:
        """The batch with the opposites of its sorted values, by the current policy, and the reference's log-probs."""
        size = len(batch.weights)
        # Some are scored twice where the last batch has fewer, so that nothing is compiled anew.
        asked = [sequences[i % len(sequences)] for i in range(size)]
        policy = client.logprobs(asked, "policy", self._temperature)
        if self.precomputes:
            reference = [sequence.per_token[REFERENCE] for sequence in asked]
        else:
            reference = client.logprobs(asked, "reference", self._temperature)
        p, q = (self._scores(found, asked) for found in (policy, reference))
        here = np.asarray(batch.weights)[::2] > 0
        if self.config.loss == "aot":
            baseline = paired(p[::2] - p[1::2], q[::2] - q[1::2], here)
        else:
            baseline = unpaired((p - q)[::2], (p - q)[1::2], here)
        return replace(
            batch,
            per_token={**batch.per_token, REFERENCE: laid(reference, batch)},
            per_sequence={**batch.per_sequence, BASELINE: baseline},
        )

    def _scores(self, logprobs: List[np.ndarray], sequences: List[Sequence]) -> np.ndarray:
        """`[S]` beta times the log-prob of each completion, or of its mean token."""
        assert self.config.beta is not None
        masks = [sequence.loss_mask for sequence in sequences]
        sums = np.array([values[mask].sum() for values, mask in zip(logprobs, masks, strict=True)])
        return self.config.beta * (sums / [mask.sum() for mask in masks] if self.config.length_normalized else sums)

    def _step(self, client: Client, batch: Batch) -> dict[str, Any]:
        """One update, which is remembered where the form has a running mean."""
        metrics = dict(client.step(batch, self.objective))
        if self.config.shifts:
            metrics["rewards/shift"] = self._mean.mean
            self._mean.add(metrics, float(batch.counts["pairs"]))
        return metrics

    def get_state(self) -> dict[str, Any]:
        """The running mean of the rewards, where the form has one."""
        return {"mean": float(self._mean.mean), "pairs": self._mean.pairs} if self.config.shifts else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        if self.config.shifts:
            self._mean.mean, self._mean.pairs = state["mean"], state["pairs"]

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
        batches = (self.measured(client, data.packed(sides, 2 * data.size), sides),) if sides else ()
        for batch in batches:
            with data.clock.part("update"):
                metrics: Metrics = self._step(client, batch)
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
