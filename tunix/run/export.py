"""Exports the weights of a run as a Hugging Face folder, or its adapter alone as a PEFT folder.

Other formats begin from the first: it is written next to the output, converted, and removed.
"""

import tempfile
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from tunix.config import DType, MeshConfig
from tunix.errors import UserError
from tunix.hf.model_folder import resolve_folder
from tunix.hf.source import TOKENIZER, of_recipe, settled
from tunix.lora.adapt import quantization
from tunix.mesh import build_mesh
from tunix.models.model import Params
from tunix.models.quantization.schemes import check_packs
from tunix.recipe.algorithms import algorithm_class
from tunix.recipe.recipe import Recipe, recipe_of_run
from tunix.run.card import model_card
from tunix.run.client import initial_weights
from tunix.run.folder import checkpoint_folder, refuse_foreign_checkpoints
from tunix.run.setup import Setup
from tunix.trainer.checkpoint import Checkpoints
from tunix.trainer.mesh_choice import memory_of
from tunix.trainer.progress import Display
from tunix.trainer.state_files import load_params
from tunix.util.atomic_io import refuse_taken
from tunix.util.object_store import url_of


def export(
    run: Path,
    out: Path,
    *,
    adapter: bool = False,
    packed: bool = False,
    step: int | None = None,
    converts: bool = False,
) -> None:
    """Writes a run's weights as a Hugging Face folder, or its adapter as a PEFT folder.

    The run may still be training, or have trained on other devices; its rows are not needed.

    Args:
        run: the run folder.
        out: the folder to write; it must not exist.
        adapter: writes the adapter alone; else it is merged into the base.
        packed: stores rounded weights in few bits; else in the dtype of the model.
        step: the checkpoint to export; the newest by default.
        converts: whether the folder is only to be converted into another format.

    Raises:
        UserError: there is no such run, checkpoint or adapter, or `out` exists.
    """
    if (recipe := recipe_of_run(run)) is None:
        raise UserError(f"{run} is no run folder: it has no recipe.yaml")
    run = Path(recipe.output)
    if adapter and recipe.adapter is None:
        raise UserError(f"{run} trained all weights: there is no adapter to export; leave --adapter out")
    if packed:
        if recipe.quantization is None:
            raise UserError(f"{run} trained no rounded weights (`quantization` in its recipe); leave --packed out")
        check_packs(recipe.quantization)
    refuse_taken(out)
    refuse_foreign_checkpoints(recipe, moved=True)
    folder = checkpoint_folder(recipe, run)
    with (
        closing(Display("export", 0, 0)) as display,
        closing(Checkpoints(folder, recipe.checkpoint, read_only=True)) as checkpoints,
    ):
        chosen = step or checkpoints.latest()
        if chosen is None or chosen not in checkpoints.steps():
            which = f" of step {step}" if step else ""
            raise UserError(f"{run} has no checkpoint{which}; it has {checkpoints.steps()}")
        source = of_recipe(recipe.model, recipe.data, run / TOKENIZER, rows=None)
        adapter_section, source = settled(recipe.adapter, source)
        recipe = recipe.model_copy(update={"adapter": adapter_section})
        algorithm = algorithm_class(recipe.algorithm.name)(recipe.algorithm)
        mesh = build_mesh(MeshConfig())
        memory, updates = memory_of(list(mesh.devices.flat)), chosen * recipe.algorithm.updates_per_step
        setup = Setup(recipe, source, algorithm, mesh, memory, updates=updates, critic=algorithm.needs.values)
        model, adapted = setup.spec.model, recipe.adapter is not None
        dtypes: dict[str, DType] = setup.dtypes(model)[0]
        if not (adapted or packed or model.simulated):
            # Written as they were trained, so read in the dtype of the computation: 2 bytes each for bfloat16.
            dtypes = dict.fromkeys(dtypes, model.dtype)
        reads_frozen = model.config.vision or (adapted and not adapter)  # no base of an adapter that is written alone
        frozen = initial_weights(setup)[1] if reads_frozen else {}
        exporter = replace(setup.exporter, card=partial(model_card, recipe, source.name, step=chosen))
        params: Params = {}
        # The trained parameters alone, without optimizer, critic or sampler.
        checkpoints.restore(chosen, lambda path: params.update(load_params(path, model.abstract(dtypes, mesh))))
        report_merging(exporter(out, setup.spec, params, frozen, adapter=adapter, packed=packed), recipe, display)
        display.say(f"converting step {chosen} of {run}" if converts else f"step {chosen} of {run} is in {out}")


def export_as(
    format: Literal["maxtext", "stablehlo"],
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    unscanned: bool = False,
    batch: int | None = None,
    prompt_length: int | None = None,
    length: int | None = None,
) -> str:
    """Writes a run's weights, an adapter merged into its base, in another format than Hugging Face's.

    Args:
        format: whose checkpoint it is, or programs that run without tunix.
        run: the run folder; or a model folder or hub id, which is converted as it is.
        out: the folder to write; it must not exist.
        step: the checkpoint to export; the newest by default.
        unscanned: of MaxText each layer's arrays apart, not stacked.
        batch, prompt_length, length: the sizes of the programs, as in `Shapes` (1, 512, 1024).

    Returns:
        How what was written is loaded.

    Raises:
        UserError: there is no such run, model or checkpoint, it cannot be converted, or `out` exists.
    """
    if format == "maxtext":
        from tunix.interop.maxtext import export_maxtext

        convert = partial(export_maxtext, scanned=not unscanned)
    else:
        from tunix.interop.stablehlo import Shapes, export_stablehlo

        convert = partial(export_stablehlo, shapes=Shapes(batch or 1, prompt_length or 512, length or 1024))
    refuse_taken(out)
    if not (run / "recipe.yaml").is_file():
        if step is not None:
            raise UserError(f"--step {step}: {run} is no run folder, and has no checkpoints; leave it out")
        return convert(resolve_folder(str(run)), out)
    # Next to the output, where there is room for a model.
    near = None if url_of(out) else out.expanduser().absolute().parent
    if near is not None:
        near.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.tmp-", dir=near) as temporary:
        export(run, Path(temporary) / "model", step=step, converts=True)
        return convert(Path(temporary) / "model", out)


def report_merging(moved: float | None, recipe: Recipe, display: Display) -> None:
    """Reports how far merging an adapter moved the matrices of a quantized base.

    `moved` is their relative change; None where no quantized base was merged.
    """
    rounding = quantization(recipe.adapter)
    if moved is not None and rounding is not None:
        display.say(
            f"the {rounding.base} base was dequantized, and the adapter added to it: writing that as "
            f"{recipe.model.dtype} moves the matrices by {moved:.2%} (root mean square)"
        )
