"""A checked recipe becomes a job: mesh, rows, tokenizer, model, weights, trainer, algorithm.

In an order that finds mistakes early: what is cheap to check is checked before weights are read.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.config import DType
from tunix.data.pipeline import (
    Batches,
    Prompts,
    account,
    cut_steps,
    eval_batches,
    eval_prompts,
    sequences_of,
    total_steps,
)
from tunix.data.shapes import TrainOn
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.hf.base_fingerprint import mark
from tunix.hf.source import TOKENIZER, Source, adapted, gives_scores, of_recipe, weights, with_stops
from tunix.lora.adapt import started
from tunix.mesh import build_mesh
from tunix.models.model import Params
from tunix.models.quantization import hardware as native
from tunix.models.quantization.fake_quant import check_unrounded
from tunix.models.quantization.formats import Quantization, bytes_per_weight, is_scale
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.recipe import Recipe
from tunix.rollout.collect import ADDED, Collector, Player, Rollouts, RolloutStream
from tunix.rollout.engine.warmup import Workload
from tunix.rollout.rewards.scorer import Scorer
from tunix.run.evaluation import Evaluation
from tunix.run.given_adapter import given_weights, settled
from tunix.run.loop import Job, Stream
from tunix.run.reference_cache import Answers, precompute
from tunix.run.reference_model import reference_source, reference_weights
from tunix.run.reward_model import judge
from tunix.run.row_layout import answers_together, cut_of, drawn_length, layout
from tunix.run.samples import Samples, prompts_of, readable_tokens
from tunix.run.teacher import Below, build_teacher, divided, teacher_source
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.trainer.progress import Display, readable
from tunix.trainer.trainer import Machinery, Trainer
from tunix.types import Sampling

MISMATCH: dict[DType, float] = {"float32": 1e-3, "bfloat16": 0.25}
"""The largest difference of trainer and sampler that is rounding; in bfloat16 five times the largest that was measured
(4.6e-2, Gemma 2 of four layers), since trained models are sharper than random ones. Where inputs are rounded to 8 bits,
that of bfloat16: two values that differ in their last bit may fall to either side."""


@dataclass(frozen=True)
class Inputs:
    """Rows and the model whose tokenizer reads them."""

    source: Source
    train: Rows
    held_out: Rows | None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What renders the rows; None serves token ids only."""
        return self.source.tokenizer


def inputs(recipe: Recipe, folder: Path) -> Inputs:
    """The model's structure, the tokenizer and the rows of a recipe.

    Args:
        folder: the run folder, where a tokenizer that is made on the spot is kept.
    """
    data = recipe.data
    train = open_rows(data.train, data.split)
    held_out = None
    if data.eval or data.eval_split:
        held_out = open_rows(data.eval or data.train, data.eval_split)
    return Inputs(of_recipe(recipe.model, data.chat_template, folder / TOKENIZER, train), train, held_out)


def assemble(recipe: Recipe, folder: Path, display: Display) -> Job:
    """Everything that the loop works with.

    Raises:
        UserError: something that the recipe names is missing or does not fit.
    """
    mesh = build_mesh(recipe.mesh, divided(recipe.teacher)[0])
    found = inputs(recipe, folder)
    recipe, source = settled(recipe, found.source)
    found = replace(found, source=source)
    teacher = teacher_source(recipe, found.source)
    environment, kwargs = recipe.rollout.environment, recipe.data.template_kwargs
    play = Player(environment, found.tokenizer, kwargs) if environment else None
    drawn = sampling(recipe, found, play.stop_strings if play else ())
    algorithm: Algorithm = algorithm_class(recipe.algorithm.name)(recipe.algorithm, drawn)
    named = algorithm.reference_path
    reference = None if named is None else reference_source(named, found.source)
    # What is wrong with every row (no tokenizer, no chat template, a mistyped column) is told before weights are read.
    first, size = Rows(found.train.name, [found.train[0]]), found.source.decoder.vocab_size
    account(first, found.tokenizer, recipe.data, read_of_rows(recipe, algorithm), size)
    scorer = _scorer(recipe, found)
    rewards = recipe.reward and judge(recipe.reward, found.tokenizer, recipe.data, recipe.model.dtype, mesh)
    collector = Collector(found.tokenizer, algorithm.sampling, scorer, play, recipe.data.max_length, rewards)
    stream = _stream(recipe, found, algorithm, collector, mesh)
    total = recipe.steps or _steps(recipe, found, algorithm)
    trainer = build_trainer(recipe, found.source, mesh, total, algorithm, found.tokenizer, teacher, reference)
    display.say(_described(trainer, found, mesh, total))
    display.say(_products(trainer, mesh))
    if algorithm.precomputes:
        algorithm.answers = _asked_reference(recipe, found, trainer, folder, display)
    evaluation = _evaluation(recipe, found, algorithm, collector)
    if algorithm.critic == "alone" and not gives_scores(found.source):
        display.say("there is no score.weight to go on from: the scalar head is new, and starts at 0")
    return Job(
        folder=folder,
        trainer=trainer,
        algorithm=algorithm,
        stream=stream,
        total=total,
        evaluation=evaluation,
        eval_every=recipe.eval.every,
        save_every=recipe.checkpoint.every,
        samples=_samples(recipe, evaluation, trainer, found, folder, display),
        exports_adapter=recipe.adapter is not None and found.source.stands_alone,
        scorer=scorer,
        workload=_workload(recipe, algorithm, evaluation),
    )


def _steps(recipe: Recipe, found: Inputs, algorithm: Algorithm) -> int:
    """Updates of the recipe's epochs, where no row is dropped."""
    epochs = recipe.epochs or 1
    if not recipe.data.cuts:
        return total_steps(len(found.train), recipe.batch_size, epochs)
    read = (algorithm.train_on, found.source.decoder.vocab_size)
    return cut_steps(found.train, found.tokenizer, recipe.data, recipe.batch_size, recipe.seed, epochs, *read)


def _asked_reference(recipe: Recipe, found: Inputs, trainer: Trainer, folder: Path, display: Display) -> Answers:
    """The reference's log-probs of all pairs, of the held-out ones too."""
    read = (found.tokenizer, recipe.data, "pairs", found.source.decoder.vocab_size)
    held_out = () if found.held_out is None else sequences_of(found.held_out, *read, limit=recipe.eval.rows)
    sequences = itertools.chain(sequences_of(found.train, *read), held_out)
    answers = precompute(sequences, trainer, recipe.model.dtype, recipe.data.train, folder, display)
    trainer.forget_reference()
    return answers


def _workload(recipe: Recipe, algorithm: Algorithm, evaluation: Evaluation) -> Workload | None:
    """What the sampler is asked at each step and at each evaluation, at most; None where that is nothing."""
    asked = len(evaluation.prompts)
    drawn = recipe.batch_size if algorithm.train_on == "prompt" else 0
    if not asked + drawn:
        return None
    group, replies = recipe.algorithm.samples_per_prompt, recipe.rollout.environment is not None
    return Workload(
        requests=max(asked, drawn * group),
        # An environment begins each episode in its own way.
        prompts=max(asked, drawn * (group if replies else 1)),
        prompt_length=recipe.data.max_length if replies else recipe.data.longest_prompt,
        length=recipe.data.max_length,
        replies=replies,
    )


def read_of_rows(recipe: Recipe, algorithm: Algorithm) -> TrainOn:
    """What is read of a row: an environment makes its prompts of the columns itself."""
    answered = algorithm.train_on == "prompt" and recipe.rollout.environment is not None
    return "row" if answered else algorithm.train_on


def sampling(recipe: Recipe, found: Inputs, stops: tuple[str, ...] = ()) -> Sampling:
    """How the policy's completions are drawn, as the loss is told too.

    Args:
        stops: texts that end a turn for an environment.
    """
    rollout = recipe.rollout
    return Sampling(
        max_tokens=recipe.data.longest_completion,
        temperature=rollout.temperature,
        stop_ids=found.source.stop_ids,
        stop_strings=(*rollout.stop, *stops),
    )


def build_trainer(
    recipe: Recipe,
    source: Source,
    mesh: Mesh,
    total: int,
    algorithm: Algorithm | None = None,
    tokenizer: Tokenizer | None = None,
    teacher: Source | None = None,
    reference: Source | None = None,
) -> Trainer:
    """The model with its weights on the mesh, and the optimizer.

    Args:
        total: steps of the run, for the schedule.
        algorithm: what will be asked of it; None where it is only exported.
        tokenizer: what stop strings are looked for with.
        teacher: of whom it learns.
        reference: what it is compared with, in place of the weights that it starts from.
    """
    decoder = with_stops(source)
    critic = None if algorithm is None else algorithm.critic
    heads = {"critic": critic in ("shared", "alone"), "speaks": critic != "alone"}
    check_unrounded(source.folder, source.rules, recipe.quantization)
    model = replace(adapted(decoder, recipe.model, recipe.adapter, recipe.quantization), **heads)
    full = recipe.adapter is None
    trained = recipe.model.param_dtype or "float32"
    frozen = recipe.model.param_dtype or recipe.model.dtype
    params, base = weights(source, model, mesh, recipe.seed, trained, frozen, full)
    if recipe.adapter is not None and recipe.adapter.source is not None:
        params = given_weights(recipe.adapter, model, params, trained, mesh)
    elif recipe.adapter is not None:
        params = started(recipe.adapter, model, params, base, trained, mesh)
    updates = total * recipe.algorithm.updates_per_step
    length, cut = cut_of(recipe, mesh, decoder, algorithm)
    machinery = Machinery(
        model=model,
        mesh=mesh,
        optimizer=build_optimizer(recipe.optimizer, updates, {name: model.axes[name] for name in params}),
        schedule=build_schedule(recipe.optimizer, updates),
        cut=cut,
        length=length,
        longest=recipe.data.max_length if algorithm is not None and algorithm.train_on == "prompt" else None,
        seed=recipe.seed,
        adapter=recipe.adapter,
        rules=recipe.quantization,
        files=source.files,
        base=source.name,
        mark=_mark(source, model.quantization) if recipe.adapter is not None else None,
        reference=algorithm is not None and algorithm.needs_reference,
        slots=recipe.rollout.slots,
        decode=None if tokenizer is None else tokenizer.decode,
    )
    own = _critic(recipe, machinery, params, base, updates) if critic == "own" else None
    taught = None if teacher is None else build_teacher(recipe, teacher, mesh, length, Below(source, model, base))
    compared = None if reference is None else reference_weights(reference, model, mesh)
    return Trainer(machinery, params, base, own, taught, compared)


def _mark(source: Source, rounding: Quantization | None) -> str | None:
    """What an adapter is told of its base; nothing where no folder holds that."""
    if source.folder is None or source.merged is not None:
        return None
    return mark(source.name, source.folder, source.decoder, rounding)


def _critic(recipe: Recipe, policy: Machinery, params: Params, base: Params, updates: int) -> Trainer:
    """A model of its own that values states. It starts from the policy's weights, and shares a frozen base with it."""
    # Only what is sampled from is to be rounded.
    model = replace(policy.model, critic=True, speaks=False, simulated=())
    dtype: DType = recipe.model.param_dtype or "float32"
    new: dict[str, DType] = {name: dtype for name in model.shapes if name not in policy.model.shapes}
    mine = {name: jax.numpy.copy(x) for name, x in params.items() if name in model.shapes}
    mine |= model.init(jax.random.key(recipe.seed), new, policy.mesh)
    rate = recipe.algorithm.model_dump().get("critic_learning_rate")
    config = recipe.optimizer.model_copy(update={"learning_rate": rate}) if rate else recipe.optimizer
    machinery = replace(
        policy,
        model=model,
        optimizer=build_optimizer(config, updates, {name: model.axes[name] for name in mine}),
        schedule=build_schedule(config, updates),
        reference=False,
    )
    return Trainer(machinery, mine, {name: x for name, x in base.items() if name in model.shapes})


def _scorer(recipe: Recipe, found: Inputs) -> Scorer | None:
    """The reward functions of a recipe, checked against the columns that the rows have."""
    if recipe.reward is None or not recipe.reward.functions:
        return None
    scorer = Scorer(recipe.reward.functions, recipe.reward.deadline, recipe.reward.workers)
    scorer.check([*found.train[0], *recipe.data.columns, *ADDED])
    return scorer


def _stream(recipe: Recipe, found: Inputs, algorithm: Algorithm, collector: Collector, mesh: Mesh) -> Stream:
    """What the steps are made of."""
    data, vocab_size = recipe.data, found.source.decoder.vocab_size
    read = {"rows": found.train, "tokenizer": found.tokenizer, "config": data, "vocab_size": vocab_size}
    read |= {"seed": recipe.seed, "epochs": recipe.epochs}
    if algorithm.train_on != "prompt":
        return Batches(batch_size=recipe.batch_size, train_on=algorithm.train_on, layout=layout(algorithm), **read)
    rounds = recipe.quantization is not None and recipe.quantization.inputs
    together = answers_together(recipe, mesh, found.source.decoder, algorithm)
    tolerance = recipe.rollout.mismatch_tolerance or MISMATCH["bfloat16" if rounds else recipe.model.dtype]
    return RolloutStream(
        Rollouts(
            prompts=[],
            collector=collector,
            stream=Prompts(**read, train_on=read_of_rows(recipe, algorithm)),
            size=recipe.batch_size,
            seed=recipe.seed,
            first=True,
            length=drawn_length(recipe, max(algorithm.members, together)),
            packing=bool(data.packing),
            members=algorithm.members,
            together=together,
            tolerance=tolerance,
            shown=recipe.rollout.samples,
        )
    )


def _evaluation(recipe: Recipe, found: Inputs, algorithm: Algorithm, collector: Collector) -> Evaluation:
    """The held-out rows: the loss of their completions, and the rewards of the model's own, greedily drawn."""
    if found.held_out is None:
        return Evaluation(algorithm)
    size, limit = found.source.decoder.vocab_size, recipe.eval.rows
    held_out, prompts = [], []
    if algorithm.held_out_on is not None and not (algorithm.train_on == "prompt" and collector.weights):
        read = {"batch_size": recipe.batch_size, "limit": limit, "train_on": algorithm.held_out_on, "vocab_size": size}
        held_out = eval_batches(found.held_out, found.tokenizer, recipe.data, layout=layout(algorithm), **read)
    if collector.weights and recipe.algorithm.speaks:
        how: TrainOn = "prompt" if recipe.rollout.environment is None else "row"
        prompts = eval_prompts(found.held_out, found.tokenizer, recipe.data, limit, size, how)
    greedy = replace(collector, sampling=replace(collector.sampling, temperature=0.0))
    return Evaluation(algorithm, held_out, prompts, greedy, recipe.eval.until)


def _samples(
    recipe: Recipe, evaluation: Evaluation, trainer: Trainer, found: Inputs, folder: Path, display: Display
) -> Samples:
    """Held-out prompts whose greedy answers are shown before and after; to an environment, the first turn."""
    number, tokenizer = recipe.eval.samples if recipe.algorithm.speaks else 0, found.tokenizer
    play = evaluation.collector.play if evaluation.collector else None
    if evaluation.prompts:
        asked = evaluation.prompts[:number]
        prompts: list = [prompt.tokens for prompt in asked]
        if play:
            prompts = [episode.prompt for episode in play([prompt.row for prompt in asked], seed=0).episodes]
        expected: list = [prompt.row.get("completion", prompt.row.get("answer", "")) for prompt in asked]
    else:
        members = evaluation.algorithm.members
        chosen = (one for packed in evaluation.held_out for one in packed.sequences[::members])
        prompts, rest = prompts_of(chosen, number)
        expected = [readable_tokens(tokens, tokenizer) for tokens in rest]
    greedy = Sampling(
        max_tokens=recipe.eval.sample_tokens,
        temperature=0.0,
        stop_ids=found.source.stop_ids,
        stop_strings=(*recipe.rollout.stop, *(play.stop_strings if play else ())),
    )
    return Samples(prompts, expected, trainer, tokenizer, greedy, folder / "samples.jsonl", display)


def _products(trainer: Trainer, mesh: Mesh) -> str:
    """How the layers multiply on these devices."""
    model, platform = trainer.machinery.model, mesh.devices.flat[0].platform
    if (rules := trainer.machinery.rules) is not None:
        return native.line(rules.kinds, model.dtype, platform, simulated=True)
    rounding = model.quantization
    return native.line([] if rounding is None else [(rounding.base, None)], model.dtype, platform)


def _described(trainer: Trainer, found: Inputs, mesh: Mesh, total: int) -> str:
    """What is about to run, in a line or two."""
    trained = sum(x.size for x in trainer.state.params.values())
    frozen = sum(x.size for name, x in trainer.frozen.items() if not is_scale(name))
    weights = f"{readable(trained)} weights train" + (f", {readable(frozen)} are frozen" if frozen else "")
    if trainer.teacher is not None:
        held = trainer.teacher.params
        own = [x.size for name, x in held.items() if trainer.frozen.get(name) is not x]
        shared = " beside the same base" if len(own) < len(held) else ""
        weights += f"; a teacher of {readable(sum(own))}{shared} ({trainer.teacher.model.config.family})"
    if (rounding := trainer.machinery.model.quantization) is not None:
        weights += f"; the base's matrices in {rounding.base}, {bytes_per_weight(trainer.frozen):.3f} bytes a weight"
    if (rules := trainer.machinery.rules) is not None:
        weights += f"; {rules.told}"
    devices = f"{mesh.size} x {jax.devices()[0].device_kind}"
    shape = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return (
        f"{found.source.decoder.family}: {weights}; {readable(len(found.train))} rows, {total} steps; "
        f"{devices}{f' ({shape})' if shape else ''}"
    )
