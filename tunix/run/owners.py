"""Whose a run folder is, and whose the checkpoints are that lie elsewhere. Loads without jax.

A run folder belongs to the recipe in it, once the run has something to lose. Its lock says nothing about a folder that
`checkpoint.folder` names, which other machines see: that belongs to the run whose recipe is in there. The same recipe
with the same output goes on, wherever it is started. Of two processes with the same recipe, the later one goes on, and
the other stops at its next checkpoint (`trainer.checkpoint`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.trainer.checkpoint_folder import folder_of
from tunix.util.yaml_io import parse_yaml, read_mapping


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
    named = read_mapping(recipe).get("checkpoint", {}).get("folder") if recipe.is_file() else None
    return folder_of(folder / "checkpoints" if named is None else Path(named).expanduser()).steps()


OWNER = "recipe.yaml"


def checkpoint_folder(recipe: Recipe, run: Path) -> Path:
    """Where a run's checkpoints are: what the recipe names, or in the run folder.

    Args:
        recipe: of a single run or a stage.
        run: its run folder.
    """
    place = recipe.checkpoint.folder
    return run / "checkpoints" if place is None else Path(place).expanduser()


def refuse_foreign_checkpoints(recipe: Recipe, *, fresh: bool = False, moved: bool = False) -> None:
    """Checks that the folders which a recipe names for checkpoints hold none, or its own.

    Args:
        recipe: one run, or one with stages.
        fresh: whether the run starts again.
        moved: whether the run folder may have another place than when it trained.

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


def own_checkpoints(recipe: Recipe) -> None:
    """Writes the recipe into the folders that it names for checkpoints, so that no other run takes them.

    Raises:
        UserError: a folder cannot be written.
    """
    for stage in _naming(recipe):
        with _named(stage):
            folder = folder_of(checkpoint_folder(stage, Path()))
            folder.delete_unfinished()
            folder.write(OWNER, stage.to_yaml())


def _naming(recipe: Recipe) -> list[Recipe]:
    """The run, or its stages, if they name a folder for their checkpoints."""
    return [one for one in recipe.stages or (recipe,) if one.checkpoint.folder is not None]


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
