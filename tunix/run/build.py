"""Builds the job of a checked recipe: mesh, rows, tokenizer, model, weights, client, algorithm.

The order reports mistakes early: whatever is cheap to check is checked before weights are read.
"""

import itertools
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.config import RowKind
from tunix.data.examples import Examples
from tunix.data.tokenizer import Tokenizer
from tunix.distributed.global_arrays import own_part
from tunix.hf.model_folder import require_classifier
from tunix.hf.source import Source, settled
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.notes import update_notes
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import Collector
from tunix.rollout.environments.remote import Player
from tunix.rollout.rewards.base import ADDED
from tunix.rollout.rewards.scorer import Scorer
from tunix.rollout.servers.probe import TEXT
from tunix.run.describe import device_notes, overview, products_line, remat_line, sampling_line, stage_line
from tunix.run.devices import apart, mesh_of
from tunix.run.frozen_models import build_teacher, divided, reference_source, reference_weights, teacher_source
from tunix.run.inputs import (
    Inputs,
    compare_views,
    held_out_line,
    microbatcher_of,
    open_inputs,
    row_kind_of,
    sampling_of,
)
from tunix.run.kernels import attention_of, check_exchange, check_products, experts_line
from tunix.run.loop import Job
from tunix.run.reference_cache import ReferenceLogprobs, precompute
from tunix.run.rehearsal import compiled_ahead
from tunix.run.reward_model import judge
from tunix.run.streams import (
    ahead_of,
    check_ahead,
    evaluation_of,
    open_stream,
    samples_of,
    steps_of,
    tolerance_of,
    workload_of,
)
from tunix.trainer.build import ClientSettings, ServerSettings, build_client
from tunix.trainer.frozen_model import reference_of
from tunix.trainer.mesh_choice import memory_of
from tunix.trainer.perf import Work
from tunix.trainer.progress import Display
from tunix.trainer.trainer import Trainer
from tunix.util.accelerators import accelerated


def assemble(recipe: Recipe, folder: Path, display: Display, stage: str = "") -> Job:
    """Builds everything that the loop of a run needs.

    Args:
        recipe: of one stage.
        folder: the run folder.
        display: is told what is trained on what.
        stage: what that line begins with, e.g. `stage 1 of 2, `.

    Raises:
        UserError: something that the recipe names is missing or does not fit.
    """
    devices, sampling_mesh = apart(recipe.rollout.devices, divided(recipe.teacher)[0])
    inputs = open_inputs(recipe, folder)
    # Completes the section of an adapter that is loaded from a folder, and makes its base the source.
    adapter, source = settled(recipe.adapter, inputs.source)
    recipe, inputs = recipe.model_copy(update={"adapter": adapter}), replace(inputs, source=source)
    compare_views(inputs)
    teacher = teacher_source(recipe, inputs.source)
    environment, kwargs = recipe.rollout.environment, recipe.data.template_kwargs
    play = Player(environment, inputs.tokenizer, kwargs) if environment else None
    sampling = sampling_of(recipe, inputs, play.stop_strings if play else ())
    algorithm: Algorithm = algorithm_class(recipe.algorithm.name)(recipe.algorithm, sampling)
    if algorithm.critic == "alone":
        require_classifier(inputs.source.decoder)
    memory = memory_of(devices)
    mesh, why = mesh_of(recipe, inputs.source.decoder, algorithm, devices, memory)
    check_ahead(recipe, algorithm, mesh, sampling_mesh)
    length, microbatcher = microbatcher_of(recipe, mesh, inputs.source.decoder, algorithm)
    branched = microbatcher.unit > 1
    model, attention = attention_of(inputs.source.decoder, recipe.model, mesh, length, branched=branched)
    recipe = recipe.model_copy(update={"model": model})
    check_products(inputs.source.decoder, model.dtype, mesh)
    check_exchange(inputs.source.decoder, mesh)
    reference_path = algorithm.reference_path
    reference = None if reference_path is None else reference_source(reference_path, inputs.source)
    # Mistakes that affect every row (no tokenizer, no chat template, a mistyped column) are reported before weights are
    # read.
    size = inputs.source.decoder.vocab_size
    next(Examples(inputs.train, inputs.tokenizer, recipe.data, row_kind_of(recipe, algorithm), size).first())
    scorer = None
    if recipe.reward is not None and recipe.reward.functions:
        scorer = Scorer(recipe.reward.functions, recipe.reward.deadline, recipe.reward.workers)
        scorer.check([*inputs.train[0], *recipe.data.columns, *ADDED])
    sampled_on = own_part(sampling_mesh or mesh)
    rewards = recipe.reward and judge(recipe.reward, inputs.tokenizer, recipe.data, recipe.model.dtype, sampled_on)
    collector = Collector(inputs.tokenizer, algorithm.sampling, scorer, play, recipe.data.max_length, rewards)
    stream = open_stream(recipe, inputs, algorithm, collector, mesh)
    total = recipe.steps or steps_of(recipe, inputs, algorithm)
    for note in (*device_notes(mesh), *update_notes(recipe, len(inputs.train), total)):
        display.say(f"note: {note}")
    client = client_of(
        recipe, inputs.source, mesh, total, algorithm, inputs.tokenizer, teacher, reference, sampling_mesh
    )
    display.say(f"{stage}{stage_line(recipe, len(inputs.train), mesh, total)}")
    if accelerated() and mesh.devices.flat[0].platform == "cpu":
        display.say("this machine has a GPU or a TPU that JAX does not use: pip install '.[gpu]', or '.[tpu]'")
    if (line := held_out_line(inputs)) is not None:
        display.say(line)
    display.detail(overview(client.learner, recipe.quantization, inputs, mesh, total))
    if why is not None and mesh.size > 1:
        display.detail(why)
    spec = client.learner.spec
    experts = experts_line(inputs.source.decoder, model.dtype, mesh)
    lines = (products_line(spec.model, recipe.quantization, mesh), attention, experts, remat_line(spec))
    display.detail("; ".join(filter(None, lines)))
    if algorithm.train_on == RowKind.PROMPT:
        display.detail(sampling_line(recipe.rollout, spec, memory, sampling_mesh))
    if algorithm.precomputes:
        algorithm.precomputed_logprobs = _precomputed_reference(
            recipe, inputs, algorithm.train_on, client, folder, display
        )
    evaluation = evaluation_of(recipe, inputs, algorithm, collector, mesh)
    if algorithm.critic == "alone" and not inputs.source.has_scalar_head:
        display.say("there is no score.weight to go on from: the scalar head is new, and starts at 0")
    stop = threading.Event()
    return Job(
        folder=folder,
        client=client,
        work=Work(
            spec.model.config,
            recipe.adapter,
            spec.microbatcher.rows,
            reference=algorithm.objective.reference,
            critic=algorithm.critic == "own",
        ),
        algorithm=algorithm,
        stream=ahead_of(recipe, stream, client, algorithm, folder, total, stop),
        total=total,
        evaluation=evaluation,
        eval_every=recipe.eval.every,
        saving=recipe.checkpoint,
        samples=samples_of(recipe, evaluation, client, inputs, folder, display),
        exports_adapter=recipe.adapter is not None and inputs.source.stands_alone,
        collector=collector,
        workload=workload_of(recipe, algorithm, evaluation),
        compile_update=partial(compiled_ahead, recipe, algorithm, inputs.source.decoder, client, mesh),
        stop=stop,
    )


def client_of(
    recipe: Recipe,
    source: Source,
    mesh: Mesh,
    total: int,
    algorithm: Algorithm | None = None,
    tokenizer: Tokenizer | None = None,
    teacher: Source | None = None,
    reference: Source | None = None,
    sampling: Mesh | None = None,
) -> Trainer:
    """The client of a recipe, with its weights on the mesh.

    Args:
        total: steps of the run, for the learning-rate schedule.
        algorithm: decides about reference, critic and rows; None for a client that only exports.
        tokenizer: decodes tokens in which stop strings are searched.
        teacher: the source of the teacher, if there is one.
        reference: the source of the reference, if it is not the initial weights.
        sampling: devices that only sample; None where sampling and training share all.
    """
    settings = settings_of(recipe, source, mesh, total, algorithm, tokenizer, reference, sampling)
    client = build_client(settings, source, mesh)
    learner = client.learner
    if teacher is not None:
        learner.teacher = build_teacher(recipe, teacher, source, learner)
    if reference is not None:
        learner.reference = reference_of(learner.spec, reference_weights(reference, learner.spec.model, mesh))
    return client


def settings_of(
    recipe: Recipe,
    source: Source,
    mesh: Mesh,
    total: int,
    algorithm: Algorithm | None,
    tokenizer: Tokenizer | None = None,
    reference: Source | None = None,
    sampling: Mesh | None = None,
) -> ClientSettings:
    """The settings of a recipe's client; for the arguments see `client_of`."""
    length, microbatcher = microbatcher_of(recipe, mesh, source.decoder, algorithm)
    samples = algorithm is not None and algorithm.train_on == RowKind.PROMPT
    return ClientSettings(
        model=recipe.model,
        optimizer=recipe.optimizer,
        updates=total * recipe.algorithm.updates_per_step,
        microbatcher=microbatcher,
        length=length,
        seed=recipe.seed,
        adapter=recipe.adapter,
        rules=recipe.quantization,
        reference=algorithm is not None and algorithm.needs_reference and reference is None,
        critic=None if algorithm is None else algorithm.critic,
        critic_learning_rate=recipe.algorithm.learning_rate_of_critic,
        longest=recipe.data.max_length if samples else None,
        slots=recipe.rollout.slots,
        sampler_memory=recipe.rollout.memory,
        sampler_mesh=recipe.rollout.devices,
        sampler_devices=sampling,
        sampler_ahead=recipe.rollout.max_staleness > 0,
        cache_dtype=recipe.rollout.cache_dtype,
        guesses=recipe.rollout.speculate,
        decode=None if tokenizer is None else tokenizer.decode,
        servers=_servers_of(recipe, tokenizer) if recipe.rollout.engine == "vllm" else None,
    )


def _servers_of(recipe: Recipe, tokenizer: Tokenizer | None) -> ServerSettings:
    """The servers that sample for a recipe; without a folder of its own weights are handed over in the run folder."""
    rollout = recipe.rollout
    return ServerSettings(
        urls=rollout.servers,
        timeout=rollout.timeout,
        folder=Path(rollout.weights_folder or Path(recipe.output) / "weights"),
        temperature=rollout.temperature,
        tolerance=tolerance_of(recipe),
        text=TEXT,
        ids=None if tokenizer is None else tuple(tokenizer.encode(TEXT)),
    )


def _precomputed_reference(
    recipe: Recipe, inputs: Inputs, kind: RowKind, client: Trainer, folder: Path, display: Display
) -> ReferenceLogprobs:
    """The reference's log-probs of all given sequences, held-out ones included; then its weights are freed."""
    size = inputs.source.decoder.vocab_size
    sequences = Examples(inputs.train, inputs.tokenizer, recipe.data, kind, size).sequences()
    if inputs.held_out is not None:
        held_out = Examples(inputs.held_out, inputs.tokenizer, recipe.data, kind, size)
        sequences = itertools.chain(sequences, held_out.sequences(recipe.eval.rows))
    of = "policy" if client.learner.reference is None else "reference"
    logprobs = precompute(sequences, client, of, recipe.model.dtype, recipe.data.train, folder, display)
    client.learner.reference = None
    return logprobs
