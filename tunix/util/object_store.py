"""Files on object stores, `gs://bucket/...` or `s3://bucket/...`: ranges are read, and folders written, through etils.

pathlib makes one slash of two, so `gs:/bucket/folder` stands for the same place: a path of the command line may be one.
A store has neither locks nor renames, so that no run can live there (`recipe.sections`), only its checkpoints
(`trainer.checkpoint_folder`). Where it cannot be reached, or refuses, each function raises a `UserError`.
"""

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunix.errors import UserError, install_command

PACKAGES = {"gs": "gcs", "s3": "s3"}
"""Scheme -> the extra of tunix that reads it."""
LAST = ("config.json", "adapter_config.json")
"""Files that are written when all others are there: without one of them, a folder is no model."""
CHUNK = 1 << 24


def url_of(path: str | Path) -> str | None:
    """The address in an object store that a path stands for, e.g. `gs://bucket/folder`; None for a local one."""
    match = re.fullmatch(r"(gs|s3):/{1,2}([^/].*)", str(path))
    return None if match is None else f"{match[1]}://{match[2].rstrip('/')}"


def files_of(url: str) -> dict[str, int]:
    """The files directly in a folder -> their sizes in bytes; empty where there is no such folder."""
    with _errors(url):
        folder = path_of(url)
        files = {file.name: file.stat() for file in folder.iterdir()} if folder.is_dir() else {}
    return {name: about.length for name, about in files.items() if not about.is_directory}


def files_below(url: str) -> list[str]:
    """The files in a folder and in folders below it, by their paths from there; empty where there is no such folder.

    Asks the store itself: a listing that fsspec remembers lacks what others have written since, such as tensorstore.
    """
    with _errors(url):
        store = _file_system(url)
        store.invalidate_cache()
        root = store._strip_protocol(url)
        try:
            store.ls(root)  # `find` may take a store that does not answer for an empty one
        except FileNotFoundError:
            return []
        return [file.removeprefix(f"{root}/") for file in store.find(root)]


def read_text(url: str) -> str | None:
    """The content of a file; None where there is none."""
    with _errors(url):
        try:
            return _file_system(url).cat_file(url).decode()
        except FileNotFoundError:
            return None


def write_text(url: str, text: str) -> None:
    """Writes a file, which is there as a whole when this returns."""
    with _errors(url):
        path_of(url).write_text(text)


def delete(url: str, names: Iterable[str]) -> None:
    """Deletes files in a folder, in as few requests as the store takes."""
    if files := [f"{url}/{name}" for name in names]:
        with _errors(url):
            _file_system(url).rm(files)


def read(url: str, begin: int, end: int) -> bytes:
    """The bytes of a file, which has to exist, from `begin` to before `end`: one request for exactly these."""
    with _errors(url):
        return _file_system(url).cat_file(url, start=begin, end=end)


@contextmanager
def uploaded(url: str) -> Iterator[Path]:
    """A local folder that is copied to the store when the block ends without an error; what makes it a model is last.

    Where the store refuses a write, nothing of the folder is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="tunix-") as local:
        yield Path(local)
        written: list[Any] = []
        with _errors(url):
            try:
                for file in sorted(Path(local).iterdir(), key=lambda file: (file.name in LAST, file.name)):
                    written.append(path_of(f"{url}/{file.name}"))
                    with file.open("rb") as source, written[-1].open("wb") as out:
                        shutil.copyfileobj(source, out, CHUNK)
            except BaseException:
                # What somebody else has put there meanwhile stays.
                for file in written:
                    file.unlink(missing_ok=True)
                raise


def path_of(path: str | Path) -> Any:
    """The `etils.epath.Path` of a place on a store or on a disk, which Orbax takes; a local one is made absolute."""
    from etils import epath

    return epath.Path(url_of(path) or Path(path).absolute())


def _file_system(url: str) -> Any:
    """The file system of fsspec that reaches a store."""
    from etils.epath import backend

    return backend.fsspec_backend.fs(url)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turns whatever a store's library raises, each its own classes, into one message."""
    try:
        yield
    except ImportError as error:
        extra = PACKAGES[url.partition(":")[0]]
        raise UserError(f"{url}: {error}. The package comes with {install_command(extra)}.") from error
    except Exception as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{url}: the object store does not answer as it should ({said}).") from error
