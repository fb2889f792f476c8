"""Turns scored completions into sequences to train on, and adds the per-token arrays that a loss reads.

Then what a batch of rollouts reports: metrics, rows of `samples.jsonl`, and notes for the user.

Axes: P prompts, G group, T time.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any

import numpy as np

from tunix.algorithms.advantages import weighted_sum
from tunix.algorithms.ops import CURRENT, TEACHER
from tunix.errors import UserError
from tunix.rollout.types import ENVIRONMENT, Scored, sequence_of
from tunix.types import IN_A_LATER_TOKEN, Sequence

Groups = list[list[Scored]]
"""`[P][G]` scored completions."""
VALUES = "values"
"""The measured values of an episode's states, `[T + 1]`; no per-token array, since the last one is of the end."""


def as_sequence(episode: Scored, left_out: bool = False, by_sampler: str = "old_logprobs") -> Sequence:
    """An episode as a sequence: the sampled tokens are trained, and the sampler's log-probs are named `by_sampler`.

    What was measured of its tokens is there too. Where tokens may be of earlier weights, `CURRENT` is 1 for those that
    are not.
    """
    prompt, completion = episode.prompt.tokens, episode.completion
    before = np.zeros(len(prompt), np.float32)
    per_token = {by_sampler: np.concatenate([before, completion.logprobs])}
    per_token |= {name: x for name, x in episode.measured.items() if name != VALUES}
    if TEACHER in per_token and (per_token[TEACHER] == IN_A_LATER_TOKEN).any():
        per_token[TEACHER] = by_spans(per_token[TEACHER], per_token[by_sampler])
    if episode.version is not None:
        per_token[CURRENT] = np.concatenate([before, completion.versions == episode.version])
    return replace(
        sequence_of(episode.prompt, completion),
        weight=0.0 if episode.unscored or left_out else 1.0,
        per_token=per_token,
    )


def by_spans(teacher_T: np.ndarray, sampler_T: np.ndarray) -> np.ndarray:
    """`[T]` teacher's log-probs whose gap to the sampler's is, at each token of a span, that of the whole span.

    A span of text with the sampler's log-prob `sum_i log p_i` and the teacher's `log q` is one action: its gap is the
    reward of each of its tokens. Tokens after the last span have none.

    Args:
        teacher_T: log q at the last token of each span, `IN_A_LATER_TOKEN` at the others.
        sampler_T: log p of each token.
    """
    ends = np.flatnonzero(teacher_T != IN_A_LATER_TOKEN)
    span = np.searchsorted(ends, np.arange(len(teacher_T)))
    sums = np.bincount(span, sampler_T, minlength=len(ends) + 1)[: len(ends)]
    gaps = np.append(teacher_T[ends] - sums, 0)
    return (sampler_T + gaps[span]).astype(np.float32)


def observed(episode: Scored) -> np.ndarray:
    """`[T]` 1 at what an environment wrote, without the prompts of the episode's further transcripts; 0 elsewhere."""
    drawn = episode.completion.drawn
    mask = ~drawn
    for place in episode.completion.restarts:
        mask[place : place + int(np.argmax([*drawn[place:], True]))] = False
    return np.concatenate([np.zeros(len(episode.prompt.tokens)), mask]).astype(np.float32)


def flat(groups: List[List[Any]]) -> list[Any]:
    """All items of nested lists, `[P][G]`, as one list of P G."""
    return [item for group in groups for item in group]


def old_policy_logprobs(sequence: Sequence) -> np.ndarray:
    """`[T]` log-probs of the policy before the updates: recomputed ones, or else the sampler's."""
    arrays = sequence.per_token
    return arrays["old_logprobs"] if "old_logprobs" in arrays else arrays["sampler_logprobs"]


def mismatch(sequence: Sequence) -> float:
    """`mean_t exp|log p - log q|` of trainer and sampler: 1 where they agree; 1 where nothing was sampled.

    NeMo-RL's `seq_logprob_error_threshold` (https://github.com/NVIDIA-NeMo/RL) compares this number. Tokens of earlier
    weights say nothing about it.
    """
    arrays = sequence.per_token
    mask = sequence.loss_mask & (arrays[CURRENT] > 0) if CURRENT in arrays else sequence.loss_mask
    distances = np.abs(arrays["old_logprobs"] - arrays["sampler_logprobs"])[mask].astype(np.float64)
    return float(np.exp(distances).mean()) if distances.size else 1.0


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


def by_seat(groups: Groups) -> dict[int, Groups]:
    """The episodes as the players of each seat see them, by its number: their own turns, and what these earned.

    A seat that took no turn in an episode has no score there. Where one player takes all turns it is the episodes.
    """
    numbers = sorted({seat for episode in flat(groups) for seat in episode.seats})

    def seen(episode: Scored, number: int) -> Scored:
        completion, rewards = episode.completion, dict(episode.rewards)
        turns = tuple(turn for turn, seat in zip(completion.turns, episode.seats, strict=False) if seat == number)
        earned = tuple(x for x, seat in zip(episode.turn_rewards, episode.seats, strict=True) if seat == number)
        if ENVIRONMENT in rewards and ENVIRONMENT not in episode.failures:
            rewards[ENVIRONMENT] = sum(earned) if earned else math.nan
        # What cuts the episode off cuts the turn of one seat, and more can follow only there.
        finish = completion.finish if turns[-1:] == completion.turns[-1:] else "stop"
        seats = (number,) * len(earned)
        completion = replace(completion, turns=turns, finish=finish)
        return replace(episode, completion=completion, rewards=rewards, turn_rewards=earned, seats=seats)

    if len(numbers) < 2:
        return {0: groups}
    return {number: [[seen(episode, number) for episode in group] for group in groups] for number in numbers}


def joined(sequence: Sequence, seats: List[Sequence]) -> Sequence:
    """A sequence with the arrays of each seat's turns, as `credit` gave them for the seat alone."""
    arrays = dict(seats[0].per_token)
    for seat in seats[1:]:
        arrays |= {name: np.where(seat.loss_mask, values, arrays[name]) for name, values in seat.per_token.items()}
    return replace(seats[0], loss_mask=sequence.loss_mask, per_token=arrays)


def reward_means(groups: Groups) -> dict[str, float]:
    """The mean of each reward over what it scored, by name, and with several seats of what each earned, as `seat1`;
    without those that scored nothing."""
    rewards, seats = rewards_of(groups), by_seat(groups)
    if len(seats) > 1 and ENVIRONMENT in rewards:
        rewards |= {f"seat{number}": rewards_of(view)[ENVIRONMENT] for number, view in seats.items()}
    return {name: float(np.nanmean(x)) for name, x in rewards.items() if not np.isnan(x).all()}


def source_means(groups: Groups, weights: Mapping[str, float]) -> dict[str, float]:
    """The mean total reward of each data set's completions, by its name; without those of which none is scored."""
    sources, totals = [group[0].prompt.source for group in groups], total_rewards(groups, weights)
    by_name = {name: totals[[source == name for source in sources]] for name in dict.fromkeys(sources) if name}
    return {name: float(np.nanmean(x)) for name, x in by_name.items() if not np.isnan(x).all()}


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


def require_numbers(groups: Groups, sequences: List[Sequence]) -> None:
    """Stops a run before an update on values that are not finite; samples of weight 0 may have any.

    Raises:
        UserError: a value of a sample that counts, such as its advantage, is not a finite number.
    """
    for number, (episode, sequence) in enumerate(zip(flat(groups), sequences, strict=True)):
        if sequence.weight == 0:
            continue
        trained = {name: values[sequence.loss_mask] for name, values in sequence.per_token.items()}
        for name, values in (trained | dict(sequence.per_sequence)).items():
            wrong = np.atleast_1d(values)[~np.isfinite(np.atleast_1d(values))]
            if not wrong.size:
                continue
            place, sample = divmod(number, len(groups[0]))
            rewards = ", ".join(f"{reward} {x:g}" for reward, x in episode.rewards.items())
            prompt = repr(episode.prompt.text[:60]) if episode.prompt.text else "token ids"
            remedy = "`credit` has to give every sample that counts numbers"
            if name == "advantages":
                remedy = (
                    "A sample that failed is NaN among the rewards and must not reach the others of its group: take "
                    "numpy's nanmean, nanmedian or nanstd in `advantages`"
                )
            raise UserError(
                f"{name} of sample {sample} of prompt {place} ({prompt}; {rewards}) is {float(wrong[0]):g}, not a "
                f"finite number; no update was made. {remedy}"
            )


def report(
    groups: Groups, weights: Mapping[str, float], signal: np.ndarray
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Metrics of a batch of rollouts, from before it is trained on, and messages for the user: failed rewards, and
    rewards that are all equal.

    Args:
        groups: `[P][G]` scored completions.
        weights: weight of each reward, by name.
        signal: `[P]` bool, whether the scores of a prompt's completions differ.
    """
    total = total_rewards(groups, weights)
    valid = total[~np.isnan(total)]
    numbers = {
        "reward/mean": float(valid.mean()),
        "reward/std": float(valid.std()),
        "reward/failed": 1 - valid.size / total.size,
        "reward/signal": float(signal.mean()),
        **sampling_report(groups),
    }
    numbers |= {f"reward/{name}": mean for name, mean in reward_means(groups).items()}
    numbers |= {f"reward/source/{name}": mean for name, mean in source_means(groups, weights).items()}
    failures = [why for group in groups for episode in group for why in episode.failures.values()]
    notes = [f"{len(failures)} rewards failed and are left out, for instance {failures[0]}"] if failures else []
    if left_out := [x.unscored for group in groups for x in group if x.unscored and not x.failures]:
        notes.append(f"{len(left_out)} samples have no score and are left out: {left_out[0]}")
    if not signal.any():
        equal = "the rewards of every group" if np.nanmin(total) < np.nanmax(total) else "all rewards"
        notes.append(
            f"no signal: {equal} are equal (mean {np.nanmean(total):.3g}), so there is nothing to learn from: prompts "
            "too hard or too easy (for a random model, as with --tiny, most are), or a reward that does not tell "
            "completions apart"
        )
    return numbers, tuple(notes)


def sampling_report(groups: Groups) -> dict[str, float]:
    """Metrics of completions that do not depend on rewards: lengths, truncation, entropy, turns."""
    episodes = flat(groups)
    drawn = np.concatenate([episode.completion.logprobs[episode.completion.drawn] for episode in episodes])
    numbers = {
        "rollout/length": float(lengths_of(groups).mean()),
        "rollout/truncated": float(np.mean([episode.truncated for episode in episodes])),
        # The sampler's log-probs are an unbiased estimate of the entropy; a loss that computes it takes precedence.
        "policy/entropy": -float(drawn.mean()),
    }
    if any(len(episode.completion.turns) > 1 for episode in episodes):
        numbers["rollout/turns"] = float(np.mean([len(episode.completion.turns) for episode in episodes]))
    if (version := episodes[0].version) is not None:
        ages = version - np.concatenate([episode.completion.versions for episode in episodes])
        numbers |= {"rollout/stale": float(np.mean(ages > 0)), "rollout/oldest": float(ages.max())}
    return numbers


def row(place: int, episode: Scored) -> dict[str, Any]:
    """The row of an episode of group number `place` for `samples.jsonl`."""
    return {
        "group": place,
        **({"source": episode.prompt.source} if episode.prompt.source else {}),
        "prompt": episode.prompt.text or episode.prompt.tokens.tolist(),
        "completion": episode.text or episode.completion.tokens.tolist(),
        "rewards": {name: None if math.isnan(x) else x for name, x in episode.rewards.items()},
        "failures": dict(episode.failures),
        **({"logged": dict(episode.logged)} if episode.logged else {}),
        "tokens": len(episode.completion.tokens),
        "finish": episode.completion.finish,
    }
