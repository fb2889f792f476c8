"""Columns within columns, by dotted names: `reward_model.ground_truth` is `row["reward_model"]["ground_truth"]`.

A column whose name has the dot itself takes precedence. Loads without jax or numpy: workers of rewards import it.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def reach(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a key within mappings by a dotted name.

    Raises:
        KeyError: there is neither.
    """
    if name in row:
        return row[name]
    for place, letter in enumerate(name):
        if letter == "." and isinstance(inner := row.get(name[:place]), Mapping):
            return reach(inner, name[place + 1 :])
    raise KeyError(name)


def reached(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The row with those of the dotted names that lead to a value, as columns of these names."""
    lifted = dict(row)
    for name in names:
        if "." in name and name not in row:
            with contextlib.suppress(KeyError):
                lifted[name] = reach(row, name)
    return lifted


def dotted(row: Mapping[str, Any], before: str = "", depth: int = 3) -> Iterator[str]:
    """Yields the names of all columns, those within columns too, down to a depth; for messages."""
    for name, value in row.items():
        yield f"{before}{name}"
        if isinstance(value, Mapping) and depth > 1:
            yield from dotted(value, f"{before}{name}.", depth - 1)
