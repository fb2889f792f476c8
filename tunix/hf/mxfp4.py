"""Matrices of experts in MXFP4, as gpt-oss is published: numbers of 4 bits, and a power of two for 32 of them.

A tensor `X` of all experts is `X_blocks`, `[experts rows groups 16]` bytes of two numbers each, the first in the low
bits, and `X_scales`, `[experts rows groups]` exponents raised by 127. They stand for `[experts rows columns]`, 32
columns for each group, which is the other way round than transformers has `X`: an expert's inputs are the columns.
Format: OCP Microscaling, https://arxiv.org/abs/2310.10537. Loads without jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from tunix.errors import UserError
from tunix.hf.safetensors_io import Stored

BLOCKS, SCALES = "_blocks", "_scales"
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
class OfExpert(Stored):
    """The numbers of an expert in a tensor in MXFP4, `[rows columns]`."""

    blocks: Stored
    """`[rows groups 16]` of the expert."""
    scales: Stored
    """`[rows groups]` of the expert."""

    @property
    def size(self) -> int:
        """Bytes of the numbers, and of what unpacking them needs meanwhile."""
        return 4 * super().size

    def read_into(self, rows: Shaped[np.ndarray, "rows columns"], start: int) -> None:
        """Fills `rows`, bfloat16, from row `start` on."""
        blocks, scales = (one.read(start, start + len(rows)) for one in (self.blocks, self.scales))
        rows[...] = dequantized(blocks, scales)


@dataclass(frozen=True)
class OfAll(Stored):
    """A tensor of all experts in MXFP4, `[experts columns rows]` as in transformers, taken apart before it is read."""

    blocks: Stored
    scales: Stored

    def part(self, number: int) -> OfExpert:
        """The numbers of one expert."""
        blocks, scales = self.blocks.part(number), self.scales.part(number)
        shape = self.shape[:0:-1]
        return OfExpert(self.file, self.key, shape, "BF16", blocks.begin, blocks, scales, turned=True)


def with_blocks(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """A folder's tensors, with each pair of blocks and scales in place of its parts.

    Raises:
        UserError: a part is missing, or the parts do not fit each other.
    """
    found = dict(stored)
    for key in (key for key in stored if key.endswith(BLOCKS)):
        name, blocks = key.removesuffix(BLOCKS), found.pop(key)
        scales = found.pop(name + SCALES, None)
        if scales is None:
            raise UserError(f"{blocks.file}: {key} is there without {name}{SCALES}. Download the folder again.")
        fits = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16)
        if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
            raise UserError(
                f"{blocks.file}: {key} {blocks.shape} of {blocks.dtype} and {scales.key} {scales.shape} of "
                f"{scales.dtype} are no MXFP4: 16 bytes for each scale, both U8. Download the folder again."
            )
        number, rows, groups = scales.shape
        shape = (number, 32 * groups, rows)
        found[name] = OfAll(blocks.file, name, shape, "BF16", blocks.begin, blocks, scales)
    return found
