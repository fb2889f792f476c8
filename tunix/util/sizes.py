"""How much memory arrays take."""

import math

import jax


def bytes_of(tree: object) -> int:
    """Bytes that a tree of shapes takes on each device; 4-bit numbers are two to a byte."""
    return sum(_bytes(x) for x in jax.tree.leaves(tree))


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    name = str(x.dtype)
    bits = 4 if name.endswith("int4") else 2 if name.endswith("int2") else 8 * x.dtype.itemsize
    return -(-math.prod(shape) * bits // 8)
