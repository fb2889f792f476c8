"""Opens datasets for access by row number: JSONL, Parquet, Arrow, folders, the hub, a function, or Python values.

`open_rows` determines the spec's form, opens it, picks the split, and returns `Rows`: a name for messages, a length,
and row `i` as a dict. A spec that looks like a path is never taken for a hub id, so a mistyped file is a missing file.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tunix.errors import UserError, nearest
from tunix.util.plugins import is_reference, load_object

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".jsonl", ".parquet", ".arrow")
_FILE_SUFFIXES = (*SUFFIXES, ".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".py", ".xlsx")
_SHARD = re.compile(r"[-_.]\d+(-of-\d+)?$")
_SPLIT_WORDS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}


@runtime_checkable
class Table(Protocol):
    """Anything with rows by number: a list, a `datasets.Dataset`, or one of the readers here."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Any: ...


class Rows:
    """The rows of a dataset by number, with a name for messages."""

    def __init__(self, name: str, table: Table, folder: Path | None = None) -> None:
        """Names a table; `open_rows` is the usual way to get one.

        Args:
            name: of the rows, for messages.
            table: the rows by number.
            folder: where relative paths in the rows begin; None for the working directory.

        Raises:
            UserError: there are no rows.
        """
        if not len(table):
            raise UserError(f"{name} is empty: there are no rows to read")
        self.name, self.folder = name, folder
        self._table = table
        self._pads = _is_arrow(table)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Row `i`, counted from 0, as a dict of columns; raises UserError where it is no mapping."""
        row = self._table[i]
        if not isinstance(row, Mapping):
            raise UserError(f"row {i + 1} of {self.name} is {row!r:.80}, not an object with columns")
        return dict(_without_padding(row) if self._pads else row)


def open_rows(spec: str | Path | Table | Iterable[Any], split: str | None = None) -> Rows:
    """Opens a dataset for random access.

    Args:
        spec: .jsonl, .parquet, .arrow; a folder of these or of `datasets.save_to_disk`; a hub id, with a
            configuration as `owner/name:config`; `module:function` or `file.py:function`, called without arguments;
            or rows themselves: a list, any iterable of dicts, or a mapping of split to rows.
        split: the split's name; None takes `train`, or the first one.

    Raises:
        UserError: nothing exists there, the form is unknown, the split does not exist, or there are no rows.
    """
    if not isinstance(spec, str | Path):
        return _pick({"train": spec} if not isinstance(spec, Mapping) else spec, split, "the given rows")
    name, path = str(spec), Path(spec).expanduser()
    if path.is_dir():
        return _open_folder(path, split)
    if path.is_file():
        return _pick({"train": _open_file(path)}, split, name, path.parent)
    if is_reference(name):
        return _pick({"train": _call(name)}, split, name)
    if path.suffix in _FILE_SUFFIXES or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{name}: there is no such file or folder (looked from {Path.cwd()})")
    return _pick(_load_hub(name), split, name)


def _call(reference: str) -> Any:
    """The result of calling the function that a recipe names."""
    function = load_object(reference)
    if not callable(function):
        raise UserError(f"{reference} is a {type(function).__name__}, not a function that returns rows")
    return function()


def _wanted(splits: Mapping[str, Any], split: str | None, name: str) -> str:
    """The name of the split to use; raises UserError with the existing names where it does not exist."""
    wanted = split or ("train" if "train" in splits else next(iter(splits), "train"))
    if wanted not in splits:
        present = ", ".join(map(repr, splits))
        raise UserError(f"{name} has no split {wanted!r}; it has {present}.{nearest(wanted, splits)}")
    return wanted


def _pick(splits: Mapping[str, Any], split: str | None, name: str, folder: Path | None = None) -> Rows:
    """The rows of one split; an iterable without access by number is read into memory."""
    rows = splits[_wanted(splits, split, name)]
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Table | Iterable):
        raise UserError(f"{name} gives {rows!r:.80}, not a list or an iterable of rows")
    return Rows(name, rows if isinstance(rows, Table) else list(rows), folder)


def _load_hub(name: str) -> dict[str, Any]:
    """All splits of a hub dataset, from the cache or the network."""
    import datasets

    path, _, config = name.partition(":")
    try:
        splits = datasets.load_dataset(path, config or None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{name} is neither a file here nor a dataset that the hub gives: {reason}. Check the spelling and the "
            "network (a private one wants `hf auth login`; a configuration is written owner/name:config)"
        ) from error
    assert isinstance(splits, datasets.DatasetDict), type(splits)
    return {str(split): rows for split, rows in splits.items()}


def _open_folder(folder: Path, split: str | None) -> Rows:
    """The rows of a folder of `datasets.save_to_disk`, or of data files whose names may contain their splits."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        import datasets

        try:
            saved = datasets.load_from_disk(str(folder))
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder} was saved by `datasets`, but does not load: {error}") from error
        splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        return _pick({str(key): rows for key, rows in splits.items()}, split, str(folder), folder)
    files = sorted(f for f in folder.rglob("*") if f.suffix in SUFFIXES and not f.name.startswith("."))
    if not files:
        raise UserError(f"{folder} holds no {', '.join(SUFFIXES)} file")
    parts: dict[str, list[Path]] = {}
    for file in files:
        parts.setdefault(_split_of(file, folder), []).append(file)
    if not parts.keys() & _SPLIT_WORDS:
        parts = {"train": files}
    wanted = _wanted(parts, split, str(folder))
    return Rows(str(folder), _Chain([_open_file(file) for file in parts[wanted]]), folder)


def _split_of(file: Path, folder: Path) -> str:
    """The split of a file: `train` for train.jsonl, train-00000-of-00002.parquet, and train/part-0.jsonl."""
    for part in reversed(file.relative_to(folder).parent.parts):
        if part in _SPLIT_WORDS:
            return part
    return _SHARD.sub("", file.stem)


def _open_file(path: Path) -> Table:
    """The reader for a data file's suffix."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: rows are read from {', '.join(SUFFIXES)}, not from {path.suffix or 'a bare name'!r}")
    if not path.stat().st_size:
        raise UserError(f"{path} is empty: there are no rows to read")
    return _Jsonl(path) if path.suffix == ".jsonl" else _Arrow(_read_table(path))


def _is_arrow(table: Table) -> bool:
    """Whether the rows are stored by Arrow, whose structs have the keys of all rows, null where a row lacks them."""
    if isinstance(table, _Chain):
        return all(map(_is_arrow, table.tables))
    datasets = sys.modules.get("datasets")  # imported, if any of its tables exists
    return isinstance(table, _Arrow) or (datasets is not None and isinstance(table, datasets.Dataset))


def _without_padding(value: Any, inside: bool = False) -> Any:
    """A value of Arrow without the null keys of structs; a column that is null stays."""
    if isinstance(value, Mapping):
        return {key: _without_padding(x, True) for key, x in value.items() if x is not None or not inside}
    return [_without_padding(x, True) for x in value] if isinstance(value, list) else value


def _read_table(path: Path) -> pyarrow.Table:
    """A Parquet file in memory, or an Arrow file (stream or file format) mapped into it."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path)
        source = pyarrow.memory_map(str(path))
        try:
            return pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:
            source.seek(0)
            return pyarrow.ipc.open_file(source).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is no whole {path.suffix} file: {error}") from error


class _Jsonl:
    """The lines of a JSONL file: their positions are read once, each line is parsed on access."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")
        self._numbers = array("Q")
        position = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    self._starts.append(position)
                    self._numbers.append(number)
                position += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> dict[str, Any]:
        # Opened again for each row: that costs 10 us, and needs no lock between the prefetch thread and the main one.
        with self._path.open("rb") as file:
            file.seek(self._starts[i])
            line = file.readline()
        try:
            row = json.loads(line)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise UserError(f"{self._path}, line {self._numbers[i]} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{self._path}, line {self._numbers[i]} is {row!r:.80}, not an object with columns")
        return row


class _Arrow:
    """The rows of a pyarrow table, taken from small zero-copy batches so that any row is found in microseconds."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._batches = table.to_batches(max_chunksize=1024)
        self._ends = list(itertools.accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> dict[str, Any]:
        b = bisect.bisect_right(self._ends, i)
        return self._batches[b].slice(i - self._ends[b] + self._batches[b].num_rows, 1).to_pylist()[0]


class _Chain:
    """Several tables one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables
        self._ends = list(itertools.accumulate(map(len, tables)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> Any:
        t = bisect.bisect_right(self._ends, i)
        return self.tables[t][i - self._ends[t] + len(self.tables[t])]


def texts(rows: Rows) -> Iterator[str]:
    """Every string in the rows, including those within messages."""
    for index in range(len(rows)):
        yield from _strings(rows[index])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for key, item in value.items() if key != "role" for text in _strings(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _strings(item))
