"""User code that a recipe names, as `module:name` or `file.py:name`, and its options."""

import importlib
import importlib.util
import inspect
import os
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tunix.errors import UserError, nearest


def is_reference(text: str) -> bool:
    """Whether a text such as `my_rows.py:train` names code, and not a hub id or a path."""
    place, colon, name = text.rpartition(":")
    return bool(colon) and name.isidentifier() and (place.endswith(".py") or place.replace(".", "_").isidentifier())


def absolute(reference: str) -> str:
    """A reference that means the same in any folder: a file with its whole path, a module as it is."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else reference


def load_object(reference: str) -> Any:
    """Imports the object that `module:name` or `file.py:name` refers to, which runs the user's code.

    Raises:
        UserError: the file, the module or the name does not exist, or the import fails.
    """
    place, _, name = reference.rpartition(":")
    if place.endswith(".py") and not os.path.isfile(place):  # which takes any text
        raise UserError(f"{reference}: there is no file {place} (paths start from the current folder)")
    try:
        module = _file_module(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever the user's code raises is for the user to fix
        raise UserError(f"{reference}: importing {place} failed with {type(error).__name__}: {error}") from error
    if name not in vars(module):
        raise UserError(f"{reference}: {place} has no {name!r}.{nearest(name, vars(module))}")
    return vars(module)[name]


def check_options(
    what: str, function: Callable[..., Any], options: Mapping[str, Any], hidden: tuple[str, ...] = ()
) -> None:
    """Refuses options that a function does not have, that are missing, or that have the wrong type.

    Args:
        what: the function's name in messages, e.g. `the reward format`.
        function: annotated; a class stands for its constructor.
        options: the options in the recipe.
        hidden: parameters that are not options.

    Raises:
        UserError: the message names the option, its value and the possible ones.
    """
    from pydantic import TypeAdapter, ValidationError

    parameters = {name: p for name, p in inspect.signature(function).parameters.items() if name not in hidden}
    types = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    for option, value in options.items():
        if option not in parameters:
            known = ", ".join(parameters) or "none"
            raise UserError(f"{what} has no option {option!r}; it has {known}.{nearest(option, parameters)}")
        try:
            TypeAdapter(types[option]).validate_python(value, strict=True)
        except ValidationError as error:
            raise UserError(f"{what} has {option}: {value!r}. {error.errors()[0]['msg']}") from error
    for parameter in parameters.values():
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required and parameter.name not in options:
            raise UserError(f"{what} wants the option {parameter.name!r}: set it in its `options`")


def _file_module(path: Path) -> ModuleType:
    """A file imported as a module: the same object until the file changes, so that classes stay equal between loads."""
    name = f"tunix_user_{path.stem}_{abs(hash((path, path.stat().st_mtime_ns)))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
