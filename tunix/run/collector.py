"""What samples and scores the completions of a run: one `Collector`, and one for each data set of a mixture that has
rewards or an environment of its own."""

from collections.abc import Mapping
from dataclasses import replace

from tunix.algorithms.base import Algorithm
from tunix.data.config import DataConfig
from tunix.data.sources import Rows
from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import Collector, Judge
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import ADDED
from tunix.rollout.rewards.config import RewardConfig
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.inputs import Inputs
from tunix.util.nested import dotted


def collector_of(
    recipe: Recipe, inputs: Inputs, algorithm: Algorithm, play: Player | None, judges: tuple[Judge, ...]
) -> Collector:
    """Opens the reward functions of a recipe, and the rewards and environments of its data sets.

    Args:
        recipe: a run or a stage.
        inputs: its rows, which have the columns that rewards read.
        algorithm: says how completions are sampled.
        play: starts the episodes of `rollout.environment`.
        judges: the reward model and the judge.

    Raises:
        UserError: a reward or an environment does not load, a column is missing, or two data sets give rewards of one
            name different weights.
    """
    data, sampling = recipe.data, algorithm.sampling
    parts = {part.section.name: part for part in inputs.train.parts if part.section is not None}
    scored_apart = {source.name for source in data.sources if source.reward is not None}
    rest = {name: part for name, part in parts.items() if name not in scored_apart}
    scorer = scorer_of(recipe.reward, rest if parts else {"": inputs.train}, data)
    collector = Collector(inputs.tokenizer, sampling, scorer, play, data.max_length, judges)
    sources: dict[str, Collector] = {}
    weights = dict(collector.weights)
    for source in data.sources:
        part = collector
        if source.reward is not None:
            part = replace(part, scorer=scorer_of(source.reward, {source.name: parts[source.name]}, data))
        if source.environment is not None:
            player = Player(
                source.environment, inputs.tokenizer, data.template_kwargs, recipe.rollout.stop_after_failures
            )
            stops = (*recipe.rollout.stop, *player.stop_strings)
            part = replace(part, play=player, sampling=replace(sampling, stop_strings=stops))
        if part is not collector:
            sources[source.name] = part
        for name, weight in part.weights.items():
            if weights.setdefault(name, weight) != weight:
                raise UserError(
                    f"data.train: the reward {name} of {source.name} has weight {weight:g}, and {weights[name]:g} for "
                    "another data set: give one of them another label"
                )
    return replace(collector, sources=sources)


def scorer_of(reward: RewardConfig | None, rows: Mapping[str, Rows], data: DataConfig) -> Scorer | None:
    """Opens reward functions and checks that rows have the columns that they read; None where there are none.

    Args:
        reward: a section of the recipe.
        rows: those that it scores, by the name of their data set.
        data: the section that names their columns.

    Raises:
        UserError: a function does not load, or a column is missing.
    """
    if reward is None or not reward.functions:
        return None
    scorer = Scorer(reward.functions, reward.deadline, reward.workers)
    for part in rows.values():
        columns = data.of(part.section).columns if part.section else data.columns
        scorer.check([*dotted(part[0]), *columns, *ADDED])
    return scorer
