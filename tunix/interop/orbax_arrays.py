"""An Orbax checkpoint as arrays by path, read and written one at a time; independent of models.

Orbax itself wants the whole tree in memory before it writes, and copies it. `Deferred` is an array that its handler
makes when its turn has come, and lets go of once it is on the disk.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from tunix.distributed.processes import first_line
from tunix.errors import UserError
from tunix.util.object_store import path_of

STEP, ITEMS = "0", "items"
"""MaxText's folder of the first step, and the folder in it that holds the train state."""
METADATA = "_METADATA"
"""The file by which a folder of arrays is recognised."""


@dataclass(frozen=True)
class Deferred:
    """An array that is made when it is written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    """Called once, when everything before it is on the disk."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class _InTurn(ocp.type_handlers.NumpyHandler):
    """Writes deferred arrays one after the other."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            for written in await super().serialize([value.make()], [info], [arg]):
                await asyncio.to_thread(written.result)
        return []


def writing_handler() -> ocp.PyTreeCheckpointHandler:
    """Writes trees of `Deferred` in the format that MaxText writes by default."""
    handlers = ocp.type_handlers.create_type_handler_registry(
        # Without a handler of jax's arrays Orbax leaves out a file that says how arrays are split, and warns.
        (jax.Array, ocp.type_handlers.ArrayHandler()),
        (int, ocp.type_handlers.ScalarHandler()),
        (Deferred, _InTurn()),
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=handlers)


class Arrays:
    """The arrays of a checkpoint by their paths, e.g. `params/params/decoder/decoder_norm/scale`."""

    def __init__(self, folder: Path):
        """Reads names, shapes and dtypes, no values.

        Args:
            folder: holds the arrays, or a step's `items`, or the steps of a run, of which the last is taken.

        Raises:
            UserError: there is no checkpoint, or it is damaged.
        """
        place = path_of(folder)
        if not place.is_dir():
            raise UserError(
                f"{folder}: there is no such folder; name a checkpoint of MaxText, such as RUN/checkpoints/0"
            )
        steps = sorted((int(step.name), step) for step in place.iterdir() if step.name.isdigit())
        folders = (place, place / ITEMS, *(step / ITEMS for _, step in reversed(steps)))
        items = next((x for x in folders if (x / METADATA).is_file()), None)
        if items is None:
            raise UserError(
                f"{folder} holds no checkpoint of MaxText: {METADATA} is neither in it, nor in its {ITEMS}/, nor in "
                f"a step's, such as {STEP}/{ITEMS}"
            )
        self.folder = items
        self._handler = ocp.PyTreeCheckpointHandler()
        try:
            tree = self._handler.metadata(self.folder).tree
        except Exception as error:  # Orbax and tensorstore raise whatever fails
            raise UserError(f"{self.folder} is no whole Orbax checkpoint: {first_line(error)}") from error
        flat: dict[str, Any] = {"/".join(map(str, path)): leaf for path, leaf in flatten_dict(tree).items()}
        leaves = {path: leaf for path, leaf in flat.items() if getattr(leaf, "dtype", None) is not None}
        self.shapes: dict[str, tuple[int, ...]] = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
        """Shape of each array."""
        self.dtypes: dict[str, np.dtype] = {path: np.dtype(leaf.dtype) for path, leaf in leaves.items()}
        """Dtype of each array."""

    def read(self, path: str) -> np.ndarray:
        """The values of one array.

        Raises:
            UserError: they cannot be read.
        """
        args = ocp.args.PyTreeRestore(
            item=unflatten_dict({path: 0}, sep="/"),
            restore_args=unflatten_dict({path: ocp.RestoreArgs(restore_type=np.ndarray)}, sep="/"),
            partial_restore=True,
        )
        try:
            restored: dict[str, Any] = flatten_dict(self._handler.restore(self.folder, args=args), sep="/")
            return restored[path]
        except Exception as error:  # tensorstore raises a bare Exception for a damaged file
            raise UserError(f"{self.folder}: {path} cannot be read: {first_line(error)}") from error
