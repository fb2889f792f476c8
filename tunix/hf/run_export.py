"""The folder of weights that a finished run exported. Loads without jax."""

from pathlib import Path

from tunix.errors import UserError
from tunix.util.yaml_io import read_mapping


def exported(run: Path) -> Path:
    """The folder that a finished run exported; the last stage's, if the run has stages.

    Raises:
        UserError: the run has not exported yet.
    """
    stages = read_mapping(run / "recipe.yaml").get("stages") or []
    last = f"{len(stages) - 1}_*/export" if stages else "export"
    folder = next(run.glob(last), None)
    if folder is None:
        raise UserError(f"{run} has exported nothing yet: finish the run, or write a folder: tunix export {run} OUT")
    return folder
