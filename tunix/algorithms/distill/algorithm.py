"""Distillation: a student learns a teacher's next-token distribution, on given text or on its own completions.

Axes: T time.
"""

from collections.abc import Sequence as List
from typing import Any

import numpy as np

from tunix.algorithms.distill.config import DistillConfig
from tunix.algorithms.distill.loss import TEACHER, distill_loss, sampled_loss
from tunix.algorithms.episodes import Groups, as_sequence, flat, measured, row, sampling_report, with_tokens
from tunix.algorithms.on_policy import Experience, OnPolicy, Prepared
from tunix.config import RowKind
from tunix.protocols import Client
from tunix.types import Divergence, Loss, LossInputs, LossOutputs, Sequence


class Distill(OnPolicy):
    """Distillation from a teacher, on given text or on the student's own completions."""

    Config = DistillConfig
    config: DistillConfig

    @property
    def needs_fresh(self) -> str | None:
        """On its own text the student is compared at states that it visits itself: it has no ratio to older ones."""
        return "algorithm: distill compares the student at its own, present completions: leave max_staleness out"

    @property
    def temperature(self) -> float:
        """Temperature of both distributions; on-policy that of the sampler."""
        return self.sampling.temperature if self.config.on_policy else self.config.temperature or 1.0

    @property
    def divergence(self) -> Divergence | None:
        """The divergence that is computed at every token; None where only the sampled token is compared."""
        kind = self.config.divergence
        if kind is None or kind == "sampled":
            return None
        return Divergence(kind, self.config.beta or 0.5, self.config.top_k, self.temperature)

    @property
    def objective(self) -> Loss:
        """The loss; on-policy at the sampling temperature, with metrics of the mismatch of trainer and sampler."""
        if self.config.on_policy:
            return Loss(self.gated_loss, divergence=self.divergence, temperature=self.temperature)
        reads = bool(self.config.sft_weight) or type(self).loss is not Distill.loss
        return Loss(self.loss, logprobs=reads, divergence=self.divergence)

    @property
    def held_out_objective(self) -> Loss:
        """The divergence on given text; where only sampled tokens are compared in training, the reverse KL, which they
        estimate."""
        if not self.config.on_policy:
            return self.objective
        divergence = self.divergence or Divergence("reverse_kl", temperature=self.temperature)
        return Loss(self.held_out_loss, logprobs=False, divergence=divergence)

    @property
    def held_out_on(self) -> RowKind:
        """Given text, also where training is on-policy."""
        return RowKind(self.config.train_on)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `sampled_loss` and `distill_loss`."""
        if self.config.divergence == "sampled":
            return sampled_loss(inputs, self.config.reduction)
        return distill_loss(inputs, self.config.reduction, self.temperature, self.config.sft_weight)

    def held_out_loss(self, inputs: LossInputs) -> LossOutputs:
        """The divergence without the SFT term."""
        return distill_loss(inputs, self.config.reduction, self.temperature, sft_weight=0.0)

    def prepare(self, client: Client, experience: Experience) -> Prepared:
        """One batch of all completions; where no divergence is computed, with the teacher's log-probs of their
        tokens."""
        groups, data = self.all_measured(client, experience), experience.data
        sequences = [as_sequence(episode) for episode in flat(groups)]
        for name in self.measures:
            (sequences,) = with_tokens([sequences], name, [flat(measured(groups, name))])
        batch = data.packed(sequences, self.config.sequences_per_update(data.size))
        return Prepared([batch], sampling_report(groups), shown(groups[: data.shown]))

    @property
    def measures(self) -> tuple[str, ...]:
        """The teacher's log-probs, where no divergence is computed."""
        return (TEACHER,) if self.config.on_policy and self.divergence is None else ()

    def measure(self, client: Client, sequences: List[Sequence], size: int) -> dict[str, List[np.ndarray]]:
        """The teacher's log-probs, at the sampling temperature."""
        return {TEACHER: client.logprobs(sequences, "teacher", self.temperature, size)}


def shown(groups: Groups) -> tuple[dict[str, Any], ...]:
    """Rows of completions for `samples.jsonl`."""
    return tuple(row(place, episode) for place, group in enumerate(groups) for episode in group)
