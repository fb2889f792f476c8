"""The words of the shipped text: one meaning for an axis letter, examples in records, docstrings that stand alone.

Everything is read from the source with `ast`; the axis letters that rooms share are those of `tunix/types.py`'s
docstring, and those of one room are in its files' legends.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.house import PHRASES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tunix"
TYPES = PACKAGE / "types.py"
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("tunix/**/*.md", "docs/**/*.md", "examples/*.py", "*.md")
    for path in ROOT.glob(pattern)
    if path.parent.name != "log" and path.name != "glossary.md"
]
TEXTS = sorted([*MODULES, *PAGES])

LISTED = re.compile(r"^    ([A-Z][a-z]?|[a-z]) +(\S.*)$", re.MULTILINE)
"""A line of the list: a letter, its meaning, and after a colon what more there is to say."""
LEGEND = re.compile(r"^Axes: ([^;]*?)(?:[.;]|\Z)", re.MULTILINE)
SHAPE = re.compile(r"`\[([^`\]]*)\]`")
LETTER = re.compile(r"[A-Z][a-z]?")
SUFFIX = re.compile(r"[a-z][a-z0-9_]*_((?:[A-Z][a-z]?)+)")
DTYPES = {"Bool", "Float", "Inexact", "Int", "Integer", "Key", "Num", "Shaped", "UInt"}
"""jaxtyping's names that are followed by axes."""

OPENINGS = ("Of ", "Likewise", "As above")
"""How a docstring begins that needs the one before it."""


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


@cache
def listed() -> dict[str, str]:
    """Letter -> its meaning."""
    text = ast.get_docstring(tree("tunix/types.py")) or ""
    return {letter: meaning.partition(":")[0] for letter, meaning in LISTED.findall(text)}


def legend(text: str) -> list[tuple[str, str]]:
    """Letters and meanings of the `Axes:` line in a docstring, without what stands in parentheses."""
    found = LEGEND.search(text)
    if found is None:
        return []
    items = re.sub(r"\s*\([^)]*\)", "", " ".join(found[1].split())).split(", ")
    return [(item.partition(" ")[0], item.partition(" ")[2]) for item in items]


def annotated(node: ast.AST) -> Iterator[str]:
    """The axes of every jaxtyping annotation, such as `B T`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Subscript) and isinstance(inner.value, ast.Name) and inner.value.id in DTYPES:
            parts = inner.slice.elts if isinstance(inner.slice, ast.Tuple) else [inner.slice]
            yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


def named(node: ast.AST) -> Iterator[str]:
    """The suffixes of names, such as the `PG` of `rewards_PG`."""
    for inner in ast.walk(node):
        name = inner.arg if isinstance(inner, ast.arg) else inner.id if isinstance(inner, ast.Name) else ""
        if found := SUFFIX.fullmatch(name):
            yield found[1]


@cache
def known(room: str) -> dict[str, str]:
    """Letter -> its meaning, of those that rooms share and those of one room, e.g. `models`."""
    modules = (module for module in MODULES if module.split("/")[1] == room)
    items = [item for module in modules for item in legend(ast.get_docstring(tree(module)) or "")]
    return dict(items) | listed()


def letters_of(axes: str) -> set[str]:
    """Axes that begin with a capital letter; `*` and `H/2` are read too."""
    letters = (re.match(r"\*?([A-Z]\w*)", axis) for axis in axes.split())
    return {letter[1] for letter in letters if letter}


def docstrings(node: ast.AST) -> Iterator[str]:
    """Every string that stands for itself: of modules, classes, functions, and fields."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant) and isinstance(inner.value.value, str):
            yield inner.value.value


def fields() -> Iterator[tuple[str, str, str]]:
    """`Class.field`, type and docstring of each field of the dataclasses in `tunix/types.py`."""
    for record in tree("tunix/types.py").body:
        if not isinstance(record, ast.ClassDef):
            continue
        for item, following in zip(record.body, [*record.body[1:], ast.Pass()], strict=True):
            if isinstance(item, ast.AnnAssign):
                said = "".join(docstrings(following)) if isinstance(following, ast.Expr) else ""
                yield f"{record.name}.{ast.unparse(item.target)}", ast.unparse(item.annotation), said


FIELDS = list(fields())


def test_the_list_of_axes_is_read():
    assert listed().keys() >= {*"BTVDFNKHLGPSMRE", "Sl", "St", "Te"}
    assert listed()["G"] == "group"
    assert len(set(listed().values())) == len(listed()), "two letters mean the same"


def wrong(faults: Callable[[str], Iterable[str | tuple[str, str]]], files: Iterable[str] = MODULES) -> dict[str, list]:
    """The faults of each file that has some."""
    return {file: those for file in files if (those := sorted(faults(file)))}


def test_a_letter_means_one_thing():
    every = {letter: meaning for module in MODULES for letter, meaning in known(module.split("/")[1]).items()}

    def faults(module: str) -> Iterator[tuple[str, str]]:
        docstring = ast.get_docstring(tree(module)) or ""
        return (item for item in legend(docstring) if item not in every.items())

    assert wrong(faults) == {}, "not as in tunix/types.py, or in another file"
    assert len(set(every.values())) == len(every), "two letters mean the same"


def test_axes_are_those_that_the_room_knows():
    def faults(module: str) -> set[str]:
        shapes = [shape for text in docstrings(tree(module)) for shape in SHAPE.findall(text)]
        in_shapes = {letter for shape in shapes for letter in re.findall(r"\b[A-Z][a-z]?\b", shape)}
        in_names = {letter for suffix in named(tree(module)) for letter in LETTER.findall(suffix)}
        in_annotations = {letter for axes in annotated(tree(module)) for letter in letters_of(axes)}
        return (in_shapes | in_names | in_annotations) - known(module.split("/")[1]).keys()

    assert wrong(faults) == {}


def test_every_listed_letter_is_in_a_legend():
    used = {letter for module in MODULES for letter, _ in legend(ast.get_docstring(tree(module)) or "")}
    assert listed().keys() <= used


def test_wrong_axes_would_be_found():
    assert legend("A tale.\n\nAxes: B rows (of a batch), Te teacher's\nwidth; 2 i is chosen.") == [
        ("B", "rows"),
        ("Te", "teacher's width"),
    ]
    code = ast.parse("def f(x_PG: Float[Array, 'B *Zz width H/2']) -> Int[np.ndarray, '']: ...")
    assert {*annotated(code)} == {"B *Zz width H/2", ""}
    assert letters_of("B *Zz width H/2") == {"B", "Zz", "H"}
    assert "Zz" not in known("models")
    assert list(named(code)) == ["PG"]


def test_a_record_gives_examples():
    assert [name for name, _, said in FIELDS if not said] == [], "without a docstring"
    explained = (name for name, annotation, _ in FIELDS if annotation == "bool" or annotation.startswith("Callable"))
    assert {name for name, _, said in FIELDS if "e.g." not in said} - set(explained) == set(), "give an example value"
    assert ("Sequence.weight", "float") in [(name, annotation) for name, annotation, _ in FIELDS]
    assert {name.partition(".")[0] for name, _, _ in FIELDS} > {"Batch", "Term", "Sampling", "Completion", "Workload"}


def test_docstrings_stand_alone():
    def faults(module: str) -> Iterator[str]:
        return (text.split("\n")[0] for text in docstrings(tree(module)) if text.startswith(OPENINGS))

    assert wrong(faults) == {}


def test_plain_technical_english():
    """No phrase of docs/glossary.md's last table. Line ends, and the marks of comments after them, part none."""
    assert "goes before" in PHRASES

    def faults(file: str) -> Iterator[str]:
        said = re.sub(r"\s+(# )?", " ", (ROOT / file).read_text()).lower()
        return (phrase for phrase in PHRASES if phrase in said)

    assert wrong(faults, TEXTS) == {}
