"""Safetensors files without models: which tensors a folder holds, one tensor at a time in, one at a time out.

Reading goes through the safetensors library. A file is mapped anew for each tensor, because mapped pages count as ours
until the file is closed. Writing streams: the header needs only shapes, so one tensor is in memory at a time
(format: https://huggingface.co/docs/safetensors, 8 bytes of header length, a JSON header, then the bytes in order).
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from tunix.errors import UserError
from tunix.models.families.base import Piece
from tunix.models.families.table import read_json
from tunix.util.atomic_io import refuse_foreign

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
"""The dtypes that weights may have in a file."""
WRITTEN: Mapping[str, Any] = {
    **DTYPES,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
"""With those that rounded weights are written in."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    key: str
    """Its name in the file."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it: `BF16`."""

    @contextmanager
    def open(self) -> Iterator[Piece]:
        """The tensor, to be read by slices while the block runs."""
        if self.dtype == "F8_E4M3":  # which the library looks for in numpy, in vain
            yield cast(Piece, self._mapped())
        else:
            with _opened(self.file) as file:
                yield file.get_slice(self.key)

    def _mapped(self) -> np.ndarray:
        header, begins = _header(self.file)
        return np.memmap(self.file, WRITTEN[self.dtype], "r", begins + header[self.key]["data_offsets"][0], self.shape)


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    """A key of WRITTEN."""
    make: Callable[[], np.ndarray]
    """Brings the values to the host, when it is their turn."""

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * np.dtype(WRITTEN[self.dtype]).itemsize


def tensors_of_folder(folder: Path) -> dict[str, Stored]:
    """All tensors of a model folder, by the names in its files: `model.safetensors`, or the shards of the index.

    Raises:
        UserError: there are none, a file is missing or damaged, or the index names a tensor that its shard lacks.
    """
    if (folder / SINGLE).is_file():
        return tensors_of_file(folder / SINGLE)
    if not (folder / INDEX).is_file():
        _refuse_folder(folder)
    index = read_json(folder / INDEX)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise UserError(f"{folder / INDEX}: weight_map must name the file of each tensor.")
    found: dict[str, Stored] = {}
    for shard in sorted(set(shards.values())):
        refuse_foreign(folder, shard)
        if not os.path.isfile(folder / shard):  # pathlib would raise for a name that is too long
            lost = [key for key, file in shards.items() if file == shard]
            raise UserError(f"{folder / shard} is missing; {INDEX} says that it holds {some(lost)}. Download it again.")
        found |= tensors_of_file(folder / shard)
    lost = [key for key in shards if key not in found]
    if lost:
        raise UserError(f"{folder}: {INDEX} names {some(lost)}, which no shard holds. Download the folder again.")
    return found


def tensors_of_file(file: Path) -> dict[str, Stored]:
    """The tensors of one file.

    Raises:
        UserError: it is damaged, or not its folder's own.
    """
    refuse_foreign(file.parent, file.name)
    with _opened(file) as opened:  # which checks it
        keys, (header, _) = list(opened.keys()), _header(file)
    return {key: Stored(file, key, tuple(header[key]["shape"]), header[key]["dtype"]) for key in keys}


def check_tensors(
    stored: Mapping[str, Stored], wanted: Mapping[str, tuple[int, ...]], where: Path, hint: str = ""
) -> None:
    """Raises UserError unless each wanted tensor is there, in its shape and in a dtype that weights may have.

    Args:
        hint: added where names or shapes do not fit.
    """
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise UserError(
            f"{where}: {len(missing)} tensor(s) that the config asks for are missing: {some(missing)}. "
            f"{len(stored)} are there, {len(wanted)} are needed. {hint}".rstrip()
        )
    wrong = [name for name, shape in wanted.items() if stored[name].shape != shape]
    if wrong:
        found = "; ".join(f"{name} expected {wanted[name]}, found {stored[name].shape}" for name in wrong[:3])
        raise UserError(
            f"{stored[wrong[0]].file}: {len(wrong)} tensor(s) do not have the config's shape: {found}. {hint}".rstrip()
        )
    foreign = [name for name in wanted if stored[name].dtype not in DTYPES]
    if foreign:
        raise UserError(
            f"{stored[foreign[0]].file}: {len(foreign)} tensor(s) are stored as {stored[foreign[0]].dtype}: "
            f"{some(foreign)}. Only {', '.join(DTYPES)} are loaded: convert the folder to one of them."
        )


def write_tensors(file: Path, entries: Sequence[Entry]) -> None:
    """Writes one safetensors file; each tensor is made, written and forgotten."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        header[entry.key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + entry.size]}
        end += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            array = np.ascontiguousarray(entry.make())
            assert (array.shape, array.dtype) == (entry.shape, np.dtype(WRITTEN[entry.dtype])), (entry, array.dtype)
            out.write(array.reshape(-1).view(np.uint8).data)


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few names and how many more: `a, b, c and 4 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """What a whole file says of its tensors, and the byte at which the first begins."""
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        return json.loads(opened.read(length)), 8 + length


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        opened = safe_open(file, "numpy")
    except SafetensorError as error:
        raise UserError(f"{file} is not a whole safetensors file ({error}). Download or export it again.") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from error
    with opened:
        yield opened


def _refuse_folder(folder: Path) -> NoReturn:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if others:
        raise UserError(f"{folder} has {some(others)}, but neither {SINGLE} nor {INDEX}. Rename it or add the index.")
    if pickles:
        raise UserError(
            f"{folder} has its weights only as {some(pickles)}. tunix loads no pickles: convert them with "
            "transformers' `AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)`."
        )
    raise UserError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there.")
