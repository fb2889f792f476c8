"""Tensors of a folder that nothing here computes with, and that an export takes along: `FamilyText.passengers`.

Qwen 3.5's folders have a head that drafts several tokens (`mtp.`). It stays as it was while the model trains.
"""

from pathlib import Path
from typing import Any

from tunix.hf.safetensors_io import Entry, Stored, tensors_of_folder
from tunix.models.families.table import FAMILIES, read_json


def passengers(base: Path, family: str) -> list[Stored]:
    """The tensors of a folder that an export takes along.

    Raises:
        UserError: a file of its weights is missing or damaged.
    """
    prefixes = FAMILIES[family].passengers
    return [one for key, one in tensors_of_folder(base).items() if key.startswith(prefixes)] if prefixes else []


def passenger_fields(base: Path, family: str) -> dict[str, Any]:
    """What a folder's config.json says about these tensors."""
    raw = read_json(base / "config.json")
    raw = raw.get("text_config", raw)
    return {name: raw[name] for name in FAMILIES[family].passenger_fields if name in raw}


def as_it_is(stored: Stored) -> Entry:
    """A tensor of another folder, to be written with the same name and bytes."""
    return Entry(stored.key, stored.shape, stored.dtype, lambda: stored.read)
