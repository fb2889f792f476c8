"""How a model's pictures are read, and written among its tokens: resized by transformers' own processors.

`expanded` writes the soft tokens of each picture in place of the mark that a chat template rendered, `read` cuts the
pictures into patches, and `pictures` finds their tokens in a row. Gemma 3 makes squares of one size of all pictures;
Qwen 3.5 keeps their proportions, so that each has as many tokens as it needs. `rope_positions`
says where rope turns their tokens to.

Axes: T time, Pi pictures, Pp patches, Pr rows of a patch, Pc columns of a patch, Rb colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tunix.data.pictures import IMAGES, opened
from tunix.errors import UserError
from tunix.types import Pictures


@dataclass(frozen=True)
class PictureReader:
    """How a model reads pictures: as squares of one size (Gemma 3), or in their proportions (Qwen 3.5); of a row whose
    pictures are known, their grids."""

    begin: str
    """The token before a picture's, e.g. `<start_of_image>`."""
    soft: str
    """The token that stands for each part of it, e.g. `<image_soft_token>`."""
    end: str
    """The token after them, e.g. `<end_of_image>`."""
    soft_id: int
    """The id of the soft token, e.g. 262144."""
    tokens: int
    """Soft tokens of a picture at most, e.g. 256."""
    patch: int
    """Pixels of a patch's side, e.g. 14."""
    pool: int
    """Patches of a side of the square that a soft token stands for, e.g. 4."""
    most: int
    """Pictures of a row at most, e.g. 2."""
    resample: int
    """PIL's number of the resampling, e.g. 2."""
    pixel_range: tuple[int, int] | None = None
    """Pixels that smaller pictures are enlarged to, and larger ones made smaller to, e.g. `(65536, 262144)`, where
    pictures keep their proportions; None where all become squares of one size."""
    grids: tuple[tuple[int, int], ...] = ()
    """Rows and columns of soft tokens of each picture of the row at hand, e.g. `((16, 16),)`."""

    @property
    def mark(self) -> str:
        """What marks a picture in a text: the token that begins it, or the three tokens around and of it."""
        return self.begin if self.pixel_range is None else self.begin + self.soft + self.end

    @property
    def sign(self) -> str:
        """The token by which a text is seen to have marks."""
        return self.begin if self.pixel_range is None else self.soft

    def expanded(self, text: str) -> str:
        """The text with the soft tokens of a picture at each mark, as transformers' processors write them."""
        if self.pixel_range is None:
            return text.replace(self.begin, f"\n\n{self.begin}{self.soft * self.tokens}{self.end}\n\n")
        first, *rest = text.split(self.soft)
        numbers = [rows * columns for rows, columns in self.grids] + [1] * len(rest)
        return first + "".join(self.soft * number + part for number, part in zip(numbers, rest, strict=False))

    def read(self, values: List[Any], folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
        """`[Pi Pp Pr Pc Rb]` uint8 the patches of a row's pictures, and `[Pi 2]` their grids; see `Pictures`.

        Args:
            values: what its column has of each.
            folder: where relative paths begin.

        Raises:
            UserError: there are too many, one cannot be read, or one has more tokens than a picture may have.
        """
        if len(values) > self.most:
            raise UserError(f"it has {len(values)} pictures, more than data.pictures {self.most}: raise that")
        pixels = np.zeros((len(values), self.tokens * self.pool**2, self.patch, self.patch, 3), np.uint8)
        grids = np.zeros((len(values), 2), np.int32)
        for number, value in enumerate(values):
            image, name = opened(value, number + 1, folder), f"picture {number + 1}"
            side = math.isqrt(self.tokens) * self.pool
            processor = _processor(side * self.patch, self.pixel_range, self.patch, self.pool, self.resample)
            try:
                made = processor(image, do_rescale=False, do_normalize=False)
            except ValueError as error:  # of a strip
                raise UserError(f"{name} is {image.width} x {image.height} pixels: {error}") from error
            if self.pixel_range is None:
                grids[number] = side // self.pool
                square = np.asarray(made["pixel_values"][0], np.uint8).transpose(1, 2, 0)
                cut = square.reshape(side, self.patch, side, self.patch, 3).transpose(0, 2, 1, 3, 4)
                pixels[number, : side**2] = cut.reshape(side**2, self.patch, self.patch, 3)  # row by row
                continue
            _, *patches = made["image_grid_thw"][0].tolist()
            rows, columns = grids[number] = [size // self.pool for size in patches]
            if rows * columns > self.tokens:
                raise UserError(
                    f"{name}, {image.width} x {image.height} pixels, has {rows * columns} tokens, more than "
                    f"data.picture_tokens {self.tokens}: raise that, or crop it"
                )
            # Colours, two equal frames, rows and columns of each patch; square by square as soft tokens have them.
            cut = np.asarray(made["pixel_values"]).reshape(-1, 3, 2, self.patch, self.patch)
            pixels[number, : len(cut)] = cut[:, :, 0].transpose(0, 2, 3, 1).astype(np.uint8)
        return pixels, grids

    def pictures(self, ids: np.ndarray, pixels: np.ndarray) -> Pictures:
        """The pictures of a sequence of the row at hand, and the places of their tokens.

        Args:
            ids: `[T]` the sequence's tokens.
            pixels: what `read` returned of the row.

        Raises:
            UserError: the text has places for more pictures, or for fewer.
        """
        soft, grids = ids == self.soft_id, np.asarray(self.grids, np.int32).reshape(-1, 2)
        edges = np.flatnonzero(np.diff(np.pad(soft, 1).astype(np.int8)))
        runs = edges[1::2] - edges[::2]
        numbers = np.prod(grids, axis=-1)
        if runs.tolist() != numbers.tolist():
            marked, images = (f"{len(x)} (of {x.tolist()} tokens)" if len(x) else "0" for x in (runs, numbers))
            raise UserError(
                f"its text has places for pictures ({self.sign}): {marked}, and its column {IMAGES!r} has {images}: "
                "give as many, or none in the text, and they come before the first question"
            )
        places = np.where(soft, np.cumsum(soft), 0).astype(np.int32)
        rope = None if self.pixel_range is None else rope_positions(places, grids)
        return Pictures(pixels, grids, places, rope)


@lru_cache(maxsize=8)
def _processor(side: int, pixel_range: tuple[int, int] | None, patch: int, pool: int, resample: int) -> Any:
    """What resizes pictures, to squares of `side` pixels or within a range of pixels."""
    from transformers import Gemma3ImageProcessorPil, Qwen2VLImageProcessorPil

    if pixel_range is None:
        return Gemma3ImageProcessorPil(size={"height": side, "width": side}, resample=resample)
    size = {"shortest_edge": pixel_range[0], "longest_edge": pixel_range[1]}
    return Qwen2VLImageProcessorPil(size=size, patch_size=patch, merge_size=pool, resample=resample)


def rope_positions(places: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """`[T 3]` int32: where the multimodal rope of Qwen turns each token to (M-RoPE, https://arxiv.org/abs/2409.12191).

    Text counts on in all three. A picture's tokens all have the time of the first one, and its row and column beside
    it; what follows counts on after the larger of its sides.

    Args:
        places: `[T]` as in `Pictures`.
        grids: `[Pi 2]` as in `Pictures`.
    """
    turned = np.zeros((len(places), 3), np.int32)
    at, seen, now = 0, 0, 0
    for rows, columns in np.asarray(grids).tolist():
        first, number = int(np.flatnonzero(places == seen + 1)[0]), rows * columns
        turned[at:first] = now + np.arange(first - at)[:, None]
        now += first - at
        turned[first : first + number] = now
        turned[first : first + number, 1:] += np.indices((rows, columns)).reshape(2, -1).T
        at, seen, now = first + number, seen + number, now + max(rows, columns)
    turned[at:] = now + np.arange(len(places) - at)[:, None]
    return turned
