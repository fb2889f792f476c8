"""Which devices exchange arrays in a collective, in each of the ways in which a program's text says it.

replica_groups={{0,2},{1,3}}                                    lists
replica_groups=[2,4]<=[4,2]T(1,0)                               two groups of four of the numbers 0..7, as `[4, 2]`
                                                                transposed
replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}    along axes of a mesh of those numbers
"""

import math
import re
from collections.abc import Sequence

import numpy as np

ARRANGED = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
"""Consecutive numbers of this shape, transposed."""


def group(text: str) -> Sequence[int]:
    """The first group of the collective that an instruction's text describes; `(0, 1)` where it names none."""
    if found := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={ARRANGED}", text):
        return _numbers(found[3], found[4]).reshape(int(found[1]), int(found[2]))[0].tolist()
    if found := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({ARRANGED}\))? \{{([^}}]*)\}}", text):
        return _along(found[1], found[2], found[3], found[4])
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", text)
    return _integers(listed[1]) if listed and listed[1] else (0, 1)


def _along(sizes: str, shape: str | None, order: str | None, axes: str) -> Sequence[int]:
    """The first group along axes of a mesh. `'a':(2)4` is the part of size 4 of an axis, past a part of size 2."""
    mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    wanted = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
    parts = {name: (int(before or 1), int(size or mesh[name])) for name, before, size in wanted}
    split: list[int] = []
    taken: list[slice | int] = []
    for name, size in mesh.items():
        before, middle = parts.get(name, (1, 1))
        split += [before, middle, size // before // middle]
        taken += [0, slice(None), 0]
    numbers = np.arange(math.prod(mesh.values())) if shape is None else _numbers(shape, order)
    return numbers.reshape(split)[tuple(taken)].reshape(-1).tolist()


def _numbers(shape: str, order: str | None) -> np.ndarray:
    """`[N]`: consecutive numbers of a shape, transposed."""
    sizes = _integers(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return (numbers if order is None else numbers.transpose(_integers(order))).reshape(-1)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
