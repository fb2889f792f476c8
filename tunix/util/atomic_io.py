"""Atomic writes: a temporary sibling is written first and then renamed, so that a reader sees all of it or nothing.

`atomic_folder` is for exports, `write_text_atomic` and `replacing` are for single files.
A folder never replaces anything; on a failure the temporary is removed and the target is unchanged. `refuse_foreign`
guards reading: a folder from elsewhere cannot name files outside of it. At the end are the files to which a run appends
lines, most of them a JSON object each, plain or as members of a gzip file: read after a kill, cut back to a checkpoint.
"""

import errno
import gzip
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tunix.errors import UserError
from tunix.util.object_store import files_below, uploaded, url_of

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space is left on the disk, or in the user's quota; a file is larger than its file system or its limit allows."""
ROOM = "Make room and run the same command"
"""The remedy."""
MOVE = ": move it away, nothing is trained from it"
"""The remedy where a file with what a run has recorded is damaged."""
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of what a run opens to write: it follows no link to a file elsewhere, and waits for no reader of a pipe."""
SAMPLES, PACKED = "samples.jsonl", "samples.jsonl.gz"
"""Files of a run folder with what its model wrote, the second one where several groups of a step are recorded."""


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk is what an error comes from, or one of the errors that it was raised from.

    Libraries in Rust and C++ (tokenizers, safetensors, tensorstore) raise errors of their own, whose texts have the
    system's.
    """
    texts = [os.strerror(code) for code in REFUSALS]
    while error is not None:
        if isinstance(error, OSError) and error.errno in REFUSALS:
            return True
        if any(text in str(error) for text in texts):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder next to `path` that is renamed to `path` when the block ends without an error.

    Where `path` is on an object store, the temporary folder is a local one, and its files are copied at the end.

    Raises:
        UserError: `path` exists and is not an empty folder, or the disk or the store refuses a write.
    """
    if (url := url_of(path)) is not None:
        refuse_taken(path)
        with uploaded(url) as folder:
            yield folder
        return
    path = path.expanduser().resolve()
    refuse_taken(path)
    with _sibling(path, " Nothing was left behind.") as temporary:
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)
        refuse_taken(path)
        temporary.rename(path)
        sync(path.parent)


def sync_folder(path: Path) -> None:
    """Flushes a folder and everything in it to the disk, so that a power cut cannot leave empty files."""
    for inside in path.rglob("*"):
        sync(inside)
    sync(path)


def write_text_atomic(path: Path, text: str | Iterable[str]) -> None:
    """Replaces the file at `path` by one with this text, or with lines that include their ends; errors as of
    `replacing`."""
    with replacing(path) as file:
        file.writelines(part.encode("utf-8") for part in ([text] if isinstance(text, str) else text))


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file next to `path` that is renamed to `path` when the block ends without an error.

    Raises:
        UserError: the disk refuses; the old file is still there.
    """
    with _sibling(path) as temporary:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)


@contextmanager
def _sibling(path: Path, after: str = "") -> Iterator[Path]:
    """The name of a temporary next to `path`, which an error removes; what the disk refuses is said in a sentence."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        yield temporary
    except BaseException as error:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(FileNotFoundError, NotADirectoryError):  # below a file nothing can be
                temporary.unlink()
        if isinstance(error, UserError) or not (isinstance(error, OSError) or is_full(error)):
            raise
        said = (isinstance(error, OSError) and error.strerror) or str(error)
        remedy = f" {ROOM}." if is_full(error) else ""
        raise UserError(f"could not write {path}: {said}.{remedy}{after}") from error


def refuse_taken(path: Path) -> None:
    """Raises UserError where a new folder would replace something; an empty folder may be filled."""
    url = url_of(path)
    taken = files_below(url) if url is not None else any(path.iterdir()) if path.is_dir() else path.exists()
    if taken:
        raise UserError(
            f"{url or path} is there already and nothing is overwritten: choose another path, or move it away."
        )


def refuse_foreign(folder: Path, name: str) -> None:
    """Refuses a file name that leads out of its folder, by its path or through a link.

    The hub's cache links the files of a snapshot to the blobs of the same repository
    (https://huggingface.co/docs/huggingface_hub/guides/manage-cache); those are allowed.

    Raises:
        UserError: the file is outside of the folder (the message says where), or is a pipe or a device.
    """
    file = folder / name
    if os.path.isabs(name) or ".." in Path(name).parts or re.search("[\0\ud800-\udc7f\udd00-\udfff]", name):
        raise UserError(
            f"{folder} names the file {name!r}, which is none of its own: only files of the folder are read."
        )
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if not target.is_relative_to(home) and not target.is_relative_to(blobs):
        raise UserError(
            f"{file} is a link to {target}, outside of {folder}: only files of the folder are read. "
            "If that file is meant, put a copy in the place of the link."
        )
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        raise UserError(f"{file} is not a file but a pipe or a device, and would never end.")


def refuse_out(path: Path) -> None:
    """Raises UserError where `--out` names an existing file, or a folder that does not exist."""
    if path.exists():
        raise UserError(f"{path} exists already: nothing is overwritten, choose another --out")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.absolute().parent}")


def sync(path: Path) -> None:
    """Flushes a file or a folder to the disk, so that a power cut cannot leave a renamed but empty file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def complete_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without what a kill cut short, and those of the members of the file of that name with `.gz`;
    none without either. Errors as of `members`."""
    yield from _lines(path)
    if (packed := path.with_name(f"{path.name}.gz")).exists():
        for content, _ in members(packed):
            yield from content.splitlines(keepends=True)


def _lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    if not path.is_file():
        raise UserError(f"{path} is not a file{MOVE}")
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def members(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """The content of each complete member of a gzip file (RFC 1952) from byte `start` on, and the byte where it ends.

    Raises:
        UserError: what is there is no gzip member.
    """
    with path.open("rb") as file:
        while True:
            file.seek(start)
            unpacking, parts = zlib.decompressobj(wbits=31), list[bytes]()
            try:
                while not unpacking.eof and (packed := file.read(1 << 16)):
                    parts.append(unpacking.decompress(packed))
            except zlib.error as error:
                raise UserError(
                    f"{path} is damaged at byte {start} ({error}): move it away, nothing is trained from it"
                ) from error
            if not unpacking.eof:
                return
            start = file.tell() - len(unpacking.unused_data)
            yield b"".join(parts), start


@contextmanager
def reading(path: Path | str, remedy: str = "") -> Iterator[None]:
    """Makes one sentence of what the content of a file, or of a folder's files, raises where it is not what it was.

    Raises:
        UserError: in place of the errors of Python's own values.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged, or of another version of tunix: {reason}{remedy}") from error


def read_rows(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The rows of a file, by `complete_lines`; raises UserError where one is no object with these keys."""
    with reading(path, MOVE):
        return [_row(line, keys) for line in complete_lines(path)]


def _row(line: bytes, keys: Iterable[str]) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step", 0), int) or not {*keys} <= row.keys():
        raise ValueError(f"{line[:60]!r} is no row of it")
    return row


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]], limit: int | None = None) -> bool:
    """Appends rows, to a `.gz` those of one step as a member, as `append` does."""
    written = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return append(path, gzip.compress(written, 6, mtime=0) if path.suffix == ".gz" else written, limit)


def append(path: Path, content: bytes, limit: int | None = None) -> bool:
    """Appends whole lines where the file then has at most `limit` bytes, and closes it, so that a killed process loses
    none; returns whether it has them. Raises UserError where it cannot be written."""
    try:
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags | SAFELY, 0o666)) as file:
            fits = limit is None or file.tell() + len(content) <= limit
            if fits:
                file.write(content)
            return fits
    except OSError as error:
        remedy = ROOM if is_full(error) else "Move it away and run the same command"
        raise UserError(
            f"{path} could not be written: {error.strerror}. {remedy}: it goes on from the last checkpoint."
        ) from error


def forget_after(path: Path, step: int | None) -> None:
    """Atomically drops the rows of steps after `step`, which will be repeated; all rows where it is None.

    Of the file of that name with `.gz`, whose members have the rows of one step each, the later members are cut off.
    """
    if path.exists():
        with reading(path, MOVE):
            kept = [line for line in _lines(path) if step is not None and _row(line, ["step"])["step"] <= step]
            write_text_atomic(path, b"".join(kept).decode())
    if (packed := path.with_name(f"{path.name}.gz")).exists():
        end = 0
        for content, end_of_member in members(packed) if step is not None else ():
            with reading(packed, MOVE):
                later = _row(content.splitlines()[0], ["step"])["step"] > step
            if later:
                break
            end = end_of_member
        if end:
            os.truncate(packed, end)
        else:
            packed.unlink()
