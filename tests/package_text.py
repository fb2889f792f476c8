"""The text that the package can print, for tests of pages that quote it."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def package_text() -> str:
    """Every string of the package and of its build; of an f-string, each piece between its values."""
    files = [*(ROOT / "tunix").rglob("*.py"), ROOT / "hatch_build.py"]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
