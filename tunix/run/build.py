"""Builds the job of a checked recipe: what a run is made of, in order.

The order reports mistakes early: whatever is cheap to check is checked before weights are read.
"""

import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

from tunix.data.mixing import rows_read
from tunix.data.pipeline import shuffled
from tunix.errors import UserError
from tunix.hf.model_folder import require_classifier
from tunix.hf.source import settled
from tunix.protocols import Sampler
from tunix.recipe.notes import total_steps, update_notes
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import Collector
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import ADDED
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.client import client_of
from tunix.run.collector import collector_of
from tunix.run.describe import details, device_notes, stage_lines
from tunix.run.evaluation import TaskEvaluation, samples_of
from tunix.run.frozen_models import divided, reference_source, teacher_source
from tunix.run.inputs import (
    Inputs,
    asynchronous,
    check_staleness,
    compare_views,
    evaluation_of,
    open_inputs,
    open_stream,
    task_prompts,
)
from tunix.run.judges import judges_of
from tunix.run.kernels import attention_of, check_exchange, check_products
from tunix.run.loop import Job
from tunix.run.reference_cache import reference_logprobs
from tunix.run.rehearsal import compiled_ahead
from tunix.run.setup import Setup, algorithm_of, apart, row_kind_of
from tunix.trainer.mesh_choice import memory_of
from tunix.trainer.progress import Display


def assemble(recipe: Recipe, folder: Path, display: Display, stage: str = "") -> Job:
    """Builds everything that the loop of a run needs, and displays what is trained on what, in a line that begins with
    `stage`, e.g. `stage 1 of 2, `.

    Raises:
        UserError: something that the recipe names is missing or does not fit.
    """
    devices, sampling_mesh = apart(recipe.rollout.devices, divided(recipe.teacher)[0])
    inputs = open_inputs(recipe, folder)
    # Completes the section of an adapter that is loaded from a folder, and makes its base the source.
    adapter, source = settled(recipe.adapter, inputs.source)
    recipe, inputs = recipe.model_copy(update={"adapter": adapter}), replace(inputs, source=source)
    compare_views(inputs)
    teacher = teacher_source(recipe, source)
    environment, data = recipe.rollout.environment, recipe.data
    stop_after = recipe.rollout.stop_after_failures
    play = Player(environment, inputs.tokenizer, data.template_kwargs, stop_after) if environment else None
    algorithm = algorithm_of(recipe, source.stop_ids, play.stop_strings if play else ())
    if algorithm.needs.values == "alone":
        require_classifier(source.decoder)

    # Devices, rows and kernels
    setup = Setup.on(devices, recipe, source, algorithm, memory_of(devices), sampling_mesh)
    mesh = setup.mesh
    check_staleness(setup)
    branched = setup.microbatcher.unit > 1
    model, attention = attention_of(source.decoder, recipe.model, mesh, setup.length, branched=branched)
    check_products(source.decoder, model.dtype, mesh)
    check_exchange(source.decoder, mesh)
    recipe = recipe.model_copy(update={"model": model})
    reference_path = algorithm.needs.reference_path
    reference = None if reference_path is None else reference_source(reference_path, source)

    # Mistakes that affect every row (no tokenizer, no chat template, a mistyped column) are reported before weights are
    # read.
    next(inputs.examples(inputs.train, data, row_kind_of(recipe, algorithm)).first())
    judges, sampler = (), Future[Sampler]()
    if recipe.reward is not None:
        judges = judges_of(recipe.reward, source, data, model.dtype, sampling_mesh or mesh, folder, sampler)
    collector = collector_of(recipe, inputs, algorithm, play, judges)
    tasks = [_task(i, setup, inputs, collector, folder, sampler) for i in range(len(recipe.eval.tasks))]
    total, epochs = recipe.steps, recipe.epochs or 1
    rows = rows_read(inputs.train, data, epochs)
    if total is None and data.divides_rows:
        # Pieces depend on the lengths and the order, so every row is rendered once for each epoch.
        examples = inputs.examples(inputs.train, data, algorithm.train_on)
        total = sum(1 for _ in shuffled(examples, recipe.batch_size, recipe.seed, epochs))
    elif total is None:  # if no row is dropped
        total = total_steps(rows, recipe.batch_size, 1)
    stream = open_stream(setup, inputs, collector, total)
    for note in (*device_notes(mesh), *update_notes(recipe, rows // epochs, total)):
        display.say(f"note: {note}")

    # Weights
    setup = replace(setup, recipe=recipe, updates=total * recipe.algorithm.updates_per_step)
    client = client_of(setup, teacher=teacher, reference=reference)
    sampler.set_result(client.sampler)
    display.say(stage + "\n".join(stage_lines(setup, inputs, total)))
    for line in details(setup, client.learner, inputs, total, attention):
        display.detail(line)
    if algorithm.needs.reference == "run":
        algorithm.precomputed_logprobs = reference_logprobs(setup, inputs, client, folder, display)
    evaluation = evaluation_of(setup, inputs, collector)
    if algorithm.needs.values == "alone" and not source.has_scalar_head:
        display.say("there is no score.weight to go on from: the scalar head is new, and starts at 0")
    stop = threading.Event()
    if recipe.rollout.max_staleness:
        stream = asynchronous(setup, stream, client, folder, total, stop)
    return Job(
        folder=folder,
        client=client,
        work=setup.work,
        algorithm=algorithm,
        stream=stream,
        total=total,
        evaluation=evaluation,
        tasks=tasks,
        eval_every=recipe.eval.every,
        saving=recipe.checkpoint,
        samples=samples_of(recipe, evaluation, client, inputs.tokenizer, folder, display),
        exports_adapter=adapter is not None and source.stands_alone,
        collector=collector,
        workload=setup.workload(len(evaluation.prompts)),
        compile_update=partial(compiled_ahead, setup, client),
        stop=stop,
    )


def _task(
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
                scorer = Scorer(reward.functions, reward.deadline, reward.workers) if reward.functions else None
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
