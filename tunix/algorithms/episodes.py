"""Turns scored completions into sequences to train on, and adds the per-token arrays that a loss reads.

Axes: P prompts, G group, T time.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any

import numpy as np

from tunix.algorithms.advantages import weighted_sum
from tunix.algorithms.loss import CURRENT
from tunix.algorithms.masks import mismatch
from tunix.errors import UserError
from tunix.rollout.types import Scored, sequence_of
from tunix.types import Sequence

Groups = list[list[Scored]]
"""`[P][G]` scored completions."""
Credited = list[list[Sequence]]
"""`[P][G]` sequences, with the per-token arrays that the loss reads."""


def as_sequence(episode: Scored, left_out: bool = False) -> Sequence:
    """An episode as a sequence: the sampled tokens are trained, and `old_logprobs` are the sampler's.

    Where tokens may be of earlier weights, `CURRENT` is 1 for those that are not.
    """
    prompt, completion = episode.prompt.tokens, episode.completion
    before = np.zeros(len(prompt), np.float32)
    current = {}
    if episode.version is not None:
        current = {CURRENT: np.concatenate([before, completion.versions == episode.version])}
    return replace(
        sequence_of(episode.prompt, completion),
        weight=0.0 if episode.unscored or left_out else 1.0,
        per_token={"old_logprobs": np.concatenate([before, completion.logprobs]), **current},
    )


def measured(groups: Groups, name: str) -> list[list[np.ndarray]]:
    """`[P][G]` an array of each episode that was computed while others were sampled, e.g. its `old_logprobs`."""
    return [[episode.measured[name] for episode in group] for group in groups]


def spread(sequence: Sequence, value: float) -> np.ndarray:
    """`[T]` one value at every trained token, 0 elsewhere."""
    return np.where(sequence.loss_mask, np.float32(value), np.float32(0))


def with_tokens(sequences: Credited, name: str, values: Iterable[List[np.ndarray]]) -> Credited:
    """The sequences with one more per-token array each."""
    return [
        [replace(x, per_token={**x.per_token, name: value}) for x, value in zip(group, row, strict=True)]
        for group, row in zip(sequences, values, strict=True)
    ]


def flat(groups: List[List[Any]]) -> list[Any]:
    """All items of nested lists, `[P][G]`, as one list of P G."""
    return [one for group in groups for one in group]


def grouped(values: Iterable[Any], like: List[List[Any]]) -> list[list[Any]]:
    """The P G values as nested lists `[P][G]` of the shape of `like`."""
    remaining = iter(values)
    return [[next(remaining) for _ in group] for group in like]


def old_policy_logprobs(sequence: Sequence) -> np.ndarray:
    """`[T]` log-probs of the policy before the updates: recomputed ones, or else the sampler's."""
    arrays = sequence.per_token
    return arrays["old_logprobs"] if "old_logprobs" in arrays else arrays["sampler_logprobs"]


def renamed(sequences: Credited, old: str, new: str) -> Credited:
    """The sequences with a per-token array under another name."""

    def one(sequence: Sequence) -> Sequence:
        rest = {name: value for name, value in sequence.per_token.items() if name != old}
        return replace(sequence, per_token={**rest, new: sequence.per_token[old]})

    return [[one(sequence) for sequence in group] for group in sequences]


def exceeds_mismatch(sequence: Sequence, limit: float) -> bool:
    """Whether the log-probs of trainer and sampler differ too much on a sequence; see `masks.mismatch`. Tokens of
    earlier weights say nothing about that."""
    arrays = sequence.per_token
    mask = sequence.loss_mask & (arrays[CURRENT] > 0) if CURRENT in arrays else sequence.loss_mask
    return not mismatch(arrays["old_logprobs"], arrays["sampler_logprobs"], mask) <= limit


def without_mismatch(sequences: Credited, limit: float) -> Credited:
    """The sequences, with weight 0 for those where `exceeds_mismatch` holds."""
    return [[replace(x, weight=0.0) if exceeds_mismatch(x, limit) else x for x in group] for group in sequences]


def shape_of(groups: Groups) -> tuple[int, int]:
    """The shape (P, G) of the groups."""
    return len(groups), len(groups[0])


def rewards_of(groups: Groups) -> dict[str, np.ndarray]:
    """Rewards `[P G]` by name; NaN where one failed, or left the completion out."""
    return {name: np.array([[e.rewards[name] for e in group] for group in groups]) for name in groups[0][0].rewards}


def are_scored(groups: Groups) -> np.ndarray:
    """`[P G]` bool, whether a completion has a score: none of its rewards failed, and one at least did not leave it
    out."""
    return np.array([[episode.unscored is None for episode in group] for group in groups])


def total_rewards(groups: Groups, weights: Mapping[str, float]) -> np.ndarray:
    """`[P G]` the weighted sum of each completion's rewards, without those that left it out; NaN without a score."""
    scored = are_scored(groups)
    rewards = {name: np.where(scored & np.isnan(x), 0.0, x) for name, x in rewards_of(groups).items()}
    return weighted_sum(rewards, weights)


def reward_means(rewards: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The mean of each reward over what it scored, by name; without those that scored nothing."""
    return {name: float(np.nanmean(x)) for name, x in rewards.items() if not np.isnan(x).all()}


def lengths_of(groups: Groups) -> np.ndarray:
    """`[P G]` number of sampled tokens of each completion."""
    return np.array([[int(episode.completion.drawn.sum()) for episode in group] for group in groups])


def require_scores(groups: Groups) -> None:
    """Stops a run in which not one sample of a step could be scored.

    Raises:
        UserError: why the first one failed.
    """
    reasons = [episode.unscored for group in groups for episode in group]
    if all(reasons):
        raise UserError(
            f"reward: none of the {len(reasons)} samples of a step could be scored, the first because {reasons[0]}. "
            "What was trained before is saved: fix the reward and run the same command."
        )


def require_numbers(groups: Groups, sequences: Credited) -> None:
    """Stops a run before an update on values that are not finite; samples of weight 0 may have any.

    Raises:
        UserError: a value of a sample that counts, such as its advantage, is not a finite number.
    """
    for place, (group, row) in enumerate(zip(groups, sequences, strict=True)):
        for number, (episode, sequence) in enumerate(zip(group, row, strict=True)):
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
