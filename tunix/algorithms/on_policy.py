"""Training on completions that the policy has sampled: what GRPO, PPO, online DPO and distillation share.

One step is `learn(rollout(...))`. `rollout` publishes the weights, samples completions of the prompts and scores them;
`learn` computes what the loss reads of them and makes the updates. Only the `Experience` is passed from one to the
other. `gate` stops a run whose sampler and trainer disagree.

Axes: P prompts, G group, T time.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tunix.algorithms.advantages import has_signal, kl_rewards, overlong_penalty
from tunix.algorithms.base import Algorithm, Update
from tunix.algorithms.episodes import (
    Credited,
    Groups,
    as_sequence,
    exceeds_mismatch,
    flat,
    grouped,
    lengths_of,
    measured,
    merged,
    notes,
    old_policy_logprobs,
    report,
    require_numbers,
    require_scores,
    rows,
    total_rewards,
    with_tokens,
)
from tunix.algorithms.loss import REFERENCE, compared_with_sampler, kl_clamp, with_mismatch
from tunix.algorithms.ops import most_uncertain
from tunix.config import RowKind
from tunix.errors import Doubtful
from tunix.protocols import Client, SamplingClient
from tunix.rollout.types import Measure, Rollouts, sequence_of
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Metrics, Sequence


@dataclass(frozen=True)
class Experience:
    """Scored completions to learn from in one step; they may wait in a queue, since new weights do not change them."""

    groups: Groups
    """`[P][G]` scored completions, with the version of the weights that each token was sampled from."""
    data: Rollouts
    """The step of these completions: its prompts, and how sequences are packed."""


@dataclass(frozen=True)
class Prepared:
    """The batches of an experience, ready for the updates."""

    batches: List[Batch]
    """One for each update, in order; none where there is nothing to learn from."""
    numbers: Mapping[str, float]
    """Metrics of the completions by name, e.g. `{"reward/mean": 0.5}`."""
    samples: tuple[Mapping[str, Any], ...] = ()
    """Rows for `samples.jsonl`."""
    notes: tuple[str, ...] = ()
    """Messages for the user, e.g. about rewards that failed."""


class OnPolicy(Algorithm):
    """An algorithm that trains on completions of its policy where rows are prompts."""

    @property
    def needs_fresh(self) -> str | None:
        """Why completions of older weights cannot be learned from, and the remedy; None where they can."""
        return None

    def update(self, client: Client, data: Any) -> Update:
        """Trains one step: samples completions, then learns from them. Given sequences are trained on as they are."""
        if self.train_on != RowKind.PROMPT:
            return super().update(client, data)
        return self.learn(client, self.rollout(client, data))

    def rollout(self, client: Client, data: Rollouts) -> Experience:
        """Samples and scores completions of the current policy; or hands over what was sampled ahead."""
        data.version = client.publish()
        if data.sampled is not None:
            return Experience([[replace(x, version=data.version) for x in group] for group in data.sampled], data)
        return Experience(self.gather(client, data), data)

    def gather(self, client: SamplingClient, data: Rollouts) -> Groups:
        """Samples one group of episodes for each prompt; a full client measures them meanwhile."""
        measure = self.measuring(client) if isinstance(client, Client) else None
        return data.collect(client, data.prompts, self.config.samples_per_prompt, measure)

    @property
    def measures(self) -> tuple[str, ...]:
        """What the loss reads of single completions, whatever their rewards, such as `old_logprobs`."""
        return ()

    def measuring(self, client: Client) -> Measure | None:
        """`measure`, to be called while others are sampled; None where nothing is measured until rewards are
        known."""
        return partial(self.measure, client) if self.measures else None

    def measure(self, client: Client, sequences: List[Sequence], size: int) -> dict[str, List[np.ndarray]]:
        """Begins to compute what `measures` names: an array for each sequence.

        Args:
            client: computes log-probs, entropies and values with the weights that were sampled from.
            sequences: prompts with their completions.
            size: number of sequences that programs are shaped for.
        """
        assert not self.measures, f"{type(self).__name__} names {self.measures}, but has no `measure`"
        return {}

    def all_measured(self, client: Client, experience: Experience) -> Groups:
        """The episodes, with what was not measured while others were sampled."""
        groups, size = experience.groups, experience.data.size * self.config.samples_per_prompt
        left = [x for x in flat(groups) if not x.measured] if self.measures else []
        if not left:
            return groups
        with experience.data.clock.part("logprobs"):
            computed = self.measure(client, [sequence_of(x.prompt, x.completion) for x in left], size)
            rest = iter([{name: values[i] for name, values in computed.items()} for i in range(len(left))])
        return [[x if x.measured else replace(x, measured=next(rest)) for x in group] for group in groups]

    def learn(self, client: Client, experience: Experience) -> Update:
        """Makes the updates on an experience.

        Raises:
            UserError: nothing can be learned from it, e.g. an advantage is not a number.
            Doubtful: sampler and trainer are not the same model; see `gate`.
        """
        data, prepared = experience.data, self.prepare(client, experience)
        with data.clock.part("update"):
            metrics = [self.step(client, batch) for batch in prepared.batches]
            if metrics:
                gate(metrics[0], prepared.batches[0], data, self.starts_at_reference)
            numbers = {**prepared.numbers, **merged(metrics)}
        numbers |= {**data.clock.metrics, **data.ahead}
        return Update(numbers, tuple(prepared.batches), prepared.samples, prepared.notes, tuple(data.clock.spans))

    def gated_loss(self, inputs: LossInputs) -> LossOutputs:
        """The loss with metrics of the mismatch of trainer and sampler, which `gate` reads."""
        sampler = inputs.batch.per_token["old_logprobs"]
        return compared_with_sampler(self.loss(inputs), inputs.batch, inputs.logprobs, sampler)

    @abstractmethod
    def prepare(self, client: Client, experience: Experience) -> Prepared:
        """The batches of an experience, with what the loss reads, and the metrics of its completions."""

    @property
    def starts_at_reference(self) -> bool:
        """Whether the policy equals its reference before the first update, which `gate` then checks."""
        return False


class PolicyGradient(OnPolicy):
    """Policy gradients from the rewards of the policy's completions; `config` is a `PolicyConfig`."""

    @property
    def group(self) -> int:
        """The group size: all completions are trained on, with weight 0 where one failed."""
        return self.config.group_size

    @property
    def needs_fresh(self) -> str | None:
        """Where the ratio starts at the trainer's own log-probs, only a correction knows of the sampler's."""
        if self.config.old_logprobs == "recompute" and self.config.correction == "none":
            return (
                "algorithm.old_logprobs: recompute starts the ratio at the present weights, so that nothing corrects "
                "for older ones: set algorithm.correction to truncate or mask, or leave old_logprobs out"
            )
        return None

    @property
    def starts_at_reference(self) -> bool:
        """Whether there is a reference."""
        return self.needs_reference

    @property
    def needs_reference(self) -> bool:
        """Whether the KL's coefficient is not 0."""
        return bool(self.config.kl)

    @property
    def reference_before_update(self) -> bool:
        """Whether the reference's log-probs are computed before the update: where rewards include the KL, and once for
        several epochs over the same rollouts. Else they are computed in the update itself, on the same rows."""
        return self.needs_reference and (self.config.kl_in == "reward" or self.config.epochs > 1)

    @property
    def objective(self) -> Loss:
        """The loss, at the sampling temperature."""
        return Loss(
            self.gated_loss,
            reference=self.needs_reference and not self.reference_before_update,
            entropy=self.reads_entropy,
            temperature=self.sampling.temperature,
        )

    def gated_loss(self, inputs: LossInputs) -> LossOutputs:
        """The loss with metrics of the mismatch of trainer and sampler, which a custom loss need not compute."""
        outputs = self.loss(inputs)
        return outputs if "mismatch/max" in outputs.peaks else with_mismatch(outputs, inputs, self.config)

    @property
    def reads_entropy(self) -> bool:
        """Whether the loss receives `inputs.entropy`, at a small cost in the head; true for a custom loss."""
        return True

    @abstractmethod
    def credit(self, client: Client, groups: Groups, sequences: Credited, data: Rollouts) -> Credited:
        """The sequences with the arrays that the loss reads: advantages, and whatever else it needs."""

    def gather(self, client: SamplingClient, data: Rollouts) -> Groups:
        """Samples one group of episodes for each prompt.

        Raises:
            UserError: none of them could be scored.
        """
        groups = super().gather(client, data)
        require_scores(groups)
        return groups

    def prepare(self, client: Client, experience: Experience) -> Prepared:
        """One batch for each update, from the parts of the completions with their advantages."""
        groups, data = self.all_measured(client, experience), experience.data
        signal = self.signal(self.scores(groups, data.weights))
        sequences = self.credit(client, groups, self.sequences(groups), data)
        require_numbers(groups, sequences)
        numbers = report(groups, data.weights, signal)
        if (limit := self.config.mismatch_limit) is not None:
            numbers["mismatch/dropped"] = float(np.mean([exceeds_mismatch(x, limit) for x in flat(sequences)]))
        size = self.config.sequences_per_update(data.size)  # of the largest part: the only shape that is compiled
        batches = [data.packed(part, size) for part in self._parts(sequences)]
        return Prepared(batches, numbers, rows(groups, sequences, data.shown), notes(groups, data.weights, signal))

    @property
    def measures(self) -> tuple[str, ...]:
        """Log-probs of the policy and of the reference, and entropies, as far as the config needs them."""
        config = self.config
        # For a single update the loss uses its current log-probs, which are the same.
        several = config.updates * config.epochs > 1 or config.mismatch_limit is not None
        wanted = {
            "old_logprobs": config.old_logprobs == "recompute" and several,
            "entropies": config.high_entropy is not None,
            REFERENCE: self.reference_before_update,
        }
        return tuple(name for name, needed in wanted.items() if needed)

    def measure(self, client: Client, sequences: List[Sequence], size: int) -> dict[str, List[np.ndarray]]:
        """Log-probs and entropies, at the sampling temperature."""
        temperature = self.sampling.temperature
        arrays: dict[str, List[np.ndarray]] = {}
        if "old_logprobs" in self.measures:
            arrays["old_logprobs"] = client.logprobs(sequences, of="policy", temperature=temperature, size=size)
        if "entropies" in self.measures:
            arrays["entropies"] = client.entropies(sequences, temperature=temperature, size=size)
        if REFERENCE in self.measures:
            arrays[REFERENCE] = client.logprobs(sequences, of="reference", temperature=temperature, size=size)
        return arrays

    def sequences(self, groups: Groups) -> Credited:
        """All episodes as sequences: tokens, masks and log-probs; a failed one has weight 0."""
        config = self.config
        by_sampler = "sampler_logprobs" if config.old_logprobs == "recompute" else "old_logprobs"
        sequences = [
            [as_sequence(episode, config.mask_truncated and episode.truncated, by_sampler) for episode in group]
            for group in groups
        ]
        for name in ("old_logprobs", REFERENCE):
            if name in self.measures:
                sequences = with_tokens(sequences, name, measured(groups, name))
        if (limit := config.mismatch_limit) is not None:
            sequences = [
                [replace(x, weight=0.0) if exceeds_mismatch(x, limit) else x for x in group] for group in sequences
            ]
        if config.high_entropy is not None:
            counted, entropies = [x.loss_mask & (x.weight > 0) for x in flat(sequences)], measured(groups, "entropies")
            masks = [x.astype(np.float32) for x in most_uncertain(flat(entropies), counted, config.high_entropy)]
            sequences = with_tokens(sequences, "high_entropy", grouped(masks, sequences))
        return sequences

    def scores(self, groups: Groups, weights: Mapping[str, float]) -> np.ndarray:
        """`[P G]` score of each completion: the weighted sum of its rewards with the overlong penalty."""
        return total_rewards(groups, weights) + self.penalties(groups)

    def signal(self, scores_PG: np.ndarray) -> np.ndarray:
        """`[P]` bool: prompts whose scores differ. Here the whole batch is compared: all True or all False."""
        return np.repeat(has_signal(scores_PG.reshape(1, -1)), len(scores_PG))

    def penalties(self, groups: Groups) -> np.ndarray:
        """`[P G]` DAPO's soft overlong penalty, 0 or below; 0 where the recipe sets none."""
        limit = self.sampling.max_tokens
        buffer = self.config.overlong_tokens(limit)
        if not buffer:
            return np.zeros((len(groups), len(groups[0])))
        return self.config.overlong_coefficient * overlong_penalty(lengths_of(groups), limit, buffer)

    def kl_rewards(self, sequence: Sequence, coefficient: float | None = None) -> np.ndarray:
        """`[T]` the KL penalty of each sampled token, where it is part of the reward, else 0.

        Args:
            sequence: has the log-probs of the policy and of the reference.
            coefficient: factor of the penalty; None for the recipe's `kl`.
        """
        config = self.config
        if not config.kl or config.kl_in != "reward":
            return np.zeros(len(sequence.tokens))
        policy, reference = old_policy_logprobs(sequence), sequence.per_token[REFERENCE]
        factor = config.kl if coefficient is None else coefficient
        return kl_rewards(policy, reference, sequence.loss_mask, factor, config.kl_estimator or "k1", kl_clamp(config))

    def _parts(self, sequences: Credited) -> Iterator[list[Sequence]]:
        """The sequences of each update: `updates` parts of the prompts, `epochs` times; parts of weight 0 are left
        out."""
        updates = min(self.config.updates, len(sequences))
        for _ in range(self.config.epochs):
            for places in np.array_split(np.arange(len(sequences)), updates):
                part = [sequence for place in places for sequence in sequences[place]]
                if any(sequence.weight > 0 and sequence.loss_mask.any() for sequence in part):
                    yield part


def gate(metrics: Metrics, batch: Batch, data: Rollouts, reference: bool) -> None:
    """Stops a run whose sampler and trainer are not the same model.

    Raises:
        Doubtful: the log-probs of a sampled token differ by more than the tolerance; or, in a run's first step, the
            policy is not the reference.
    """
    worst = float(metrics.get("mismatch/max", 0.0))  # absent while only a critic is trained
    if not worst <= data.tolerance:
        place = int(metrics["mismatch/max/at"])
        sequence, position, token = (
            int(np.asarray(x).reshape(-1)[place]) for x in (batch.sequence_ids, batch.positions, batch.tokens)
        )
        raise Doubtful(
            f"rollout.mismatch_tolerance: at token {position} (id {token}) of sample {sequence} the trainer's and the "
            f"sampler's log-probs differ by {worst:.4g}, more than {data.tolerance:g}: the policy that is trained is "
            "not the one that sampled. In bfloat16 some difference is rounding; a larger one is a defect, or sampling "
            "that the loss cannot mirror. Raise the tolerance only if the difference is understood."
        )
    drift = float(metrics.get("kl/reference", 0.0))
    if reference and data.first and not abs(drift) <= data.tolerance:
        raise Doubtful(
            f"kl/reference is {drift:.4g} before the first update, where the policy is the reference: they do not hold "
            "the same weights"
        )
