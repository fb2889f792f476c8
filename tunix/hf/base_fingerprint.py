"""Which base an adapter belongs to: a few numbers of every matrix, written beside it and compared when it is loaded;
and how the base was rounded when the adapter was trained (QLoRA), so that it is rounded again under it.

They are compared by their distance and not as a digest, because a base that was saved again in another dtype is the
same, and the sibling that it was fine-tuned to may be meant. So what is near passes, what has moved is noted, and only
weights that have nothing to do with each other are refused. An adapter that other tools wrote names its base, no more.

Axes: M matrices.
"""

import base64
import binascii
import json
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float

from tunix.errors import UserError
from tunix.hf.model_folder import named_tensors
from tunix.hf.peft_config import CONFIG
from tunix.hf.safetensors_io import DTYPES, Stored
from tunix.lora.adapt import quantization
from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.models.families.table import FAMILIES, read_json
from tunix.models.quantization.formats import Quantization
from tunix.models.quantization.modules import MODULES

FILE = "tunix_base.json"
"""Beside adapter_config.json; PEFT does not look at it."""
VALUES = 8
"""Numbers of each matrix."""
SAME = 0.02
"""Distance up to which two bases are one: bfloat16 moves numbers by 0.2 %, eight bits by 1 %."""
UNRELATED = 0.5
"""Distance from which they have nothing in common: independent weights are 1.2 apart, fine-tuned ones below 0.3."""

Numbers = Float[np.ndarray, "M 8"]


class Mark(NamedTuple):
    """What an adapter knows of its base."""

    base: str
    """Its name: a hub id or a path."""
    rounding: Quantization | None
    """How its matrices were rounded; None where they were not, or another tool wrote the adapter."""
    numbers: Numbers | None
    """None where another tool wrote the adapter."""


def mark(name: str, folder: Path, config: DecoderConfig, rounding: Quantization | None) -> str:
    """The text of FILE for adapters of a base.

    Args:
        name: hub id or path of the base.
        folder: where it is.
        rounding: what the adapter is trained on, of these weights.

    Raises:
        UserError: the folder's files are missing or damaged.
    """
    numbers = _numbers(folder, config)
    assert numbers is not None, "the base was loaded, so its tensors are there"
    held = base64.b64encode(numbers.astype(ml_dtypes.bfloat16).tobytes()).decode()
    rounded = None if rounding is None else {"base": rounding.base, "tile": rounding.tile}
    told = {"base": name, "rounded": rounded, "matrices": len(numbers), "numbers": held}
    return json.dumps(told, indent=2) + "\n"


def named_base(adapter: Path) -> str:
    """The base that a PEFT folder names; empty where it names none."""
    return str(read_json(adapter / CONFIG).get("base_model_name_or_path") or "")


def rounding_of(adapter: Path) -> Quantization | None:
    """How the base was rounded when an adapter was trained on it; None where nothing says that it was.

    Raises:
        UserError: the file that says it is damaged.
    """
    return _mark_of(adapter).rounding


def foreign_base(adapter: Path, name: str, folder: Path, config: DecoderConfig) -> str:
    """What there is to say where an adapter may belong to another base than the one that it is put on; else nothing.

    Args:
        adapter: a PEFT folder.
        name: hub id or path of the base that it is put on.
        folder: where that is.
        config: its structure.

    Raises:
        UserError: it belongs to weights that have nothing in common with these.
    """
    known = _mark_of(adapter)
    here = None if known.numbers is None else _numbers(folder, config)
    # Of another shape: loading says which of the two does not fit.
    if known.numbers is None or here is None or here.shape != known.numbers.shape:
        return _foreign_name(adapter, known.base, name)
    apart = distance(known.numbers, here)
    if apart <= SAME:
        return ""
    now = f"is put on {name}" if known.base != name else "its weights are others now"
    if apart < UNRELATED:
        return f"note: {adapter} was trained on {known.base} and {now}: the matrices have moved by {apart:.0%}"
    raise UserError(
        f"{adapter} was trained on {known.base} and {now}: the shapes fit, but the matrices have nothing in common. "
        f"Give it the base that it was trained on; if these weights are meant, remove {adapter / FILE}"
    )


def distance(one: Numbers, other: Numbers) -> float:
    """Mean over the matrices of `|a - b| / max(|a|, |b|)`: 0 for equal ones, about 1.2 for independent ones."""
    size = np.maximum(np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1))
    return float(np.mean(np.linalg.norm(one - other, axis=1) / np.maximum(size, np.finfo(np.float32).tiny)))


def _foreign_name(adapter: Path, named: str, name: str) -> str:
    """A note where the names differ in their last part: a folder is often moved, and seldom called something else."""
    if not named or Path(named).name == Path(name).name:
        return ""
    return f"note: {adapter} was trained on {named} and is put on {name}: their shapes fit, their weights may not"


def _numbers(folder: Path, config: DecoderConfig) -> Numbers | None:
    """A few of every matrix, from the files; None where one is not there as it should be, which loading will tell."""
    stored, table = named_tensors(folder, config.family), FAMILIES[config.family].tensors
    wanted = [table["embed/w"].name]
    wanted += [table[f"layers/{name}/w"].key(layer) for layer in range(config.num_layers) for name in MODULES.values()]
    if not all(key in stored and len(stored[key].shape) == 2 and stored[key].dtype in DTYPES for key in wanted):
        return None
    return np.stack([_some(stored[key]) for key in wanted])


def _some(stored: Stored) -> Float[np.ndarray, "8"]:
    """Of its middle row, evenly spaced."""
    rows, columns = stored.shape
    with stored.open() as piece:
        row = piece[rows // 2 : rows // 2 + 1, :][0]
    return row[np.linspace(0, columns - 1, VALUES).astype(int)].astype(np.float32)


def _mark_of(adapter: Path) -> Mark:
    if not (adapter / FILE).is_file():
        return Mark(named_base(adapter), None, None)
    said = read_json(adapter / FILE)
    try:
        held = np.frombuffer(base64.b64decode(said["numbers"], validate=True), ml_dtypes.bfloat16)
        rounded = said.get("rounded")
        rounding = None if rounded is None else quantization(AdapterConfig(kind="qlora", **rounded))
        return Mark(str(said["base"]), rounding, held.astype(np.float32).reshape(-1, VALUES))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UserError(f"{adapter / FILE} is damaged ({error}): copy the adapter again, or remove this file") from None
