"""A checked recipe becomes a job: mesh, rows, tokenizer, model, weights, trainer, algorithm.

In an order that finds mistakes early: what is cheap to check is checked before weights are read.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from tunix.algorithms.base import Algorithm
from tunix.data.pipeline import Batches, account, eval_batches, total_steps
from tunix.data.sources import Rows, open_rows
from tunix.data.tokenizer import Tokenizer
from tunix.loop import Job
from tunix.mesh import build_mesh
from tunix.recipe import Recipe, algorithm_class
from tunix.samples import Samples, prompts_of
from tunix.source import TOKENIZER, Source, adapted, of_recipe, weights, with_stops
from tunix.trainer.client import Machinery, Trainer
from tunix.trainer.optimizer import build_optimizer, build_schedule
from tunix.trainer.passes import Cut, rows_per_pass
from tunix.trainer.progress import Display, readable
from tunix.types import Batch, Sampling


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
    mesh = build_mesh(recipe.mesh)
    found = inputs(recipe, folder)
    algorithm: Algorithm = algorithm_class(recipe.algorithm.name)(recipe.algorithm)
    size = found.source.decoder.vocab_size
    read = {"tokenizer": found.tokenizer, "config": recipe.data, "batch_size": recipe.batch_size}
    read |= {"train_on": algorithm.train_on, "vocab_size": size}
    # What is wrong with every row (no tokenizer, no chat template, a mistyped column) is told before weights are read.
    first = Rows(found.train.name, [found.train[0]])
    account(first, found.tokenizer, recipe.data, algorithm.train_on, size)
    batches = Batches(found.train, seed=recipe.seed, epochs=recipe.epochs, **read)
    held_out = eval_batches(found.held_out, limit=recipe.eval.rows, **read) if found.held_out else []
    total = recipe.steps or total_steps(len(found.train), recipe.batch_size, recipe.epochs or 1)
    trainer = build_trainer(recipe, found.source, mesh, total)
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
        exports_adapter=recipe.adapter is not None and found.source.stands_alone,
    )


def build_trainer(recipe: Recipe, source: Source, mesh: Mesh, total: int) -> Trainer:
    """The model with its weights on the mesh, and the optimizer.

    Args:
        total: updates of the run, for the schedule.
    """
    decoder = with_stops(source)
    model = adapted(decoder, recipe.model, recipe.adapter)
    full = recipe.adapter is None
    trained = recipe.model.param_dtype or "float32"
    frozen = recipe.model.param_dtype or recipe.model.dtype
    params, base = weights(source, model, mesh, recipe.seed, trained, frozen, full)
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
        files=source.files,
        base=source.name,
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
