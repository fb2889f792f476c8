"""What samples and scores the completions of a run: one `Collector`, and one for each data set of a mixture that has an
environment of its own."""

from dataclasses import replace

from tunix.algorithms.base import Algorithm
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import Collector, Judge
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import ADDED, read_reward
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
    named = {"": recipe.reward, **{source.name: source.reward for source in data.sources}}
    sections = {name: section for name, section in named.items() if section is not None}
    functions = [
        replace(read_reward(function, section.deadline), data_set=name)
        for name, section in sections.items()
        for function in section.functions
    ]
    scorer = None
    if functions:
        workers = [section.workers for section in sections.values() if section.workers]
        scorer = Scorer(functions, workers=max(workers, default=None), data_sets=sections.keys() - {""})
        for part in inputs.train.parts or (inputs.train,):
            columns = data.of(part.section).columns if part.section else data.columns
            scorer.check([*dotted(part[0]), *columns, *ADDED], part.section.name if part.section else "")
    sources: dict[str, Collector] = {}
    plain = Collector(inputs.tokenizer, sampling, scorer, play, data.max_length, judges)
    for source in data.sources:
        if source.environment is not None:
            player = Player(
                source.environment, inputs.tokenizer, data.template_kwargs, recipe.rollout.stop_after_failures
            )
            stops = (*recipe.rollout.stop, *player.stop_strings)
            sources[source.name] = replace(plain, play=player, sampling=replace(sampling, stop_strings=stops))
    return replace(plain, sources=sources)
