"""Reads a folder's config.json and checks it against the headers of the folder's weights.

A size that contradicts the files is refused here, at the cost of reading headers: with a billion layers, even a list of
the missing tensors would take minutes.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix.errors import UserError
from tunix.hf.model_folder import named_tensors
from tunix.hf.safetensors_io import Stored, check_tensors
from tunix.models.config import DecoderConfig
from tunix.models.families.table import axes_of, family_of, from_hf, read_json, tensors_of

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_folder(folder: Path, pictures: bool = False) -> DecoderConfig:
    """The structure of the model in a folder with weights.

    Args:
        folder: has config.json and safetensors.
        pictures: whether the tower that sees pictures belongs to the model; else only the text part is read.

    Raises:
        UserError: config.json is missing, broken or not supported; there are no weights, or a file of them is damaged;
            or the two disagree about a size.
    """
    file = folder / "config.json"
    raw = read_json(file)
    family = family_of(raw, file)
    stored = named_tensors(folder, family)
    _check_layers(raw, stored, file)
    config = from_hf(raw, file, pictures)
    stored = stored if config.vision is None else named_tensors(folder, family, pictures=True)
    sizes, wanted = axes_of(config), {}
    for tensor in tensors_of(config).values():
        shape = tuple(sizes[axis] for axis in tensor.ours.split())
        keys = {key for layer in config.layers_with(tensor.mixer) for key in tensor.keys(layer, shape)}
        wanted |= dict.fromkeys(keys & stored.keys(), tensor.their_shape(shape))
    check_tensors(stored, dict(sorted(wanted.items())), folder)
    return config


def _check_layers(raw: Mapping[str, Any], stored: Mapping[str, Stored], file: Path) -> None:
    """Refuses more layers than the files have; no other size of config.json becomes the length of a list."""
    text = raw.get("text_config")
    layers = (text if isinstance(text, dict) else raw).get("num_hidden_layers")
    there = len({at[1] for name in stored if (at := LAYER.match(name))})
    if isinstance(layers, int) and layers > there:
        raise UserError(
            f"{file}: num_hidden_layers = {layers}, but the files beside it have {there} layers: "
            f"model.layers.{there}. and what follows are missing. Download the folder again, or correct the number."
        )
