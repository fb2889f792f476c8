"""Training on completions that the policy has sampled: what GRPO, PPO, online DPO and distillation share.

One step is `learn(rollout(...))`. `rollout` publishes the weights, samples completions of the prompts and scores them;
`learn` computes what the loss reads of them and makes the updates. Only the `Experience` is passed from one to the
other. `gate` stops a run whose sampler and trainer disagree.

Axes: B rows, T time, P prompts, G group.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tunix.algorithms.advantages import has_signal, kl_rewards, overlong_penalty
from tunix.algorithms.base import Algorithm, Needs, Update
from tunix.algorithms.episodes import (
    Groups,
    as_sequence,
    by_seat,
    flat,
    joined,
    lengths_of,
    mismatch,
    observed,
    old_policy_logprobs,
    report,
    require_numbers,
    require_scores,
    row,
    total_rewards,
)
from tunix.algorithms.ops import (
    IMPORTANCE_BOUNDS,
    REFERENCE,
    TEACHER,
    compared_with_sampler,
    importance_weight,
    kl_estimate,
    kl_loss,
    log_ratio,
    old_logprobs,
    reference_logprobs,
    sampler_logprobs,
    sequence_mean,
)
from tunix.config import OBSERVED, RowKind
from tunix.errors import Doubtful
from tunix.protocols import Client, SamplingClient
from tunix.rollout.types import Rollouts, Scored, sequence_of
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Metrics, Sampling, Sequence, Term

LOGPROBS: Mapping[str, Literal["policy", "reference", "teacher"]] = {
    "old_logprobs": "policy",
    REFERENCE: "reference",
    TEACHER: "teacher",
}
"""Per-token values that are log-probs -> the model that gives them."""

ENTROPY_COEFFICIENT, ENTROPY_STEP = "entropy_coefficient", 0.005
"""The per-sequence value in place of `entropy_bonus` where an entropy is held, and by how much it moves after a step:
Skywork-OR1, https://arxiv.org/abs/2505.22312."""


@dataclass(frozen=True)
class Experience:
    """Scored completions to learn from in one step; they may wait in a queue, since new weights do not change them."""

    groups: Groups
    """`[P][G]` scored completions, with the version of the weights that each token was sampled from."""
    data: Rollouts
    """The step of these completions: its prompts, and how sequences are packed."""


class OnPolicy(Algorithm):
    """An algorithm that trains on completions of its policy where rows are prompts."""

    def update(self, client: Client, data: Any) -> Update:
        """Trains one step: samples completions, then learns from them. Given sequences are trained on as they are."""
        if self.config.reads != RowKind.PROMPT:
            return super().update(client, data)
        return self.learn(client, self.rollout(client, data))

    def rollout(self, client: Client, data: Rollouts) -> Experience:
        """Samples and scores completions of the current policy; or hands over what was sampled ahead."""
        data.version = client.publish()
        if data.sampled is not None:
            return Experience([[replace(x, version=data.version) for x in group] for group in data.sampled], data)
        return Experience(self.gather(client, data), data)

    def gather(self, client: SamplingClient, data: Rollouts) -> Groups:
        """Samples one group of episodes for each prompt; a full client measures them meanwhile.

        Raises:
            UserError: rewards are learned from, and none of the episodes could be scored.
        """
        measure = partial(self.measure, client) if self.needs.measured and isinstance(client, Client) else None
        groups = data.collect(client, data.prompts, self.config.samples_per_prompt, measure)
        if self.config.learns_from_rewards:
            require_scores(groups)
        return groups

    def measure(self, client: Client, sequences: List[Sequence], size: int) -> dict[str, List[np.ndarray]]:
        """Begins to compute what `needs.measured` names: an array for each sequence.

        Args:
            client: computes log-probs and values with the weights that were sampled from.
            sequences: prompts with their completions.
            size: number of sequences that programs are shaped for.
        """
        read = dict.fromkeys(LOGPROBS, sequences)
        if self.needs.whole:
            read[REFERENCE] = [replace(x, candidates=None) for x in sequences]
        return {
            name: client.logprobs(read[name], LOGPROBS[name], self.temperature, size)
            for name in self.needs.measured
            if name in LOGPROBS
        }

    def all_measured(self, client: Client, experience: Experience) -> Groups:
        """The episodes, with what was not measured while others were sampled."""
        groups, size = experience.groups, experience.data.size * self.config.samples_per_prompt
        left = [x for x in flat(groups) if not x.measured] if self.needs.measured else []
        if not left:
            return groups
        with experience.data.clock.part("logprobs"):
            computed = self.measure(client, [sequence_of(x.prompt, x.completion) for x in left], size)
            rest = iter([{name: values[i] for name, values in computed.items()} for i in range(len(left))])
        return [[x if x.measured else replace(x, measured=next(rest)) for x in group] for group in groups]

    @abstractmethod
    def prepare(self, client: Client, experience: Experience) -> Update:
        """What an experience gives before the updates: a batch with what the loss reads for each of them, in order, or
        none where there is nothing to learn from; and the metrics, rows and notes of its completions."""

    def learn(self, client: Client, experience: Experience) -> Update:
        """Makes the updates on an experience.

        Raises:
            UserError: nothing can be learned from it, e.g. an advantage is not a number.
            Doubtful: sampler and trainer are not the same model; see `gate`.
        """
        data, prepared = experience.data, self.prepare(client, experience)
        numbers = dict(prepared.metrics)
        with data.clock.part("update"):
            metrics = [self.step(client, batch) for batch in prepared.batches]
            if metrics:
                gate(metrics[0], prepared.batches[0], data, self.needs.keeps_reference)
                # Means over the updates, but `mismatch/*` of the first one, before the policy has moved.
                read = [{name: float(x) for name, x in each.items() if not name.endswith("/at")} for each in metrics]
                numbers |= {name: float(np.mean([each[name] for each in read])) for name in read[0]}
                numbers |= {name: x for name, x in read[0].items() if name.startswith("mismatch/")}
        return replace(prepared, metrics={**numbers, **data.clock.metrics, **data.ahead}, spans=tuple(data.clock.spans))

    @property
    def objective(self) -> Loss:
        """The loss and what it needs from the model; on the policy's completions with what `gate` reads."""
        objective = super().objective
        return replace(objective, function=self.gated_loss) if self.config.reads == RowKind.PROMPT else objective

    def gated_loss(self, inputs: LossInputs) -> LossOutputs:
        """The loss with metrics of the mismatch of trainer and sampler, which a custom loss need not compute."""
        return compared_with_sampler(self.loss(inputs), inputs)


class PolicyGradient(OnPolicy):
    """Policy gradients from the rewards of the policy's completions; `config` is a `PolicyConfig`."""

    def __init__(self, config: Any, sampling: Sampling | None = None):
        super().__init__(config, sampling)
        self.kl_coefficient: float = config.kl
        """Factor of the KL penalty in the rewards; it may change from step to step."""
        self.entropy_coefficient: float = config.entropy_bonus
        """Coefficient of the entropy where less than `entropy_target` is left; it changes from step to step."""

    @property
    def group(self) -> int:
        """The group size: all completions are trained on, with weight 0 where one failed."""
        return self.config.group_size

    @property
    def needs(self) -> Needs:
        """A reference where there is a KL, the entropy where there is a bonus or a custom loss, which may read it."""
        config, fresh = self.config, None
        custom = not str(type(self).loss.__module__).startswith("tunix.")  # code that is executed as a text has none
        # For a single update the loss uses its current log-probs, which are the same.
        several = config.updates_per_step > 1 or config.mismatch_limit is not None
        measured = {
            "old_logprobs": config.old_logprobs == "recompute" and several,
            REFERENCE: config.reference_before_update,
        }
        if config.old_logprobs == "recompute" and config.correction == "none":
            # Where the ratio starts at the trainer's own log-probs, only a correction knows of the sampler's.
            fresh = (
                "algorithm.old_logprobs: recompute starts the ratio at the present weights, so that nothing corrects "
                "for older ones: set algorithm.correction to truncate or mask, or leave old_logprobs out"
            )
        return Needs(
            entropy=bool(config.entropy_bonus or config.entropy_target) or custom,
            whole=config.penalties_over == "whole",
            reference=("step" if config.reference_before_update else "update") if config.kl else None,
            measured=tuple(name for name, needed in measured.items() if needed),
            fresh=fresh,
        )

    def penalised(self, outputs: LossOutputs, inputs: LossInputs) -> LossOutputs:
        """The loss of a surrogate, corrected for a sampler that is not the trainer, with the terms `kl` and `entropy`.

        Args:
            outputs: the term `policy`, and others that stay as they are.
            inputs: the reference's log-probs are read where `kl` is not 0, `sampler_logprobs` for a correction, and the
                per-sequence `kl_coefficient` in place of `kl` where it changes from step to step.
        """
        config, batch = self.config, inputs.batch
        policy, over, metrics = outputs.terms["policy"].values, outputs.terms["policy"].over, dict(outputs.metrics)
        if config.old_logprobs == "recompute":
            # Log of trainer over sampler before the updates.
            log_weights = log_ratio(jnp.asarray(old_logprobs(inputs)), batch.per_token["sampler_logprobs"], batch)
            if config.correction != "none":
                weight, changed = importance_weight(
                    log_weights, config.correction, *IMPORTANCE_BOUNDS[config.correction]
                )
                policy = policy * weight
                metrics["mismatch/corrected"] = changed.astype(jnp.float32)
            if config.geometric_mask is not None:
                low, high = config.geometric_mask
                means = sequence_mean(log_weights, batch)
                masked = (means < math.log(low)) | (means > math.log(high))
                policy = jnp.where(masked, 0.0, policy)
                metrics["mismatch/masked"] = masked.astype(jnp.float32)
        terms = {"policy": Term(policy, over)}
        if config.kl:
            logprobs, reference = inputs.logprobs, reference_logprobs(inputs)
            if inputs.whole_logprobs is not None:
                logprobs = inputs.whole_logprobs
            metrics["kl/reference"] = cast(Array, kl_estimate(log_ratio(logprobs, reference, batch), "k3"))
            if config.kl_in == "loss":
                coefficients = batch.per_sequence.get("kl_coefficient")
                coefficient = config.kl if coefficients is None else inputs.per_token(jnp.asarray(coefficients))
                kl = kl_loss(
                    logprobs,
                    reference,
                    batch,
                    estimator=config.kl_estimator,
                    limit=config.kl_output_clamp,
                    # Not the old log-probs: where these are recomputed, they are the trainer's.
                    sampler_logprobs=sampler_logprobs(inputs) if config.kl_weighted else None,
                )
                terms["kl"] = Term(coefficient * kl, over)
        if inputs.entropy is not None:
            metrics["policy/entropy"] = inputs.entropy
            if config.entropy_bonus or config.entropy_target:
                held = batch.per_sequence.get(ENTROPY_COEFFICIENT)
                bonus = config.entropy_bonus if held is None else inputs.per_token(jnp.asarray(held))
                terms["entropy"] = Term(-bonus * inputs.entropy, over)
        if config.observation_weight:
            terms["observations"] = Term(-config.observation_weight * inputs.logprobs, "observed")
        others = {name: term for name, term in outputs.terms.items() if name != "policy"}
        return replace(outputs, terms={**terms, **others}, metrics=metrics)

    @abstractmethod
    def credit(self, client: Client, groups: Groups, sequences: list[Sequence], data: Rollouts) -> list[Sequence]:
        """The sequences with the arrays that the loss reads: advantages, and whatever else it needs.

        Args:
            client: computes what else is needed.
            groups: `[P][G]` scored completions.
            sequences: P G of them in that order, with tokens, masks and log-probs; a failed one has weight 0.
            data: the step of these completions.
        """

    def prepare(self, client: Client, experience: Experience) -> Update:
        """One batch for each update, from the parts of the completions with their advantages."""
        config, groups, data = self.config, self.all_measured(client, experience), experience.data
        views = by_seat(groups).values()
        signal = np.any([self.signal(self.scores(view, data.weights)) for view in views], axis=0)
        numbers, notes = report(groups, data.weights, signal)
        sampler = "sampler_logprobs" if config.old_logprobs == "recompute" else "old_logprobs"
        sequences = [as_sequence(x, config.mask_truncated and x.truncated, sampler) for x in flat(groups)]
        if config.observation_weight:
            seen = zip(sequences, flat(groups), strict=True)
            sequences = [replace(x, per_token={**x.per_token, OBSERVED: observed(episode)}) for x, episode in seen]
        if config.mismatch_limit is not None:
            dropped = [not mismatch(x) <= config.mismatch_limit for x in sequences]
            sequences = [replace(x, weight=0.0) if drop else x for x, drop in zip(sequences, dropped, strict=True)]
            numbers["mismatch/dropped"] = float(np.mean(dropped))
        credited = []
        for view in views:  # role-conditioned advantages: each seat's turns, compared with those of the same seat
            masks = (sequence_of(x.prompt, x.completion).loss_mask for x in flat(view))
            seen = [replace(x, loss_mask=mask) for x, mask in zip(sequences, masks, strict=True)]
            credited.append(self.credit(client, view, seen, data))
        sequences = [joined(x, seats) for x, *seats in zip(sequences, *credited, strict=True)]
        if config.entropy_target is not None:
            numbers["policy/entropy_missing"] = missing = config.entropy_target - numbers["policy/entropy"]
            numbers["policy/entropy_coefficient"] = held = self.entropy_coefficient if missing >= 0 else 0.0
            sequences = [replace(x, per_sequence={**x.per_sequence, ENTROPY_COEFFICIENT: held}) for x in sequences]
        require_numbers(groups, sequences)
        samples = (
            self._sample(place // len(groups[0]), episode, sequence)
            for place, (episode, sequence) in enumerate(zip(flat(groups), sequences, strict=True))
        )
        # `updates` parts of the prompts, `epochs` times; parts in which nothing counts are left out.
        prompts = np.array_split(np.arange(len(groups)), min(config.updates, len(groups)))
        parts = [[sequences[p * len(groups[0]) + i] for p in part for i in range(len(groups[0]))] for part in prompts]
        size = config.sequences_per_update(data.size)  # of the largest part: the only shape that is compiled
        counted = [any(x.weight > 0 and x.loss_mask.any() for x in part) for part in parts]
        batches = tuple(data.packed(part, size) for part, counts in zip(parts, counted, strict=True) if counts)
        totals = total_rewards(groups, data.weights)
        rewards = tuple(totals[part].ravel() for part, counts in zip(prompts, counted, strict=True) if counts)
        return Update(numbers, batches * config.epochs, samples, notes, rewards=rewards * config.epochs)

    def _sample(self, group: int, episode: Scored, sequence: Sequence) -> dict[str, Any]:
        """What may be recorded of an episode of a group, with the values of its tokens."""
        arrays, begin = sequence.per_token, len(episode.prompt.tokens)
        mean = float(arrays["advantages"][sequence.loss_mask].mean())
        shown = {"advantages": arrays["advantages"][begin:], "logprobs": episode.completion.logprobs}
        if "old_logprobs" in arrays and "sampler_logprobs" in arrays:
            shown["mismatch"] = (arrays["old_logprobs"] - arrays["sampler_logprobs"])[begin:]
        per_token = {
            "tokens": episode.completion.tokens.tolist(),
            "trained": sequence.loss_mask[begin:].astype(int).tolist(),
            **{name: np.nan_to_num(np.asarray(x, np.float64)).round(4).tolist() for name, x in shown.items()},
        }
        # Of a sample of weight 0 it need not be a finite number.
        advantage = mean if math.isfinite(mean) else 0.0
        return {**row(group, episode), "advantage": advantage, "per_token": per_token}

    def learn(self, client: Client, experience: Experience) -> Update:
        """Makes the updates on an experience; the entropy's coefficient then follows that of its completions."""
        update = super().learn(client, experience)
        if self.config.entropy_target is not None:
            step = ENTROPY_STEP if update.metrics["policy/entropy_missing"] >= 0 else -ENTROPY_STEP
            self.entropy_coefficient = max(0.0, self.entropy_coefficient + step)
        return update

    def get_state(self) -> dict[str, Any]:
        """The present coefficient of the entropy, where it changes."""
        return {} if self.config.entropy_target is None else {"entropy": self.entropy_coefficient}

    def set_state(self, state: dict[str, Any]) -> None:
        self.entropy_coefficient = state.get("entropy", self.entropy_coefficient)

    def scores(self, groups: Groups, weights: Mapping[str, float]) -> np.ndarray:
        """`[P G]` score of each completion: the weighted sum of its rewards with what its length adds."""
        return total_rewards(groups, weights) + self.penalties(groups, weights)

    def signal(self, scores_PG: np.ndarray) -> np.ndarray:
        """`[P]` bool: prompts whose scores differ. Here the whole batch is compared: all True or all False."""
        return np.repeat(has_signal(scores_PG.reshape(1, -1)), len(scores_PG))

    def penalties(self, groups: Groups, weights: Mapping[str, float]) -> np.ndarray:
        """`[P G]` DAPO's soft overlong penalty, 0 or below; 0 where the recipe sets none."""
        limit = self.sampling.max_tokens
        buffer = self.config.overlong_tokens(limit)
        if not buffer:
            return np.zeros((len(groups), len(groups[0])))
        return overlong_penalty(lengths_of(groups), limit, buffer)

    def kl_rewards(self, sequence: Sequence) -> np.ndarray:
        """`[T]` the KL penalty of each sampled token, where it is part of the reward, else 0.

        Args:
            sequence: has the log-probs of the policy and of the reference.
        """
        config = self.config
        if not config.kl or config.kl_in != "reward":
            return np.zeros(len(sequence.tokens))
        policy, reference = old_policy_logprobs(sequence), sequence.per_token[REFERENCE]
        mask, estimator, limit = sequence.loss_mask, config.kl_estimator, config.kl_output_clamp
        return kl_rewards(policy, reference, mask, self.kl_coefficient, estimator, limit)


def gate(metrics: Metrics, batch: Batch, data: Rollouts, reference: bool) -> None:
    """Stops a run whose sampler and trainer are not the same model.

    Raises:
        Doubtful: the log-probs of a sampled token differ by more than the tolerance; or, in a run's first step, the
            policy is not the reference.
    """
    if not math.isfinite(float(metrics.get("train/loss", 0.0))):
        return  # `optimizer.on_nonfinite` says what follows
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
