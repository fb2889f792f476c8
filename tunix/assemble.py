"""A checked recipe becomes a job: mesh, rows, tokenizer, model, weights, trainer, algorithm.

In an order that finds mistakes early: what is cheap to check is checked before weights are read.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.data.chat import with_template
from tunix.data.pipeline import Batches, eval_batches, total_steps
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.loop import Job
from tunix.mesh import build_mesh
from tunix.recipe import Recipe, algorithm_class
from tunix.samples import Samples, prompts_of
from tunix.source import Source, adapted, check_vocabulary, from_scratch, pretrained, weights, with_stops
from tunix.trainer.client import Machinery, Trainer
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.trainer.passes import Cut, rows_per_pass
from tunix.trainer.progress import Display, readable
from tunix.types import Batch, Sampling


@dataclass(frozen=True)
class Inputs:
    """Rows and the tokenizer that reads them."""

    source: Source
    tokenizer: Tokenizer | None
    train: Rows
    held_out: Rows | None
    files: Path | None
    """Folder whose tokenizer files an export takes along."""


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
    made = folder / "tokenizer"
    model = recipe.model
    source = from_scratch(model, made, train) if model.path is None else pretrained(model.path)
    check_vocabulary(source)
    tokenizer = source.tokenizer
    if data.chat_template is not None:
        if tokenizer is None:
            raise UserError("data.chat_template changes nothing for a model without a tokenizer: its rows are token ids")
        tokenizer = with_template(tokenizer, data.chat_template)
        if not made.is_dir():
            tokenizer.save(made)
    return Inputs(source, tokenizer, train, held_out, made if made.is_dir() else source.folder)


def assemble(recipe: Recipe, folder: Path, display: Display) -> Job:
    """Everything that the loop works with.

    Raises:
        UserError: something that the recipe names is missing or does not fit.
    """
    mesh = build_mesh(recipe.mesh)
    found = inputs(recipe, folder)
    algorithm: Algorithm = algorithm_class(recipe.algorithm.name)(recipe.algorithm)
    size = found.source.decoder.vocab_size
    read = {"tokenizer": found.tokenizer, "config": recipe.data, "batch_size": recipe.batch_size}
    read |= {"train_on": algorithm.train_on, "vocab_size": size}
    batches = Batches(found.train, seed=recipe.seed, epochs=recipe.epochs, **read)
    held_out = eval_batches(found.held_out, limit=recipe.eval.rows, **read) if found.held_out else []
    total = recipe.steps or total_steps(len(found.train), recipe.batch_size, recipe.epochs or 1)
    trainer = build_trainer(recipe, found, mesh, total)
    display.say(_described(trainer, found, mesh, total))
    return Job(
        folder=folder,
        trainer=trainer,
        algorithm=algorithm,
        batches=batches,
        total=total,
        evaluation=held_out,
        eval_every=recipe.eval.every,
        save_every=recipe.checkpoint.every,
        samples=_samples(recipe, held_out, trainer, found.tokenizer, folder, display),
    )


def build_trainer(recipe: Recipe, found: Inputs, mesh: Mesh, total: int) -> Trainer:
    """The model with its weights on the mesh, and the optimizer.

    Args:
        total: updates of the run, for the schedule.
    """
    decoder = with_stops(found.source)
    model = adapted(decoder, recipe.model, recipe.adapter)
    full = recipe.adapter is None
    trained = recipe.model.param_dtype or "float32"
    frozen = recipe.model.param_dtype or recipe.model.dtype
    params, base = weights(found.source, model, mesh, recipe.seed, trained, frozen, full)
    length, packing = recipe.data.max_length, recipe.data.packing
    rows = rows_per_pass(mesh, recipe.batch_size, recipe.micro_batch_size, length, packing)
    machinery = Machinery(
        model=model,
        mesh=mesh,
        optimizer=build_optimizer(recipe.optimizer, total, {name: model.axes[name] for name in params}),
        schedule=build_schedule(recipe.optimizer, total),
        cut=Cut(rows, mesh),
        length=length,
        seed=recipe.seed,
        adapter=recipe.adapter,
        files=found.files,
        base=recipe.model.path or str(recipe.output),
    )
    return Trainer(machinery, params, base)


def _samples(
    recipe: Recipe,
    held_out: list[Batch],
    trainer: Trainer,
    tokenizer: Tokenizer | None,
    folder: Path,
    display: Display,
) -> Samples:
    prompts, expected = prompts_of(held_out, recipe.eval.samples)
    stops = tokenizer.stop_ids if tokenizer else ()
    sampling = Sampling(max_tokens=recipe.eval.sample_tokens, temperature=0.0, stop_ids=stops)
    return Samples(prompts, expected, trainer, tokenizer, sampling, folder / "samples.jsonl", display)


def _described(trainer: Trainer, found: Inputs, mesh: Mesh, total: int) -> str:
    """What is about to run, in a line or two."""
    trained = sum(x.size for x in trainer.state.params.values())
    frozen = sum(x.size for x in trainer.frozen.values())
    weights = f"{readable(trained)} weights train" + (f", {readable(frozen)} are frozen" if frozen else "")
    devices = f"{mesh.size} x {jax.devices()[0].device_kind}"
    shape = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return (
        f"{found.source.decoder.family}: {weights}; {readable(len(found.train))} rows, {total} steps; "
        f"{devices}{f' ({shape})' if shape else ''}"
    )
