"""Files to which a run appends lines, most of them a JSON object each: read after a kill, cut back to a checkpoint."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunix.errors import UserError
from tunix.util.atomic_io import ROOM, write_text_atomic


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a file, without a last line that a kill cut short; empty without a file."""
    if not path.exists():
        return []
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in complete]


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows and closes the file, so that a killed process loses none.

    Raises:
        UserError: the file cannot be written.
    """
    append_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def append_text(path: Path, text: str) -> None:
    """Appends whole lines and closes the file.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(
            f"{path} could not be written: {error.strerror}. {ROOM}: it goes on from the last checkpoint."
        ) from error


def forget_after(path: Path, step: int | None) -> None:
    """Atomically drops the rows of steps after `step`, which will be repeated; all rows where it is None."""
    rows = [row for row in read_rows(path) if step is not None and row["step"] <= step]
    write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
