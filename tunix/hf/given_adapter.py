"""Training continues from an existing adapter: `adapter: {from: FOLDER}`.

Its settings (rank, alpha, targets, ...) are read from its folder, and training starts from its A and B. The base stays
the base: it is frozen, it is the reference, and the export names it.
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
from tunix.hf.run_export import exported
from tunix.hf.safetensors_io import some
from tunix.hf.source import Source
from tunix.lora.adapt import quantization
from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.models.model import Model, Params

KEY = "adapter.from"


def settled(adapter: AdapterConfig | None, source: Source) -> tuple[AdapterConfig | None, Source]:
    """The complete adapter section once `from` has been read, and the source of the base under that adapter.

    Args:
        adapter: the recipe's section; without a `from` it is returned unchanged.
        source: the model's; where it ends in the same adapter that `from` names, its base is returned.

    Raises:
        UserError: there is no such adapter, tunix does not support its kind, it belongs to another base, or the section
            contradicts it.
    """
    if adapter is None or adapter.source is None:
        return adapter, source
    folder = _folder(adapter.source)
    if source.merged is not None:
        if source.merged.resolve() != folder.resolve():
            raise UserError(
                f"{KEY}: model.path ends in the adapter {source.merged}, which would be merged below {folder}: name "
                "the base as model.path, or the same adapter in both places"
            )
        source = replace(source, merged=None, rounding=None)
    assert source.folder is not None, "the recipe is checked: there is a model.path"
    # Checked before the base's numbers are read, because it costs nothing.
    whole = _whole(adapter, folder, source.decoder)
    if doubt := foreign_base(folder, source.name, source.folder, source.decoder):
        print(doubt, file=sys.stderr)
    return whole, source


def given_weights(adapter: AdapterConfig, model: Model, fresh: Params, trained: DType, mesh: Mesh) -> Params:
    """The weights that train: the adapter's A and B, and its tables and scalar head where its folder has them.

    Args:
        adapter: the section that `settled` returned.
        model: the model with that adapter.
        fresh: initial weights of everything that trains; those that the folder does not have are kept.
        trained: dtype of the weights that train.
        mesh: where they are placed.

    Raises:
        UserError: its tensors are damaged or do not fit the model.
    """
    folder = Path(str(adapter.source))
    _, arrays = load_adapter(folder, model.config)
    if model.has_lm_head and HEAD in arrays:
        raise reward_model(folder)
    if foreign := sorted(set(arrays) - set(model.shapes)):
        raise UserError(f"{KEY}: {folder} brings {some(foreign)}, which the model that trains does not have")
    places = model.shardings(mesh)
    given = {name: jax.device_put(jnp.asarray(array, trained), places[name]) for name, array in arrays.items()}
    return {**fresh, **given}


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


def _whole(section: AdapterConfig, folder: Path, config: DecoderConfig) -> AdapterConfig:
    """The settings in the folder, with those of the section that a folder does not record (dropout, rounding)."""
    theirs = described(folder / CONFIG, config.tied).adapter
    given = section.model_fields_set
    for key in ("rank", "alpha", "ranks", "alphas", "targets", "rslora", "dora", "also"):
        mine = getattr(section, key)
        if key in given and _differs(theirs, key, mine, config):
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
    base = {"kind": section.kind, "base": section.base, "tile": section.tile}
    if rounding is not None:
        base = {"kind": "qlora", "base": rounding.base, "tile": rounding.tile}
    return theirs.model_copy(update={**base, "dropout": section.dropout, "source": str(folder)})


def _differs(theirs: AdapterConfig, key: str, mine: object, config: DecoderConfig) -> bool:
    """Whether this value of a key would change the adapter; different patterns may select the same modules."""
    if key in ("rslora", "dora", "also"):
        return getattr(theirs, key) != mine
    other = theirs.model_copy(update={key: mine})
    return other.modules_of(config) != theirs.modules_of(config)
