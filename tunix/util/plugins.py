"""User code that a recipe names, as `module:name` or `file.py:name`, and its options.

A file imports its neighbours, the files of its folder, and modules of the current folder, now and in calls later on.
`_Neighbours` finds them for imports that stand in such files alone, and only where Python finds nothing else: a
neighbour called `json.py` or `datasets.py` hides neither the standard library nor a package from the rest of tunix.
"""

import ast
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tunix.errors import UserError, nearest

_IMPORT_MACHINERY = (importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_PACKAGE = Path(__file__).parents[1]
_INSTALLED = (_PACKAGE, *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")))
"""Folders of code that is not the user's."""


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
    _NEIGHBOURS.add(Path.cwd())
    # Where a file has changed, all are imported again: others hold what they imported from it.
    if not all(path.is_file() and _NEIGHBOURS.loaded(path) for path in _NEIGHBOURS.modules):
        for path in list(_NEIGHBOURS.modules):
            _NEIGHBOURS.drop(path)
    before = _NEIGHBOURS.importing
    try:
        if place.endswith(".py"):
            # The same object until the file changes, so that classes stay equal between loads; and the one that a
            # neighbour has imported by its plain name, if one has.
            path = Path(place).resolve()
            _NEIGHBOURS.add(path.parent)
            if (module := _NEIGHBOURS.loaded(path)) is None:
                unique = f"tunix_user_{path.stem}_{abs(hash((path, path.stat().st_mtime_ns)))}"
                loader = _Shared(unique, path)
                spec = importlib.util.spec_from_file_location(unique, path, loader=loader)
                assert spec is not None
                module = sys.modules[unique] = importlib.util.module_from_spec(spec)
                loader.exec_module(module)
        else:  # of the current folder where Python finds none
            _NEIGHBOURS.importing = place.partition(".")[0]
            module = importlib.import_module(place)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises is for the user to fix
        line = f" at {where}" if (where := user_line(error)) else ""
        said = f"{reference}: importing {place} failed{line} with {type(error).__name__}: {error}"
        # A package may have the name of a neighbour, and is imported in its place.
        missing = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        specs = (PathFinder.find_spec(missing, [str(folder)]) for folder in _NEIGHBOURS.folders if missing)
        hidden = next((spec.origin for spec in specs if spec is not None and spec.origin is not None), None)
        there = sys.modules.get(missing)
        if hidden is not None and there is not None and there.__spec__ and there.__spec__.origin != hidden:
            said += f". {hidden} has the name of an installed module, which is imported in its place: rename it"
        raise UserError(said) from error
    finally:
        _NEIGHBOURS.importing = before
    if not hasattr(module, name):  # a module may import its names when they are asked for, as trl.rewards does
        raise UserError(f"{reference}: {place} has no {name!r}.{nearest(name, vars(module))}")
    return getattr(module, name)


def user_line(error: BaseException) -> str | None:
    """Where the user's code raised an error, e.g. `judge.py, line 12`; None where none of it is in the traceback."""
    if isinstance(error, SyntaxError) and error.filename and not _installed(error.filename):
        return f"{_shown(error.filename)}, line {error.lineno}"
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    theirs = [(file, number) for file, number in lines if not file.startswith("<") and not _installed(file)]
    return f"{_shown(theirs[-1][0])}, line {theirs[-1][1]}" if theirs else None


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


def _installed(file: str) -> bool:
    """Whether a file belongs to tunix, the standard library or an installed package."""
    path = Path(file)
    return any(map(path.is_relative_to, _INSTALLED)) or bool({"site-packages", "dist-packages"} & {*path.parts})


def _shown(file: str) -> str:
    """A file's path from the current folder where it is in there, else its name."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def _refuse_namesakes(path: Path) -> None:
    """Refuses a file whose neighbour another folder's file has taken the name of: `import helpers` means one module."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # importing the file says what is wrong, and in which line
        return
    names: set[str] = set()
    """The top-level modules that its import statements name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    for name in sorted(names - sys.stdlib_module_names):
        spec, module = PathFinder.find_spec(name, [str(path.parent)]), sys.modules.get(name)
        if spec is None or spec.origin is None or module is None or module.__spec__ is None:
            continue
        other = module.__spec__.origin
        if other is not None and other != spec.origin and not _installed(other):
            raise UserError(
                f"{path} imports {name}, which is {spec.origin}, but {other} has that name in this process already: "
                "rename one of the two"
            )


class _Neighbours(MetaPathFinder):
    """The last of Python's finders: top-level modules that the user's files import from their folders."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.modules: dict[Path, tuple[int, ModuleType]] = {}
        """File -> its time of change when it was imported, and the module."""
        self.importing: str | None = None
        """The module that a recipe names, which may come from the current folder, whoever imports it."""

    def add(self, folder: Path) -> None:
        """Adds a folder whose files may import each other; again where something removed this finder."""
        if folder not in self.folders:
            self.folders.append(folder)
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def loaded(self, path: Path) -> ModuleType | None:
        """The module of a file that was imported since it last changed."""
        time, module = self.modules.get(path, (None, None))
        return module if time == path.stat().st_mtime_ns else None

    def drop(self, path: Path) -> None:
        """Forgets a file's module."""
        _, module = self.modules.pop(path)
        for name in [name for name, other in sys.modules.items() if other is module]:
            del sys.modules[name]

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The neighbour of this name of the file that imports it; None for imports that are not the user's."""
        if path is not None:  # a module within a package, which Python finds by itself
            return None
        folders = [Path.cwd()]
        if name != self.importing:
            # What called this method, then Python's import, then the file that imports.
            files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
            after = itertools.dropwhile(lambda file: file not in _IMPORT_MACHINERY, files)
            file = Path(next((file for file in after if file not in _IMPORT_MACHINERY), ""))
            inside = [folder for folder in self.folders if file.is_relative_to(folder)]
            if not inside or _installed(str(file)):
                return None
            folders = [*sorted(inside, key=lambda folder: -len(folder.parts)), *folders]  # the innermost first
        specs = (PathFinder.find_spec(name, [str(folder)]) for folder in folders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.origin and spec.loader is not None and Path(spec.origin).suffix == ".py":
            spec.loader = _Shared(spec.name, Path(spec.origin).resolve())
        return spec


class _Shared(SourceFileLoader):
    """Loads a file once, whether it is imported by its plain name or named in a recipe. What Python compiles is not
    kept: `__pycache__` tells changes by the second, and a run leaves nothing beside the user's files."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, str(path))
        self._file, self._known = path, _NEIGHBOURS.loaded(path)

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the file."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The file's module where it is imported already."""
        return self._known

    def exec_module(self, module: ModuleType) -> None:
        """Runs the file, unless it has been."""
        if self._known is not None:
            return
        _NEIGHBOURS.modules[self._file] = (self._file.stat().st_mtime_ns, module)
        try:
            _refuse_namesakes(self._file)
            super().exec_module(module)
        except BaseException:
            _NEIGHBOURS.drop(self._file)
            raise


_NEIGHBOURS = _Neighbours()
