"""A file that takes long to make, kept as far as it is: `OUT.partial`, beside what it will be.

Its first line says what the rest follows from (settings, digests of model and rows); then come lines in the order of
the output, appended in chunks of a fixed number and handed to the disk. Whoever is killed leaves whole chunks, and
perhaps a torn one, which the next call cuts off: it goes on where a chunk ends, so that each chunk is always made as a
whole and the result is the one of an uninterrupted call, to the byte.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tunix.errors import UserError
from tunix.util.atomic_io import write_lines_atomic
from tunix.util.yaml_io import shown

DIGEST = "sha256:"
"""Begins every digest."""
WHOLE = 1 << 26
"""Bytes of a file up to which its digest is that of its content; above, of its size and time: weights are large."""


class Partial:
    """The lines so far. Made by `partial`."""

    def __init__(self, out: Path, path: Path, file: IO[bytes], begins: int, held: int):
        """Args:
        begins: bytes before the first line.
        held: lines that are there.
        """
        self._out, self._path, self._file, self._begins = out, path, file, begins
        self.held = held
        """Lines so far."""

    def append(self, lines: Iterable[str]) -> None:
        """Adds a chunk; on return the disk has it.

        Raises:
            UserError: the disk refuses.
        """
        written = [line.encode() for line in lines]
        try:
            self._file.seek(0, os.SEEK_END)
            self._file.writelines(written)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"could not write {self._path}: {error.strerror or error}.") from error
        self.held += len(written)

    def lines(self) -> Iterator[str]:
        """All of them, from the first."""
        self._file.seek(self._begins)
        yield from (line.decode() for line in self._file)

    def finish(self, lines: Iterable[str]) -> None:
        """Writes the output in one go, and takes the partial file away."""
        write_lines_atomic(self._out, lines)
        self._path.unlink()


@contextmanager
def partial(out: Path, follows_from: Mapping[str, Any], chunk: int, total: int) -> Iterator[Partial]:
    """What there is of `out`, or an empty beginning.

    Args:
        follows_from: what the lines follow from; JSON values.
        chunk: lines that are appended at a time; the last chunk may be shorter.
        total: lines of the whole.

    Raises:
        UserError: there is the beginning of something else, or another process is at it.
    """
    path = out.with_name(f"{out.name}.partial")
    try:
        path.touch()
        file = path.open("r+b")
    except OSError as error:
        raise UserError(f"could not write {path}: {error.strerror or error}.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{path}: another process is writing it; wait for it, or choose another --out") from error
        first = file.readline()
        held, end = _whole_chunks(file, len(first), chunk, total)
        if held:
            _same(path, first, follows_from)
        else:
            first = json.dumps(follows_from).encode() + b"\n"
            file.seek(0)
            file.write(first)
            end = len(first)
        file.truncate(end)
        kept = Partial(out, path, file, len(first), held)
        try:
            yield kept
        finally:
            if not kept.held:
                path.unlink()


def _whole_chunks(file: IO[bytes], begins: int, chunk: int, total: int) -> tuple[int, int]:
    """Lines of whole chunks, and the byte behind them."""
    held, end, at = 0, begins, begins
    for number, line in enumerate(file, start=1):
        at += len(line)
        if line.endswith(b"\n") and (number % chunk == 0 or number == total):
            held, end = number, at
    return held, end


def _same(path: Path, first: bytes, follows_from: Mapping[str, Any]) -> None:
    """Refuses the beginning of another file.

    Raises:
        UserError: names what differs.
    """
    try:
        before = json.loads(first)
        differing = [key for key in {**before, **follows_from} if before.get(key) != follows_from.get(key)]
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no beginning of ours: move it away, or choose another --out") from error
    if differing:
        said = "; ".join(_told(key, before.get(key), follows_from.get(key)) for key in differing)
        raise UserError(
            f"{path} holds what another call began: {said}. Call again as then, delete it to begin anew, or choose "
            "another --out"
        )


def _told(key: str, before: Any, now: Any) -> str:
    """One difference; a digest tells a person nothing."""
    digests = any(isinstance(value, dict) or str(value).startswith(DIGEST) for value in (before, now))
    return f"other {key}" if digests else f"{key} was {shown(before)}, and is {shown(now)}"


def digest_of_rows(rows: Iterable[Any]) -> str:
    """Of JSON values, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return DIGEST + digest.hexdigest()


def digest_of_folder(folder: Path) -> str:
    """Of a model's files by name: the content of small ones, size and time of those above `WHOLE`."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            stat = file.stat()
            large = stat.st_size > WHOLE
            held = f"{stat.st_size} {stat.st_mtime_ns}".encode() if large else file.read_bytes()
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(held).digest())
    return DIGEST + digest.hexdigest()
