"""A model folder on an object store, as a local one: its small files are copied, its weights stay where they are.

The copy is in the user's cache folder, at a path that says the address. There a file of weights is its header, and a
hole as long as the rest: so it is checked as any other, and its tensors are read from the store, by ranges.
"""

import struct
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from tunix.errors import UserError
from tunix.util.atomic_io import replacing
from tunix.util.object_store import files_of, read

COPIES = Path("~/.cache/tunix/folders")
"""Where the copies are; deleted at any time, they are made again."""
LONGEST_HEADER = 100_000_000
"""Bytes above which safetensors refuses a header."""


def local_copy(url: str, wanted: Sequence[str]) -> Path:
    """Copies the files of a folder but no tensors of its safetensors files, or brings an earlier copy up to date.

    Args:
        url: e.g. `gs://bucket/model`.
        wanted: patterns of the files' names.

    Raises:
        UserError: there is no such folder, or the store cannot be reached.
    """
    sizes = {name: size for name, size in files_of(url).items() if any(fnmatch(name, one) for one in wanted)}
    if not sizes:
        raise UserError(f"{url}: there is no such folder, or no model in it.")
    folder = COPIES.expanduser() / url.replace("://", "/")
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and file.name not in sizes:
            file.unlink()
    for name, size in sizes.items():
        end = _header_end(f"{url}/{name}", size) if name.endswith(".safetensors") else size
        content = read(f"{url}/{name}", 0, end)
        with replacing(folder / name) as file:
            file.write(content)
            file.truncate(size)
    return folder


def address_of(file: Path) -> str | None:
    """The address of a file in the store that a local one is the copy of; None for a file of its own."""
    root = COPIES.expanduser()
    if not file.is_relative_to(root):
        return None
    scheme, *rest = file.relative_to(root).parts
    return f"{scheme}://{'/'.join(rest)}"


def _header_end(url: str, size: int) -> int:
    """The byte at which the header of a safetensors file ends."""
    begin = read(url, 0, min(size, 8))
    (length,) = struct.unpack("<Q", begin) if len(begin) == 8 else (0,)
    return min(size, 8 + length if length <= LONGEST_HEADER else 8)
