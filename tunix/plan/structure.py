"""The structure of a recipe's model without its weights and without a download."""

import re
from pathlib import Path

from tunix.config import ModelConfig
from tunix.errors import UserError
from tunix.hf.peft_folder import CONFIG, named_base
from tunix.hf.run_export import exported
from tunix.hf.source import Source, from_scratch
from tunix.models.config import DecoderConfig
from tunix.models.families.table import presets, read_config, with_vision


def structure(config: ModelConfig, pictures: bool = False) -> Source:
    """The source of a recipe's model, with neither weights nor tokenizer.

    Args:
        config: the recipe's `model` section.
        pictures: whether the tower that sees pictures belongs to the model.

    Raises:
        UserError: the model's sizes are not known here.
    """
    if config.path is None:
        return from_scratch(config, pictures)
    return Source(decoder_of(config.path, pictures), None, name=config.path)


def decoder_of(path: str, pictures: bool = False) -> DecoderConfig:
    """The structure of a model: from the config.json of a folder, of a run's export or of a hub id's files in the
    cache, or else from the preset that a hub id names.

    Raises:
        UserError: there is none of these.
    """
    folder = Path(path).expanduser()
    if (folder / "recipe.yaml").is_file():
        folder = exported(folder)
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file() and (base := named_base(folder)):
        return decoder_of(base, pictures)
    if folder.is_dir():
        return read_config(folder, pictures)
    if (cached := _cached(path)) is not None:
        return read_config(cached, pictures)
    if (name := named_preset(path)) is not None:
        return with_vision(presets()[name], published=True) if pictures else presets()[name]
    raise UserError(
        f"{path}: its sizes are not known here, and a plan downloads nothing: give a folder with its config.json, "
        "such as `model.path=folder`"
    )


def named_preset(name: str) -> str | None:
    """The preset that a hub id names: `qwen3-0.6b` for `Qwen/Qwen3-0.6B-Base`; None without one."""
    wanted = _bare(name.rpartition("/")[2])
    found = [one for one in presets() if re.search(rf"{re.escape(_bare(one))}(?![0-9.])", wanted)]
    return max(found, key=len, default=None)


def _bare(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def _cached(name: str) -> Path | None:
    """The folder in the hub's cache with the config.json of a hub id; None where it was never downloaded."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except huggingface_hub.errors.HFValidationError:  # no hub id
        return None
    return Path(found).parent if isinstance(found, str) else None
