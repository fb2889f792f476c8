"""Opens datasets for access by row number: data files, folders, the hub, a function, or Python values.

`open_rows` determines the spec's form, opens it, picks the split, and returns `Rows`: a name for messages, a length,
row `i` as a dict, and a digest of the rows. `open_held_out` picks a split for evaluation. A spec that looks like a path
is never taken for a hub id, so a mistyped file is a missing file.

A file's suffix says its format, `.gz` or `.zst` after it that it is compressed. A folder's files are sorted into splits
by the words that the library `datasets` takes for them, in the names of files and folders; what would train rows twice,
or rows of two splits together, is refused with the names of both files.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import filecmp
import hashlib
import io
import itertools
import json
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

from tunix.data.config import RowsConfig
from tunix.errors import UserError, nearest
from tunix.util.faults import planned
from tunix.util.nested import dotted, reached
from tunix.util.plugins import is_reference, load_object
from tunix.util.yaml_io import parse_yaml

if TYPE_CHECKING:
    import pyarrow

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".arrow")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Suffix of a compressed text file -> the format's name in pyarrow."""

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words for it in the names of files and folders, as in `datasets.data_files.SPLIT_KEYWORDS`."""
_SPLITS = {word: split for split, words in KEYWORDS.items() for word in words}
_KEYWORD = re.compile(rf"(?<![^-._ 0-9/])({'|'.join(_SPLITS)})(?![^-._ 0-9/])", re.IGNORECASE)
_NUMBERED = re.compile(r"[-_.]\d+(-of-\d+)?$")
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_COPY = re.compile(r"^copy of |[-_. ]+(copy|bak|backup|old|orig)( ?\d+)?$| ?\(\d+\)$")
"""What a name has more than that of the file which it is a copy of, e.g. `train (1)`, `train - copy`, `train.bak`."""
_SUSPICIOUS = re.compile(r"train|held.?out|hold.?out", re.IGNORECASE)
"""What names of files have where they are of one split of several, in whatever words."""
_NOT_ROWS = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files that describe a dataset, which `datasets` writes beside its rows."""
_PEEKED = 16
"""Rows of each file of a folder whose columns are compared."""


@runtime_checkable
class Table(Protocol):
    """Anything with rows by number: a list, a `datasets.Dataset`, or one of the readers here."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...


def data_suffix(path: Path) -> str | None:
    """The suffix that says the format of a data file, e.g. `.jsonl` or `.csv.gz`; None for any other file."""
    *_, before, last = ("", "", *(suffix.lower() for suffix in path.suffixes))
    if last in COMPRESSED:
        return before + last if before in TEXT_SUFFIXES else None
    return last if last in SUFFIXES else None


def splits_named(name: str) -> set[str]:
    """The splits that a name's words stand for: `{"test"}` for `questions_test-v2`; empty for `questions`."""
    return {_SPLITS[word.lower()] for word in _KEYWORD.findall(name)}


def open_file(path: Path) -> Table:
    """The rows of a data file.

    Raises:
        UserError: the suffix says no format that is read, the file is empty, or it is not what the suffix says.
    """
    suffix = data_suffix(path)
    if suffix is None:
        raise UserError(
            f"{path}: rows are read from {', '.join(SUFFIXES)}, the first five also as {' or '.join(COMPRESSED)}, not "
            f"from {path.suffix or 'a bare name'!r}"
        )
    if not path.stat().st_size:
        raise UserError(f"{path} is empty: there are no rows to read")
    if suffix in (".parquet", ".arrow"):
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet

        try:
            if suffix == ".parquet":
                # Not `read_table`, which makes columns of folder names such as `split=train`.
                table = pyarrow.parquet.ParquetFile(path).read()
            else:  # mapped into memory
                source = pyarrow.memory_map(str(path))
                try:
                    table = pyarrow.ipc.open_stream(source).read_all()
                except pyarrow.ArrowInvalid:
                    source.seek(0)
                    table = pyarrow.ipc.open_file(source).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path} is no whole {suffix} file: {error}") from error
        _refuse_repeated(path, table.schema.names)
        return ArrowTable(table)
    content = None
    if path.suffix.lower() in COMPRESSED:  # in memory: rows of it cannot be found otherwise
        import pyarrow

        try:
            with pyarrow.OSFile(str(path)) as file:
                content = pyarrow.CompressedInputStream(file, COMPRESSED[path.suffix.lower()]).read()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path} is no whole {path.suffix} file: {error}. Copy or download it again") from error
    if not suffix.startswith((".csv", ".tsv")):
        # An object in each line, or one array of objects.
        lines = JsonLines(path, content)
        first = lines.line(0).lstrip()[:1] if len(lines) else b""
        is_array = first == b"["
        if not is_array:
            if first != b"{" or suffix.split(".")[1] != "json":
                return lines
            with contextlib.suppress(UserError):  # an object may go on in the next line
                lines[0]
                return lines
        try:
            document = _parse(path.read_bytes() if content is None else content)
        except ValueError as error:
            if not is_array:
                return lines
            raise UserError(
                f"{path} begins with '[', so that it is read as one JSON array of rows, and is not: {_reason(error)}. "
                "Without the bracket, each line is a row"
            ) from error
        if isinstance(document, dict):
            raise UserError(
                f"{path} is one JSON object with the keys {', '.join(map(repr, document))}, not rows: make it an array "
                "of objects, or write an object in each line"
            )
        for number, row in enumerate(document, 1):
            if not isinstance(row, dict):
                raise UserError(f"{path}: element {number} of its array is {row!r:.80}, not an object with columns")
        return document
    # A header, and values that are strings as they stand there: `007` is no number 7.
    content = path.read_bytes() if content is None else content
    delimiter, separators = ("\t", "tabs") if suffix.startswith(".tsv") else (",", "commas")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line} is not UTF-8 ({error.reason}): save it as UTF-8") from error
    csv.field_size_limit(2**31 - 1)  # the default refuses texts above 128 KiB
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[dict[str, str]] = []
    header: list[str] = []
    try:
        for values in filter(None, reader):
            if header and len(values) != len(header):
                raise UserError(
                    f"{path}, line {reader.line_num} has {len(values)} values for the {len(header)} columns of the "
                    f"header ({', '.join(header)}): put a value with {separators} in quotes"
                )
            if header:
                rows.append(dict(zip(header, values, strict=True)))
            header = header or values
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from error
    _refuse_repeated(path, header)
    if len(header) == 1 and (other := next((mark for mark in (";", "\t", ",", "|") if mark in header[0]), None)):
        raise UserError(
            f"{path}: its header is the single column {header[0]!r}; values are separated by {separators} here, not by "
            f"{other!r}"
        )
    return rows


class JsonLines:
    """The lines of a JSONL file: their positions are read once, each line is parsed on access."""

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        """Reads the file once.

        Args:
            path: where it is.
            content: what it holds where it is compressed; None to read each line from the file.

        Raises:
            UserError: its encoding is not UTF-8.
        """
        self._path, self._content = path, content
        self._starts = array("Q")
        self._numbers = array("Q")
        digest = hashlib.sha256()
        position = 0
        with self._opened() as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise UserError(f"{path} is text in UTF-16: save it as UTF-8")
                skipped = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0  # a byte order mark
                if text := line[skipped:].strip():
                    digest.update(text + b"\n")
                    self._starts.append(position + skipped)
                    self._numbers.append(number)
                position += len(line)
        self.digest = digest.hexdigest()
        """SHA-256 of the lines without blanks around them."""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> dict[str, Any]:
        where = f"{self._path}, line {self._numbers[i]}"
        try:
            row = _parse(self.line(i).strip())
        except ValueError as error:
            raise UserError(f"{where} is not JSON: {_reason(error)}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where} is {row!r:.80}, not an object with columns")
        return row

    def line(self, i: int) -> bytes:
        """The bytes of row `i`."""
        if planned("data"):
            return b""
        # Opened again for each row: that costs 10 us, and needs no lock between the prefetch thread and the main one.
        with self._opened() as file:
            file.seek(self._starts[i])
            return file.readline()

    def _opened(self) -> io.BufferedReader | io.BytesIO:
        return self._path.open("rb") if self._content is None else io.BytesIO(self._content)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError where a key is there twice, of which Python would take the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value: write null or leave the key out")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def _parse(text: bytes) -> Any:
    """The value of a JSON text in UTF-8; raises ValueError where it is none."""
    try:
        return _DECODER.decode(text.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _reason(error: ValueError) -> str:
    """Why a text is not JSON, and where in it."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    return f"{error.msg} at {line}column {error.colno}"


def _refuse_repeated(path: Path, columns: Sequence[str]) -> None:
    """Raises UserError where two columns have one name: a row would hold the last of them."""
    if repeated := [name for i, name in enumerate(columns) if name in columns[:i]]:
        raise UserError(f"{path} has the column {repeated[0]!r} twice: rename one of them")


class Chain:
    """Several tables one after the other."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self.tables = tables
        self._ends = list(itertools.accumulate(map(len, tables)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> Any:
        table, place = self.at(i)
        return table[place]

    def at(self, i: int) -> tuple[Any, int]:
        """The table of row `i`, and the row's number there."""
        t = bisect.bisect_right(self._ends, i)
        return self.tables[t], i - self._ends[t] + len(self.tables[t])


class ArrowTable(Chain):
    """The rows of a pyarrow table, taken from small zero-copy batches so that any row is found in microseconds."""

    def __init__(self, table: pyarrow.Table) -> None:
        super().__init__(table.to_batches(max_chunksize=1024))

    def __getitem__(self, i: int) -> dict[str, Any]:
        batch, place = self.at(i)
        return batch.slice(place, 1).to_pylist()[0]


def files_by_split(folder: Path) -> tuple[dict[str, list[Path]], bool]:
    """The data files below a folder, sorted, by their splits; and whether their names have any.

    Files in `data/` with names such as `NAME-00000-of-00002.parquet` belong to the split NAME. For others a word for
    train, validation or test counts, in the file's name or that of a folder; a file without one is a split by its own
    name. Where no name has such a word, all files are the split `train`. Hidden files and folders, folders whose names
    begin with `_`, and files that describe a dataset are left out.

    Raises:
        UserError: there are no data files, the names of some only hint at a split, or README.md says that there are
            several datasets.
    """
    # The README.md of a copy of a hub dataset lists its configurations as the hub reads it.
    readme, card = folder / "README.md", None
    if readme.is_file():
        head = re.match(r"---\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
        with contextlib.suppress(UserError):  # no card of a dataset
            card = parse_yaml(head[1], str(readme)) if head else None
    configurations = card.get("configs") if isinstance(card, dict) else None
    if isinstance(configurations, list) and len(configurations) > 1:
        names = ", ".join(str(each.get("config_name")) for each in configurations if isinstance(each, dict))
        raise UserError(f"{folder} holds several datasets, as its README.md says ({names}): name the files of one")
    files: list[Path] = []
    for file in sorted(folder.rglob("*")):
        *parents, name = file.relative_to(folder).parts
        hidden = name.startswith(".") or any(part.startswith((".", "_")) for part in parents)
        if not hidden and name not in _NOT_ROWS and data_suffix(file) and file.is_file():
            files.append(file)
    if not files:
        raise UserError(f"{folder} holds no {', '.join(SUFFIXES)} file")
    splits: dict[str, list[Path]] = {}
    is_split = False
    for file in files:
        *parents, name = file.relative_to(folder).parts
        stem, shard = _stem(file), _SHARD.fullmatch(_stem(file))
        names = {shard["split"]} if shard and parents == ["data"] else splits_named("/".join([*parents, stem]))
        is_split = is_split or bool(names)
        for split in names or {_NUMBERED.sub("", stem)}:
            splits.setdefault(split, []).append(file)
    if is_split:
        return {split: splits[split] for split in [*KEYWORDS, *splits] if split in splits}, True
    # `trainset` and `testset`, or `rows` and `held-out`: no words that stand by themselves, but no one split either.
    sorts = [bool(_SUSPICIOUS.search(str(file.relative_to(folder)))) for file in files]
    if len(set(sorts)) > 1:
        _refuse_pair(folder, files[0], files[sorts.index(not sorts[0])], "may be different splits")
    return {"train": files}, False


def open_split(folder: Path, split: str, splits: Mapping[str, Sequence[Path]]) -> Table:
    """The rows of one split of a folder, its files in the order of their names.

    Args:
        folder: the folder.
        split: one of the splits.
        splits: from `files_by_split`.

    Raises:
        UserError: one of its files may belong to another split, two files may hold the same rows, a shard is missing,
            or the files have different columns.
    """
    files = splits[split]
    for other in splits.keys() - {split}:
        if shared := {*files} & {*splits[other]}:
            raise UserError(
                f"{folder}: {min(shared).relative_to(folder)} may be of the split {split!r} or {other!r}: rename it, "
                "or name the file itself"
            )
    if other := next((file for file in files if data_suffix(file) != data_suffix(files[0])), None):
        _refuse_pair(folder, files[0], other, f"hold the split {split!r} in two formats")
    originals = {(file.parent, _stem(file).lower()): file for file in files}
    shards: dict[tuple[Path, str], list[tuple[int, Path]]] = {}
    sizes: dict[int, list[Path]] = {}
    common: set[str] | None = None
    for file in files:
        # The words that say its split, `test/` where a folder says it; the empty word where none does.
        *parents, _ = file.relative_to(folder).parts
        words = {f"{word.lower()}/" for part in parents for word in _KEYWORD.findall(part)}
        words |= {word.lower() for word in _KEYWORD.findall(_stem(file))}
        shard = _SHARD.fullmatch(_stem(file))
        words = {"data/"} if shard and parents == ["data"] else words or {""}
        common = words if common is None else common & words
        if not common:
            _refuse_pair(folder, files[0], file, f"are both named as the split {split!r}")
        name = _COPY.sub("", _stem(file).lower())
        if name != _stem(file).lower() and (original := originals.get((file.parent, name))):
            _refuse_pair(folder, original, file, "look like a file and its copy")
        for other in sizes.setdefault(file.stat().st_size, []):
            if filecmp.cmp(other, file, shallow=False):
                _refuse_pair(folder, other, file, "hold the same rows")
        sizes[file.stat().st_size].append(file)
        if shard:
            shards.setdefault((file.parent, shard["split"]), []).append((int(shard["count"]), file))
    for (count, first), *rest in shards.values():
        for total, file in rest:
            if total != count:
                _refuse_pair(folder, first, file, "are shards of different numbers")
        if 1 + len(rest) != count:
            raise UserError(
                f"{folder}: {first.relative_to(folder)} is one of {count} shards, of which {1 + len(rest)} are there: "
                "download them all, or name files instead of the folder"
            )
    tables = [open_file(file) for file in files]
    columns = [{name for i in range(min(len(table), _PEEKED)) for name in table[i]} for table in tables]
    widest = max(range(len(files)), key=lambda i: len(columns[i]))
    for file, names in zip(files, columns, strict=True):
        if not names <= columns[widest]:
            _refuse_pair(
                folder,
                files[widest],
                file,
                f"have rows of different columns ({', '.join(sorted(columns[widest]))}; {', '.join(sorted(names))})",
            )
    return Chain(tables)


def _refuse_pair(folder: Path, first: Path, second: Path, fault: str) -> NoReturn:
    names = f"{first.relative_to(folder)} and {second.relative_to(folder)}"
    raise UserError(f"{folder}: {names} {fault}: take one of them away, or name the file itself instead of the folder")


def _stem(file: Path) -> str:
    """A data file's name without the suffix that says its format."""
    return file.name[: -len(data_suffix(file) or "")]


_FILE_SUFFIXES = (*SUFFIXES, *COMPRESSED, ".txt", ".zip", ".py", ".xlsx")
COMPARED = 1 << 16
"""Rows that a digest reads at most: 25 us each."""
COMPARED_OBJECTS = 256
"""Rows that it reads at most where they hold more than JSON does, such as pictures, which take milliseconds each."""


class Rows:
    """The rows of a dataset by number, with a name for messages."""

    def __init__(
        self,
        name: str,
        table: Table,
        folder: Path | None = None,
        split: str | None = None,
        files: Iterable[Path] = (),
        columns: Iterable[str] = (),
    ) -> None:
        """Names a table; `open_rows` is the usual way to get one.

        Args:
            name: of the rows, for messages.
            table: the rows by number.
            folder: where relative paths in the rows begin; None for the working directory.
            split: which split of a dataset they are; None where it has no splits.
            files: those that they are read from, where that is known.
            columns: dotted names of columns within columns, which rows have as columns of these names.

        Raises:
            UserError: there are no rows.
        """
        if not len(table):
            raise UserError(f"{name} is empty: there are no rows to read")
        self.name, self.folder, self.split = name, folder, split
        self.files = frozenset(file.resolve() for file in files)
        self.parts: tuple[Rows, ...] = ()
        """The rows of each data set, one after the other, where they are of several; else empty."""
        self.section: RowsConfig | None = None
        """The recipe's item for these rows, where they are one of several data sets."""
        self._table, self._nested = table, tuple(name for name in columns if "." in name)
        self._pads = _is_arrow(table)

    @classmethod
    def joined(cls, parts: Sequence[Rows], sections: Sequence[RowsConfig]) -> Rows:
        """The rows of several data sets, one after the other, with the recipe's item for each."""
        for part, section in zip(parts, sections, strict=True):
            part.section = section
        rows = cls(" + ".join(part.name for part in parts), Chain(parts))
        rows.files = frozenset(file for part in parts for file in part.files)
        rows.parts = tuple(parts)
        return rows

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Row `i`, counted from 0, as a dict of columns; raises UserError where it is no mapping."""
        row = self._table[i]
        if not isinstance(row, Mapping):
            raise UserError(f"row {i + 1} of {self.name} is {row!r:.80}, not an object with columns")
        # Before nulls within columns are left out: one that is reached is there, and null.
        row = reached(row, self._nested) if self._nested else row
        return dict(_without_padding(row) if self._pads else row)

    @cached_property
    def digest(self) -> str:
        """What rows with the same values in the same order have in common, wherever and however they are stored.

        It covers the number of rows and up to `COMPARED` rows, evenly spread, without columns that are null; of more
        rows in JSON lines, also each line as it is written. Computed once.

        Raises:
            UserError: one of these rows cannot be read.
        """
        if self.parts:
            return hashlib.sha256(" ".join(part.digest for part in self.parts).encode()).hexdigest()
        try:
            json.dumps(self[0])
            most = COMPARED
        except (TypeError, ValueError):  # more than text, numbers, lists and mappings
            most = COMPARED_OBJECTS
        number, total = min(len(self), most), hashlib.sha256()
        for i in range(number):
            # The last row is among them: a file that is being written grows there.
            row = self[i * (len(self) - 1) // max(number - 1, 1)]
            values = sorted((str(name), value) for name, value in row.items() if value is not None)
            total.update(json.dumps(values, default=_as_json, skipkeys=True).encode() + b"\n")
        tables = self._table.tables if isinstance(self._table, Chain) else [self._table]
        lines = [table.digest for table in tables if isinstance(table, JsonLines)] if len(self) > most else []
        parts = [str(len(self)), total.hexdigest(), *lines]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    @property
    def columns(self) -> list[str]:
        """The names of the first row's columns, those within columns too."""
        return list(dotted(self[0]))

    def shares_rows_with(self, other: Rows) -> bool:
        """Whether rows of this dataset are known to be in another: they come from one file, or all are the same."""
        return bool(self.files & other.files) or (len(self) == len(other) and self.digest == other.digest)


def _as_json(value: Any) -> Any:
    """What stands for a value that JSON does not have, such as a picture, in a digest."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if hasattr(value, "tolist"):  # an array of any library, or a scalar of numpy
        return value.tolist()
    if hasattr(value, "tobytes"):  # a picture of PIL
        return hashlib.sha256(value.tobytes()).hexdigest()
    return str(value) if isinstance(value, date | time | timedelta | Decimal) else type(value).__name__


@dataclass(frozen=True)
class _Source:
    """A dataset that is not yet read: its splits, each with a function that opens its rows."""

    name: str
    splits: Mapping[str, Callable[[], Any]]
    has_splits: bool = True
    """False where `train` stands for all rows there are."""
    folder: Path | None = None
    files: Mapping[str, list[Path]] | None = None
    """The files of each split, where they are known."""

    def rows(self, split: str, columns: Iterable[str] = ()) -> Rows:
        """The rows of a split; an iterable without access by number is read into memory.

        Raises:
            UserError: there is no such split, or no rows in it.
        """
        if self.files and split not in self.splits:
            # A folder's splits have one name for all words that mean the same.
            split = next(iter(splits_named(split)), split)
        if split not in self.splits:
            present = ", ".join(map(repr, self.splits))
            raise UserError(f"{self.name} has no split {split!r}; it has {present}.{nearest(split, self.splits)}")
        rows = self.splits[split]()
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Table | Iterable):
            raise UserError(f"{self.name} gives {rows!r:.80}, not a list or an iterable of rows")
        table = rows if isinstance(rows, Table) else list(rows)
        files = self.files[split] if self.files else ()
        return Rows(self.name, table, self.folder, split if self.has_splits else None, files, columns)


def open_rows(spec: str | Path | Table | Iterable[Any], split: str | None = None, columns: Iterable[str] = ()) -> Rows:
    """Opens a dataset for random access.

    Args:
        spec: a data file (`SUFFIXES`); a folder of these or of `datasets.save_to_disk`; a hub id, with a
            configuration as `owner/name:config`; `module:function` or `file.py:function`, called without arguments;
            or rows themselves: a list, any iterable of dicts, or a mapping of split to rows.
        split: the split's name; None takes `train`, or the first one.
        columns: names that are read; a dotted one such as `reward_model.ground_truth` is a column within a column.

    Raises:
        UserError: nothing exists there, the form is unknown, the split does not exist, or there are no rows.
    """
    source = _source(spec)
    split = split or ("train" if "train" in source.splits else next(iter(source.splits), "train"))
    return source.rows(split, columns)


def open_held_out(
    spec: str | Path | Table | Iterable[Any], split: str | None = None, columns: Iterable[str] = ()
) -> Rows:
    """Opens the rows of a dataset that models are measured on.

    Args:
        spec: see `open_rows`.
        split: the split's name; None takes the one for validation, without it the one for test, and the only one of a
            dataset that has no other.
        columns: see `open_rows`.

    Raises:
        UserError: see `open_rows`; or the split is None and none or several could be meant.
    """
    source = _source(spec)
    names = [split] if split else list(source.splits)
    if len(names) == 1:
        return source.rows(names[0], columns)
    for kind in ("validation", "test"):
        fitting = [kind] if kind in names else [name for name in names if splits_named(name) == {kind}]
        if len(fitting) == 1:
            return source.rows(fitting[0], columns)
        if fitting:
            break
    raise UserError(
        f"{source.name} has the splits {', '.join(map(repr, names))}, and which is held out is not clear: name it in "
        "data.eval_split, or with --split for `tunix eval`"
    )


def _source(spec: str | Path | Table | Iterable[Any]) -> _Source:
    if isinstance(spec, Mapping):
        return _Source("the given rows", {str(split): lambda rows=rows: rows for split, rows in spec.items()})
    if not isinstance(spec, str | Path):
        return _Source("the given rows", {"train": lambda: spec}, has_splits=False)
    name, path = str(spec), Path(spec).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            import datasets

            try:
                saved = datasets.load_from_disk(str(path))
            except (OSError, ValueError, KeyError) as error:
                raise UserError(f"{path} was saved by `datasets`, but does not load: {error}") from error
            if not isinstance(saved, datasets.DatasetDict):
                return _Source(str(path), {"train": lambda: saved}, False, path)
            splits = {str(split): lambda rows=rows: rows for split, rows in saved.items()}
            return _Source(str(path), splits, folder=path)
        files, has_splits = files_by_split(path)
        opened = {split: partial(open_split, path, split, files) for split in files}
        return _Source(str(path), opened, has_splits, path, files)
    if path.is_file():
        return _Source(name, {"train": partial(open_file, path)}, False, path.parent, {"train": [path]})
    if is_reference(name):

        def call() -> Any:
            function = load_object(name)
            if not callable(function):
                raise UserError(f"{name} is a {type(function).__name__}, not a function that returns rows")
            return function()

        return _Source(name, {"train": call}, has_splits=False)
    if path.suffix in _FILE_SUFFIXES or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{name}: there is no such file or folder (looked from {Path.cwd()})")
    import datasets

    repository, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, config or None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{name} is neither a file here nor a dataset that the hub gives: {reason}. Check the spelling and the "
            "network (a private one wants `hf auth login`; a configuration is written owner/name:config)"
        ) from error
    assert isinstance(loaded, datasets.DatasetDict), type(loaded)
    return _Source(name, {str(split): lambda rows=rows: rows for split, rows in loaded.items()})


def _is_arrow(table: Table) -> bool:
    """Whether the rows are stored by Arrow, whose structs have the keys of all rows, null where a row lacks them."""
    if isinstance(table, Chain):
        return isinstance(table, ArrowTable) or all(map(_is_arrow, table.tables))
    datasets = sys.modules.get("datasets")  # imported, if any of its tables exists
    return datasets is not None and isinstance(table, datasets.Dataset)


def _without_padding(value: Any, inside: bool = False) -> Any:
    """A value of Arrow without the null keys of structs; a column that is null stays."""
    if isinstance(value, Mapping):
        return {key: _without_padding(x, True) for key, x in value.items() if x is not None or not inside}
    return [_without_padding(x, True) for x in value] if isinstance(value, list) else value


def texts(value: Any) -> Iterator[str]:
    """Every string in rows or in a value of them, including those within messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for key, item in value.items() if key != "role" for text in texts(item))
    elif isinstance(value, Rows):
        yield from (text for index in range(len(value)) for text in texts(value[index]))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in texts(item))
