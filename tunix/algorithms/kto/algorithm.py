"""Kahneman-Tversky Optimisation: completions that are labelled desirable or not become likelier or less likely.

What a completion is worth is measured from z0, how far the policy is from the reference on the whole. It is estimated
before each update, from completions that are put behind prompts of other rows, so that no micro-batch sees another one.

Axes: S sequences, T time.
"""

from collections.abc import Sequence as List
from dataclasses import replace
from typing import Literal

import numpy as np

from tunix.algorithms.base import Algorithm, Update
from tunix.algorithms.kto.config import KTOConfig
from tunix.algorithms.kto.loss import BASELINE, kto_loss
from tunix.data.packing import LABEL
from tunix.data.pipeline import Packed
from tunix.protocols import Client
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Sequence

SIDES = {"chosen": 1.0, "rejected": 0.0}
"""Side of a metric's name -> the label it is of."""


class KTO(Algorithm):
    """KTO, and the unpaired form of APO-zero."""

    Config = KTOConfig
    config: KTOConfig

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `kto_loss`."""
        return kto_loss(inputs, self.config)

    @property
    def train_on(self) -> Literal["labels"]:
        """A completion and its label."""
        return "labels"

    @property
    def needs_reference(self) -> bool:
        """Always."""
        return True

    @property
    def reference_path(self) -> str | None:
        """As the recipe says."""
        return self.config.reference_path

    @property
    def objective(self) -> Loss:
        """The loss, with the reference's log-probs."""
        return Loss(self.loss, reference=True)

    def update(self, client: Client, data: Packed) -> Update:
        """One update, measured from the batch's own z0."""
        batch = self.measured(client, data)
        metrics = dict(client.step(batch, self.objective))
        if self.config.loss == "kto":
            metrics["kl/z0"] = float(np.asarray(batch.per_sequence[BASELINE])[0])
        return Update(without_absent(metrics, batch), (batch,))

    def evaluate(self, client: Client, held_out: List[Packed]) -> dict[str, float]:
        """The loss over all the batches, each measured from its own z0."""
        batches = [self.measured(client, packed) for packed in held_out]
        return without_absent(client.evaluate(batches, self.held_out_objective), *batches)

    def measured(self, client: Client, data: Packed) -> Batch:
        """The batch with its z0, where the form has one."""
        if self.config.loss == "apo_zero":
            return data.batch
        size, length = len(data.batch.weights), data.batch.tokens.shape[1]
        found = np.full(size, self.baseline(client, data.sequences, size, length), np.float32)
        return replace(data.batch, per_sequence={**data.batch.per_sequence, BASELINE: found})

    def baseline(self, client: Client, sequences: List[Sequence], size: int, length: int) -> float:
        """z0: `max(0, mean_i log p(y_i | x_j) / p_ref(y_i | x_j))`, where x_j is the prompt of the row behind i.

        A row alone has no other prompt; its z0 is 0.

        Args:
            sequences: of the batch.
            size: S; so many are scored, some twice where the last batch has fewer, so that nothing is compiled anew.
            length: tokens that fit.
        """
        if len(sequences) < 2:
            return 0.0
        mixed = mismatched(sequences, length)
        asked = [mixed[i % len(mixed)] for i in range(size)]
        policy, reference = client.logprobs(asked, "policy"), client.logprobs(asked, "reference")
        drift = [(p - q)[x.loss_mask].sum() for p, q, x in zip(policy, reference, mixed, strict=False)]
        return max(0.0, float(np.mean(drift)))


def mismatched(sequences: List[Sequence], length: int) -> list[Sequence]:
    """Each completion behind the prompt of the next row, the last one's behind the first; cut off at `length`."""

    def one(own: Sequence, other: Sequence) -> Sequence:
        start, end = int(np.argmax(own.loss_mask)), int(np.argmax(other.loss_mask))
        tokens = np.concatenate([other.tokens[:end], own.tokens[start:]])
        mask = np.concatenate([np.zeros(end, bool), own.loss_mask[start:]])
        return Sequence(tokens[:length].astype(np.int32), mask[:length])

    return [one(own, other) for own, other in zip(sequences, [*sequences[1:], sequences[0]], strict=True)]


def without_absent(metrics: dict, *batches: Batch) -> dict:
    """The metrics without those of a label that no sequence has: there is nothing that they could be the mean of."""
    present = {
        float(label)
        for batch in batches
        for label, weight in zip(np.asarray(batch.per_sequence[LABEL]), np.asarray(batch.weights), strict=True)
        if weight > 0
    }
    absent = {side for side, label in SIDES.items() if label not in present}
    gone = {f"/{side}" for side in absent} | ({"rewards/margin"} if absent else set())
    return {name: value for name, value in metrics.items() if not any(name.endswith(end) for end in gone)}
