"""Whose a run folder is: that of the recipe in it, once the run has something to lose. Loads without jax."""

from pathlib import Path

from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.trainer.checkpoint_folder import folder_of
from tunix.util.yaml_io import read_mapping


def refuse_no_run(folder: Path) -> None:
    """Refuses a folder with files that are not a run's.

    Raises:
        UserError: it is not empty and holds no run.
    """
    if not (folder / "recipe.yaml").is_file() and _foreign(folder):
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


def _foreign(folder: Path) -> bool:
    """Whether a folder holds files that are not those of a run that never trained."""
    ours = (".lock", "recipe.yaml")
    return folder.is_dir() and not all(file.name.startswith(ours) for file in folder.iterdir())


def trained(folder: Path) -> bool:
    """Whether a run, or one of its stages, has a checkpoint or an export."""
    places = [folder, *(path.parent for path in folder.glob("*/recipe.yaml"))]
    return any((place / "export").exists() or checkpoint_steps(place) for place in places)


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of which a single run has checkpoints."""
    recipe = folder / "recipe.yaml"
    named = read_mapping(recipe).get("checkpoint", {}).get("folder") if recipe.is_file() else None
    return folder_of(folder / "checkpoints" if named is None else Path(named).expanduser()).steps()
