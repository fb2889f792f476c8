"""Tensors that hold a matrix of all experts, or several: taken apart while a folder is read, put together as it is
written.

An expert's matrices follow each other by rows, or take turns along the last axis (`FamilyText.alternate`). Biases of
all experts are taken apart as their matrices are.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Shaped

from tunix.hf.mxfp4 import OfAll
from tunix.hf.safetensors_io import Entry, Sent, Stored
from tunix.models.families.base import FamilyText

WHOLE = ("F32", "BF16")
"""What numbers that are not rounded are written as."""


@dataclass(frozen=True)
class Turns(Stored):
    """A matrix, or a bias, whose columns take turns in a file with those of others."""

    whole: Stored
    """What they take turns in."""
    place: int
    """Whose turn comes first is 0."""
    number: int
    """How many take turns."""

    @property
    def size(self) -> int:
        """Bytes of its numbers, and of all that are read for them."""
        return (1 + self.number) * super().size

    def read_into(self, rows: Shaped[np.ndarray, "r ..."], start: int) -> None:
        """Fills `rows`, of the file's dtype, from row `start` on; of a bias, rows are what takes turns."""
        each = self.number if len(self.shape) == 1 else 1
        found = self.whole.read(start * each, (start + len(rows)) * each)
        rows[...] = found[..., self.place :: self.number]


def apart(name: str, tensor: Stored, family: FamilyText) -> list[tuple[str, Stored]]:
    """A tensor under its name, or the matrices of all experts that it holds, each at its place in the file.

    Args:
        family: whose folder has it.
    """
    end = next((end for end in family.stacked if name.endswith(end)), None)
    if end is None or len(tensor.shape) != (2 if family.stacked[end][0].endswith(".bias") else 3):
        return [(name, tensor)]
    parts, stem = family.stacked[end], name.removesuffix(end)
    if tensor.shape[-1 if family.alternate else 1] % len(parts):
        return [(name, tensor)]
    return [
        (f"{stem}.{expert}{own}", _part(tensor, expert, place, len(parts), family.alternate))
        for expert in range(tensor.shape[0])
        for place, own in enumerate(parts)
    ]


def _part(tensor: Stored, expert: int, place: int, number: int, alternate: bool) -> Stored:
    """One matrix of an expert, which has so many in a tensor."""
    if isinstance(tensor, OfAll):
        return tensor.matrix(expert, place, number)
    shape, size = tensor.shape[1:], tensor.size // tensor.shape[0]
    if not alternate or number == 1:
        begin = tensor.begin + expert * size + place * size // number
        return replace(tensor, shape=(shape[0] // number, *shape[1:]), begin=begin)
    whole = replace(tensor, shape=shape, begin=tensor.begin + expert * size)
    own = (*shape[:-1], shape[-1] // number)
    return Turns(tensor.file, tensor.key, own, tensor.dtype, whole.begin, whole, place, number)


def together(entries: Iterable[Entry], family: FamilyText) -> Iterator[Entry]:
    """Tensors to write, those of each expert as one of all experts; the inverse of `apart`.

    Rounded matrices, which have scales of their own beside them, stay each for itself.

    Args:
        family: whose folder is written.
    """
    whole = {own: (end, place) for end, parts in family.stacked.items() for place, own in enumerate(parts)}
    each = re.compile(rf"(.*)\.(\d+)({'|'.join(map(re.escape, whole))})")
    stacks: dict[str, dict[tuple[int, int], Entry]] = {}
    for entry in entries:
        if entry.dtype not in WHOLE or (found := each.fullmatch(entry.key)) is None:
            yield entry
            continue
        end, place = whole[found[3]]
        stacks.setdefault(found[1] + end, {})[int(found[2]), place] = entry
    for key, parts in stacks.items():
        ordered, number = [parts[at] for at in sorted(parts)], 1 + max(place for _, place in parts)
        shape, axis = list(ordered[0].shape), -1 if family.alternate else 0
        shape[axis] *= number
        send = partial(_sent, ordered, (len(parts) // number, *shape), number if family.alternate else 1)
        yield Entry(key, (len(parts) // number, *shape), ordered[0].dtype, send)


def _sent(entries: list[Entry], shape: tuple[int, ...], turns: int) -> Sent:
    """Sends the tensors of each expert, which are one in the file.

    Args:
        turns: how many of them take turns along the last axis.
    """
    there = [entry.send() for entry in entries]

    def laid() -> np.ndarray:
        arrays = [one() for one in there]
        groups = [np.stack(arrays[at : at + turns], axis=-1) for at in range(0, len(arrays), turns)]
        return np.concatenate([group.reshape(-1) for group in groups]).reshape(shape)

    return laid


def hint(family: FamilyText) -> str:
    """What an error about tensors of each expert adds where a folder may have one of all experts."""
    axes = "inputs, outputs" if family.alternate else "rows, columns"
    named = (
        f"one that ends in {end} [experts, {axes}] holds {' and '.join(own)}"
        for end, own in family.stacked.items()
        if not end.endswith("_bias")
    )
    return f"Of all experts of a layer {', '.join(named)}." if family.stacked else ""
