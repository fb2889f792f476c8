"""What samples and scores the completions of a run, in training and in its evaluations: one `Collector`, and one for
each data set of a mixture that has an environment of its own, and each task of `eval` that has one or rewards."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from tunix.algorithms.base import Algorithm
from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.pipeline import eval_batches, prompt_of, reasons
from tunix.data.types import Accounting, Kept, Packed, Prompt
from tunix.errors import UserError, install_command
from tunix.hf.source import Source
from tunix.inference.model import of_chats
from tunix.protocols import Sampler
from tunix.recipe.sections import Sections
from tunix.rollout.collect import Agents, Collector, Judge
from tunix.rollout.environments.adapters import LM_EVAL, evaluation_rows, require_package
from tunix.rollout.environments.config import EnvironmentConfig, History
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import ADDED, read_reward
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.evaluation import Evaluation, HarnessEvaluation, TaskEvaluation
from tunix.run.inputs import Inputs
from tunix.run.judges import judges_of
from tunix.run.setup import Setup, layout

Play = Player | Agents
"""What plays the episodes of an environment."""


def player_of(
    environment: EnvironmentConfig | None,
    source: Source,
    data: DataConfig,
    temperature: float,
    stop_after: int | None = None,
    history: History = "append",
) -> Play | None:
    """What plays the episodes of an environment for a model; None without one. An agent may ask for this temperature.

    Raises:
        UserError: it does not load.
    """
    if environment is None or environment.agent is None:
        kwargs = data.template_kwargs
        return environment and Player(environment, source.tokenizer, kwargs, stop_after, history)
    try:
        from tunix.serving.agents import AgentPlayer
    except ModuleNotFoundError as error:
        raise UserError(f"rollout.environment.agent needs {error.name}: {install_command('serve')}") from None
    return AgentPlayer(environment.agent, source, data, temperature, stop_after)


def collector_of(
    recipe: Sections, inputs: Inputs, algorithm: Algorithm, play: Play | None, judges: tuple[Judge, ...]
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
        scorer = Scorer(functions, data_sets=sections.keys() - {""})
        for part in inputs.train.parts or (inputs.train,):
            columns = data.of(part.section).columns if part.section else data.columns
            scorer.check([*part.columns, *columns, *ADDED], part.section.name if part.section else "")
    sources: dict[str, Collector] = {}
    plain = Collector(inputs.tokenizer, sampling, scorer, play, data.max_length, judges)
    for source in data.sources:
        if source.environment is not None:
            kwargs, rollout = data.template_kwargs, recipe.rollout
            player = Player(source.environment, inputs.tokenizer, kwargs, rollout.stop_after_failures, rollout.history)
            stops = (*recipe.rollout.stop, *player.stop_strings)
            sources[source.name] = replace(plain, play=player, sampling=replace(sampling, stop_strings=stops))
    collector = replace(plain, sources=sources)
    for player in (part.play for part in collector.parts if recipe.rollout.oversample > 1):
        if isinstance(player, Player) and not player.replayable:
            raise UserError(
                f"rollout.oversample: the environment {player.name} is not replayable, so that its episodes cannot be "
                "paused: set it to 1, or take another environment"
            )
    return collector


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
        examples = inputs.examples(rows, recipe.data, algorithm.held_out_on, taught=True)
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


def task_of(
    number: int, setup: Setup, inputs: Inputs, collector: Collector, folder: Path, sampler: Future[Sampler]
) -> TaskEvaluation | HarnessEvaluation:
    """A task of `eval`; the run's `collector` plays it where it sets neither environment nor reward. `sampler` is the
    policy's, once it is there.

    Raises:
        UserError: its rows, environment, rewards or harness are not there or do not fit; the message begins with its
            key.
    """
    recipe, tokenizer, written = setup.recipe, inputs.tokenizer, setup.recipe.eval.tasks[number]
    task = written.in_run(recipe.rollout.environment, recipe.reward)
    environment, reward = task.environment, task.reward
    try:
        if task.harness_task:
            require_package(str(task.data), "lm-eval", LM_EVAL, "lm-eval")
            if tokenizer is None:
                raise UserError("the model has no tokenizer, and the harness asks in texts")
            chat = tokenizer.chat_template is not None and of_chats(recipe.data, "the run")
            return HarnessEvaluation(task, inputs.source, chat, recipe.data)
        data = task.data_in_run(recipe.data)
        rows = evaluation_rows(data, environment, recipe.seed)
        assert rows is not None, "the recipe's rules want some"
        kind = RowKind.PROMPT if environment is None else RowKind.ROW
        prompts = _first_prompts(inputs.examples(rows, data, kind), task.n)
        if written.environment is not None or written.reward is not None:
            kwargs, history = data.template_kwargs, recipe.rollout.history
            play = Player(environment, tokenizer, kwargs, history=history) if environment else None
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
            collector.scorer.check([*rows[0], *data.columns, *ADDED])
        if not collector.weights:
            raise UserError("nothing scores the answers: its environment gives no rewards, so name some, reward")
    except UserError as error:
        raise UserError(f"eval.tasks.{number} ({task.name}): {error}") from error
    return TaskEvaluation(task, prompts, collector)
