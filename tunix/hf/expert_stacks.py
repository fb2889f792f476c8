"""Tensors that hold a matrix of all experts, or several: taken apart while a folder is read, put together as it is
written.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from tunix.hf.safetensors_io import Entry, Sent, Stored

Ends = Mapping[str, tuple[str, ...]]
"""As `FamilyText.stacked`: how names of such tensors end -> names of each expert's matrices, in the order of rows."""

WHOLE = ("F32", "BF16")
"""What numbers that are not rounded are written as."""


def apart(name: str, tensor: Stored, stacked: Ends) -> list[tuple[str, Stored]]:
    """A tensor under its name, or the matrices of all experts that it holds, each at its place in the file.

    Args:
        stacked: as `FamilyText.stacked`.
    """
    end = next((end for end in stacked if name.endswith(end)), None)
    if end is None or len(tensor.shape) != 3 or tensor.shape[1] % len(stacked[end]):
        return [(name, tensor)]
    number, rows, width = tensor.shape
    shape = (rows // len(stacked[end]), width)
    keys = [f"{name.removesuffix(end)}.{expert}{own}" for expert in range(number) for own in stacked[end]]
    size = tensor.size // len(keys)
    return [(key, replace(tensor, shape=shape, begin=tensor.begin + at * size)) for at, key in enumerate(keys)]


def together(entries: Iterable[Entry], stacked: Ends) -> Iterator[Entry]:
    """Tensors to write, those of each expert as one of all experts; the inverse of `apart`.

    Rounded matrices, which have scales of their own beside them, stay each for itself.

    Args:
        stacked: as `FamilyText.stacked`.
    """
    whole = {own: (end, place) for end, parts in stacked.items() for place, own in enumerate(parts)}
    each = re.compile(rf"(.*)\.(\d+)({'|'.join(map(re.escape, whole))})")
    stacks: dict[str, dict[tuple[int, int], Entry]] = {}
    for entry in entries:
        if entry.dtype not in WHOLE or (found := each.fullmatch(entry.key)) is None:
            yield entry
            continue
        end, place = whole[found[3]]
        stacks.setdefault(found[1] + end, {})[int(found[2]), place] = entry
    for key, parts in stacks.items():
        ordered, rows = [parts[at] for at in sorted(parts)], 1 + max(place for _, place in parts)
        shape = (len(parts) // rows, rows * ordered[0].shape[0], ordered[0].shape[1])
        yield Entry(key, shape, ordered[0].dtype, partial(_sent, ordered, shape))


def _sent(entries: list[Entry], shape: tuple[int, ...]) -> Sent:
    """Sends the tensors of each expert, which are one in the file."""
    there = [entry.send() for entry in entries]
    return lambda: np.concatenate([one() for one in there]).reshape(shape)


def hint(stacked: Ends) -> str:
    """What an error about tensors of each expert adds where a folder may have one of all experts."""
    named = (
        f"one that ends in {end} [experts, rows, columns] holds {' and '.join(own)}" for end, own in stacked.items()
    )
    return f"Of all experts of a layer {', '.join(named)}." if stacked else ""
