"""Where checkpoints are: a folder on a disk, or one on an object store.

Both hold a checkpoint in `<step>/`, and differ in what makes it complete. On a disk it is written as `<step>.tmp/`,
flushed, and renamed. A store has no renames, but shows a file as a whole or not at all: a checkpoint there is complete
when it has `commit_success.txt`, written last and deleted first. Orbax marks the state alone on `gs://` by a file of
that name, too.
"""

import os
import re
import shutil
from pathlib import Path

from tunix.util import object_store
from tunix.util.atomic_io import sync, sync_folder

COMPLETE = "commit_success.txt"
"""The file that makes a checkpoint on a store complete."""
UNFINISHED = re.compile(r"\d+\.(tmp|orbax-checkpoint-tmp.*)")
"""Names of unfinished folders that a dead process left: ours, and Orbax's from runs of earlier versions."""


def folder_of(path: Path) -> "DiskFolder | StoreFolder":
    """The folder at a path, which may stand for an address such as `gs://bucket/runs/x`."""
    url = object_store.url_of(path)
    return DiskFolder(path.absolute()) if url is None else StoreFolder(url)


class DiskFolder:
    """Checkpoints in a folder of the file system; a text is named by its path in there, e.g. `3/metrics/metrics`."""

    remedies: tuple[str, str] = ("make room and run", "")
    """What to do if a checkpoint could not be written, and before one is deleted that could not be read."""

    def __init__(self, path: Path):
        self._path = path
        self.name = str(path)
        """The folder as messages name it."""

    def steps(self) -> list[int]:
        """All complete steps, oldest first."""
        names = os.listdir(self._path) if self._path.is_dir() else []
        return sorted(int(name) for name in names if re.fullmatch("[0-9]+", name))

    def place(self, step: int) -> Path:
        """Where a complete step is."""
        return self._path / str(step)

    def begin(self, step: int) -> Path:
        """Where a step is written until it is finished."""
        part = self._part(step)
        part.mkdir()
        return part

    def finish(self, step: int, texts: dict[str, str]) -> None:
        """Adds texts by their names in the checkpoint, and makes it complete."""
        part = self._part(step)
        for name, text in texts.items():
            (part / name).parent.mkdir()
            (part / name).write_text(text, encoding="utf-8")
        sync_folder(part)
        part.rename(self.place(step))
        sync(self._path)

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, of which a process that dies leaves nothing that looks like one."""
        # Under another name first: half a checkpoint must not look like one.
        shutil.rmtree(self.place(step).rename(self._part(step)))

    def delete_unfinished(self) -> None:
        """Deletes what dead processes left; creates the folder."""
        self._path.mkdir(parents=True, exist_ok=True)
        for path in self._path.iterdir():
            if UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def find(self, name: str) -> str | None:
        """A text, e.g. `3/record/metadata`, or None where there is none."""
        file = self._path / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def write(self, name: str, text: str) -> None:
        """Writes a text outside of any checkpoint."""
        (self._path / name).write_text(text, encoding="utf-8")

    def _part(self, step: int) -> Path:
        return self._path / f"{step}.tmp"


class StoreFolder:
    """Checkpoints on an object store, with the methods of `DiskFolder`."""

    remedies: tuple[str, str] = (
        "see that the store can be reached and written, and run",
        "See that the store can be reached; if it can, the checkpoint is damaged. ",
    )

    def __init__(self, url: str):
        self.name = self._url = url

    def steps(self) -> list[int]:
        return sorted(step for step, names in self._files().items() if COMPLETE in names)

    def place(self, step: int) -> Path:
        return Path(f"{self._url}/{step}")

    begin = place

    def finish(self, step: int, texts: dict[str, str]) -> None:
        for name, text in texts.items():
            self.write(f"{step}/{name}", text)
        self.write(f"{step}/{COMPLETE}", "")

    def delete(self, step: int) -> None:
        object_store.delete(f"{self._url}/{step}", [COMPLETE])
        object_store.delete(f"{self._url}/{step}", object_store.files_below(f"{self._url}/{step}"))

    def delete_unfinished(self) -> None:
        for step, names in self._files().items():
            if COMPLETE not in names:
                object_store.delete(f"{self._url}/{step}", names)

    def find(self, name: str) -> str | None:
        return object_store.read_text(f"{self._url}/{name}")

    def write(self, name: str, text: str) -> None:
        object_store.write_text(f"{self._url}/{name}", text)

    def _files(self) -> dict[int, list[str]]:
        """The files of each step, complete or not."""
        files: dict[int, list[str]] = {}
        for path in object_store.files_below(self._url):
            step, _, name = path.partition("/")
            if step.isdigit() and name:
                files.setdefault(int(step), []).append(name)
        return files
