"""The run folder: locked for one recipe and one process, cleaned up after a kill, reopened for more steps."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunix.errors import UserError
from tunix.hf.source import TOKENIZER
from tunix.recipe.recipe import Recipe
from tunix.rollout.types import SPANS
from tunix.run.owners import (
    checkpoint_steps,
    own_checkpoints,
    refuse_foreign_checkpoints,
    refuse_no_run,
    refuse_other_run,
    trained,
)
from tunix.trainer.progress import Display
from tunix.util.atomic_io import ROOM, forget_after, is_full, write_text_atomic


@contextmanager
def claimed(recipe: Recipe, fresh: bool) -> Iterator[Path]:
    """Creates the run folder, or checks that it belongs to this recipe, and locks it against other processes.

    Raises:
        UserError: it holds something else, another process uses it, or it cannot be written; the same of a folder that
            the recipe names for checkpoints.
    """
    folder = Path(recipe.output).expanduser()
    stored = folder / "recipe.yaml"
    refuse_no_run(folder)
    refuse_foreign_checkpoints(recipe, fresh=fresh)
    if fresh and stored.is_file():
        with locked(folder):
            move_aside(folder)
    if folder.is_file():
        raise UserError(f"output: {folder} cannot be written: it is a file, and a run is a folder. Set another output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror}") from error
    with locked(folder):
        refuse_other_run(recipe, folder)
        own_checkpoints(recipe)
        write_text_atomic(stored, recipe.to_yaml())
        yield folder


def prepare(folder: Path, start: int | None) -> None:
    """Deletes what earlier starts wrote after the checkpoint that the run resumes from."""
    for path in folder.glob("*.tmp-*"):  # half written when a process was killed; the folder is locked
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    forget_after(folder / "samples.jsonl", start)
    if (folder / SPANS).exists():  # of runs on completions alone
        forget_after(folder / SPANS, start)
    if start is None and (folder / TOKENIZER).is_dir():
        shutil.rmtree(folder / TOKENIZER)  # trained on rows that may have been corrected since


def reopen(folder: Path, after: Path | None, display: Display, step: int) -> None:
    """Moves the export of fewer steps aside before training continues.

    Args:
        after: folder of the next stage, which starts from this export; None without one.
        step: steps that are done.

    Raises:
        UserError: the next stage has already started from the export.
    """
    if step:
        display.say(f"going on from step {step}")
    if not (folder / "export").exists():
        return
    if after is not None and trained(after):
        raise UserError(
            f"{folder} was asked for more steps, but {after} has started from its weights already: start again with "
            "--fresh or another output"
        )
    move_aside(folder / "export")


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
        raise UserError(f"{said} {_kept(Path(output).expanduser())}") from error


def _kept(folder: Path) -> str:
    """The newest checkpoint of a run, or of each of its stages."""
    stages = {path.parent.name: checkpoint_steps(path.parent) for path in sorted(folder.glob("*/recipe.yaml"))}
    single = checkpoint_steps(folder)
    newest = [f"step {max(steps)} of {name}" for name, steps in stages.items() if steps]
    newest += [f"step {max(single)}"] if single else []
    return f"The checkpoint of {', '.join(newest)} is kept." if newest else "No checkpoint was written yet."


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder against a second process; the lock ends with this process, however it ends.

    Raises:
        UserError: another process uses the folder, or it cannot be written.
    """
    try:
        lock = (folder / ".lock").open("w")
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
