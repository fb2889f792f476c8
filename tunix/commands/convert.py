"""`tunix import` and the other formats of `tunix export`: between model folders and what other programs read.

`FORMATS` at the end is the table of the formats to which a model folder is converted.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tunix.config import DType
from tunix.errors import UserError

HUGGINGFACE = "huggingface"
OPTIONS = {
    "adapter": HUGGINGFACE,
    "packed": HUGGINGFACE,
    "unscanned": "maxtext",
    "batch": "stablehlo",
    "prompt_length": "stablehlo",
    "length": "stablehlo",
}
"""Options of `tunix export` -> the format that has them."""
SCHEME = "maxtext:"


def check_options(form: str, given: Mapping[str, Any]) -> None:
    """Refuses options that belong to another format than the one that is written.

    Args:
        form: a value of `--format`.
        given: options by name that were given a value.

    Raises:
        UserError: names the option.
    """
    for name in given:
        if OPTIONS[name] != form:
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{option} belongs to --format {OPTIONS[name]}, and changes nothing of --format {form}: leave it out"
            )


def export_converted(run: Path, out: Path, form: str, given: Mapping[str, Any], step: int | None = None) -> None:
    """Writes a run's weights in another format than Hugging Face's, and tells how they are loaded.

    Args:
        run: the run folder; or a model folder or hub id, which is converted as it is.
        out: the folder to write; it must not exist.
        form: a key of `FORMATS`.
        given: the format's options by name, e.g. `{"batch": 8}`; those left out have their defaults.
        step: the checkpoint to export; the newest by default.

    Raises:
        UserError: there is no such run, model or checkpoint, it cannot be converted, or `out` exists.
    """
    from tunix.run.export import export_as

    print(f"{run} is in {out}, as {form}: {export_as(run, out, FORMATS[form](given), step)}")


def import_model(source: str, out: Path, like: str | None = None, dtype: DType | None = None) -> None:
    """Writes a checkpoint of MaxText as a model folder.

    Args:
        source: `maxtext:FOLDER`.
        out: the folder to write; it must not exist.
        like: a model folder or hub id with config.json and tokenizer; None where they are in the checkpoint's folder.
        dtype: of the written weights; None keeps each array's own.

    Raises:
        UserError: `source` is not written so, or as `import_maxtext`.
    """
    if not source.startswith(SCHEME):
        raise UserError(f"{source}: write which format it is, {SCHEME}FOLDER; Hugging Face's folders need no import")
    from tunix.hf.model_folder import resolve_folder
    from tunix.interop.maxtext import import_maxtext

    folder = Path(source.removeprefix(SCHEME)).expanduser()
    import_maxtext(folder, out, like=None if like is None else resolve_folder(like), dtype=dtype)
    print(f"{folder} is in {out}, a model folder that every command reads")


def _maxtext(given: Mapping[str, Any]) -> Callable[[Path, Path], str]:
    from tunix.interop.maxtext import export_maxtext

    return partial(export_maxtext, scanned=not given)


def _stablehlo(given: Mapping[str, Any]) -> Callable[[Path, Path], str]:
    from tunix.interop.stablehlo import Shapes, export_stablehlo

    sizes = {"batch": 1, "prompt_length": 512, "length": 1024, **given}
    return partial(export_stablehlo, shapes=Shapes(sizes["batch"], sizes["prompt_length"], sizes["length"]))


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Callable[[Path, Path], str]]] = {
    "maxtext": _maxtext,
    "stablehlo": _stablehlo,
}
"""Value of `--format` -> what converts `(model folder, out)`, from the options that were given."""
