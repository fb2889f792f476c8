"""Matrices that a folder holds in another form than one tensor each: in few bits, or those of all experts in one.

compressed-tensors, which transformers and vLLM read: a matrix `X.weight` is replaced by its rounded values and
`X.weight_scale`, `[O, I / tile]` in float32. Values are `X.weight` where a server multiplies them as they are (fp8, and
int8 with rounded inputs), else 32-bit words in `X.weight_packed`, with the matrix's shape in `X.weight_shape`: numbers
are raised by half their range and packed one after the other from the lowest bit on. `models/quantization/schemes.py`
writes config.json's part.

MXFP4, as gpt-oss is published: numbers of 4 bits, and a power of two for 32 of them. A tensor `X` of all experts is
`X_blocks`, `[experts rows groups 16]` bytes of two numbers each, the first in the low bits, and `X_scales`, `[experts
rows groups]` exponents raised by 127. They stand for `[experts rows columns]`, 32 columns for each group, which is the
other way round than transformers has `X`: an expert's inputs are the columns. Format: OCP Microscaling,
https://arxiv.org/abs/2310.10537.

Tensors that hold a matrix of all experts, or several, are taken apart while a folder is read, and put together as it is
written. An expert's matrices follow each other by rows, or take turns along the last axis (`FamilyText.alternate`).
Biases of all experts are taken apart as their matrices are.

Loads without jax. Axes: I inputs, O outputs.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import ml_dtypes
import numpy as np
from jaxtyping import Int, Shaped, UInt8

from tunix.errors import UserError
from tunix.hf.safetensors_io import Entry, Sent, Stored
from tunix.models.families.base import FamilyText

VALUES, PACKED, SCALES, SHAPE = "weight", "weight_packed", "weight_scale", "weight_shape"


def pack_words(values: Int[np.ndarray, "O I"], bits: int) -> Int[np.ndarray, "O words"]:
    """Packs signed numbers of a few bits into 32-bit words; `unpack_words` is the inverse."""
    each = 32 // bits
    raised = np.pad((values.astype(np.int64) + (1 << bits - 1)), ((0, 0), (0, -values.shape[1] % each)))
    lanes = raised.reshape(len(values), -1, each) << (np.arange(each) * bits)
    return lanes.sum(axis=2).astype(np.uint32).view(np.int32)


def unpack_words(packed: Int[np.ndarray, "O words"], inputs: int) -> Int[np.ndarray, "O I"]:
    """Unpacks the signed numbers in 32-bit words; `pack_words` is the inverse."""
    bits = next(bits for bits in (4, 8) if -(-inputs * bits // 32) == packed.shape[1])
    lanes = packed.view(np.uint32)[:, :, None] >> (np.arange(32 // bits, dtype=np.uint32) * bits)
    lifted = (lanes & ((1 << bits) - 1)).astype(np.int32) - (1 << bits - 1)
    return lifted.reshape(len(packed), -1)[:, :inputs]


BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
BIAS = 127
"""What exponents are raised by."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What 3 bits stand for, two of an exponent and one of a mantissa; a fourth, the highest, is the sign."""


@cache
def _pairs() -> UInt8[np.ndarray, "codes 4"]:
    """The two bfloat16 numbers of each byte at each exponent, at 256 times the exponent plus the byte."""
    numbers = np.array([*E2M1, *(-x for x in E2M1)], np.float32)
    byte, exponent = np.arange(256), np.arange(256)[:, None]
    both = np.stack([numbers[byte & 15], numbers[byte >> 4]], axis=-1)
    with np.errstate(over="ignore"):
        scaled = np.ldexp(both, exponent[..., None] - BIAS)
    return scaled.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1, 1).view(np.uint8)


def dequantized(
    blocks: UInt8[np.ndarray, "*rows groups 16"], scales: UInt8[np.ndarray, "*rows groups"]
) -> Shaped[np.ndarray, "*rows columns"]:
    """The numbers in bfloat16, which has all of them but those at either end of the exponents."""
    codes = scales[..., None].astype(np.uint16) << 8 | blocks
    pairs = np.take(_pairs().view(np.uint32)[:, 0], codes)
    return pairs.view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


@dataclass(frozen=True)
class Packed(Stored):
    """A matrix that a file holds in few bits, or MXFP4's of all experts, read as the numbers that it stands for."""

    values: Stored
    scales: Stored
    """Their rows are those of the matrix."""

    @property
    def size(self) -> int:
        """Bytes of the numbers, and of what unpacking them needs meanwhile: as much again three times."""
        return 4 * super().size

    def part(self, number: int) -> "Packed":
        """The matrix of one expert, `[rows columns]`, of MXFP4's `[experts columns rows]`."""
        values, scales = self.values.part(number), self.scales.part(number)
        shape, begin = self.shape[:0:-1], values.begin
        return replace(self, shape=shape, begin=begin, values=values, scales=scales, turned=True)

    def read_into(self, rows: Shaped[np.ndarray, "rows columns"], start: int) -> None:
        """Fills `rows`, contiguous and of this matrix's dtype, from row `start` on."""
        stop = start + len(rows)
        values, scales = self.values.read(start, stop), self.scales.read(start, stop)
        if self.dtype == "BF16":  # MXFP4
            rows[...] = dequantized(values, scales)
            return
        if self.values.dtype == "I32":
            values = unpack_words(values, self.shape[1])
        tiles, scales = (len(values), scales.shape[1], -1), scales.astype(np.float32)
        np.multiply(values.reshape(tiles), scales[:, :, None], out=rows.reshape(tiles), dtype=np.float32)


def unpacked(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """A folder's tensors, with what is stored in few bits in place of its parts.

    Raises:
        UserError: a part is missing, or the parts do not fit each other.
    """
    tensors = dict(stored)
    for key in (key for key in stored if key.endswith(BLOCKS)):
        name, blocks = key.removesuffix(BLOCKS), tensors.pop(key)
        scales = tensors.pop(name + BLOCK_SCALES, None)
        if scales is None:
            raise UserError(f"{blocks.file}: {key} is there without {name}{BLOCK_SCALES}. Download the folder again.")
        fits = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16)
        if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
            raise UserError(
                f"{blocks.file}: {key} {blocks.shape} of {blocks.dtype} and {scales.key} {scales.shape} of "
                f"{scales.dtype} are no MXFP4: 16 bytes for each scale, both U8. Download the folder again."
            )
        number, rows, groups = scales.shape
        shape = (number, 32 * groups, rows)
        tensors[name] = Packed(blocks.file, name, shape, "BF16", blocks.begin, blocks, scales)
    for key in (key for key in stored if key.endswith(f".{SCALES}")):
        module, scales = key.removesuffix(SCALES), tensors.pop(key)
        held = next((tensors.pop(module + part) for part in (PACKED, VALUES) if module + part in tensors), None)
        if held is None:
            raise UserError(f"{scales.file}: {key} is there without {module}{PACKED}. Download the folder again.")
        shape = held.shape
        if held.key.endswith(PACKED):
            stated = tensors.pop(module + SHAPE, None)
            if stated is None or stated.shape != (2,):
                raise UserError(f"{held.file}: {held.key} is there without its shape. Download the folder again.")
            shape = outputs, inputs = tuple(int(size) for size in stated.read())
            if held.shape[0] != outputs or held.shape[1] not in (-(-inputs * bits // 32) for bits in (4, 8)):
                raise UserError(
                    f"{held.file}: {held.key} has shape {held.shape}, which is no matrix {shape} of 4 or 8 bits: take "
                    "the model that the folder was made of"
                )
        if len(scales.shape) != 2 or scales.shape[0] != shape[0] or shape[1] % scales.shape[1]:
            raise UserError(
                f"{scales.file}: {key} has shape {scales.shape}, which is no scale for each output, or for each of its "
                f"groups of inputs, of a matrix {shape}: take the model that the folder was made of"
            )
        tensors[module + VALUES] = Packed(held.file, held.key, shape, "F32", held.begin, held, scales)
    return tensors


WHOLE = ("F32", "BF16")
"""What numbers that are not rounded are written as."""


def split_experts(name: str, tensor: Stored, family: FamilyText) -> list[tuple[str, Stored]]:
    """A tensor under its name, or the matrices of all experts that it holds, each at its place in the file.

    Args:
        family: whose folder has it.
    """
    if isinstance(tensor, Packed) and len(tensor.shape) == 2:
        # Rounded matrices have outputs before inputs in every family.
        return [(name, replace(tensor, turned=family.alternate and _of_an_expert(family, name) is not None))]
    end = next((end for end in family.stacked if name.endswith(end)), None)
    if end is None or len(tensor.shape) != (2 if family.stacked[end][0].endswith(".bias") else 3):
        return [(name, tensor)]
    parts, stem, number = family.stacked[end], name.removesuffix(end), len(family.stacked[end])
    if tensor.shape[-1 if family.alternate else 1] % number:
        return [(name, tensor)]
    matrices: list[tuple[str, Stored]] = []
    for expert in range(tensor.shape[0]):
        whole = tensor.part(expert)
        sizes = list(whole.shape)
        sizes[-1 if family.alternate and not whole.turned else 0] //= number
        shape, begin, size = tuple(sizes), whole.begin, whole.size // number
        for place, part in enumerate(parts):
            if number == 1:
                matrix = whole
            elif family.alternate:
                matrix = replace(whole, shape=shape, turns=(whole, place, number))
            else:
                matrix = replace(whole, shape=shape, begin=begin + place * size)
            matrices.append((f"{stem}.{expert}{part}", matrix))
    return matrices


def stack_experts(entries: Iterable[Entry], family: FamilyText) -> Iterator[Entry]:
    """Tensors to write, those of each expert as one of all experts; the inverse of `split_experts`.

    Rounded matrices, which have scales of their own beside them, stay each for itself.

    Args:
        family: whose folder is written.
    """
    whole = {part: (end, place) for end, parts in family.stacked.items() for place, part in enumerate(parts)}
    stacks: dict[str, dict[tuple[int, int], Entry]] = {}
    for entry in entries:
        if entry.dtype not in WHOLE or (match := _of_an_expert(family, entry.key)) is None:
            yield entry
            continue
        end, place = whole[match[3]]
        stacks.setdefault(match[1] + end, {})[int(match[2]), place] = entry
    for key, parts in stacks.items():
        ordered, number = [parts[at] for at in sorted(parts)], 1 + max(place for _, place in parts)
        sizes, axis = list(ordered[0].shape), -1 if family.alternate else 0
        sizes[axis] *= number
        shape, turns = (len(parts) // number, *sizes), number if family.alternate else 1

        def send(ordered: list[Entry] = ordered, shape: tuple[int, ...] = shape, turns: int = turns) -> Sent:
            arriving = [entry.send() for entry in ordered]

            def laid() -> np.ndarray:
                arrays = [wait() for wait in arriving]
                groups = [np.stack(arrays[at : at + turns], axis=-1) for at in range(0, len(arrays), turns)]
                return np.concatenate([group.reshape(-1) for group in groups]).reshape(shape)

            return laid

        yield Entry(key, shape, ordered[0].dtype, send)


def _of_an_expert(family: FamilyText, name: str) -> re.Match[str] | None:
    """The parts of an expert's name: what is before its number, the number, and which of its matrices or biases."""
    ends = "|".join(re.escape(part) for parts in family.stacked.values() for part in parts)
    return re.fullmatch(rf"(.*)\.(\d+)({ends})", name) if ends else None
