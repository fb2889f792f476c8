"""What a reader has to hold of tunix/, in numbers; `make house` prints them.

Read from the source with `ast`: names are compared as words, so that a method and a function of one name count as one.
"""

import ast
import inspect
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tunix"
SHORT_FUNCTION, SHORT_FILE = 8, 110
"""Lines of code of a function, and lines of a file, below which it should earn its name."""
_UNWRITTEN = (ROOT / "docs/glossary.md").read_text().partition("\n## Words that we do not write")[2]
BANNED = set(re.findall(r"`(\w+)`", _UNWRITTEN))
"""Names of local values that say nothing."""
PHRASES = [phrase for phrases in re.findall(r"^\| ([^|]+) \|", _UNWRITTEN, re.M)[1:] for phrase in phrases.split(", ")]
"""Odd words, for which the glossary has the usual ones."""
PRIVATE = ("jax._src", "tokamax._src")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Source:
    """One file."""

    path: Path
    text: str = field(init=False)
    nodes: list[ast.AST] = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.path.read_text()
        self.nodes = list(ast.walk(ast.parse(self.text)))  # once: walking is most of what these measures take

    @property
    def module(self) -> str:
        """e.g. `tunix.trainer.step`."""
        name = ".".join(self.path.relative_to(ROOT).with_suffix("").parts)
        return name.removesuffix(".__init__")

    @cached_property
    def functions(self) -> list[Function]:
        """All functions and methods, those within functions included."""
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def imported(self) -> set[str]:
        """The modules of tunix that it imports, anywhere in it."""
        names = set[str]()
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tunix":
                names.add(node.module)
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        return names

    @cached_property
    def code(self) -> set[int]:
        """Numbers of the lines that are no docstring, comment or blank line."""
        lines = enumerate(self.text.splitlines(), 1)
        numbers = {number for number, line in lines if line.strip() and not line.strip().startswith("#")}
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                numbers -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return numbers

    def code_lines(self, function: Function) -> int:
        """Lines of a function without docstrings, comments and blank lines."""
        return len(self.code & set(range(function.lineno, (function.end_lineno or function.lineno) + 1)))


@cache
def sources() -> list[Source]:
    """All files of the package."""
    return [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]


def uses(files: list[Source]) -> Counter[str]:
    """How often each word is read as a name, an attribute or in an import."""
    counts = Counter[str]()
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                counts[node.id] += 1
            elif isinstance(node, ast.Attribute):
                counts[node.attr] += 1
    return counts


def used_once(files: list[Source]) -> list[str]:
    """Functions of at most SHORT_FUNCTION lines of code that are named once: called at one place, and no formula."""
    counts = uses(files)
    return [
        f"{file.path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for file in files
        for function in file.functions
        if counts[function.name] == 1 and not function.decorator_list and file.code_lines(function) <= SHORT_FUNCTION
    ]


def lonely(files: list[Source]) -> list[str]:
    """Files below SHORT_FILE lines that one other file imports, but for the `__init__.py` of folders."""
    importers = defaultdict[str, set[str]](set)
    for file in files:
        for module in file.imported:
            importers[module].add(file.module)
    return [
        str(file.path.relative_to(ROOT))
        for file in files
        if len(file.text.splitlines()) < SHORT_FILE
        and len(importers[file.module] - {file.module}) == 1
        and file.path.name != "__init__.py"
    ]


def bundled(files: list[Source]) -> list[str]:
    """Calls that pass a bundle `*name` or `**name`; not of a function's own `*args` and `**kwargs`."""
    calls = []
    for file in files:
        own = {
            arg.arg
            for function in file.functions
            for arg in (function.args.vararg, function.args.kwarg)
            if arg is not None
        }
        for node in file.nodes:
            if isinstance(node, ast.Call):
                stars = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
                stars += [keyword.value for keyword in node.keywords if keyword.arg is None]
                if any(isinstance(star, ast.Name) and star.id not in own for star in stars):
                    calls.append(f"{file.path.relative_to(ROOT)}:{node.lineno}")
    return calls


def banned(files: list[Source]) -> list[str]:
    """Local values with a name that says nothing, outside of comprehensions."""
    places = []
    for file in files:
        inside = {
            id(name) for node in file.nodes if isinstance(node, ast.comprehension) for name in ast.walk(node.target)
        }
        for node in file.nodes:
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inside
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""  # pyright: ignore
            name = node.name if isinstance(node, Function) else name
            if name in BANNED:
                places.append(f"{file.path.relative_to(ROOT)}:{node.lineno} {name}")  # pyright: ignore
    return places


def closure(files: list[Source], folder: str) -> tuple[int, int]:
    """Files that a folder imports, itself and what those import included, and their lines; without `__init__`s."""
    by_name = {file.module: file for file in files}
    left = [name for name in by_name if name.startswith(folder)]
    reached = set[str]()
    while left:
        name = left.pop()
        if name in by_name and name not in reached:
            reached.add(name)
            left += by_name[name].imported
    kept = [by_name[name] for name in reached if by_name[name].path.name != "__init__.py"]
    return len(kept), sum(len(file.text.splitlines()) for file in kept)


def recipe_keys() -> tuple[int, int]:
    """Keys of all sections of a recipe, every algorithm's included, and those of GRPO's `algorithm`."""
    from tunix.recipe.algorithms import ALGORITHMS
    from tunix.recipe.recipe import Recipe

    configs = {name: config for name, (config, *_) in ALGORITHMS.items()}
    sections: set[type[BaseModel]] = {Recipe, *configs.values()}
    left = list(sections)
    while left:
        inner = {kind for info in left.pop().model_fields.values() for kind in _models(info.annotation)} - sections
        sections |= inner
        left += inner
    # A field that a class inherits is one key in all of them.
    keys = {(_declared(section, name), name) for section in sections for name in section.model_fields}
    return len(keys), len(configs["grpo"].model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _declared(section: type[BaseModel], name: str) -> type:
    """The class in which a field is first declared."""
    return next(kind for kind in reversed(section.__mro__) if name in inspect.get_annotations(kind))


def numbers() -> dict[str, int | float]:
    """The measures by name."""
    files = sources()
    functions = [(file, function) for file in files for function in file.functions]
    lines = sum(len(file.code) for file in files)
    grpo_files, grpo_lines = closure(files, "tunix.algorithms.grpo")
    modules = {file.module for file in files}
    keys, grpo_keys = recipe_keys()
    return {
        "lines": sum(len(file.text.splitlines()) for file in files),
        "files": len(files),
        "functions": len(functions),
        "lines of code to a function": round(lines / len(functions), 1),
        "short functions used once": len(used_once(files)),
        "short files with one importer": len(lonely(files)),
        "calls with bundles": len(bundled(files)),
        "imports of the busiest file": max(len(file.imported & modules) for file in files),
        "recipe keys": keys,
        "recipe keys of GRPO": grpo_keys,
        "files in the closure of algorithms/grpo": grpo_files,
        "lines in the closure of algorithms/grpo": grpo_lines,
        "banned local names": len(banned(files)),
        "files with private names of others": sum(any(name in file.text for name in PRIVATE) for file in files),
    }


if __name__ == "__main__":
    lists = {"once": used_once, "lonely": lonely, "bundled": bundled, "banned": banned}
    if sys.argv[1:]:
        print("\n".join(lists[sys.argv[1]](sources())))
    else:
        print("\n".join(f"{name:45}{value:>10,}" for name, value in numbers().items()))
