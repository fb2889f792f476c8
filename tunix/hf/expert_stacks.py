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

from tunix.hf.compressed_tensors import Rounded
from tunix.hf.safetensors_io import Entry, Sent, Stored
from tunix.models.families.base import FamilyText

WHOLE = ("F32", "BF16")
"""What numbers that are not rounded are written as."""


@dataclass(frozen=True)
class Turns(Stored):
    """A matrix, or a bias, whose outputs take turns in a file with those of others. Not read by itself: all of them are
    read together, each byte once, and taken apart where they belong (`tensor_loading.py`)."""

    whole: Stored
    """What they take turns in."""
    place: int
    """Whose turn comes first is 0."""
    number: int
    """How many take turns."""

    def read_into(self, rows: Shaped[np.ndarray, "r ..."], start: int) -> None:
        """Never called: whoever reads takes `whole`."""
        raise AssertionError(f"{self.key} is read with what takes turns in it")


def apart(name: str, tensor: Stored, family: FamilyText) -> list[tuple[str, Stored]]:
    """A tensor under its name, or the matrices of all experts that it holds, each at its place in the file.

    Args:
        family: whose folder has it.
    """
    if isinstance(tensor, Rounded):
        # Rounded matrices have outputs before inputs in every family.
        return [(name, replace(tensor, turned=family.alternate and _of_an_expert(family, name) is not None))]
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
    whole = tensor.part(expert)
    if number == 1:
        return whole
    shape = list(whole.shape)
    shape[-1 if alternate and not whole.turned else 0] //= number
    if not alternate:
        return replace(whole, shape=tuple(shape), begin=whole.begin + place * whole.size // number)
    about = (whole.file, whole.key, tuple(shape), whole.dtype, whole.begin)
    return Turns(*about, whole, place, number, turned=whole.turned)


def together(entries: Iterable[Entry], family: FamilyText) -> Iterator[Entry]:
    """Tensors to write, those of each expert as one of all experts; the inverse of `apart`.

    Rounded matrices, which have scales of their own beside them, stay each for itself.

    Args:
        family: whose folder is written.
    """
    whole = {own: (end, place) for end, parts in family.stacked.items() for place, own in enumerate(parts)}
    stacks: dict[str, dict[tuple[int, int], Entry]] = {}
    for entry in entries:
        if entry.dtype not in WHOLE or (found := _of_an_expert(family, entry.key)) is None:
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


def _of_an_expert(family: FamilyText, name: str) -> re.Match[str] | None:
    """The parts of an expert's name: what is before its number, the number, and which of its matrices or biases."""
    ends = "|".join(re.escape(own) for parts in family.stacked.values() for own in parts)
    return re.fullmatch(rf"(.*)\.(\d+)({ends})", name) if ends else None


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
