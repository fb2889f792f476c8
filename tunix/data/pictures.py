"""The pictures of rows: files, bytes or PIL images, the marks that say where in the text they stand, and how a model
reads them and writes them among its tokens: resized by transformers' own processors.

`with_marks` puts a mark into the messages for each picture that has none. Of a `PictureReader`, `expanded` writes the
soft tokens of each picture in place of the mark that a chat template rendered, `read` cuts the pictures into patches,
and `pictures` finds their tokens in a row. Gemma 3 makes squares of one size of all pictures; Qwen 3.5 keeps their
proportions, so that each has as many tokens as it needs. A picture is read from disk or from the row itself, never from
a network. Loads without jax.

Axes: T time, Pi pictures, Pp patches, Pr rows of a patch, Pc columns of a patch, Rb colours.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix.errors import UserError, install_command

if TYPE_CHECKING:
    from PIL.Image import Image

    from tunix.types import Pictures

IMAGES = "images"
"""The column of a row's pictures."""
MOST_PIXELS = 50_000_000
"""Pixels of a picture at most: one of 10 kB may unpack to gigabytes."""


def needed_pillow() -> None:
    """Asks for Pillow.

    Raises:
        UserError: it is not installed.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UserError(f"pictures need Pillow: {install_command('pictures')}") from error


def opened(value: Any, number: int, folder: Path | None) -> Image:
    """A picture in RGB, turned as its file says.

    Args:
        value: a path, bytes, a PIL image, or a mapping with `bytes` or `path`, as `datasets` stores them.
        number: of the picture in its row, from 1, for messages.
        folder: where relative paths begin; None for the working directory.

    Raises:
        UserError: it is missing, broken, too large or no picture; or an address on a network.
    """
    needed_pillow()
    from PIL import Image, ImageOps, UnidentifiedImageError

    name = f"picture {number}"
    if isinstance(value, Mapping):
        parts = [value[key] for key in ("bytes", "path") if value.get(key) is not None]
        if not parts:
            raise UserError(f"{name} is {value!r:.80}, without bytes and path")
        value = parts[0]
    if isinstance(value, bytes | bytearray):
        source = io.BytesIO(value)
    elif isinstance(value, str | Path):
        if "://" in str(value) or str(value).startswith("data:"):
            raise UserError(f"{name}, {value!s:.80}, is an address: tunix fetches nothing; download it, give its path")
        source = Path(value).expanduser()
        source = source if source.is_absolute() or folder is None else folder / source
        if source.exists() and not source.is_file():  # a folder, or a pipe that nobody writes to
            raise UserError(f"{name}, {source}, is no file")
        name = f"{name}, {source},"
    elif isinstance(value, Image.Image):
        source = value
    else:
        raise UserError(f"{name} is {value!r:.80}, not a path, bytes or a PIL image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below, with a remedy
            image = source if isinstance(source, Image.Image) else Image.open(source)
        if (pixels := image.width * image.height) > MOST_PIXELS:
            raise UserError(f"{name} has {pixels:,} pixels, more than {MOST_PIXELS:,}: make it smaller")
        turned = ImageOps.exif_transpose(image)
        return turned.convert("RGB")
    except FileNotFoundError:
        raise UserError(f"{name} does not exist: paths count from {folder or Path.cwd()}") from None
    except UnidentifiedImageError:
        raise UserError(f"{name} is no picture that Pillow knows: give PNG, JPEG or WebP") from None
    except Image.DecompressionBombError:
        raise UserError(f"{name} has more than {MOST_PIXELS:,} pixels: make it smaller") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # Pillow's decoders raise all of these
        raise UserError(f"{name} cannot be read ({error}): is the file whole?") from error


def images_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[Any]:
    """The values of a row's pictures; empty without any.

    Args:
        row: its columns.
        columns: our column name -> the data's.
    """
    value = row.get(columns.get(IMAGES, IMAGES))
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def with_marks(
    row: Mapping[str, Any], columns: Mapping[str, str], reader: "PictureReader", folder: Path | None
) -> tuple[Mapping[str, Any], np.ndarray, "PictureReader"]:
    """The row with a mark for each of its pictures, their patches as `PictureReader.read` makes them, and the reader,
    which knows their grids.

    A message marks one by a part `{"type": "image"}`, which may hold the picture itself where the row has no column of
    pictures. Where nothing is marked, all are marked at the start of the first user's message, or of the prompt; of
    pairs without a prompt in messages, in both sides.

    Args:
        row: its columns.
        columns: our column name -> the data's.
        reader: how the model reads them.
        folder: where relative paths begin.

    Raises:
        UserError: see `PictureReader.read`.
    """
    values = images_of(row, columns)
    said = {name: row.get(columns.get(name, name)) for name in ("messages", "prompt", "chosen", "rejected")}
    whole = said["messages"] or said["prompt"]
    marked: dict[str, Any] = {}
    if not values:
        # A part may hold its picture itself.
        parts = parts_of(whole if _is_chat(whole) else said["chosen"])
        held = [[part[key] for key in ("image", "path", "url") if part.get(key) is not None] for part in parts]
        values = [value[0] for value in held if value]
    else:
        sides = ("chosen", "rejected")
        names = ["messages" if said["messages"] is not None else "prompt"]
        if said["messages"] is None and _is_chat(said["chosen"]):
            # Conversations that begin with the prompt's messages, or have it as their own first one.
            before = list(said["prompt"] or ()) if _is_chat(said["prompt"]) else []
            inside = list(said["chosen"] or ())[: len(before)] == before
            names = [*(["prompt"] if before else []), *(sides if inside else [])]
        mark, sign = reader.mark, reader.sign
        marked = {columns.get(name, name): _marked(said[name], len(values), mark, sign) for name in names if said[name]}
    pixels, grids = reader.read(values, folder)
    return {**row, **marked}, pixels, replace(reader, grids=tuple((rows, columns) for rows, columns in grids.tolist()))


def _is_chat(said: Any) -> bool:
    return isinstance(said, list | tuple) and all(isinstance(message, Mapping) for message in said)


def _marked(said: Any, number: int, mark: str, sign: str) -> Any:
    """A text or messages with so many marks at their start, unless they have some; what is wrong stays as it is."""
    if isinstance(said, str):
        return said if sign in said else mark * number + said
    if not _is_chat(said) or parts_of(said) or any(sign in str(message.get("content")) for message in said):
        return said
    first = next((i for i, message in enumerate(said) if message.get("role") == "user"), None)
    if first is None:
        return said
    content = said[first].get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    message = {**said[first], "content": [*({"type": "image"} for _ in range(number)), *texts]}
    return [*said[:first], message, *said[first + 1 :]]


def parts_of(messages: Any) -> list[Mapping[str, Any]]:
    """The parts of messages that mark a picture; none of what is no list of messages."""
    if not _is_chat(messages):
        return []
    lists = [content for message in messages if isinstance(content := message.get("content"), list | tuple)]
    return [part for parts in lists for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


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
        from tunix.types import Pictures  # it loads jax, which checking a recipe does not wait for

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
