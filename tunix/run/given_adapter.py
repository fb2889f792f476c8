"""An adapter that is there already goes on training: `adapter: {from: FOLDER}`.

What it is (rank, alpha, targets, ...) is read from its folder, and its A and B are where training starts. The base
stays the base: it is frozen, the reference, and what the export names.
"""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.config import DType
from tunix.errors import UserError
from tunix.hf.base_fingerprint import foreign_base, rounding_of
from tunix.hf.model_folder import resolve_folder, reward_model
from tunix.hf.peft_adapter import HEAD, load_adapter
from tunix.hf.peft_config import CONFIG, described
from tunix.hf.safetensors_io import some
from tunix.hf.source import Source, exported
from tunix.lora.adapt import quantization
from tunix.lora.config import AdapterConfig
from tunix.models.model import Model, Params
from tunix.recipe.recipe import Recipe

KEY = "adapter.from"


def settled(recipe: Recipe, source: Source) -> tuple[Recipe, Source]:
    """The recipe with the whole `adapter` section that its `from` stands for, and the base below that adapter.

    Args:
        source: of `model`; where that ends in the very adapter that `from` names, its base is what is returned.

    Raises:
        UserError: there is no such adapter, it is none that tunix computes, belongs to another base, or the section
            contradicts it.
    """
    if recipe.adapter is None or recipe.adapter.source is None:
        return recipe, source
    folder = _folder(recipe.adapter.source)
    if source.merged is not None:
        if source.merged.resolve() != folder.resolve():
            raise UserError(
                f"{KEY}: model.path ends in the adapter {source.merged}, which would be merged below {folder}: name "
                "the base as model.path, or the same adapter in both places"
            )
        source = replace(source, merged=None, rounding=None)
    assert source.folder is not None, "the recipe is checked: there is a model.path"
    # Before the base's numbers: what kind it is, and whether the section agrees, costs nothing to say.
    whole = _whole(recipe.adapter, folder, source.decoder.tied)
    if doubt := foreign_base(folder, source.name, source.folder, source.decoder):
        print(doubt, file=sys.stderr)
    return recipe.model_copy(update={"adapter": whole}), source


def given_weights(adapter: AdapterConfig, model: Model, fresh: Params, trained: DType, mesh: Mesh) -> Params:
    """What trains: the adapter's own weights, and its tables and scalar head where it brings them.

    Args:
        adapter: `settled`.
        model: with that adapter.
        fresh: weights of all that trains; those that the folder does not have stay.
        trained: their dtype.

    Raises:
        UserError: its tensors are damaged or do not fit the model.
    """
    folder = Path(str(adapter.source))
    _, arrays = load_adapter(folder, model.config)
    if model.speaks and HEAD in arrays:
        raise reward_model(folder)
    if foreign := sorted(set(arrays) - set(model.shapes)):
        raise UserError(f"{KEY}: {folder} brings {some(foreign)}, which the model that trains does not have")
    places = model.shardings(mesh)
    own = {name: jax.device_put(jnp.asarray(array, trained), places[name]) for name, array in arrays.items()}
    return {**fresh, **own}


def _folder(path: str) -> Path:
    """The PEFT folder that a folder, a hub id or a run stands for."""
    local = Path(path).expanduser()
    try:
        folder = exported(local) if (local / "recipe.yaml").is_file() else resolve_folder(path)
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from error
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{KEY}: {folder} holds no {CONFIG}, so no adapter; `tunix export RUN OUT --adapter` writes that of a run"
        )
    return folder


def _whole(section: AdapterConfig, folder: Path, tied: bool) -> AdapterConfig:
    """What the folder says, and of the section what the folder does not know."""
    theirs = described(folder / CONFIG, tied).adapter
    given = section.model_fields_set
    for key in ("rank", "alpha", "ranks", "alphas", "targets", "rslora", "dora", "also"):
        mine = getattr(section, key)
        if key in given and _differs(theirs, key, mine):
            raise UserError(
                f"adapter.{key}: {mine} contradicts {folder}, which {KEY} names: its {key} is "
                f"{getattr(theirs, key)}. Leave {key} out"
            )
    rounding, asked = rounding_of(folder), quantization(section)
    if rounding is not None and "kind" in given and asked != rounding:
        raise UserError(
            f"adapter.kind: {folder} was trained on a base in {rounding.base} (tile {rounding.tile}): leave kind, base "
            "and tile out, or say the same"
        )
    how = {"kind": section.kind, "base": section.base, "tile": section.tile}
    if rounding is not None:
        how = {"kind": "qlora", "base": rounding.base, "tile": rounding.tile}
    return theirs.model_copy(update={**how, "dropout": section.dropout, "source": str(folder)})


def _differs(theirs: AdapterConfig, key: str, mine: object) -> bool:
    """Whether the adapter would be another one with this value of a key; patterns may say the same in other words."""
    if key in ("rslora", "dora", "also"):
        return getattr(theirs, key) != mine
    other = theirs.model_copy(update={key: mine})
    return other.targeted != theirs.targeted or other.modules != theirs.modules
