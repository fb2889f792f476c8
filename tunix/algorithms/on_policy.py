"""What GRPO and PPO share: sample, score, say what each token is worth, update on parts of it.

`update` is the papers' loop. A subclass says how completions are credited and what the loss is; `SFT` has no use for
any of this. What is measured of a batch of rollouts (`report`) and the gate on the sampler (`gate`) are below.

Axes: P prompts, G group, T time.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from tunix.algorithms.advantages import has_signal, overlong_penalty, weighted_sum
from tunix.algorithms.base import Algorithm, Update
from tunix.algorithms.loss import REFERENCE, with_mismatch
from tunix.algorithms.masks import mismatch, most_uncertain
from tunix.errors import Doubtful, UserError
from tunix.protocols import Client
from tunix.rollout.collect import Rollouts, Scored, require_scores
from tunix.types import Batch, Loss, LossInputs, LossOutputs, Metrics, Sequence

Groups = list[list[Scored]]
Credited = list[list[Sequence]]


class PolicyGradient(Algorithm):
    """Learning from the rewards of one's own completions; `config` is a `PolicyConfig`."""

    @property
    def train_on(self) -> Literal["completion", "all", "prompt"]:
        """Only prompts are read."""
        return "prompt"

    @property
    def group(self) -> int:
        """Every one is trained on, with weight 0 where it failed."""
        return self.config.group_size

    @property
    def needs_reference(self) -> bool:
        """Not while the coefficient is 0."""
        return bool(self.config.kl)

    @property
    def asks_before(self) -> bool:
        """Whether the reference is asked before the update: rewards need it there, and several passes over the same
        rollouts need it once. Else it is asked in the update itself, about the same rows."""
        return self.needs_reference and (self.config.kl_in == "reward" or self.config.epochs > 1)

    @property
    def objective(self) -> Loss:
        """The loss, on the distribution that was sampled from."""
        return Loss(
            self.gated_loss,
            reference=self.needs_reference and not self.asks_before,
            entropy=self.reads_entropy,
            temperature=self.sampling.temperature,
        )

    def gated_loss(self, inputs: LossInputs) -> LossOutputs:
        """The loss with the sampler's mismatch measured, which a loss of one's own need not think of."""
        outputs = self.loss(inputs)
        return outputs if "mismatch/max" in outputs.peaks else with_mismatch(outputs, inputs, self.config)

    @property
    def reads_entropy(self) -> bool:
        """Whether the loss is given `inputs.entropy`, at a little of the head's time. A loss of one's own is."""
        return True

    @abstractmethod
    def credit(self, client: Client, groups: Groups, sequences: Credited, data: Rollouts) -> Credited:
        """The sequences with what the loss reads of them: advantages, and whatever else it names."""

    def update(self, client: Client, data: Rollouts) -> Update:
        """One step: sample from the current policy, score, credit, and update on parts of what came back."""
        client.publish()
        groups = self.gather(client, data)
        signal = self.signal(self.scores(groups, data.weights))
        sequences = self.credit(client, groups, self.sequences(client, groups), data)
        require_numbers(groups, sequences)
        with data.clock.part("update"):
            batches = [data.packed(part, self._part_size(data)) for part in self._parts(sequences)]
            metrics = [self.step(client, batch) for batch in batches]
            if metrics:
                gate(metrics[0], batches[0], data, self.needs_reference)
            numbers = report(groups, data.weights, signal) | merged(metrics)
            if self.config.mismatch_limit is not None:
                numbers["mismatch/dropped"] = float(
                    np.mean([far(x, self.config.mismatch_limit) for x in flat(sequences)])
                )
        numbers |= {f"perf/{part}_seconds": seconds for part, seconds in data.clock.items()}
        return Update(numbers, tuple(batches), rows(groups, sequences, data.shown), notes(groups, data.weights, signal))

    def gather(self, client: Client, data: Rollouts) -> Groups:
        """One group of episodes for each prompt.

        Raises:
            UserError: none of them could be scored.
        """
        groups = data.collect(client, data.prompts, self.config.group_size)
        require_scores(groups)
        return groups

    def step(self, client: Client, batch: Batch) -> Metrics:
        """One optimizer update."""
        return client.step(batch, self.objective)

    def sequences(self, client: Client, groups: Groups) -> Credited:
        """Tokens, masks and log-probs of all episodes; a failed one has weight 0."""
        config = self.config
        sequences = [
            [as_sequence(episode, left_out=config.mask_truncated and episode.truncated) for episode in group]
            for group in groups
        ]
        if config.old_logprobs == "recompute":
            sequences = renamed(sequences, "old_logprobs", "sampler_logprobs")
            # A single update starts from them: the loss takes its own.
            if config.updates * config.epochs > 1 or config.mismatch_limit is not None:
                sequences = self._with_logprobs(client, sequences, "old_logprobs", "policy")
        if config.mismatch_limit is not None:
            sequences = without_mismatch(sequences, config.mismatch_limit)
        if config.high_entropy is not None:
            sequences = self._with_high_entropy(client, sequences, config.high_entropy)
        if self.asks_before:
            sequences = self._with_logprobs(client, sequences, REFERENCE, "reference")
        return sequences

    def scores(self, groups: Groups, weights: Mapping[str, float]) -> np.ndarray:
        """`[P G]` what each completion is worth: the weighted sum of its rewards, less what it is too long."""
        return weighted_sum(rewards_of(groups), weights) + self.penalties(groups)

    def signal(self, scores_PG: np.ndarray) -> np.ndarray:
        """`[P]` bool: prompts whose completions tell better from worse. Compared is the whole batch."""
        return np.repeat(has_signal(scores_PG.reshape(1, -1)), len(scores_PG))

    def penalties(self, groups: Groups) -> np.ndarray:
        """`[P G]` DAPO's soft overlong penalty, 0 where the recipe asks for none."""
        limit = self.sampling.max_tokens
        buffer = self.config.overlong_tokens(limit)
        if not buffer:
            return np.zeros(shape_of(groups))
        return self.config.overlong_coefficient * overlong_penalty(lengths_of(groups), limit, buffer)

    def _with_logprobs(
        self, client: Client, sequences: Credited, name: str, of: Literal["policy", "reference"]
    ) -> Credited:
        """The sequences with log-probs under the sampling temperature."""
        found = client.logprobs(flat(sequences), of, self.sampling.temperature)
        return with_tokens(sequences, name, grouped(found, sequences))

    def _with_high_entropy(self, client: Client, sequences: Credited, share: float) -> Credited:
        """The sequences with 1 at the tokens of `masks.most_uncertain`, of all that count in this step, else 0."""
        listed = flat(sequences)
        entropies = client.entropies(listed, self.sampling.temperature)
        kept = most_uncertain(entropies, [x.loss_mask & (x.weight > 0) for x in listed], share)
        return with_tokens(sequences, "high_entropy", grouped([x.astype(np.float32) for x in kept], sequences))

    def _parts(self, sequences: Credited) -> Iterator[list[Sequence]]:
        """What each update sees: `updates` parts of the prompts, `epochs` times; parts without weight are left out."""
        updates = min(self.config.updates, len(sequences))
        for _ in range(self.config.epochs):
            for places in np.array_split(np.arange(len(sequences)), updates):
                part = [sequence for place in places for sequence in sequences[place]]
                if any(sequence.weight > 0 and sequence.loss_mask.any() for sequence in part):
                    yield part

    def _part_size(self, data: Rollouts) -> int:
        """Sequences of the largest part: the one shape that is compiled."""
        return self.config.sequences_per_update(data.size)


def as_sequence(episode: Scored, left_out: bool = False) -> Sequence:
    """An episode as a sequence: the drawn tokens are trained, `old_logprobs` are the sampler's."""
    prompt, completion = episode.prompt.tokens, episode.completion
    before = np.zeros(len(prompt), np.float32)
    failed = any(math.isnan(reward) for reward in episode.rewards.values())
    return Sequence(
        tokens=np.concatenate([prompt, completion.tokens]).astype(np.int32),
        loss_mask=np.concatenate([before.astype(bool), completion.drawn]),
        weight=0.0 if failed or left_out else 1.0,
        per_token={"old_logprobs": np.concatenate([before, completion.logprobs])},
    )


def spread(sequence: Sequence, value: float) -> np.ndarray:
    """`[T]` one value on every trained token."""
    return np.where(sequence.loss_mask, np.float32(value), np.float32(0))


def with_tokens(sequences: Credited, name: str, values: Iterable[List[np.ndarray]]) -> Credited:
    """The sequences with one more per-token array each."""
    return [
        [replace(x, per_token={**x.per_token, name: value}) for x, value in zip(group, own, strict=True)]
        for group, own in zip(sequences, values, strict=True)
    ]


def flat(groups: List[List[Any]]) -> list[Any]:
    """`[P][G]` -> `[P G]`."""
    return [one for group in groups for one in group]


def grouped(values: Iterable[Any], like: List[List[Any]]) -> list[list[Any]]:
    """`[P G]` -> `[P][G]`, as `like` is."""
    found = iter(values)
    return [[next(found) for _ in group] for group in like]


def drawn_with(sequence: Sequence) -> np.ndarray:
    """`[T]` log-probs of the policy before the updates: the sampler's, where they are not computed again."""
    own = sequence.per_token
    return own["old_logprobs"] if "old_logprobs" in own else own["sampler_logprobs"]


def renamed(sequences: Credited, old: str, new: str) -> Credited:
    """The sequences with a per-token array under another name."""

    def one(sequence: Sequence) -> Sequence:
        rest = {name: value for name, value in sequence.per_token.items() if name != old}
        return replace(sequence, per_token={**rest, new: sequence.per_token[old]})

    return [[one(sequence) for sequence in group] for group in sequences]


def far(sequence: Sequence, limit: float) -> bool:
    """Whether trainer and sampler are too far apart on a sequence; see `masks.mismatch`."""
    own = sequence.per_token
    return not mismatch(own["old_logprobs"], own["sampler_logprobs"], sequence.loss_mask) <= limit


def without_mismatch(sequences: Credited, limit: float) -> Credited:
    """The sequences, with weight 0 for those that are `far`."""
    return [[replace(x, weight=0.0) if far(x, limit) else x for x in group] for group in sequences]


def shape_of(groups: Groups) -> tuple[int, int]:
    """(P, G)."""
    return len(groups), len(groups[0])


def rewards_of(groups: Groups) -> dict[str, np.ndarray]:
    """`[P G]` by the name of the reward; NaN where it failed."""
    return {name: np.array([[e.rewards[name] for e in group] for group in groups]) for name in groups[0][0].rewards}


def lengths_of(groups: Groups) -> np.ndarray:
    """`[P G]` drawn tokens."""
    return np.array([[int(episode.completion.drawn.sum()) for episode in group] for group in groups])


def report(groups: Groups, weights: Mapping[str, float], signal: np.ndarray) -> dict[str, float]:
    """What is measured of a batch of rollouts before it is trained on.

    Args:
        weights: of the rewards.
        signal: `[P]` of `PolicyGradient.signal`.
    """
    named = rewards_of(groups)
    total = weighted_sum(named, weights)
    valid = total[~np.isnan(total)]
    numbers = {
        "reward/mean": float(valid.mean()),
        "reward/std": float(valid.std()),
        "reward/failed": 1 - valid.size / total.size,
        "reward/signal": float(signal.mean()),
        **drawn_report(groups),
    }
    return numbers | {f"reward/{name}": float(np.nanmean(values)) for name, values in named.items()}


def drawn_report(groups: Groups) -> dict[str, float]:
    """What is measured of completions whatever they are worth."""
    episodes = flat(groups)
    drawn = np.concatenate([episode.completion.logprobs[episode.completion.drawn] for episode in episodes])
    numbers = {
        "rollout/length": float(lengths_of(groups).mean()),
        "rollout/truncated": float(np.mean([episode.truncated for episode in episodes])),
        # What the sampler drew with is an unbiased estimate of the entropy; a loss that computes it goes before.
        "policy/entropy": -float(drawn.mean()),
    }
    if any(len(episode.completion.turns) > 1 for episode in episodes):
        numbers["rollout/turns"] = float(np.mean([len(episode.completion.turns) for episode in episodes]))
    return numbers


def require_numbers(groups: Groups, sequences: Credited) -> None:
    """Refuses what no update can use. Samples of weight 0, such as failed ones, may be credited with anything.

    Raises:
        UserError: a value of a sample that counts, such as its advantage, is not a finite number.
    """
    for place, (group, own) in enumerate(zip(groups, sequences, strict=True)):
        for number, (episode, sequence) in enumerate(zip(group, own, strict=True)):
            if sequence.weight == 0:
                continue
            trained = {name: values[sequence.loss_mask] for name, values in sequence.per_token.items()}
            for name, values in (trained | dict(sequence.per_sequence)).items():
                wrong = np.atleast_1d(values)[~np.isfinite(np.atleast_1d(values))]
                if wrong.size:
                    raise UserError(_not_a_number(name, float(wrong[0]), f"sample {number} of prompt {place}", episode))


def _not_a_number(name: str, value: float, which: str, episode: Scored) -> str:
    rewards = ", ".join(f"{reward} {x:g}" for reward, x in episode.rewards.items())
    prompt = repr(episode.prompt.text[:60]) if episode.prompt.text else "token ids"
    remedy = (
        "A sample that failed is NaN among the rewards and must not reach the others of its group: take numpy's "
        "nanmean, nanmedian or nanstd in `advantages`"
    )
    return f"{name} of {which} ({prompt}; {rewards}) is {value:g}, not a finite number; no update was made. " + (
        remedy if name == "advantages" else "`credit` has to give every sample that counts numbers"
    )


def merged(metrics: List[Metrics]) -> dict[str, float]:
    """The means over a step's updates; of the sampler's mismatch the first's, before the policy had moved."""
    read = [{name: float(value) for name, value in one.items() if not name.endswith("/at")} for one in metrics]
    means = {name: float(np.mean([one[name] for one in read])) for name in (read[0] if read else ())}
    return means | {name: value for name, value in (read[0] if read else {}).items() if name.startswith("mismatch/")}


def gate(metrics: Metrics, batch: Batch, data: Rollouts, reference: bool) -> None:
    """Stops a run whose sampler and trainer are not one model.

    Raises:
        Doubtful: the log-probs of a drawn token differ by more than the tolerance; or, in a run's first step, the
            policy is not the reference.
    """
    worst = float(metrics.get("mismatch/max", 0.0))  # not measured while a critic alone is warmed up
    if not worst <= data.tolerance:
        place = int(metrics["mismatch/max/at"])
        sequence, position, token = (
            int(np.asarray(x).reshape(-1)[place]) for x in (batch.sequence_ids, batch.positions, batch.tokens)
        )
        raise Doubtful(
            f"rollout.mismatch_tolerance: at token {position} (id {token}) of sample {sequence} the trainer's and the "
            f"sampler's log-probs differ by {worst:.4g}, more than {data.tolerance:g}: the policy that is trained is "
            "not the one that drew. In bfloat16 some difference is rounding; a larger one is a defect, or sampling "
            "that the loss cannot mirror. Raise the tolerance only if the difference is understood."
        )
    drift = float(metrics.get("kl/reference", 0.0))
    if reference and data.first and not abs(drift) <= data.tolerance:
        raise Doubtful(
            f"kl/reference is {drift:.4g} before the first update, where the policy is the reference: they do not hold "
            "the same weights"
        )


def rows(groups: Groups, sequences: Credited, number: int) -> tuple[dict[str, Any], ...]:
    """The first groups for `samples.jsonl`: what was drawn, what it earned, what it was credited with."""
    shown = [
        (place, episode, sequence)
        for place, (group, own) in enumerate(zip(groups[:number], sequences, strict=False))
        for episode, sequence in zip(group, own, strict=True)
    ]
    return tuple({**row(place, episode), "advantage": _advantage(sequence)} for place, episode, sequence in shown)


def _advantage(sequence: Sequence) -> float:
    """The mean over the trained tokens; 0 for a sample of weight 0 that was credited with no number."""
    mean = float(sequence.per_token["advantages"][sequence.loss_mask].mean())
    return mean if math.isfinite(mean) else 0.0


def row(place: int, episode: Scored) -> dict[str, Any]:
    """An episode of the group at a place, for `samples.jsonl`."""
    return {
        "group": place,
        "prompt": episode.prompt.text or episode.prompt.tokens.tolist(),
        "completion": episode.text or episode.completion.tokens.tolist(),
        "rewards": {name: None if math.isnan(x) else x for name, x in episode.rewards.items()},
        "failures": dict(episode.failures),
        "tokens": len(episode.completion.tokens),
        "finish": episode.completion.finish,
    }


def notes(groups: Groups, weights: Mapping[str, float], signal: np.ndarray) -> tuple[str, ...]:
    """What a person should be told of this step; `signal` as in `report`."""
    failures = [why for group in groups for episode in group for why in episode.failures.values()]
    told = [f"{len(failures)} rewards failed and are left out, for instance {failures[0]}"] if failures else []
    if not signal.any():
        total = weighted_sum(rewards_of(groups), weights)
        equal = "the rewards of every group" if np.nanmin(total) < np.nanmax(total) else "all rewards"
        told.append(
            f"no signal: {equal} are equal (mean {np.nanmean(total):.3g}), so there is nothing to learn from: prompts "
            "too hard or too easy, or a reward that does not tell completions apart"
        )
    return tuple(told)
