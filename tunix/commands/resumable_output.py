"""`ResumableOutput`: writes a file chunk by chunk to `OUT.partial`, so that an interrupted command can resume.

The first line of `OUT.partial` holds everything that determines the output (settings, digests of model and rows). Then
follow the lines of the output, appended in chunks of a fixed number and synced to disk. A killed process leaves
complete chunks and perhaps an incomplete one, which the next call truncates. Each chunk is computed as a whole, so the
result is that of an uninterrupted call, byte for byte.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tunix.errors import UserError
from tunix.util.atomic_io import ROOM, write_text_atomic
from tunix.util.yaml_io import shown

DIGEST = "sha256:"
"""Prefix of every digest."""
SMALL_FILE = 1 << 26
"""Maximum bytes of a file whose content is digested; of larger files, such as weights, only size and time are."""


@dataclass
class ResumableOutput:
    """The lines of an unfinished output; created by `resumable_output`."""

    out: Path
    """The file to write in the end."""
    path: Path
    file: IO[bytes]
    """The partial file, open and locked."""
    start: int
    """Position of its first line in bytes."""
    done: int
    """Number of lines so far."""

    def append(self, lines: Iterable[str]) -> None:
        """Appends a chunk, which is on disk when this returns; raises UserError where it cannot be written."""
        written = [line.encode() for line in lines]
        try:
            self.file.seek(0, os.SEEK_END)
            self.file.writelines(written)
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            kept = f"{ROOM}: it goes on from the {self.done} rows that are kept."
            raise UserError(f"could not write {self.path}: {error.strerror or error}. {kept}") from error
        self.done += len(written)

    def lines(self) -> Iterator[str]:
        """Yields all lines from the first."""
        self.file.seek(self.start)
        yield from (line.decode() for line in self.file)

    def finish(self, lines: Iterable[str]) -> None:
        """Writes the output atomically and deletes the partial file."""
        write_text_atomic(self.out, lines)
        self.path.unlink()


@contextmanager
def resumable_output(out: Path, inputs: Mapping[str, Any], chunk: int, total: int) -> Iterator[ResumableOutput]:
    """Opens and locks the partial file of `out`, or creates it.

    Args:
        out: the file to write in the end.
        inputs: JSON values that determine the lines.
        chunk: lines that are appended at a time; the last chunk may be shorter.
        total: lines of the whole output.

    Raises:
        UserError: the partial file has other inputs (the message names them), or another process is writing it.
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
        # The number of lines in complete chunks, and the position after them in bytes.
        done, end, at = 0, len(first), len(first)
        for number, line in enumerate(file, start=1):
            at += len(line)
            if line.endswith(b"\n") and (number % chunk == 0 or number == total):
                done, end = number, at
        if done:
            try:
                before = json.loads(first)
                differing = [key for key in {**before, **inputs} if before.get(key) != inputs.get(key)]
            except (ValueError, TypeError, AttributeError) as error:
                raise UserError(f"{path} is no beginning of ours: move it away, or choose another --out") from error
            changes = []
            for key in differing:
                was, now = before.get(key), inputs.get(key)
                digests = any(isinstance(value, dict) or str(value).startswith(DIGEST) for value in (was, now))
                changes.append(f"other {key}" if digests else f"{key} was {shown(was)}, and is {shown(now)}")
            if changes:
                raise UserError(
                    f"{path} holds what another call began: {'; '.join(changes)}. Repeat that call, delete the file to "
                    "start again, or choose another --out"
                )
        else:
            first = json.dumps(inputs).encode() + b"\n"
            file.seek(0)
            file.write(first)
            end = len(first)
        file.truncate(end)
        output = ResumableOutput(out, path, file, len(first), done)
        try:
            yield output
        finally:
            if not output.done:
                path.unlink()


def digest_of_rows(rows: Iterable[Any]) -> str:
    """The digest of JSON values in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return DIGEST + digest.hexdigest()


def digest_of_folder(folder: Path) -> str:
    """The digest of a folder's files by name: the content of small ones, size and time of those above `SMALL_FILE`."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            stat = file.stat()
            large = stat.st_size > SMALL_FILE
            content = f"{stat.st_size} {stat.st_mtime_ns}".encode() if large else file.read_bytes()
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return DIGEST + digest.hexdigest()
