"""Trees of dicts, and their leaves by paths."""

from collections.abc import Mapping
from typing import Any


def tree_of(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The tree that has these leaves at these paths."""
    tree: dict[str, Any] = {}
    for (*path, last), value in leaves.items():
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree
