"""Safetensors files, independent of models: which tensors a folder contains; reading and writing one at a time.

The safetensors library checks a file. Its tensors are read by ranges of rows, into memory and not mapped: mapped pages
would be read one by one, and count as this process's memory until the file is closed. Writing streams: the header needs
only shapes; while one tensor is written, a few others are on their way from the device, bounded in bytes (format:
https://huggingface.co/docs/safetensors, 8 bytes of header length, a JSON header, then the bytes in order).

A model folder on an object store is read as a local one: its small files are copied into the user's cache folder, at a
path that says the address, and its weights stay where they are. In the copy a file of weights is its header, and a hole
as long as the rest: so it is checked as any other, and its tensors are read from the store, by ranges.
"""

import json
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from tunix.distributed import processes
from tunix.distributed.shared_folder import SharedFolder
from tunix.errors import UserError
from tunix.models.families.table import read_json
from tunix.util.ahead import ahead, limit_of
from tunix.util.atomic_io import refuse_foreign, replacing
from tunix.util.object_store import files_of, read

COPIES = Path("~/.cache/tunix/folders")
"""Where the copies are; deleted at any time, they are made again."""
COMPARED = 1 << 24
"""Elements of two tensors that are compared at a time."""
LONGEST_HEADER = 100_000_000
"""Bytes above which safetensors refuses a header."""


def local_copy(url: str, wanted: Sequence[str]) -> Path:
    """Copies the files of a folder but no tensors of its safetensors files, or brings an earlier copy up to date.

    Args:
        url: e.g. `gs://bucket/model`.
        wanted: patterns of the files' names.

    Raises:
        UserError: there is no such folder, or the store cannot be reached.
    """
    sizes = {name: size for name, size in files_of(url).items() if any(fnmatch(name, pattern) for pattern in wanted)}
    if not sizes:
        raise UserError(f"{url}: there is no such folder, or no model in it.")
    folder = COPIES.expanduser() / url.replace("://", "/")
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and file.name not in sizes:
            file.unlink()
    for name, size in sizes.items():
        end = size
        if name.endswith(".safetensors"):  # no more than its header
            begin = read(f"{url}/{name}", 0, min(size, 8))
            (length,) = struct.unpack("<Q", begin) if len(begin) == 8 else (0,)
            end = min(size, 8 + length if length <= LONGEST_HEADER else 8)
        content = read(f"{url}/{name}", 0, end)
        with replacing(folder / name) as file:
            file.write(content)
            file.truncate(size)
    return folder


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
"""The dtypes that weights may have in a file that is loaded."""
WRITTEN: Mapping[str, Any] = {
    **DTYPES,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
"""The dtypes that are read and written: `DTYPES` and those of rounded weights."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    key: str
    """Name of the tensor in the file."""
    shape: tuple[int, ...]
    dtype: str
    """The dtype as safetensors spells it, e.g. `BF16`."""
    begin: int
    """The byte of the file at which its values begin."""
    turned: bool = field(default=False, kw_only=True)
    """Whether `shape` is that of the transposed matrix: the file has it the other way round than its family's table."""
    turns: tuple["Stored", int, int] | None = field(default=None, kw_only=True)
    """`(whole, place, number)` of a matrix, or a bias, whose outputs take turns in the file with those of others: what
    they take turns in, whose turn comes first is 0, and how many take turns. It is not read by itself: `whole` is, each
    byte once, and taken apart where its parts belong (`tensor_transfer.py`)."""

    @property
    def size(self) -> int:
        """Bytes of memory that reading all of it takes."""
        return math.prod(self.shape) * np.dtype(WRITTEN[self.dtype]).itemsize

    def part(self, number: int) -> "Stored":
        """One of the tensors that it is a stack of along its first axis."""
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], begin=self.begin + number * size)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Reads the rows from `start` to before `stop`, all of them by default.

        Raises:
            UserError: the file cannot be read, or has become shorter.
        """
        rows = range(self.shape[0])[start:stop]
        array = np.empty((len(rows), *self.shape[1:]), WRITTEN[self.dtype])
        self.read_into(array, rows.start)
        return array

    def same_values(self, other: "Stored") -> bool:
        """Whether both hold the same numbers, of which some rows are compared at a time.

        Raises:
            UserError: a file cannot be read, or has become shorter.
        """
        if self.shape != other.shape:
            return False
        step = max(COMPARED // max(math.prod(self.shape[1:]), 1), 1)
        starts = range(0, self.shape[0], step)
        return all(np.array_equal(self.read(i, i + step), other.read(i, i + step)) for i in starts)

    def read_into(self, rows: np.ndarray, start: int) -> None:
        """Fills `rows`, contiguous and of the file's dtype, from row `start` on: a contiguous range of the file.

        Raises:
            UserError: the file cannot be read, or has become shorter.
        """
        assert self.turns is None, f"{self.key} is read with what takes turns in it"
        row = math.prod(self.shape[1:]) * rows.itemsize
        read_range(self.file, self.begin + start * row, rows.reshape(-1).view(np.uint8).data)


Sent = Callable[[], np.ndarray]
"""Waits for values that are on their way to the host, and lays them out as in the file."""


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype in the file: a key of WRITTEN."""
    send: Callable[[], Sent]
    """Sends the values on their way to the host, some time before they are written."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(WRITTEN[self.dtype]).itemsize


def tensors_of_folder(folder: Path) -> dict[str, Stored]:
    """All tensors of a model folder, by the names in its files: `model.safetensors`, or the shards of the index.

    A tensor is read from the shard that the index names for it, whatever other shards hold under the same name: an
    earlier version of the folder left that behind. Files that the index does not name are not read.

    Raises:
        UserError: there are none, a file is missing or damaged, the index names a tensor that its shard lacks, a tensor
            that the index does not name is in two shards, or there are both a whole file and shards.
    """
    is_whole = (folder / SINGLE).is_file()
    if not (folder / INDEX).is_file():
        if is_whole:
            return tensors_of_file(folder / SINGLE)
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        reason = f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there."
        if others := sorted(file.name for file in folder.glob("*.safetensors")):
            reason = f"{folder} has {some(others)}, but neither {SINGLE} nor {INDEX}. Rename it or add the index."
        elif pickles:
            reason = (
                f"{folder} has its weights only as {some(pickles)}. tunix loads no pickles: convert them with "
                "transformers' `AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)`."
            )
        raise UserError(reason)
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise UserError(f"{folder / INDEX}: weight_map must name the file of each tensor.")
    shards = sorted(set(places.values()))
    if is_whole and shards != [SINGLE]:
        for shard in shards:
            refuse_foreign(folder, shard)
        # Without its shards, an index is left over from before the weights were joined.
        if not any(os.path.isfile(folder / shard) for shard in shards):
            return tensors_of_file(folder / SINGLE)
        raise UserError(
            f"{folder} holds weights twice: {SINGLE}, and {some(shards)}, which {INDEX} names. Remove those that are "
            f"out of date: {SINGLE}, or {INDEX} and its shards."
        )
    tensors: dict[str, Stored] = {}
    for shard in shards:
        refuse_foreign(folder, shard)
        if not os.path.isfile(folder / shard):  # pathlib would raise for a name that is too long
            lost = [key for key, file in places.items() if file == shard]
            raise UserError(f"{folder / shard} is missing; {INDEX} says that it holds {some(lost)}. Download it again.")
        held = tensors_of_file(folder / shard)
        lost = [key for key, file in places.items() if file == shard and key not in held]
        if lost:
            raise UserError(
                f"{folder / shard} lacks {some(lost)}, which {INDEX} says that it holds. Download the folder again."
            )
        for key, stored in held.items():
            if key not in places and key in tensors:
                raise UserError(
                    f"{folder}: {key} is in both {tensors[key].file.name} and {shard}, and {INDEX} does not say which "
                    "is right. Download the folder again, or add the tensor to weight_map."
                )
            if places.get(key, shard) == shard:
                tensors[key] = stored
    return tensors


def tensors_of_file(file: Path) -> dict[str, Stored]:
    """The tensors of one file.

    Raises:
        UserError: it is damaged, or a link out of its folder.
    """
    refuse_foreign(file.parent, file.name)
    try:
        with safe_open(file, "numpy"):
            pass  # the library checks the header, and that the file holds what it names
    except SafetensorError as error:
        raise UserError(f"{file} is not a whole safetensors file ({error}). Download or export it again.") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from error
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        key: Stored(file, key, tuple(held["shape"]), held["dtype"], 8 + length + held["data_offsets"][0])
        for key, held in header.items()
    }


def check_tensors(
    stored: Mapping[str, Stored], wanted: Mapping[str, tuple[int, ...]], where: Path, hint: str = ""
) -> None:
    """Raises UserError unless each wanted tensor is there, in its shape and in a dtype that weights may have.

    Args:
        stored: the tensors that there are.
        wanted: names -> expected shapes.
        where: file or folder for the message.
        hint: added to the message where names or shapes do not fit.
    """
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise UserError(
            f"{where}: {len(missing)} tensor(s) that the config asks for are missing: {some(missing)}. "
            f"{len(stored)} are there, {len(wanted)} are needed. {hint}".rstrip()
        )
    in_table = {name: stored[name].shape[::-1] if stored[name].turned else stored[name].shape for name in wanted}
    wrong = [name for name, shape in wanted.items() if in_table[name] != shape]
    if wrong:
        shapes = "; ".join(f"{name} expected {wanted[name]}, found {in_table[name]}" for name in wrong[:3])
        raise UserError(
            f"{stored[wrong[0]].file}: {len(wrong)} tensor(s) do not have the config's shape: {shapes}. {hint}".rstrip()
        )
    foreign = [name for name in wanted if stored[name].dtype not in DTYPES]
    if foreign:
        raise UserError(
            f"{stored[foreign[0]].file}: {len(foreign)} tensor(s) are stored as {stored[foreign[0]].dtype}: "
            f"{some(foreign)}. Only {', '.join(DTYPES)} are loaded: convert the folder to one of them."
        )


def some(names: Sequence[str]) -> str:
    """The first three names and how many more: `a, b, c and 4 more`."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def read_range(file: Path, begin: int, into: memoryview) -> None:
    """Fills `into` with the bytes of a file from `begin` on; those of a copy come from the object store.

    Raises:
        UserError: the file cannot be read, or ends before.
    """
    copies = COPIES.expanduser()
    if file.is_relative_to(copies):
        scheme, *rest = file.relative_to(copies).parts
        data = read(f"{scheme}://{'/'.join(rest)}", begin, begin + len(into))
        into[: len(data)] = data
        into = into[len(data) :]
    else:
        try:
            with open(file, "rb", buffering=0) as opened:
                opened.seek(begin)
                while into and (count := opened.readinto(into)):
                    into = into[count:]
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror or error}.") from error
    if into:
        raise UserError(f"{file} has become shorter while it was read. Download or export it again.")


SHARD = 5 << 30
"""Bytes of a file of weights, above which they are split into several."""


def write_shards(folder: SharedFolder, entries: Sequence[Entry]) -> None:
    """Writes a folder's tensors to one file, or above SHARD bytes to several with an index.

    The processes of a run, all of which call it, share out the files.
    """
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(earlier.size for earlier in shards[-1]) + entry.size > SHARD:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        write_share(folder, 0, SINGLE, shards[0])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_share(folder, number - 1, name, shard)
        places |= {entry.key: name for entry in shard}
    if not processes.lead():
        return
    index = {"metadata": {"total_size": sum(entry.size for entry in entries)}, "weight_map": places}
    with folder.in_step():
        (folder.path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_share(folder: SharedFolder, number: int, name: str, entries: Sequence[Entry]) -> None:
    """Writes a safetensors file where its number is this process's; else sends its tensors, which are gathered by all
    together. Each tensor is written and freed in turn, and the next ones are sent meanwhile."""
    left = deque(entries)
    if folder.writes(number):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in entries:
            header[entry.key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end + entry.size]}
            end += entry.size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        limit = limit_of(entry.size for entry in entries)
        with folder.in_step(), open(folder.path / name, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for entry, arriving in ahead(entries, lambda x: x.size, lambda _: [left.popleft().send()], limit):
                # Taken out of the list, so that it is freed before the next ones are sent.
                array = np.ascontiguousarray(arriving.pop()())
                assert (array.shape, array.dtype) == (entry.shape, np.dtype(WRITTEN[entry.dtype])), (entry, array.dtype)
                out.write(array.reshape(-1).view(np.uint8).data)
                del array
    # All of them, or those that were not sent when the disk refused: each is a program of all processes.
    for entry in left:
        entry.send()()
