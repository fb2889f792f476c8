"""Distillation: a student learns a teacher's next-token distribution, on given text or on its own completions.

Axes: T time.
"""

from collections.abc import Sequence as List
from dataclasses import replace

import numpy as np

from tunix.algorithms.base import Needs, Update
from tunix.algorithms.distill.config import SHOWN, DistillConfig
from tunix.algorithms.distill.loss import distill_loss, prefix_weights, sampled_loss
from tunix.algorithms.episodes import (
    Groups,
    as_sequence,
    flat,
    report,
    require_scores,
    row,
    sampling_report,
    total_rewards,
)
from tunix.algorithms.on_policy import Experience, OnPolicy
from tunix.algorithms.ops import TEACHER
from tunix.config import RowKind
from tunix.protocols import Client, SamplingClient
from tunix.rollout.types import Rollouts, Scored
from tunix.types import Divergence, Loss, LossInputs, LossOutputs, TeacherView

PREFIX_WEIGHTS = "prefix_weights"
"""Name of a batch's per-token weights with `prefix_weight`."""


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
            return sampled_loss(inputs.logprobs, old, teacher, inputs.batch, weights=arrays.get(PREFIX_WEIGHTS, 1.0))
        assert inputs.compared is not None
        return distill_loss(
            inputs.compared, inputs.logprobs, temperature=self.temperature, sft_weight=config.sft_weight
        )

    def held_out_loss(self, inputs: LossInputs) -> LossOutputs:
        """The divergence without the SFT term."""
        assert inputs.compared is not None
        return distill_loss(inputs.compared, inputs.logprobs, temperature=self.temperature)

    def gather(self, client: SamplingClient, data: Rollouts) -> Groups:
        """Samples one group of episodes for each prompt; nothing is asked of a teacher that is to see their scores."""
        if self.config.success is None:
            return super().gather(client, data)
        groups = data.collect(client, data.prompts, self.config.samples_per_prompt)
        require_scores(groups)
        return groups

    def shown(self, groups: Groups, data: Rollouts) -> list[list[TeacherView | None]]:
        """What the teacher reads before each completion: the prompt with another attempt that succeeded, the first one
        of the group, and with feedback on one that did not (SDPO, https://arxiv.org/abs/2601.20802); None where there
        is neither."""
        totals, limit = total_rewards(groups, data.weights), self.config.success

        def seen(group: List[Scored], scores: np.ndarray, i: int) -> TeacherView | None:
            others = (x.text for j, x in enumerate(group) if j != i and scores[j] >= limit)
            said = (x for name, x in group[i].logged.items() if name.endswith("/feedback") and isinstance(x, str) and x)
            texts = {"attempt": next(others, ""), "feedback": "" if scores[i] >= limit else "\n".join(said)}
            blocks = {name: SHOWN[name].format(text) if text else "" for name, text in texts.items()}
            return data.taught(group[i].prompt, blocks) if any(blocks.values()) else None

        return [[seen(x, scores, i) for i in range(len(x))] for x, scores in zip(groups, totals, strict=True)]

    def prepare(self, client: Client, experience: Experience) -> Update:
        """One batch of all completions; where no divergence is computed, with the teacher's log-probs of their
        tokens. Those of which the teacher is shown nothing have weight 0."""
        data, numbers, views = experience.data, dict[str, float](), [None] * len(flat(experience.groups))
        if self.config.success is not None:
            shown = self.shown(experience.groups, data)
            groups: Groups = []
            for group, of_group in zip(experience.groups, shown, strict=True):
                same = TeacherView(group[0].prompt.tokens, np.zeros_like(group[0].prompt.tokens))  # as the student
                read = zip(group, of_group, strict=True)
                groups.append([replace(x, prompt=replace(x.prompt, teacher=view or same)) for x, view in read])
            experience, views = replace(experience, groups=groups), flat(shown)
            numbers, _ = report(groups, data.weights, np.ones(len(groups), bool))
            numbers["distill/taught"] = float(np.mean([view is not None for view in views]))
        groups, leaves = self.all_measured(client, experience), self.config.success is not None
        pairs = zip(flat(groups), views, strict=True)
        sequences = [as_sequence(episode, leaves and view is None) for episode, view in pairs]
        if gamma := self.config.prefix_weight:
            for i, x in enumerate(sequences):
                gaps = np.where(x.loss_mask, x.per_token[TEACHER] - x.per_token["old_logprobs"], np.float32(0))
                weights = {PREFIX_WEIGHTS: prefix_weights(gaps, gamma)}
                sequences[i] = replace(x, per_token={**x.per_token, **weights})
        counts = any(x.weight > 0 and x.loss_mask.any() for x in sequences)
        batches = (data.packed(sequences, self.config.sequences_per_update(data.size)),) if counts else ()
        samples = (row(place, episode) for place, group in enumerate(groups) for episode in group)
        return Update({**sampling_report(groups), **numbers}, batches, samples)
