"""The pictures of rows: files, bytes or PIL images, and the marks that say where in the text they stand.

`with_marks` puts a mark into the messages for each picture that has none; `picture_reader.py` does the rest. A picture
is read from disk or from the row itself, never from a network.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunix.errors import UserError, install_command

if TYPE_CHECKING:
    from PIL.Image import Image

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
    row: Mapping[str, Any], columns: Mapping[str, str], mark: str, sign: str
) -> tuple[Mapping[str, Any], list[Any]]:
    """The row with a mark for each of its pictures, and the pictures.

    A message marks one by a part `{"type": "image"}`, which may hold the picture itself where the row has no column of
    pictures. Where nothing is marked, all are marked at the start of the first user's message, or of the prompt; of
    pairs without a prompt in messages, in both sides.

    Args:
        row: its columns.
        columns: our column name -> the data's.
        mark: what is written into a text for a picture.
        sign: the part of it by which a text has marks of its own.
    """
    values = images_of(row, columns)
    said = {name: row.get(columns.get(name, name)) for name in ("messages", "prompt", "chosen", "rejected")}
    whole = said["messages"] or said["prompt"]
    if not values:
        # A part may hold its picture itself.
        parts = _parts(whole if _is_chat(whole) else said["chosen"])
        held = [[part[key] for key in ("image", "path", "url") if part.get(key) is not None] for part in parts]
        return row, [values[0] for values in held if values]
    sides = ("chosen", "rejected")
    names = ["messages" if said["messages"] is not None else "prompt"]
    if said["messages"] is None and _is_chat(said["chosen"]):
        # Conversations that begin with the prompt's messages, or have it as their own first one.
        before = list(said["prompt"] or ()) if _is_chat(said["prompt"]) else []
        inside = list(said["chosen"] or ())[: len(before)] == before
        names = [*(["prompt"] if before else []), *(sides if inside else [])]
    marked = {columns.get(name, name): _marked(said[name], len(values), mark, sign) for name in names if said[name]}
    return {**row, **marked}, values


def _is_chat(said: Any) -> bool:
    return isinstance(said, list | tuple) and all(isinstance(message, Mapping) for message in said)


def _marked(said: Any, number: int, mark: str, sign: str) -> Any:
    """A text or messages with so many marks at their start, unless they have some; what is wrong stays as it is."""
    if isinstance(said, str):
        return said if sign in said else mark * number + said
    if not _is_chat(said) or _parts(said) or any(sign in str(message.get("content")) for message in said):
        return said
    first = next((i for i, message in enumerate(said) if message.get("role") == "user"), None)
    if first is None:
        return said
    content = said[first].get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    message = {**said[first], "content": [*({"type": "image"} for _ in range(number)), *texts]}
    return [*said[:first], message, *said[first + 1 :]]


def _parts(messages: Any) -> list[Mapping[str, Any]]:
    """The parts of messages that mark a picture; none of what is no list of messages."""
    if not _is_chat(messages):
        return []
    lists = [content for message in messages if isinstance(content := message.get("content"), list | tuple)]
    return [part for parts in lists for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]
