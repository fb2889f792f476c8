"""The names of tensors in multimodal folders, beside those that a text-only folder gives them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tunix.hf.safetensors_io import tensors_of_folder
from tunix.models.config import DecoderConfig
from tunix.models.families.table import FAMILIES


def rename(key: str, prefixes: Sequence[tuple[str, str | None]]) -> str | None:
    """A tensor's name by the first of these prefixes that it has; None where it belongs to a part that is left out."""
    for theirs, ours in prefixes:
        if key.startswith(theirs):
            return None if ours is None else ours + key.removeprefix(theirs)
    return key


def spelling(config: DecoderConfig, base: Path | None) -> Callable[[str], str]:
    """How an export calls the tensors of a model, from the names that the tables of its family have.

    Args:
        config: the model's.
        base: the folder that the weights were loaded from, whose names a multimodal export keeps; None for none.

    Raises:
        UserError: a file of its weights is missing or damaged.
    """
    vision = FAMILIES[config.family].vision
    if config.vision is None or vision is None:
        return lambda name: name
    keys = () if base is None else tensors_of_folder(base)
    known = {rename(key, vision.prefixes): key for key in keys}
    return lambda name: known.get(name) or str(rename(name, vision.written))
