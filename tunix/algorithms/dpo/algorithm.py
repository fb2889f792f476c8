"""Direct Preference Optimisation and its relatives: the better of two completions becomes likelier.

Pairs are given, or sampled (`online`): the policy completes each prompt several times, and the completions with the
highest and the lowest reward are the prompt's pair.

Baselines of AOT's rewards, the values of equal rank, are computed before an update: per-sequence values of the whole
batch, so that no micro-batch and no row depends on another one.

Axes: P prompts, G group, B rows, T time, S sequences, Pa pairs (2 i is chosen, 2 i + 1 rejected).
"""

from collections.abc import Sequence as List
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from tunix.algorithms.base import Needs, Update
from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.dpo.loss import BASELINE, POLICY_WEIGHT, dpo_loss
from tunix.algorithms.episodes import as_sequence, by_seat, report, row, total_rewards
from tunix.algorithms.on_policy import Experience, OnPolicy
from tunix.algorithms.ops import REFERENCE, reference_logprobs
from tunix.errors import UserError
from tunix.protocols import Client
from tunix.types import Batch, LossInputs, LossOutputs, Sequence

Pairs = Float[np.ndarray, "Pa"]


class DPO(OnPolicy):
    """DPO and its relatives; `DPOConfig.loss` names the forms."""

    Config = DPOConfig
    config: DPOConfig

    sequences_per_example = 2

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """`dpo_loss` by the config."""
        config = self.config
        assert config.beta is not None
        return dpo_loss(
            inputs.logprobs,
            reference_logprobs(inputs) if config.has_reference else None,
            inputs.batch,
            loss=config.forms,
            beta=config.beta,
            label_smoothing=config.label_smoothing or 0.0,
            gamma=config.gamma or 0.0,
            length_normalized=config.length_normalized,
            divergence=config.divergence,
            alpha=config.alpha or 0.5,
            ld_alpha=config.ld_alpha,
            baselines=inputs.batch.per_sequence[BASELINE] if config.sorts else None,
            policy_weights=inputs.batch.per_sequence[POLICY_WEIGHT] if config.policy_weights else None,
            sft_weight=config.sft_weight or 0.0,
            sft_reduction=config.sft_reduction,
        )

    @property
    def needs(self) -> Needs:
        """A reference where the form has one, as the recipe says; where values are sorted, before the update."""
        config = self.config
        if not config.has_reference:
            return Needs()
        return Needs(reference="run" if config.reference == "precompute" else "step" if config.sorts else "update")

    def prepare_sequence(self, sequence: Sequence) -> Sequence:
        """The sequence with the reference's log-probs, where they were precomputed."""
        if self.precomputed_logprobs is None:
            return sequence
        return replace(sequence, per_token={**sequence.per_token, REFERENCE: self.precomputed_logprobs(sequence)})

    def prepare_batch(self, client: Client, batch: Batch, sequences: List[Sequence]) -> Batch:
        """The batch with a baseline for each reward, where the form has baselines.

        bco: the mean of earlier updates. aot, aot_unpaired: the values of equal rank by the current policy, with the
        reference's log-probs (Melnyk et al. 2024, https://arxiv.org/abs/2406.05882). Pairs of weight 0 are not sorted,
        and have 0. With `policy_weights`, the weight of each side (`policy_weights_of`).
        """
        if self.config.policy_weights:
            weights = np.ones(len(batch.weights), np.float32)
            weights[: len(sequences)] = self.policy_weights_of(client, sequences, len(weights))
            return replace(batch, per_sequence={**batch.per_sequence, POLICY_WEIGHT: weights})
        if not self.config.sorts:
            return batch
        size = len(batch.weights)
        # Where the last batch has fewer sequences, some are scored twice, so that nothing is compiled again.
        scored = [sequences[i % len(sequences)] for i in range(size)]
        policy = client.logprobs(scored, "policy", self.temperature)
        if self.needs.reference == "run":
            reference = [sequence.per_token[REFERENCE] for sequence in scored]
        else:
            reference = client.logprobs(scored, "reference", self.temperature)
        assert self.config.beta is not None
        masks = [x.loss_mask for x in scored]
        # Of each completion the log-prob, or its mean over tokens, times beta.
        counts = [mask.sum() for mask in masks] if self.config.length_normalized else 1
        p, q = (
            self.config.beta * (np.array([x[mask].sum() for x, mask in zip(logprobs, masks, strict=True)]) / counts)
            for logprobs in (policy, reference)
        )
        counted = np.asarray(batch.weights)[::2] > 0
        baseline = np.zeros(size, np.float32)
        if self.config.loss == "aot":
            # With n(i) the margin of pair i under the reference, and k the rank of the policy's, `n_k - n(i)`: the
            # difference of the pair's rewards becomes `m_k - n_k`, of the k-th smallest margins.
            policy_Pa, reference_Pa = (p[::2] - p[1::2])[counted], (q[::2] - q[1::2])[counted]
            baseline[::2][counted] = of_same_rank(policy_Pa, reference_Pa) - reference_Pa
        else:  # the reward of equal rank on the other side; see `loss.aot_unpaired`
            chosen, rejected = (p - q)[::2][counted], (p - q)[1::2][counted]
            baseline[::2][counted] = of_same_rank(chosen, rejected)
            baseline[1::2][counted] = of_same_rank(rejected, chosen)
        # The reference's log-probs at the places of their tokens in the batch's rows; 0 in the padding.
        starts = np.cumsum([0, *map(len, reference)])
        at_places = np.concatenate(reference)[starts[np.asarray(batch.sequence_ids)] + np.asarray(batch.positions)]
        in_rows = np.where(np.asarray(batch.segment_ids) > 0, at_places, 0).astype(np.float32)
        return replace(
            batch,
            per_token={**batch.per_token, REFERENCE: in_rows},
            per_sequence={**batch.per_sequence, BASELINE: baseline},
        )

    def policy_weights_of(self, client: Client, sequences: List[Sequence], size: int) -> list[float]:
        """`exp(mean_t log(p(y_t) / sum_v p(v)^2))`, how likely each completion is as one of the policy's: WPO, Zhou et
        al. 2024, https://arxiv.org/abs/2406.11827, eq. 2, aligned to sampling.

        Where p has temperature 1, the log-prob at 1/2 is `log(p(y_t)^2 / sum_v p(v)^2)`; less that at 1 it is the
        summand.
        """
        sharp, plain = (client.logprobs(sequences, "policy", t, size) for t in (self.temperature / 2, self.temperature))
        return [
            float(np.exp((x - y)[sequence.loss_mask].mean()))
            for x, y, sequence in zip(sharp, plain, sequences, strict=True)
        ]

    def prepare(self, client: Client, experience: Experience) -> Update:
        """One batch of the best and the worst completion of each prompt; none where no prompt has a pair.

        Raises:
            UserError: several seats share the completions.
        """
        groups, data = experience.groups, experience.data
        if len(by_seat(groups)) > 1:
            raise UserError(
                "algorithm.name: dpo compares whole completions, and in those of rollout.environment two seats play "
                "against each other: take grpo or ppo, which credit each seat"
            )
        ranks = ranked(total_rewards(groups, data.weights))
        sides = [as_sequence(group[i]) for group, rank in zip(groups, ranks, strict=True) for i in rank or ()]
        signal = np.array([rank is not None for rank in ranks])
        batches = [self.prepare_batch(client, data.packed(sides, 2 * data.size), sides)] if sides else []
        samples = (
            {**row(place, episode), "side": ("chosen", "rejected")[rank.index(i)] if rank and i in rank else None}
            for place, (group, rank) in enumerate(zip(groups, ranks, strict=True))
            for i, episode in enumerate(group)
        )
        numbers, notes = report(groups, data.weights, signal)
        return Update(numbers, tuple(batches), samples, notes)


def ranked(scores_PG: np.ndarray) -> list[tuple[int, int] | None]:
    """Indices of the best and the worst completion of each group, of equal ones the first; None where all scores are
    equal.

    Args:
        scores_PG: NaN where a reward failed; such completions are left out.
    """
    return [
        None
        if np.isnan(scores).all() or np.nanmax(scores) == np.nanmin(scores)
        else (int(np.nanargmax(scores)), int(np.nanargmin(scores)))
        for scores in scores_PG
    ]


def of_same_rank(values: Pairs, others: Pairs) -> Pairs:
    """For each value the other one that has its rank; equal ones rank in the order of the batch."""
    out = np.empty_like(others)
    out[np.argsort(values, kind="stable")] = np.sort(others)
    return out
