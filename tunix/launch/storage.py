"""What a job leaves behind and what it reads: folders that have to outlive it, and files that have to go along.

A pod's disk goes with the pod, and a restart is a new pod. So checkpoints and the run folder have to be on a volume or
on gs://, and files that the recipe names have to be on a volume, or small enough to be sent along with it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.util.object_store import url_of
from tunix.util.plugins import is_reference

OWN_DISKS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every node of a cluster has for itself."""
MOST_BYTES = 900_000
"""Most bytes of the recipe and the files that go along: Kubernetes takes 1 MiB, with everything around them."""
WRITTEN = ("output", "folder")
"""Last part of the keys that name what a run writes."""


@dataclass(frozen=True)
class Mount:
    """A volume that all pods of a job see."""

    claim: str
    """Name of a PersistentVolumeClaim, e.g. `runs`; many pods have to be allowed to write (ReadWriteMany)."""
    path: str
    """Where it is mounted, e.g. `/runs`."""


def mount_of(text: str) -> Mount:
    """Reads `CLAIM:/path`.

    Raises:
        UserError: it is written otherwise.
    """
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/") or path == "/":
        raise UserError(f"--mount {text}: write CLAIM:/path, a PersistentVolumeClaim and where it is mounted")
    return Mount(claim, path.rstrip("/"))


def require_lasting(recipe: Recipe, mounts: tuple[Mount, ...]) -> list[str]:
    """Checks that a pod's end loses nothing that the next one needs.

    Returns:
        What is lost all the same, one sentence each.

    Raises:
        UserError: checkpoints would be lost.
    """
    lost = _within(recipe.output, mounts) is None
    for stage in recipe.stages or (recipe,):
        place = stage.checkpoint.folder
        if lost if place is None else url_of(place) is None and _within(place, mounts) is None:
            name = f"output: {recipe.output}" if place is None else f"checkpoint.folder: {place}"
            stem = PurePosixPath(recipe.output).name
            raise UserError(
                f"{name} is on the pod's own disk, which goes with the pod: a restart would begin again. Put the run "
                f"on a volume, --mount CLAIM:/runs output=/runs/{stem}, or its checkpoints on "
                f"checkpoint.folder=gs://BUCKET/{stem}"
            )
    if not lost:
        return []
    return [
        f"output: {recipe.output} is on the pod's own disk: checkpoints stay, but metrics.jsonl, samples and export/ "
        "go with the pod; --mount CLAIM:/runs output=/runs/... keeps them"
    ]


def require_shared(recipe: Recipe) -> None:
    """Checks that a run's folders are not on a disk which each node has for itself.

    Raises:
        UserError: one of them is.
    """
    for stage in recipe.stages or (recipe,):
        for key, place in (("output", recipe.output), ("checkpoint.folder", stage.checkpoint.folder)):
            if place is not None and _below(place, OWN_DISKS):
                raise UserError(
                    f"{key}: {place} is on each node's own disk: a job that is started again may get other nodes. Take "
                    "a folder that all nodes share, such as one in your home folder"
                )


def sent_along(recipe: Recipe, mounts: tuple[Mount, ...]) -> dict[str, str]:
    """Small files that the recipe names: code (`judge.py:short`) and chat templates.

    Returns:
        Path, from the current folder -> text.

    Raises:
        UserError: a file of this machine cannot go along, so that the pods would not find it.
    """
    texts: dict[str, str] = {}
    for key, value in _named(recipe.sections()):
        code = is_reference(value) and value.rpartition(":")[0].endswith(".py")
        place = value.rpartition(":")[0] if code else value
        if key.rpartition(".")[2] in WRITTEN or _within(place, mounts) or not Path(place).expanduser().exists():
            continue
        if not (code or place.endswith(".jinja")):
            raise UserError(
                f"{key}: {place} is on this machine, and the pods do not see it: copy it to a volume (--mount "
                "CLAIM:/data) and name it there, or take a hub id, or for a model gs://"
            )
        if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            raise UserError(f"{key}: {place} goes along with the job, from the current folder down: name it from there")
        texts[str(PurePosixPath(place))] = Path(place).read_text(encoding="utf-8")
    if (size := sum(len(text.encode()) for text in texts.values())) > MOST_BYTES:
        raise UserError(f"{', '.join(texts)}: {size:,} bytes, and {MOST_BYTES:,} go along: put them into the image")
    return texts


def _named(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested values, with its dotted key."""
    if isinstance(value, str):
        yield path, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        yield from _named(item, f"{path}.{key}".lstrip("."))


def _within(place: str, mounts: tuple[Mount, ...]) -> Mount | None:
    """The volume that a path is on; None for none of them."""
    return next((mount for mount in mounts if _below(place, (mount.path,))), None)


def _below(place: str, folders: tuple[str, ...]) -> bool:
    return any(PurePosixPath(place).is_relative_to(folder) for folder in folders)
