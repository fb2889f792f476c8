"""Trees of dicts: their leaves by paths, and how much memory those take."""

import math
from collections.abc import Mapping
from typing import Any

import jax


def tree_of(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The tree that has these leaves at these paths."""
    tree: dict[str, Any] = {}
    for (*path, last), value in leaves.items():
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def bytes_of(tree: object) -> int:
    """Bytes that a tree of shapes takes on each device; 4-bit numbers are two to a byte."""
    return sum(_bytes(x) for x in jax.tree.leaves(tree))


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    name = str(x.dtype)
    bits = 4 if name.endswith("int4") else 2 if name.endswith("int2") else 8 * x.dtype.itemsize
    return -(-math.prod(shape) * bits // 8)
