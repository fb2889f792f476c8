"""Rounded weights stored in few bits: the compressed-tensors format, which transformers and vLLM read.

A matrix `X.weight` is replaced by its rounded values and `X.weight_scale`, `[O, I / tile]` in float32. Values are
`X.weight` where a server multiplies them as they are (fp8, and int8 with rounded inputs), else 32-bit words in
`X.weight_packed`, with the matrix's shape in `X.weight_shape`: numbers are raised by half their range and packed one
after the other from the lowest bit on. `models/quantization/schemes.py` writes config.json's part. Loads without jax.

Axes: I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float, Int, Shaped

from tunix.errors import UserError
from tunix.hf.safetensors_io import Entry, Sent, Stored
from tunix.models.quantization.schemes import BITS, WORDS, Packing, format_of

VALUES, PACKED, SCALES, SHAPE = "weight", "weight_packed", "weight_scale", "weight_shape"


def entries(module: str, packing: Packing, values: Callable[[], Sent], scales: Callable[[], Sent]) -> Iterator[Entry]:
    """The tensors that a matrix is written as.

    Args:
        module: the name of the matrix in the file, up to `weight`.
        packing: how it is packed.
        values: computes and sends its values, `[O I]` of the rule's type.
        scales: the same of its scales, `[O I/tile]`.
    """
    assert packing.rule.weights is not None
    # Rounded once for the values and again for the scales: kept in between, all matrices would be on the host at once.
    (outputs, inputs), kind = packing.shape, packing.rule.weights
    if format_of(packing.rule) == WORDS:
        packed = (outputs, -(-inputs * BITS[kind] // 32))
        yield Entry(module + PACKED, packed, "I32", lambda: partial(_words_of, values(), BITS[kind]))
        yield Entry(module + SHAPE, (2,), "I64", lambda: partial(np.array, packing.shape))
    else:
        yield Entry(module + VALUES, packing.shape, "F8_E4M3" if kind == "fp8" else "I8", values)
    yield Entry(module + SCALES, (outputs, inputs // packing.tile), "F32", scales)


def _words_of(values: Sent, bits: int) -> np.ndarray:
    return words(values(), bits)


def words(values: Int[np.ndarray, "O I"], bits: int) -> Int[np.ndarray, "O words"]:
    """Packs signed numbers of a few bits into 32-bit words; `unfolded` is the inverse."""
    each = 32 // bits
    raised = np.pad((values.astype(np.int64) + (1 << bits - 1)), ((0, 0), (0, -values.shape[1] % each)))
    lanes = raised.reshape(len(values), -1, each) << (np.arange(each) * bits)
    return lanes.sum(axis=2).astype(np.uint32).view(np.int32)


def unfolded(packed: Int[np.ndarray, "O words"], inputs: int) -> Int[np.ndarray, "O I"]:
    """Unpacks the signed numbers in 32-bit words; `words` is the inverse."""
    bits = next(bits for bits in (4, 8) if -(-inputs * bits // 32) == packed.shape[1])
    lanes = packed.view(np.uint32)[:, :, None] >> (np.arange(32 // bits, dtype=np.uint32) * bits)
    lifted = (lanes & ((1 << bits) - 1)).astype(np.int32) - (1 << bits - 1)
    return lifted.reshape(len(packed), -1)[:, :inputs]


@dataclass(frozen=True)
class Rounded(Stored):
    """A matrix that a file holds in few bits, and that is read as the float32 numbers it stands for."""

    values: Stored
    scales: Stored
    packed: bool

    @property
    def size(self) -> int:
        """Bytes of the numbers, and of what unpacking them needs meanwhile: as much again three times."""
        return 4 * super().size

    def read_into(self, rows: Float[np.ndarray, "o I"], start: int) -> None:
        """Fills `rows`, float32, from row `start` on."""
        stop = start + len(rows)
        values: Shaped[np.ndarray, "o i"] = self.values.read(start, stop)
        if self.packed:
            values = unfolded(values, self.shape[1])
        scales = self.scales.read(start, stop).astype(np.float32)
        tiles = (len(values), scales.shape[1], -1)
        np.multiply(values.reshape(tiles), scales[:, :, None], out=rows.reshape(tiles), dtype=np.float32)


def unpacked(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """A folder's tensors, with each rounded matrix in place of its parts.

    Raises:
        UserError: a part is missing, or the parts do not fit each other.
    """
    found = dict(stored)
    for key in (key for key in stored if key.endswith(f".{SCALES}")):
        module, scales = key.removesuffix(SCALES), found.pop(key)
        held = next((found.pop(module + part) for part in (PACKED, VALUES) if module + part in found), None)
        if held is None:
            raise UserError(f"{scales.file}: {key} is there without {module}{PACKED}. Download the folder again.")
        packed = held.key.endswith(PACKED)
        shape = _shape(found.pop(module + SHAPE, None), held) if packed else held.shape
        if len(scales.shape) != 2 or scales.shape[0] != shape[0] or shape[1] % scales.shape[1]:
            raise UserError(
                f"{scales.file}: {key} has shape {scales.shape}, which is no scale for each output, or for each of its "
                f"groups of inputs, of a matrix {shape}: take the model that the folder was made of"
            )
        found[module + VALUES] = Rounded(held.file, held.key, shape, "F32", held.begin, held, scales, packed)
    return found


def _shape(stored: Stored | None, packed: Stored) -> tuple[int, ...]:
    """The shape that a packed matrix has unpacked, read from its file."""
    if stored is None or stored.shape != (2,):
        raise UserError(f"{packed.file}: {packed.key} is there without its shape. Download the folder again.")
    outputs, inputs = (int(size) for size in stored.read())
    if packed.shape[0] != outputs or packed.shape[1] not in (-(-inputs * bits // 32) for bits in (4, 8)):
        raise UserError(
            f"{packed.file}: {packed.key} has shape {packed.shape}, which is no matrix ({outputs}, {inputs}) of 4 or 8 "
            "bits: take the model that the folder was made of"
        )
    return outputs, inputs
