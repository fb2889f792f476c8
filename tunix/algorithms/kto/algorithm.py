"""Kahneman-Tversky Optimisation: completions that are labelled desirable or not become likelier or less likely.

A completion's reward is compared with z0, an estimate of KL(policy || reference). It is computed before each update,
from completions after prompts of other rows, so that no micro-batch depends on another one.

Axes: S sequences, T time.
"""

from collections.abc import Sequence as List
from dataclasses import replace

import numpy as np

from tunix.algorithms.base import Algorithm, Needs
from tunix.algorithms.kto.config import KTOConfig
from tunix.algorithms.kto.loss import BASELINE, kto_loss
from tunix.data.packing import LABEL
from tunix.data.types import Packed
from tunix.protocols import Client
from tunix.types import Batch, LossInputs, LossOutputs, Metrics, Sequence

SIDES = {"chosen": 1.0, "rejected": 0.0}
"""Last part of a metric's name -> the label of its completions."""


class KTO(Algorithm):
    """KTO, and the unpaired form of APO-zero."""

    Config = KTOConfig
    config: KTOConfig

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """`kto_loss` by the config; `apo_zero` has no baseline."""
        config, batch = self.config, inputs.batch
        assert inputs.reference_logprobs is not None
        return kto_loss(
            inputs.logprobs,
            inputs.reference_logprobs,
            batch.per_sequence[LABEL],
            batch,
            baseline=0.0 if config.loss == "apo_zero" else batch.per_sequence[BASELINE],
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )

    @property
    def needs(self) -> Needs:
        """A reference: rewards are log-ratios to it."""
        return Needs(reference="update")

    def step(self, client: Client, batch: Batch) -> Metrics:
        """Makes one update, with z0 of this batch as a metric."""
        metrics = dict(super().step(client, batch))
        if self.config.loss == "kto":
            metrics["kl/z0"] = float(np.asarray(batch.per_sequence[BASELINE])[0])
        return without_absent(metrics, batch)

    def evaluate(self, client: Client, held_out: List[Packed]) -> dict[str, float]:
        """Evaluates the loss on all batches, each with its own z0."""
        return without_absent(super().evaluate(client, held_out), *(packed.batch for packed in held_out))

    def prepare_batch(self, client: Client, batch: Batch, sequences: List[Sequence]) -> Batch:
        """The batch with its z0, where the loss has one.

        z0 is `max(0, mean_i log p(y_i | x_j) / p_ref(y_i | x_j))`, where x_j is the prompt of the row after i, and the
        first row's after the last; both together are cut off at a row's length. For a single row, which has no other
        prompt, it is 0.
        """
        if self.config.loss == "apo_zero":
            return batch
        size, baseline = len(batch.weights), 0.0  # programs are shaped for S; the last batch may have fewer sequences
        if len(sequences) > 1:
            mixed, length = list[Sequence](), batch.tokens.shape[1]
            for sequence, other in zip(sequences, [*sequences[1:], sequences[0]], strict=True):
                start, end = int(np.argmax(sequence.loss_mask)), int(np.argmax(other.loss_mask))
                tokens = np.concatenate([other.tokens[:end], sequence.tokens[start:]])
                mask = np.concatenate([np.zeros(end, bool), sequence.loss_mask[start:]])
                mixed.append(Sequence(tokens[:length].astype(np.int32), mask[:length]))
            policy, reference = (client.logprobs(mixed, of, size=size) for of in ("policy", "reference"))
            drift = [(p - q)[x.loss_mask].sum() for p, q, x in zip(policy, reference, mixed, strict=True)]
            baseline = max(0.0, float(np.mean(drift)))
        return replace(batch, per_sequence={**batch.per_sequence, BASELINE: np.full(size, baseline, np.float32)})


def without_absent(metrics: dict, *batches: Batch) -> dict:
    """The metrics without means over a label that no sequence has."""
    present = {
        float(label)
        for batch in batches
        for label, weight in zip(np.asarray(batch.per_sequence[LABEL]), np.asarray(batch.weights), strict=True)
        if weight > 0
    }
    absent = {side for side, label in SIDES.items() if label not in present}
    gone = {f"/{side}" for side in absent} | ({"rewards/margin"} if absent else set())
    return {name: value for name, value in metrics.items() if not any(name.endswith(end) for end in gone)}
