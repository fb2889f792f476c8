"""What a batch of rollouts reports: metrics, rows of `samples.jsonl`, and notes for the user.

Axes: P prompts, G group.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Any

import numpy as np

from tunix.algorithms.episodes import Credited, Groups, flat, lengths_of, reward_means, rewards_of, total_rewards
from tunix.rollout.types import Scored
from tunix.types import Metrics, Sequence


def report(groups: Groups, weights: Mapping[str, float], signal: np.ndarray) -> dict[str, float]:
    """Metrics of a batch of rollouts, from before it is trained on.

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
    return numbers | {f"reward/{name}": mean for name, mean in reward_means(rewards_of(groups)).items()}


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


def merged(metrics: List[Metrics]) -> dict[str, float]:
    """Metrics of a step: means over its updates, but `mismatch/*` of the first one, before the policy has moved."""
    read = [{name: float(value) for name, value in one.items() if not name.endswith("/at")} for one in metrics]
    means = {name: float(np.mean([one[name] for one in read])) for name in (read[0] if read else ())}
    return means | {name: value for name, value in (read[0] if read else {}).items() if name.startswith("mismatch/")}


def rows(groups: Groups, sequences: Credited, number: int) -> tuple[dict[str, Any], ...]:
    """Rows of the first groups for `samples.jsonl`: completions with rewards and advantages."""
    shown = [
        (place, episode, sequence)
        for place, (group, trained) in enumerate(zip(groups[:number], sequences, strict=False))
        for episode, sequence in zip(group, trained, strict=True)
    ]
    return tuple({**row(place, episode), "advantage": _advantage(sequence)} for place, episode, sequence in shown)


def _advantage(sequence: Sequence) -> float:
    """The mean advantage of the trained tokens; 0 where it is not a finite number (a sample of weight 0)."""
    mean = float(sequence.per_token["advantages"][sequence.loss_mask].mean())
    return mean if math.isfinite(mean) else 0.0


def row(place: int, episode: Scored) -> dict[str, Any]:
    """The row of an episode of group number `place` for `samples.jsonl`."""
    return {
        "group": place,
        "prompt": episode.prompt.text or episode.prompt.tokens.tolist(),
        "completion": episode.text or episode.completion.tokens.tolist(),
        "rewards": {name: None if math.isnan(x) else x for name, x in episode.rewards.items()},
        "failures": dict(episode.failures),
        **({"logged": dict(episode.logged)} if episode.logged else {}),
        "tokens": len(episode.completion.tokens),
        "finish": episode.completion.finish,
    }


def notes(groups: Groups, weights: Mapping[str, float], signal: np.ndarray) -> tuple[str, ...]:
    """Messages for the user about this step: failed rewards, and rewards that are all equal.

    Args:
        groups: see `report`.
        weights: see `report`.
        signal: see `report`.
    """
    failures = [why for group in groups for episode in group for why in episode.failures.values()]
    messages = [f"{len(failures)} rewards failed and are left out, for instance {failures[0]}"] if failures else []
    if left_out := [x.unscored for group in groups for x in group if x.unscored and not x.failures]:
        messages.append(f"{len(left_out)} samples have no score and are left out: {left_out[0]}")
    if not signal.any():
        total = total_rewards(groups, weights)
        equal = "the rewards of every group" if np.nanmin(total) < np.nanmax(total) else "all rewards"
        messages.append(
            f"no signal: {equal} are equal (mean {np.nanmean(total):.3g}), so there is nothing to learn from: prompts "
            "too hard or too easy (for a random model, as with --tiny, most are), or a reward that does not tell "
            "completions apart"
        )
    return tuple(messages)
