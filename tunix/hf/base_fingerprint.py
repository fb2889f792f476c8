"""The base that an adapter belongs to: a few numbers of every matrix, saved with the adapter and compared at loading.

The file also says how the base was rounded when the adapter was trained (QLoRA), so that it is rounded in the same way
under it. Numbers are compared by their distance and not as a digest, because a base that was saved again in another
dtype is the same base, and a fine-tuned version of it may be intended. So equal weights pass, changed ones cause a
note, and only unrelated weights are refused. An adapter that another tool wrote has no numbers: it only names its base.
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
from tunix.hf.safetensors_io import DTYPES
from tunix.lora.adapt import quantization
from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.models.families.table import FAMILIES, read_json
from tunix.models.quantization.formats import Quantization
from tunix.models.quantization.modules import BANKS, projections_of

FILE = "tunix_base.json"
"""File in the adapter's folder, next to adapter_config.json; PEFT ignores it."""
VALUES = 8
"""How many numbers of each matrix are compared."""
SAME = 0.02
"""Distance up to which two bases count as the same: bfloat16 changes numbers by 0.2 %, eight bits by 1 %."""
UNRELATED = 0.5
"""Distance from which two bases are unrelated: independent weights are 1.2 apart, fine-tuned ones below 0.3."""

Numbers = Float[np.ndarray, "matrices 8"]


class BaseFingerprint(NamedTuple):
    """What an adapter's folder says about its base."""

    base: str
    """Name of the base: a hub id or a path, e.g. `meta-llama/Llama-3.2-1B`."""
    rounding: Quantization | None
    """How the base's matrices were rounded; None where they were not, or another tool wrote the adapter."""
    numbers: Numbers | None
    """A few numbers of each matrix of the base; None where another tool wrote the adapter."""


def fingerprint(name: str, folder: Path, config: DecoderConfig, rounding: Quantization | None) -> str:
    """The content of FILE for adapters of a base, as JSON text.

    Args:
        name: hub id or path of the base.
        folder: the folder with its weights.
        config: its structure.
        rounding: how the weights are rounded while the adapter trains on them; None where they are not.

    Raises:
        UserError: the folder's files are missing or damaged.
    """
    numbers = _numbers(folder, config)
    assert numbers is not None, "the base was loaded, so its tensors are there"
    encoded = base64.b64encode(numbers.astype(ml_dtypes.bfloat16).tobytes()).decode()
    rounded = None if rounding is None else {"base": rounding.base, "tile": rounding.tile}
    content = {"base": name, "rounded": rounded, "matrices": len(numbers), "numbers": encoded}
    return json.dumps(content, indent=2) + "\n"


def named_base(adapter: Path) -> str:
    """The base that a PEFT folder names; empty where it names none."""
    return str(read_json(adapter / CONFIG).get("base_model_name_or_path") or "")


def rounding_of(adapter: Path) -> Quantization | None:
    """How the base was rounded when an adapter was trained on it; None where the folder mentions no rounding.

    Raises:
        UserError: the fingerprint in the folder is damaged.
    """
    return _fingerprint_of(adapter).rounding


def foreign_base(adapter: Path, name: str, folder: Path, config: DecoderConfig) -> str:
    """A note to the user where an adapter may belong to another base than the one it is loaded on; empty if not.

    Args:
        adapter: a PEFT folder.
        name: hub id or path of the base that it is loaded on.
        folder: the folder with that base's weights.
        config: that base's structure.

    Raises:
        UserError: it belongs to weights that have nothing in common with these.
    """
    known = _fingerprint_of(adapter)
    numbers = None if known.numbers is None else _numbers(folder, config)
    # Where the shapes differ, loading reports which of the two does not fit.
    if known.numbers is None or numbers is None or numbers.shape != known.numbers.shape:
        # Names are compared by their last part: folders are often moved, but rarely renamed.
        if not known.base or Path(known.base).name == Path(name).name:
            return ""
        return (
            f"note: {adapter} was trained on {known.base} and is put on {name}: their shapes fit, their weights may not"
        )
    moved = distance(known.numbers, numbers)
    if moved <= SAME:
        return ""
    now = f"is put on {name}" if known.base != name else "its weights are others now"
    if moved < UNRELATED:
        return f"note: {adapter} was trained on {known.base} and {now}: the matrices have moved by {moved:.0%}"
    raise UserError(
        f"{adapter} was trained on {known.base} and {now}: the shapes fit, but the matrices have nothing in common. "
        f"Give it the base that it was trained on; if these weights are meant, remove {adapter / FILE}"
    )


def distance(a: Numbers, b: Numbers) -> float:
    """Mean over the matrices of `|a - b| / max(|a|, |b|)`: 0 for equal bases, about 1.2 for independent ones."""
    size = np.maximum(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    return float(np.mean(np.linalg.norm(a - b, axis=1) / np.maximum(size, np.finfo(np.float32).tiny)))


def _numbers(folder: Path, config: DecoderConfig) -> Numbers | None:
    """A few numbers of every matrix's middle row, evenly spaced, from the files; None where a matrix is missing or
    unusual (loading reports it)."""
    stored, table = named_tensors(folder, config.family), FAMILIES[config.family].tensors
    wanted = [table["embed/w"].name]
    # Without those of experts, which are most of a mixture's tensors.
    names = [f"layers/{name}/w" for ours in projections_of(config).values() for name in ours if name not in BANKS]
    matrices = [table[name] for name in names if name in table]
    wanted += [x.key(n) for n in range(config.num_layers) for x in matrices if n in config.layers_with(x.mixer)]
    if not all(key in stored and len(stored[key].shape) == 2 and stored[key].dtype in DTYPES for key in wanted):
        return None
    numbers = []
    for key in wanted:
        rows, columns = stored[key].shape
        (row,) = stored[key].read(rows // 2, rows // 2 + 1)
        numbers.append(row[np.linspace(0, columns - 1, VALUES).astype(int)].astype(np.float32))
    return np.stack(numbers)


def _fingerprint_of(adapter: Path) -> BaseFingerprint:
    if not (adapter / FILE).is_file():
        return BaseFingerprint(named_base(adapter), None, None)
    content = read_json(adapter / FILE)
    try:
        numbers = np.frombuffer(base64.b64decode(content["numbers"], validate=True), ml_dtypes.bfloat16)
        rounded = content.get("rounded")
        rounding = None if rounded is None else quantization(AdapterConfig.model_validate({"kind": "qlora", **rounded}))
        return BaseFingerprint(str(content["base"]), rounding, numbers.astype(np.float32).reshape(-1, VALUES))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UserError(f"{adapter / FILE} is damaged ({error}): copy the adapter again, or remove this file") from None
