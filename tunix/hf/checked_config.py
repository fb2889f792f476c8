"""The model that a folder describes, once its config.json has been compared with the headers of its weights.

A size that no file bears out is refused here, at the cost of reading headers: with a billion layers even listing what
is missing would take minutes.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix.errors import UserError
from tunix.hf.model_folder import named_tensors
from tunix.hf.safetensors_io import Stored, check_tensors
from tunix.models.config import DecoderConfig
from tunix.models.families.base import axis_sizes
from tunix.models.families.table import FAMILIES, family_of, from_hf, read_json

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_folder(folder: Path) -> DecoderConfig:
    """The model that a folder with weights describes.

    Raises:
        UserError: config.json is missing, broken or not supported; there are no weights, or a file of them is damaged;
            or the two disagree about a size.
    """
    file = folder / "config.json"
    raw = read_json(file)
    family = family_of(raw, file)
    stored = named_tensors(folder, family)
    _check_layers(raw, stored, file)
    config = from_hf(raw, file)
    sizes, wanted = axis_sizes(config), {}
    for tensor in FAMILIES[family].tensors.values():
        shape = tensor.their_shape(tuple(sizes[axis] for axis in tensor.ours.split()))
        keys = {tensor.key(layer) for layer in range(config.num_layers)}
        wanted |= dict.fromkeys(keys & stored.keys(), shape)
    check_tensors(stored, dict(sorted(wanted.items())), folder)
    return config


def _check_layers(raw: Mapping[str, Any], stored: Mapping[str, Stored], file: Path) -> None:
    """Refuses more layers than the files have; no other size is a length of something that is made of config.json."""
    text = raw.get("text_config")
    layers = (text if isinstance(text, dict) else raw).get("num_hidden_layers")
    there = len({at[1] for name in stored if (at := LAYER.match(name))})
    if isinstance(layers, int) and layers > there:
        raise UserError(
            f"{file}: num_hidden_layers = {layers}, but the files beside it have {there} layers: "
            f"model.layers.{there}. and what follows are missing. Download the folder again, or correct the number."
        )
