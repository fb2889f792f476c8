"""Opens datasets for access by row number: data files, folders, the hub, a function, or Python values.

`open_rows` determines the spec's form, opens it, picks the split, and returns `Rows`: a name for messages, a length,
row `i` as a dict, and a digest of the rows. `open_held_out` picks a split for evaluation. A spec that looks like a path
is never taken for a hub id, so a mistyped file is a missing file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tunix.data.config import DataConfig
from tunix.data.files import (
    COMPRESSED,
    SUFFIXES,
    ArrowTable,
    Chain,
    JsonLines,
    Table,
    files_by_split,
    open_file,
    open_split,
    splits_named,
)
from tunix.errors import UserError, nearest
from tunix.util.plugins import is_reference, load_object

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
    ) -> None:
        """Names a table; `open_rows` is the usual way to get one.

        Args:
            name: of the rows, for messages.
            table: the rows by number.
            folder: where relative paths in the rows begin; None for the working directory.
            split: which split of a dataset they are; None where it has no splits.
            files: those that they are read from, where that is known.

        Raises:
            UserError: there are no rows.
        """
        if not len(table):
            raise UserError(f"{name} is empty: there are no rows to read")
        self.name, self.folder, self.split = name, folder, split
        self.files = frozenset(file.resolve() for file in files)
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

    @cached_property
    def digest(self) -> str:
        """What rows with the same values in the same order have in common, wherever and however they are stored.

        It covers the number of rows and up to `COMPARED` rows, evenly spread, without columns that are null; of more
        rows in JSON lines, also each line as it is written. Computed once.

        Raises:
            UserError: one of these rows cannot be read.
        """
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

    def rows(self, split: str) -> Rows:
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
        return Rows(self.name, table, self.folder, split if self.has_splits else None, files)


def open_rows(spec: str | Path | Table | Iterable[Any], split: str | None = None) -> Rows:
    """Opens a dataset for random access.

    Args:
        spec: a data file (`files.SUFFIXES`); a folder of these or of `datasets.save_to_disk`; a hub id, with a
            configuration as `owner/name:config`; `module:function` or `file.py:function`, called without arguments;
            or rows themselves: a list, any iterable of dicts, or a mapping of split to rows.
        split: the split's name; None takes `train`, or the first one.

    Raises:
        UserError: nothing exists there, the form is unknown, the split does not exist, or there are no rows.
    """
    source = _source(spec)
    return source.rows(split or ("train" if "train" in source.splits else next(iter(source.splits), "train")))


def open_held_out(spec: str | Path | Table | Iterable[Any], split: str | None = None) -> Rows:
    """Opens the rows of a dataset that models are measured on.

    Args:
        spec: see `open_rows`.
        split: the split's name; None takes the one for validation, without it the one for test, and the only one of a
            dataset that has no other.

    Raises:
        UserError: see `open_rows`; or the split is None and none or several could be meant.
    """
    source = _source(spec)
    names = [split] if split else list(source.splits)
    if len(names) == 1:
        return source.rows(names[0])
    for kind in ("validation", "test"):
        fitting = [kind] if kind in names else [name for name in names if splits_named(name) == {kind}]
        if len(fitting) == 1:
            return source.rows(fitting[0])
        if fitting:
            break
    raise UserError(
        f"{source.name} has the splits {', '.join(map(repr, names))}, and which is held out is not clear: name it in "
        "data.eval_split, or with --split for `tunix eval`"
    )


def held_out_rows(data: DataConfig) -> Rows | None:
    """The rows that a recipe holds out; None where it holds out none.

    Raises:
        UserError: see `open_held_out`.
    """
    if data.eval is not None:
        return open_held_out(data.eval, data.eval_split)
    return open_rows(data.train, data.eval_split) if data.eval_split else None


def _source(spec: str | Path | Table | Iterable[Any]) -> _Source:
    """The dataset that a spec stands for."""
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
        return all(map(_is_arrow, table.tables))
    datasets = sys.modules.get("datasets")  # imported, if any of its tables exists
    return isinstance(table, ArrowTable) or (datasets is not None and isinstance(table, datasets.Dataset))


def _without_padding(value: Any, inside: bool = False) -> Any:
    """A value of Arrow without the null keys of structs; a column that is null stays."""
    if isinstance(value, Mapping):
        return {key: _without_padding(x, True) for key, x in value.items() if x is not None or not inside}
    return [_without_padding(x, True) for x in value] if isinstance(value, list) else value


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
