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
from tunix.distributed.processes import lead
from tunix.errors import UserError
from tunix.hf.source import settled
from tunix.protocols import Sampler
from tunix.recipe.notes import total_steps, update_notes
from tunix.recipe.recipe import Recipe
from tunix.run.client import client_of
from tunix.run.collector import collector_of, evaluation_of, player_of, task_of
from tunix.run.describe import details, device_notes, stage_lines
from tunix.run.evaluation import samples_of
from tunix.run.frozen_models import divided, read_by_teachers, teacher_sources
from tunix.run.inputs import (
    asynchronous,
    check_staleness,
    compare_views,
    open_inputs,
    open_stream,
)
from tunix.run.judges import judges_of
from tunix.run.kernels import attention_of, check_exchange, check_products
from tunix.run.loop import Job
from tunix.run.profiler import Profiler
from tunix.run.reference_cache import reference_logprobs
from tunix.run.rehearsal import compiled_ahead
from tunix.run.setup import Setup, algorithm_of, apart
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
    teachers = teacher_sources(recipe, source)
    data, rollout = recipe.data, recipe.rollout
    play = player_of(
        rollout.environment, source, data, rollout.temperature, rollout.stop_after_failures, rollout.history
    )
    algorithm = algorithm_of(recipe, source.stop_ids, play.stop_strings if play else ())

    # Devices, rows and kernels
    setup = Setup.on(devices, recipe, source, algorithm, memory_of(devices), sampling_mesh)
    mesh = setup.mesh
    check_staleness(setup)
    model, attention = attention_of(source.decoder, recipe.model, mesh, setup.length, branched=setup.branched)
    check_products(source.decoder, model, mesh)
    check_exchange(source.decoder, mesh)
    recipe = recipe.model_copy(update={"model": model})

    # Mistakes that affect every row (no tokenizer, no chat template, a mistyped column) are reported before weights are
    # read.
    next(inputs.examples(inputs.train, data, recipe.row_kind).first())
    inputs, notes = read_by_teachers(recipe, teachers, inputs)
    judges, sampler = (), Future[Sampler]()
    if recipe.reward is not None:
        judges = judges_of(recipe.reward, source, data, model.dtype, sampling_mesh or mesh, folder, sampler)
    collector = collector_of(recipe, inputs, algorithm, play, judges)
    tasks = [task_of(i, setup, inputs, collector, folder, sampler) for i in range(len(recipe.eval.tasks))]
    total, epochs = recipe.steps, recipe.epochs or 1
    rows = rows_read(inputs.train, data, epochs)
    if total is None and data.divides_rows:
        # Pieces depend on the lengths and the order, so every row is rendered once for each epoch.
        examples = inputs.examples(inputs.train, data, recipe.algorithm.reads, taught=True)
        total = sum(1 for _ in shuffled(examples, recipe.batch_size, recipe.seed, epochs))
    elif total is None:  # if no row is dropped
        total = total_steps(rows, recipe.batch_size, 1)
    profile = recipe.logging.profile
    if profile is not None and (wrong := profile.beyond(total)):
        raise UserError(wrong)
    stream = open_stream(setup, inputs, collector, total)
    for note in (*device_notes(mesh), *update_notes(recipe, rows // epochs, total), *notes):
        display.say(f"note: {note}")

    # Weights
    setup = replace(setup, recipe=recipe, updates=total * recipe.algorithm.updates_per_step)
    client = client_of(setup, teachers=teachers)
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
        profiler=Profiler(folder, profile, display) if profile is not None and lead() else None,
        stop=stop,
    )
