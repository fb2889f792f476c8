"""Data files and folders of them: which files are read, which split each belongs to, and their rows by number.

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
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

from tunix.errors import UserError
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


class ArrowTable:
    """The rows of a pyarrow table, taken from small zero-copy batches so that any row is found in microseconds."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._batches = table.to_batches(max_chunksize=1024)
        self._ends = list(itertools.accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> dict[str, Any]:
        b = bisect.bisect_right(self._ends, i)
        return self._batches[b].slice(i - self._ends[b] + self._batches[b].num_rows, 1).to_pylist()[0]


class Chain:
    """Several tables one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables
        self._ends = list(itertools.accumulate(map(len, tables)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> Any:
        t = bisect.bisect_right(self._ends, i)
        return self.tables[t][i - self._ends[t] + len(self.tables[t])]


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
