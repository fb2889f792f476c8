"""What samples and scores the completions of a run, in training and in its evaluations: one `Collector`, and one for
each data set of a mixture, and each task of `eval`, that has rewards or an environment of its own."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from tunix.algorithms.base import Algorithm
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.pipeline import eval_batches, prompt_of, reasons
from tunix.data.sources import Rows
from tunix.data.types import Accounting, Kept, Packed, Prompt
from tunix.errors import UserError
from tunix.protocols import Sampler
from tunix.recipe.sections import Sections
from tunix.rollout.collect import Collector, Judge
from tunix.rollout.config import EvalTask
from tunix.rollout.environments.adapters import evaluation_rows
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import ADDED
from tunix.rollout.rewards.config import RewardConfig
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.evaluation import Evaluation, TaskEvaluation
from tunix.run.inputs import Inputs
from tunix.run.judges import judges_of
from tunix.run.setup import Setup, layout


def collector_of(
    recipe: Sections, inputs: Inputs, algorithm: Algorithm, play: Player | None, judges: tuple[Judge, ...]
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
    scorer = Scorer(reward.functions, reward.deadline)
    for part in rows.values():
        columns = data.of(part.section).columns if part.section else data.columns
        scorer.check([*part.columns, *columns, *ADDED])
    return scorer


def evaluation_of(setup: Setup, inputs: Inputs, collector: Collector) -> Evaluation:
    """The evaluation on held-out rows: the loss of their completions, and the rewards of greedy answers."""
    recipe, algorithm = setup.recipe, setup.algorithm
    # A row has one greedy answer, which there is nothing to compare with.
    collector = replace(collector, judges=tuple(judge for judge in collector.judges if not judge.compares))
    rows, limit = inputs.held_out, recipe.eval.rows
    if rows is None:
        return Evaluation(algorithm, until=recipe.eval.until)
    held_out, prompts = [], []
    by_source: dict[str, list[Packed]] = {}
    if algorithm.held_out_on is not None and not (setup.samples and collector.weights):
        examples = inputs.examples(rows, recipe.data, algorithm.held_out_on)
        packed = layout(algorithm, setup.microbatcher.multiple)
        held_out = eval_batches(examples, recipe.batch_size, limit, packed)
        by_source = {x.source: eval_batches(x, recipe.batch_size, limit, packed) for x in examples.parts}
    if collector.weights and recipe.algorithm.has_lm_head:
        kind = RowKind.PROMPT if recipe.rollout.environment is None else RowKind.ROW
        prompts = _first_prompts(inputs.examples(rows, recipe.data, kind), limit)
    return Evaluation(algorithm, held_out, prompts, collector.greedy, recipe.eval.until, by_source)


def _first_prompts(examples: Examples, limit: int) -> list[Prompt]:
    """The prompts of the first rows; raises UserError where none has one."""
    read = list(examples.first(limit))
    prompts = [prompt_of(example) for example in read if isinstance(example, Kept)]
    if not prompts:
        why = reasons(sum(map(Accounting.of, read), Accounting()))
        raise UserError(f"{examples.rows.name}: none of its first {len(read)} rows has a prompt: {why}")
    return prompts


def task_prompts(task: EvalTask, recipe: Sections, inputs: Inputs) -> tuple[list[Prompt], DataConfig, list[str]]:
    """The prompts of a task of `eval`, after `EvalTask.in_run`; how they are rendered; and the columns of its rows.

    Raises:
        UserError: there are no such rows, or none of them has a prompt.
    """
    data = task.data_in_run(recipe.data)
    rows = evaluation_rows(data, task.environment, recipe.seed)
    assert rows is not None, "the recipe's rules want some"
    kind = RowKind.PROMPT if task.environment is None else RowKind.ROW
    return _first_prompts(inputs.examples(rows, data, kind), task.n), data, [*rows[0], *data.columns]


def task_of(
    number: int, setup: Setup, inputs: Inputs, collector: Collector, folder: Path, sampler: Future[Sampler]
) -> TaskEvaluation:
    """A task of `eval`; the run's `collector` plays it where it sets neither environment nor reward. `sampler` is the
    policy's, once it is there.

    Raises:
        UserError: its rows, environment or rewards are not there or do not fit; the message begins with its key.
    """
    recipe, tokenizer, written = setup.recipe, inputs.tokenizer, setup.recipe.eval.tasks[number]
    task = written.in_run(recipe.rollout.environment, recipe.reward)
    environment, reward = task.environment, task.reward
    try:
        prompts, data, columns = task_prompts(task, recipe, inputs)
        if written.environment is not None or written.reward is not None:
            play = Player(environment, tokenizer, data.template_kwargs) if environment else None
            stops = (*recipe.rollout.stop, *(play.stop_strings if play else ()))
            sampling = replace(setup.algorithm.sampling, stop_strings=stops)
            collector = Collector(tokenizer, sampling, None, play, data.max_length)
            if reward is not None:
                mesh = setup.sampling_mesh or setup.mesh
                judges = judges_of(reward, inputs.source, data, recipe.model.dtype, mesh, folder, sampler)
                scorer = Scorer(reward.functions, reward.deadline) if reward.functions else None
                collector = replace(collector, scorer=scorer, judges=judges)
        # An answer of a task has nothing to be compared with.
        collector = replace(collector, judges=tuple(judge for judge in collector.judges if not judge.compares))
        if collector.scorer is not None:
            collector.scorer.check([*columns, *ADDED])
        if not collector.weights:
            raise UserError("nothing scores the answers: its environment gives no rewards, so name some, reward")
    except UserError as error:
        raise UserError(f"eval.tasks.{number} ({task.name}): {error}") from error
    return TaskEvaluation(task, prompts, collector, recipe.rollout.temperature)
