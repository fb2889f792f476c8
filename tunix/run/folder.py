"""Whose a run folder is, and whose checkpoints are that lie elsewhere; its lock. Loads without jax.

A run folder belongs to the recipe in it, once the run has something to lose. Its lock says nothing about a folder that
`checkpoint.folder` names, which other machines see: that belongs to the run whose recipe is in there. The same recipe
with the same output goes on, wherever it is started. Of two processes with the same recipe, the later one goes on, and
the other stops at its next checkpoint (`trainer.checkpoint`).
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.trainer.checkpoint_folder import folder_of
from tunix.util.atomic_io import ROOM, SAFELY, is_full, write_text_atomic
from tunix.util.yaml_io import parse_yaml, read_mapping

OWNER = "recipe.yaml"


@contextmanager
def claimed(recipe: Recipe, fresh: bool) -> Iterator[Path]:
    """Creates the run folder, or checks that it belongs to this recipe, and locks it against other processes.

    Raises:
        UserError: it holds something else, another process uses it, or it cannot be written; the same of a folder that
            the recipe names for checkpoints.
    """
    folder = Path(recipe.output).expanduser()
    stored = folder / OWNER
    refuse_no_run(folder)
    refuse_foreign_checkpoints(recipe, fresh=fresh)
    if fresh and stored.is_file():
        with locked(folder):
            move_aside(folder)
    if folder.is_file():
        raise UserError(f"output: {folder} cannot be written: it is a file, and a run is a folder. Set another output")
    with locked(folder):
        refuse_other_run(recipe, folder)
        for stage in _naming(recipe):  # so that no other run takes its checkpoints
            with _named(stage):
                elsewhere = folder_of(checkpoint_folder(stage, Path()))
                elsewhere.delete_unfinished()
                elsewhere.write(OWNER, stage.to_yaml())
        write_text_atomic(stored, recipe.to_yaml())
        yield folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder, which it creates, against a second process; the lock ends with this one, however it ends.

    Raises:
        UserError: another process uses the folder, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | SAFELY, 0o666), "w")
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror}") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder}: another tunix process is running there; wait for it, or set another output"
            ) from error
        yield


def move_aside(folder: Path) -> Path:
    """Renames a folder to the first free `folder.old-N`, so that nothing is lost."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return folder.rename(aside)


@contextmanager
def explaining_full_disk(output: str) -> Iterator[None]:
    """Makes one sentence of a full disk, wherever it is met, which says what of the run is kept.

    Raises:
        UserError: the disk was full.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        said = str(error) if isinstance(error, UserError) else f"{output}: the disk is full. {ROOM}."
        folder = Path(output).expanduser()
        runs = {f" of {path.parent.name}": path.parent for path in sorted(folder.glob("*/recipe.yaml"))} | {"": folder}
        newest = [f"step {max(steps)}{name}" for name, run in runs.items() if (steps := checkpoint_steps(run))]
        kept = f"The checkpoint of {', '.join(newest)} is kept." if newest else "No checkpoint was written yet."
        raise UserError(f"{said} {kept}") from error


def refuse_no_run(folder: Path) -> None:
    """Refuses a folder with files that are not a run's.

    Raises:
        UserError: it is not empty and holds no run.
    """
    # A run that never trained leaves these.
    ours = (".lock", "recipe.yaml")
    foreign = folder.is_dir() and not all(file.name.startswith(ours) for file in folder.iterdir())
    if foreign and not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder} is not empty and holds no run: set output to another folder")


def refuse_other_run(recipe: Recipe, folder: Path) -> None:
    """Refuses a folder where another recipe has trained.

    Without a checkpoint there is nothing to lose: a corrected recipe may take over the folder.

    Raises:
        UserError: keys differ that decide what is trained.
    """
    stored = folder / "recipe.yaml"
    if stored.is_file() and trained(folder) and (differing := recipe.difference(Recipe.load(stored))):
        raise UserError(
            f"{folder} holds the run of another recipe: {', '.join(differing)} differ. Give this one another "
            "output=..., or start again with --fresh (the old run is moved aside)."
        )


def trained(folder: Path) -> bool:
    """Whether a run, or one of its stages, has a checkpoint or an export."""
    places = [folder, *(path.parent for path in folder.glob("*/recipe.yaml"))]
    return any((place / "export").exists() or checkpoint_steps(place) for place in places)


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of which a single run has checkpoints."""
    recipe = folder / "recipe.yaml"
    section = read_mapping(recipe).get("checkpoint") if recipe.is_file() else None
    named = section.get("folder") if isinstance(section, dict) else None
    return folder_of(Path(named).expanduser() if isinstance(named, str) else folder / "checkpoints").steps()


def checkpoint_folder(recipe: Recipe, run: Path) -> Path:
    """Where the checkpoints of a single run or a stage are: what its recipe names, or in its run folder."""
    place = recipe.checkpoint.folder
    return run / "checkpoints" if place is None else Path(place).expanduser()


def refuse_foreign_checkpoints(recipe: Recipe, *, fresh: bool = False, moved: bool = False) -> None:
    """Checks that the folders which a recipe or its stages name for checkpoints hold none, or its own; its run folder
    may have another place than when it trained where it was `moved`.

    Raises:
        UserError: a folder holds another run's checkpoints, or any for a `fresh` run, or cannot be reached.
    """
    for stage in _naming(recipe):
        with _named(stage):
            folder = folder_of(checkpoint_folder(stage, Path()))
            steps, text = folder.steps(), folder.find(OWNER)
        begin = f"checkpoint.folder: {folder.name} holds"
        if fresh and steps:
            raise UserError(
                f"{begin} checkpoints of steps {steps}, and --fresh deletes nothing: set another checkpoint.folder, or "
                "delete that one"
            )
        if steps and text is None:
            raise UserError(f"{begin} checkpoints, but not the {OWNER} of their run: set another checkpoint.folder")
        if text is None:
            continue
        stored = Recipe.build(parse_yaml(text, f"{folder.name}/{OWNER}"), f"{folder.name}/{OWNER}")
        differing = stage.difference(stored) if steps else []
        if not moved and stage.output != stored.output:
            differing.append("output")
        if differing:
            raise UserError(
                f"{begin} the checkpoints of another run, with output {stored.output}: {', '.join(differing)} differ. "
                "Give this run another checkpoint.folder, or the same recipe and output to go on from them."
            )


def _naming(recipe: Recipe) -> list[Recipe]:
    """The run, or its stages, if they name a folder for their checkpoints."""
    return [stage for stage in recipe.stages or (recipe,) if stage.checkpoint.folder is not None]


@contextmanager
def _named(recipe: Recipe) -> Iterator[None]:
    """Names the key where a folder cannot be used."""
    try:
        yield
    except (UserError, OSError) as error:
        said = str(error.strerror if isinstance(error, OSError) else error)
        raise UserError(
            f"checkpoint.folder: {recipe.checkpoint.folder} cannot be used: {said.rstrip('.')}. Check the address, and "
            "that this machine may read and write there, or set another folder."
        ) from error
