"""Distillation: on given text the student copies the teacher's distribution; or it writes, and the teacher comments.

Axes: T time.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from tunix.algorithms.base import Algorithm, Update
from tunix.algorithms.distill.config import DistillConfig
from tunix.algorithms.distill.loss import distill_loss, sampled_loss
from tunix.algorithms.loss import compared_with_sampler
from tunix.algorithms.on_policy import Groups, as_sequence, drawn_report, flat, gate, merged, row
from tunix.protocols import Client
from tunix.rollout.collect import Rollouts
from tunix.types import Divergence, Loss, LossInputs, LossOutputs, Sequence


class Distill(Algorithm):
    """Learning from a teacher, on given text or on one's own."""

    Config = DistillConfig
    config: DistillConfig

    @property
    def train_on(self) -> Literal["completion", "all", "prompt"]:
        """Only prompts where the student writes."""
        return "prompt" if self.config.on_policy else self.config.train_on

    @property
    def temperature(self) -> float:
        """Of both distributions: on-policy that of the sampler."""
        return self.sampling.temperature if self.config.on_policy else self.config.temperature or 1.0

    @property
    def divergence(self) -> Divergence | None:
        """What is computed at every token; None where the drawn token alone is asked about."""
        kind = self.config.divergence
        if kind is None or kind == "sampled":
            return None
        return Divergence(kind, self.config.beta or 0.5, self.config.top_k, self.temperature)

    @property
    def objective(self) -> Loss:
        """The loss; on-policy on the distribution that was sampled from, with the sampler's mismatch measured."""
        if self.config.on_policy:
            return Loss(self.gated_loss, divergence=self.divergence, temperature=self.temperature)
        reads = bool(self.config.sft_weight) or type(self).loss is not Distill.loss
        return Loss(self.loss, logprobs=reads, divergence=self.divergence)

    @property
    def held_out_objective(self) -> Loss:
        """On given text, which the student did not draw: the divergence; where only drawn tokens are asked about, the
        reverse KL that they estimate."""
        if not self.config.on_policy:
            return self.objective
        divergence = self.divergence or Divergence("reverse_kl", temperature=self.temperature)
        return Loss(self.held_out_loss, logprobs=False, divergence=divergence)

    @property
    def held_out_on(self) -> Literal["completion", "all"]:
        """Given completions, whatever is trained on."""
        return self.config.train_on

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `sampled_loss` and `distill_loss`."""
        if self.config.divergence == "sampled":
            return sampled_loss(inputs, self.config.reduction)
        return distill_loss(inputs, self.config.reduction, self.temperature, self.config.sft_weight)

    def held_out_loss(self, inputs: LossInputs) -> LossOutputs:
        """The divergence alone."""
        return distill_loss(inputs, self.config.reduction, self.temperature, sft_weight=0.0)

    def gated_loss(self, inputs: LossInputs) -> LossOutputs:
        """The loss with the sampler's mismatch measured."""
        sampler = inputs.batch.per_token["old_logprobs"]
        return compared_with_sampler(self.loss(inputs), inputs.batch, inputs.logprobs, sampler)

    def update(self, client: Client, data: Any) -> Update:
        """One step: on a packed batch, or on what the student writes to the prompts."""
        return self._on_own_text(client, data) if self.config.on_policy else super().update(client, data)

    def _on_own_text(self, client: Client, data: Rollouts) -> Update:
        """Sample from the current student, ask the teacher, update.

        Raises:
            Doubtful: sampler and trainer are not one model.
        """
        client.publish()
        groups = data.collect(client, data.prompts, self.config.group_size or 1)
        sequences = [as_sequence(episode) for episode in flat(groups)]
        if self.divergence is None:
            with data.clock.part("teacher"):
                sequences = self._commented(client, sequences)
        with data.clock.part("update"):
            batch = data.packed(sequences, self.config.sequences_per_update(data.size))
            metrics = client.step(batch, self.objective)
            gate(metrics, batch, data, reference=False)
        numbers = drawn_report(groups) | merged([metrics])
        numbers |= {f"perf/{part}_seconds": seconds for part, seconds in data.clock.items()}
        return Update(numbers, (batch,), shown(groups[: data.shown]))

    def _commented(self, client: Client, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences with the teacher's log-probs, at the temperature that they were drawn at."""
        found = client.logprobs(sequences, "teacher", self.temperature)
        return [with_comment(sequence, comment) for sequence, comment in zip(sequences, found, strict=True)]


def with_comment(sequence: Sequence, logprobs: np.ndarray) -> Sequence:
    """The sequence with the teacher's log-probs `[T]`."""
    return replace(sequence, per_token={**sequence.per_token, "teacher_logprobs": logprobs})


def shown(groups: Groups) -> tuple[dict[str, Any], ...]:
    """Rows for `samples.jsonl`: what was drawn."""
    return tuple(row(place, episode) for place, group in enumerate(groups) for episode in group)
