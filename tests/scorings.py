"""Scores of samples that are all there at once."""

from collections.abc import Mapping, Sequence
from typing import Any

from tunix.rollout.rewards.base import Score
from tunix.rollout.rewards.scorer import Scorer, Scoring


def scores_with(
    scorer: Scorer,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, list[Score]]:
    """Scores by reward name, each in the order of the samples; `columns` have a value for each sample."""
    columns = columns or {}
    scoring = Scoring(scorer, {"": columns})
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        scoring.add(number, prompt, completion, {name: values[number] for name, values in columns.items()})
    return {name: list(scores.values()) for name, scores in scoring.result().items()}
