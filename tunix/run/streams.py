"""The inputs of a run's steps and evaluations: batches of given sequences, or prompts that the policy answers."""

import threading
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.algorithms.on_policy import OnPolicy
from tunix.config import RowKind
from tunix.data.pipeline import Batches, Prompts, cut_steps, eval_batches, eval_prompts, pictures_of_row
from tunix.distributed import processes
from tunix.errors import UserError
from tunix.protocols import Client
from tunix.recipe.notes import total_steps
from tunix.recipe.recipe import Recipe
from tunix.rollout.asynchronous import FILE, AsyncRollouts, Holding, Journal
from tunix.rollout.backlog import Backlog
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream
from tunix.run.evaluation import Evaluation, Samples, prompts_of, readable_tokens
from tunix.run.inputs import Inputs, answers_together, layout, microbatcher_of, row_kind_of, sampled_row_length
from tunix.run.loop import Stream
from tunix.trainer.progress import Display
from tunix.trainer.trainer import Trainer
from tunix.types import Sampling, Workload

MEASURED = 4
"""Micro-batches that the completions fill, at full length, whose log-probs are computed at a time while others are
sampled: of fewer, a larger share would be padding in the last one."""
MISMATCH: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.25, "int8": 1.0, "fp8": 1.0}
"""Default `rollout.mismatch_tolerance`: the largest difference of trainer and sampler that rounding explains. For
bfloat16, five times the largest measured one (4.6e-2, Gemma 2 of four layers), since trained models are sharper than
random ones. It is used too where activations are rounded to 8 bits: values that differ in their last bit may round in
different directions. Caches of 8 bits round keys and values that the trainer does not round, which is no mistake of
either: four times the largest difference of fp8 that was measured (0.24, a small model in float32 with heads of 8
numbers; docs/log.md)."""


ON_SERVERS: dict[str, float] = {"float32": 0.01, "bfloat16": 2.0}
"""The default with `rollout.engine: vllm`, whose kernels add in another order and keep other intermediate results. It
finds other weights, another model and another transform, not small defects: `mismatch/mean` shows those
(docs/log.md has what was measured)."""


def tolerance_of(recipe: Recipe) -> float:
    """The largest difference of the trainer's and the sampler's log-probs with which a run goes on, e.g. 1e-3."""
    rollout, dtype = recipe.rollout, recipe.model.dtype
    if rollout.mismatch_tolerance is not None:
        return rollout.mismatch_tolerance
    if rollout.engine == "vllm":
        return ON_SERVERS[dtype]
    rounds = recipe.quantization is not None and recipe.quantization.inputs
    return max(MISMATCH[kind] for kind in ("bfloat16" if rounds else dtype, rollout.cache_dtype or dtype))


def open_stream(recipe: Recipe, inputs: Inputs, algorithm: Algorithm, collector: Collector, mesh: Mesh) -> Stream:
    """The stream of step inputs: batches of the rows, or rollouts of their prompts."""
    data, vocab_size = recipe.data, inputs.source.decoder.vocab_size
    _, microbatcher = microbatcher_of(recipe, mesh, inputs.source.decoder, algorithm)
    if algorithm.train_on != RowKind.PROMPT:
        return Batches(
            inputs.train,
            inputs.tokenizer,
            data,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            epochs=recipe.epochs,
            train_on=algorithm.train_on,
            vocab_size=vocab_size,
            layout=layout(algorithm, microbatcher.multiple),
        )
    together = answers_together(recipe, mesh, inputs.source.decoder, algorithm)
    stream = Prompts(
        inputs.train,
        inputs.tokenizer,
        data,
        seed=recipe.seed,
        epochs=recipe.epochs,
        vocab_size=vocab_size,
        train_on=row_kind_of(recipe, algorithm),
    )
    spare = recipe.rollout.spare(recipe.batch_size)
    return RolloutStream(
        RolloutStep(
            prompts=[],
            collector=collector,
            stream=stream,
            backlog=Backlog(stream, collector.sampling) if spare else None,
            spare=spare,
            size=recipe.batch_size,
            seed=recipe.seed,
            first=True,
            length=sampled_row_length(recipe, max(algorithm.sequences_per_example, together)),
            packing=bool(data.packing),
            sequences_per_example=algorithm.sequences_per_example,
            together=together,
            multiple=microbatcher.multiple,
            tolerance=tolerance_of(recipe),
            pictures=pictures_of_row(data, microbatcher.unit),
            measured_together=MEASURED * microbatcher.rows * microbatcher.unit,
            shown=recipe.rollout.samples,
        )
    )


def check_ahead(recipe: Recipe, algorithm: Algorithm, mesh: Mesh, sampling: Mesh | None) -> None:
    """Refuses to sample ahead where it cannot be done; nothing happens where a recipe does not ask for it.

    Args:
        mesh: that of training.
        sampling: devices that only sample; None where both share all.

    Raises:
        UserError: with the reason.
    """
    if not recipe.rollout.max_staleness:
        return
    begin = f"rollout.max_staleness: {recipe.rollout.max_staleness}"
    if isinstance(algorithm, OnPolicy) and algorithm.needs_fresh is not None:
        raise UserError(f"{begin}: {algorithm.needs_fresh}")
    servers = recipe.rollout.engine != "tunix"
    if servers and recipe.rollout.in_flight == "continue":
        raise UserError(
            "rollout.in_flight: continue needs tunix's own engine in this process, which can be paused at any token; "
            "with servers completions finish under the weights that they began with: leave it out"
        )
    if processes.number() > 1 and not servers:
        raise UserError(
            f"{begin} needs one process or servers (rollout.engine: vllm), and there are {processes.number()} "
            "processes, whose engines would each be at another place when weights are handed over: leave it out"
        )
    if servers and mesh.size > 1 and recipe.reward is not None and recipe.reward.model is not None:
        raise UserError(
            f"{begin}: a reward model would share {mesh.size} devices with training, and each would wait for the "
            "other: sample with tunix's own engine on rollout.mesh.devices, which the reward model then uses too"
        )
    if not servers and sampling is None and mesh.size > 1:
        raise UserError(
            f"{begin}: programs of training and of sampling would wait for each other on {mesh.size} shared devices; "
            "give sampling some of its own, e.g. rollout.mesh.devices=1"
        )


def ahead_of(
    recipe: Recipe,
    stream: Stream,
    client: Trainer,
    algorithm: Algorithm,
    folder: Path,
    total: int,
    stop: threading.Event,
) -> Stream:
    """The stream of an asynchronous run, whose next steps are sampled ahead; the given one where a recipe does not ask
    for that. `stop` happens where the run is to stop."""
    staleness = recipe.rollout.max_staleness
    if not staleness:
        return stream
    assert isinstance(stream, RolloutStream)
    assert isinstance(algorithm, OnPolicy)
    assert isinstance(client.sampler, Holding)
    stream.like = replace(stream.like, mixed=True)
    journal = Journal(folder / FILE, recipe.identity)
    return AsyncRollouts(
        stream,
        client,
        client.sampler,
        algorithm.gather,
        journal,
        staleness=staleness,
        total=total,
        goes_on=recipe.rollout.in_flight == "continue",
        stop=stop,
    )


def steps_of(recipe: Recipe, inputs: Inputs, algorithm: Algorithm) -> int:
    """The number of steps in the recipe's epochs, if no row is dropped."""
    epochs = recipe.epochs or 1
    if not recipe.data.cuts:
        return total_steps(len(inputs.train), recipe.batch_size, epochs)
    return cut_steps(
        inputs.train,
        inputs.tokenizer,
        recipe.data,
        recipe.batch_size,
        recipe.seed,
        epochs,
        algorithm.train_on,
        inputs.source.decoder.vocab_size,
    )


def workload_of(recipe: Recipe, algorithm: Algorithm, evaluation: Evaluation) -> Workload | None:
    """The largest workload of the sampler at a step or an evaluation; None where neither samples."""
    held_out = len(evaluation.prompts)
    begun = recipe.batch_size + recipe.rollout.spare(recipe.batch_size)
    trained = begun if algorithm.train_on == RowKind.PROMPT else 0
    if not held_out + trained:
        return None
    group, replies = recipe.algorithm.samples_per_prompt, recipe.rollout.environment is not None
    return Workload(
        requests=max(held_out, trained * group),
        prompt_length=recipe.data.max_length if replies else recipe.data.longest_prompt,
        length=recipe.data.max_length,
    )


def evaluation_of(recipe: Recipe, inputs: Inputs, algorithm: Algorithm, collector: Collector, mesh: Mesh) -> Evaluation:
    """The evaluation on held-out rows: the loss of their completions, and the rewards of greedy answers."""
    if inputs.held_out is None:
        return Evaluation(algorithm)
    size, limit = inputs.source.decoder.vocab_size, recipe.eval.rows
    held_out, prompts = [], []
    if algorithm.held_out_on is not None and not (algorithm.train_on == RowKind.PROMPT and collector.weights):
        _, microbatcher = microbatcher_of(recipe, mesh, inputs.source.decoder, algorithm)
        held_out = eval_batches(
            inputs.held_out,
            inputs.tokenizer,
            recipe.data,
            batch_size=recipe.batch_size,
            limit=limit,
            train_on=algorithm.held_out_on,
            vocab_size=size,
            layout=layout(algorithm, microbatcher.multiple),
        )
    if collector.weights and recipe.algorithm.has_lm_head:
        kind = RowKind.PROMPT if recipe.rollout.environment is None else RowKind.ROW
        prompts = eval_prompts(inputs.held_out, inputs.tokenizer, recipe.data, limit, size, kind)
    greedy = replace(collector, sampling=replace(collector.sampling, temperature=0.0))
    return Evaluation(algorithm, held_out, prompts, greedy, recipe.eval.until)


def samples_of(
    recipe: Recipe, evaluation: Evaluation, client: Client, inputs: Inputs, folder: Path, display: Display
) -> Samples:
    """Held-out prompts whose greedy answers are shown before and after training; of episodes, the first turn."""
    number, tokenizer = recipe.eval.samples if recipe.algorithm.has_lm_head else 0, inputs.tokenizer
    play = evaluation.collector.play if evaluation.collector else None
    if evaluation.prompts:
        shown = evaluation.prompts[:number]
        prompts: list = [prompt.tokens for prompt in shown]
        pictures = [prompt.pictures for prompt in shown]
        if play:
            prompts = [episode.prompt for episode in play([prompt.row for prompt in shown], seed=0).episodes]
        expected: list = [prompt.row.get("completion", prompt.row.get("answer", "")) for prompt in shown]
    else:
        per_example = evaluation.algorithm.sequences_per_example
        chosen = (one for packed in evaluation.held_out for one in packed.sequences[::per_example])
        prompts, rest, pictures = prompts_of(chosen, number)
        expected = [readable_tokens(tokens, tokenizer) for tokens in rest]
    greedy = Sampling(
        max_tokens=recipe.eval.sample_tokens,
        temperature=0.0,
        stop_ids=inputs.source.stop_ids,
        stop_strings=(*recipe.rollout.stop, *(play.stop_strings if play else ())),
    )
    return Samples(prompts, expected, pictures, client, tokenizer, greedy, folder / "samples.jsonl", display)
