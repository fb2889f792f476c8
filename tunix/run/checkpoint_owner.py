"""Who owns checkpoints outside of a run folder, in `checkpoint.folder`: one run, named by the recipe in there.

The lock of the run folder says nothing about such a folder, which other machines see. Its recipe decides instead: the
same recipe with the same output goes on, wherever it is started. Of two processes with the same recipe, the later one
goes on, and the other stops at its next checkpoint (`trainer.checkpoint`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.trainer.checkpoint_folder import folder_of
from tunix.util.yaml_io import parse_yaml

OWNER = "recipe.yaml"


def checkpoint_folder(recipe: Recipe, run: Path) -> Path:
    """Where a run's checkpoints are: what the recipe names, or in the run folder.

    Args:
        recipe: of a single run or a stage.
        run: its run folder.
    """
    given = recipe.checkpoint.folder
    return run / "checkpoints" if given is None else Path(given).expanduser()


def refuse_foreign_checkpoints(recipe: Recipe, *, fresh: bool = False, moved: bool = False) -> None:
    """Checks that the folders which a recipe names for checkpoints hold none, or its own.

    Args:
        recipe: one run, or one with stages.
        fresh: whether the run starts again.
        moved: whether the run folder may have another place than when it trained.

    Raises:
        UserError: a folder holds another run's checkpoints, or any for a `fresh` run, or cannot be reached.
    """
    for one in _naming(recipe):
        with _named(one):
            folder = folder_of(checkpoint_folder(one, Path()))
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
        differing = one.difference(stored) if steps else []
        if not moved and one.output != stored.output:
            differing.append("output")
        if differing:
            raise UserError(
                f"{begin} the checkpoints of another run, with output {stored.output}: {', '.join(differing)} differ. "
                "Give this run another checkpoint.folder, or the same recipe and output to go on from them."
            )


def own_checkpoints(recipe: Recipe) -> None:
    """Writes the recipe into the folders that it names for checkpoints, so that no other run takes them.

    Raises:
        UserError: a folder cannot be written.
    """
    for one in _naming(recipe):
        with _named(one):
            folder = folder_of(checkpoint_folder(one, Path()))
            folder.delete_unfinished()
            folder.write(OWNER, one.to_yaml())


def _naming(recipe: Recipe) -> list[Recipe]:
    """The run, or its stages, if they name a folder for their checkpoints."""
    return [one for one in recipe.stages or (recipe,) if one.checkpoint.folder is not None]


@contextmanager
def _named(recipe: Recipe) -> Iterator[None]:
    """Names the key where a folder cannot be used."""
    try:
        yield
    except (UserError, OSError) as error:
        given = str(recipe.checkpoint.folder)
        said = str(error.strerror if isinstance(error, OSError) else error)
        raise UserError(
            f"checkpoint.folder: {given} cannot be used: {said.rstrip('.')}. Check the address, and that this machine "
            "may read and write there, or set another folder."
        ) from error
