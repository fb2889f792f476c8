"""Distillation: a student learns a teacher's next-token distribution, on given text or on its own completions.

Axes: T time.
"""

from tunix.algorithms.base import Needs, Update
from tunix.algorithms.distill.config import DistillConfig
from tunix.algorithms.distill.loss import distill_loss, sampled_loss
from tunix.algorithms.episodes import as_sequence, flat, row, sampling_report
from tunix.algorithms.on_policy import Experience, OnPolicy
from tunix.algorithms.ops import TEACHER
from tunix.config import RowKind
from tunix.protocols import Client
from tunix.types import Divergence, Loss, LossInputs, LossOutputs


class Distill(OnPolicy):
    """Distillation from a teacher, on given text or on the student's own completions."""

    Config = DistillConfig
    config: DistillConfig

    @property
    def needs(self) -> Needs:
        """The divergence from the teacher at every token; or, where only the sampled token is compared, the teacher's
        log-prob of it."""
        config = self.config
        if config.divergence is None or config.divergence == "sampled":
            divergence = None
        else:
            divergence = Divergence(config.divergence, config.beta or 0.5, config.top_k, self.temperature)
        if not config.on_policy:
            reads = bool(config.sft_weight) or type(self).loss is not Distill.loss
            return Needs(logprobs=reads, divergence=divergence)
        return Needs(
            divergence=divergence,
            measured=() if divergence else (TEACHER,),
            # The student is compared at states that it visits itself: it has no ratio to older ones.
            fresh="algorithm: distill compares the student at its own, present completions: leave max_staleness out",
        )

    @property
    def held_out_objective(self) -> Loss:
        """The divergence on given text; where only sampled tokens are compared in training, the reverse KL, which they
        estimate."""
        if not self.config.on_policy:
            return self.objective
        divergence = self.needs.divergence or Divergence("reverse_kl", temperature=self.temperature)
        return Loss(self.held_out_loss, logprobs=False, divergence=divergence)

    @property
    def held_out_on(self) -> RowKind:
        """Given text, also where training is on-policy."""
        return RowKind.COMPLETION

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """`sampled_loss` or `distill_loss` by the config."""
        config, arrays = self.config, inputs.batch.per_token
        if config.divergence == "sampled":
            old, teacher = arrays["old_logprobs"], arrays[TEACHER]
            return sampled_loss(inputs.logprobs, old, teacher, inputs.batch)
        assert inputs.compared is not None
        return distill_loss(
            inputs.compared, inputs.logprobs, temperature=self.temperature, sft_weight=config.sft_weight
        )

    def held_out_loss(self, inputs: LossInputs) -> LossOutputs:
        """The divergence without the SFT term."""
        assert inputs.compared is not None
        return distill_loss(inputs.compared, inputs.logprobs, temperature=self.temperature)

    def prepare(self, client: Client, experience: Experience) -> Update:
        """One batch of all completions; where no divergence is computed, with the teacher's log-probs of their
        tokens."""
        groups, data = self.all_measured(client, experience), experience.data
        sequences = [as_sequence(episode) for episode in flat(groups)]
        batch = data.packed(sequences, self.config.sequences_per_update(data.size))
        samples = (row(place, episode) for place, group in enumerate(groups) for episode in group)
        return Update(sampling_report(groups), (batch,), samples)
