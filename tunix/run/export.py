"""The weights of a run, written for others: a Hugging Face folder, or a PEFT folder of the adapter alone."""

import json
from contextlib import ExitStack, closing
from pathlib import Path

from tunix.config import MeshConfig
from tunix.errors import UserError
from tunix.hf.source import TOKENIZER, of_recipe
from tunix.mesh import build_mesh
from tunix.models.quantization.schemes import check_packs
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.recipe import Recipe
from tunix.run.build import build_trainer
from tunix.run.given_adapter import settled
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.progress import Display
from tunix.trainer.trainer import Trainer
from tunix.util.atomic_io import refuse_taken


def export(run: Path, out: Path, *, adapter: bool = False, packed: bool = False, step: int | None = None) -> None:
    """Writes a run's weights as a Hugging Face folder, or its adapter as a PEFT folder.

    The run may be going on meanwhile, or have been made on other devices; its rows need not be there any more.

    Args:
        run: the run folder.
        out: the folder to write; it must not exist.
        adapter: the adapter alone; else it is merged into the base.
        packed: rounded weights in few bits; else each is the number on its grid.
        step: of which checkpoint; the newest by default.

    Raises:
        UserError: there is no such run, checkpoint or adapter, or `out` exists.
    """
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run} is no run folder: it has no recipe.yaml")
    # As it lies here: a later stage looks for the one before it beside itself, wherever the run was made.
    recipe = Recipe.load(run / "recipe.yaml", [f"output={json.dumps(str(run))}"])
    if recipe.stages:
        recipe = recipe.stages[-1]
        run = Path(recipe.output)
    if adapter and recipe.adapter is None:
        raise UserError(f"{run} trained all weights: there is no adapter to export; leave --adapter out")
    if packed:
        if recipe.quantization is None:
            raise UserError(f"{run} trained no rounded weights (`quantization` in its recipe); leave --packed out")
        check_packs(recipe.quantization)
    refuse_taken(out)
    with ExitStack() as stack:
        display = stack.enter_context(closing(Display("export", 0, 0)))
        checkpoints = stack.enter_context(closing(Checkpoints(run / "checkpoints", recipe.checkpoint, read_only=True)))
        wanted = step or checkpoints.latest()
        if wanted is None or wanted not in checkpoints.steps():
            asked = f" of step {step}" if step else ""
            raise UserError(f"{run} has no checkpoint{asked}; it has {checkpoints.steps()}")
        source = of_recipe(recipe.model, recipe.data.chat_template, run / TOKENIZER, rows=None)
        recipe, source = settled(recipe, source)
        algorithm = algorithm_class(recipe.algorithm.name)(recipe.algorithm)
        trainer = build_trainer(recipe, source, build_mesh(MeshConfig()), wanted, algorithm)
        trainer.state, _ = checkpoints.restore(wanted, trainer.state)
        trainer.export(out, adapter=adapter, packed=packed)
        report_merging(trainer, display)
        display.say(f"step {wanted} of {run} is in {out}")


def report_merging(trainer: Trainer, display: Display) -> None:
    """Says what became of a quantized base that an adapter was merged into."""
    model = trainer.machinery.model
    if trainer.merging is not None and model.quantization is not None:
        display.say(
            f"the {model.quantization.base} base was dequantized, and the adapter added to it: writing that as "
            f"{model.dtype} moves the matrices by {trainer.merging:.2%} (root mean square)"
        )
