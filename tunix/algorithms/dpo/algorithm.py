"""Direct Preference Optimisation and its relatives: the better of two completions becomes likelier.

Pairs are given, or sampled (`online`): the policy completes each prompt several times, and the completions with the
highest and the lowest reward are the prompt's pair.

Baselines of rewards are known before an update: BCO's running mean, and for AOT the values of equal rank. Both are
per-sequence values of the whole batch, so that no micro-batch and no row depends on another one.

Axes: P prompts, G group, B rows, T time, S sequences, Pa pairs (2 i is chosen, 2 i + 1 rejected).
"""

from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tunix.algorithms.dpo.config import DPOConfig
from tunix.algorithms.dpo.loss import BASELINE, dpo_loss
from tunix.algorithms.episodes import Groups, as_sequence, notes, report, require_scores, row, total_rewards
from tunix.algorithms.loss import REFERENCE
from tunix.algorithms.on_policy import Experience, OnPolicy, Prepared
from tunix.protocols import Client
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Metrics, Sampling, Sequence

Ranks = list[tuple[int, int] | None]
"""For each group (index of the best, index of the worst completion), or None where all scores are equal."""


class DPO(OnPolicy):
    """DPO and its relatives; `DPOConfig.loss` names the forms."""

    Config = DPOConfig
    config: DPOConfig

    sequences_per_example = 2

    def __init__(self, config: DPOConfig, sampling: Sampling | None = None):
        """Creates the algorithm with its running mean of rewards; for the arguments see `Algorithm`."""
        super().__init__(config, sampling)
        self._mean = Running()

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """See `dpo_loss`."""
        return dpo_loss(inputs, self.config)

    @property
    def needs_reference(self) -> bool:
        """Whether the form has a reference whose log-probs are not precomputed."""
        return self.config.has_reference and not self.precomputes

    @property
    def reference_path(self) -> str | None:
        """The recipe's `reference_path`."""
        return self.config.reference_path

    @property
    def precomputes(self) -> bool:
        """Whether the reference's log-probs of all rows are computed before training."""
        return self.config.reference == "precompute"

    def prepare_sequence(self, sequence: Sequence) -> Sequence:
        """The sequence with the reference's log-probs, where they were precomputed."""
        if self.precomputed_logprobs is None:
            return sequence
        return replace(sequence, per_token={**sequence.per_token, REFERENCE: self.precomputed_logprobs(sequence)})

    @property
    def objective(self) -> Loss:
        """The loss; for completions of the policy at the sampling temperature."""
        # Where values are sorted, `prepare_batch` has computed the reference's log-probs.
        reference = self.needs_reference and not self.config.sorts
        if self.config.online:
            return Loss(self.gated_loss, reference=reference, temperature=self._temperature)
        return Loss(self.loss, reference=reference)

    @property
    def _temperature(self) -> float:
        """Temperature of the log-probs: the sampler's where the completions are the policy's."""
        return self.sampling.temperature if self.config.online else 1.0

    def prepare_batch(self, client: Client, batch: Batch, sequences: List[Sequence]) -> Batch:
        """The batch with a baseline for each reward, where the form has baselines.

        Args:
            client: computes log-probs.
            batch: the packed batch.
            sequences: the sequences that were packed into it.
        """
        if self.config.shifts:
            baseline = self._mean.baseline(len(batch.weights))
            return replace(batch, per_sequence={**batch.per_sequence, BASELINE: baseline})
        return self._sorted(client, batch, sequences) if self.config.sorts else batch

    def _sorted(self, client: Client, batch: Batch, sequences: List[Sequence]) -> Batch:
        """The batch with the values of equal rank as baselines, by the current policy, and the reference's log-probs.

        AOT, Melnyk et al. 2024, https://arxiv.org/abs/2406.05882, paired or not. Pairs of weight 0 are not sorted, and
        have 0.
        """
        size = len(batch.weights)
        # Where the last batch has fewer sequences, some are scored twice, so that nothing is compiled again.
        scored = [sequences[i % len(sequences)] for i in range(size)]
        policy = client.logprobs(scored, "policy", self._temperature)
        if self.precomputes:
            reference = [sequence.per_token[REFERENCE] for sequence in scored]
        else:
            reference = client.logprobs(scored, "reference", self._temperature)
        p, q = (self._scores(logprobs, scored) for logprobs in (policy, reference))
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
        return replace(
            batch,
            per_token={**batch.per_token, REFERENCE: in_rows(reference, batch)},
            per_sequence={**batch.per_sequence, BASELINE: baseline},
        )

    def _scores(self, logprobs: List[np.ndarray], sequences: List[Sequence]) -> np.ndarray:
        """`[S]` beta times the log-prob of each completion, or times its mean over tokens."""
        assert self.config.beta is not None
        masks = [sequence.loss_mask for sequence in sequences]
        sums = np.array([values[mask].sum() for values, mask in zip(logprobs, masks, strict=True)])
        return self.config.beta * (sums / [mask.sum() for mask in masks] if self.config.length_normalized else sums)

    def step(self, client: Client, batch: Batch) -> Metrics:
        """Makes one update, and adds its rewards to the running mean where the form has one."""
        metrics = dict(super().step(client, batch))
        if self.config.shifts:
            metrics["rewards/shift"] = self._mean.mean
            self._mean.add(metrics, float(batch.counts["pairs"]))
        return metrics

    def get_state(self) -> dict[str, Any]:
        """The running mean of the rewards, where the form has one."""
        return {"mean": float(self._mean.mean), "pairs": self._mean.pairs} if self.config.shifts else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the running mean."""
        if self.config.shifts:
            self._mean.mean, self._mean.pairs = state["mean"], state["pairs"]

    @property
    def starts_at_reference(self) -> bool:
        """Whether the reference is the weights that the run starts from."""
        return self.needs_reference and self.reference_path is None

    def prepare(self, client: Client, experience: Experience) -> Prepared:
        """One batch of the best and the worst completion of each prompt; none where no prompt has a pair.

        Raises:
            UserError: none of the completions could be scored.
        """
        groups, data = experience.groups, experience.data
        require_scores(groups)
        ranks = ranked(total_rewards(groups, data.weights))
        sides = [as_sequence(group[i]) for group, rank in zip(groups, ranks, strict=True) for i in rank or ()]
        signal = np.array([rank is not None for rank in ranks])
        batches = [self.prepare_batch(client, data.packed(sides, 2 * data.size), sides)] if sides else []
        numbers = report(groups, data.weights, signal)
        return Prepared(batches, numbers, rows(groups, ranks, data.shown), notes(groups, data.weights, signal))


def ranked(scores_PG: np.ndarray) -> Ranks:
    """The best and the worst completion of each group; of equal ones the first.

    Args:
        scores_PG: NaN where a reward failed; such completions are left out.
    """

    return [
        None
        if np.isnan(scores).all() or np.nanmax(scores) == np.nanmin(scores)
        else (int(np.nanargmax(scores)), int(np.nanargmin(scores)))
        for scores in scores_PG
    ]


def rows(groups: Groups, ranks: Ranks, number: int) -> tuple[dict[str, Any], ...]:
    """Rows of the first groups for `samples.jsonl`: completions with rewards and their side of the pair."""
    return tuple(
        {**row(place, episode), "side": ("chosen", "rejected")[rank.index(i)] if rank and i in rank else None}
        for place, (group, rank) in enumerate(zip(groups[:number], ranks, strict=False))
        for i, episode in enumerate(group)
    )


Pairs = Float[np.ndarray, "Pa"]


class Running:
    """Running mean reward of all pairs trained on: half the sum of the two sides' means, weighted by pairs.

    It stays on the device, so that no step waits for the numbers of the one before.
    """

    def __init__(self) -> None:
        """Starts at 0, which all rewards are where the policy is the reference."""
        self.mean: jax.Array | float = 0.0
        self.pairs = 0.0

    def add(self, metrics: Metrics, pairs: float) -> None:
        """Adds an update's `rewards/chosen` and `rewards/rejected` to the mean.

        Args:
            metrics: the update's metrics.
            pairs: sum of the weights of the update's pairs.
        """
        self.pairs += pairs
        reward = 0.5 * (metrics["rewards/chosen"] + metrics["rewards/rejected"])
        self.mean = self.mean + (reward - self.mean) * (pairs / self.pairs)

    def baseline(self, size: int) -> jax.Array:
        """`[S]` the mean, for every sequence."""
        return jnp.broadcast_to(jnp.asarray(self.mean, jnp.float32), (size,))


def in_rows(values: List[np.ndarray], batch: Batch) -> Float[np.ndarray, "B T"]:
    """Per-token values of sequences at the places of their tokens in the batch's rows; 0 in the padding."""
    starts = np.cumsum([0, *map(len, values)])
    places = starts[np.asarray(batch.sequence_ids)] + np.asarray(batch.positions)
    at_places = np.concatenate(values)[places]
    return np.where(np.asarray(batch.segment_ids) > 0, at_places, 0).astype(np.float32)


def of_same_rank(values: Pairs, others: Pairs) -> Pairs:
    """For each value the other one that has its rank; equal ones rank in the order of the batch."""
    out = np.empty_like(others)
    out[np.argsort(values, kind="stable")] = np.sort(others)
    return out
