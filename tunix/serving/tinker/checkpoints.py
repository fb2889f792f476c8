"""What is on disk of training runs, as folders:

    FOLDER/RUN/run.json                  the base, rank, modules and metadata of a run
    FOLDER/RUN/weights/NAME/             a PEFT folder, and optimizer.safetensors: what training goes on from
    FOLDER/RUN/sampler_weights/NAME/     a PEFT folder

The protocol's path of the second is `tinker://RUN/weights/NAME`. Both are adapters that transformers, vLLM and
`tunix generate --adapter` read. A checkpoint appears complete or not at all, and stays until its folder is deleted,
whatever time to live it was saved with.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tunix.errors import UserError
from tunix.util.atomic_io import atomic_folder, write_text_atomic

PATH = re.compile(r"tinker://((?!\.)[\w.:-]{1,200})/(weights|sampler_weights)/((?!\.)[\w.:-]{1,200})")
"""A path; a run and a checkpoint are called what a folder can be called."""
OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True)
class Run:
    """What is known of a training run."""

    base_model: str
    """The base, as clients name it."""
    rank: int
    """The rank of its adapter, e.g. 32."""
    modules: tuple[str, ...]
    """What it adapts, by short Hugging Face names, e.g. `("q_proj", "k_proj")`."""
    user_metadata: Mapping[str, Any] | None = None
    """Whatever its client noted, e.g. `{"renderer_name": "qwen3"}`."""


class Checkpoints:
    """All runs below a folder; one thread writes."""

    def __init__(self, folder: Path):
        """Makes the folder if it is not there."""
        self._folder = folder.expanduser().resolve()
        self._folder.mkdir(parents=True, exist_ok=True)

    def begin(self, name: str, run: Run) -> None:
        """Notes a new run."""
        (self._folder / name).mkdir(exist_ok=True)
        write_text_atomic(self._folder / name / "run.json", json.dumps(asdict(run), indent=2) + "\n")

    def run(self, name: str) -> Run:
        """A run.

        Raises:
            UserError: there is none of that name.
        """
        known = {file.parent.name: file for file in self._folder.glob("*/run.json")}
        if name not in known:
            raise UserError(f"there is no training run {name}")
        values = json.loads(known[name].read_text(encoding="utf-8"))
        return Run(**{**values, "modules": tuple(values["modules"])})

    def folder(self, path: str) -> Path:
        """The folder of a checkpoint.

        Raises:
            UserError: there is none.
        """
        if not (folder := self._place(path)).is_dir():
            raise UserError(f"there is no checkpoint {path}")
        return folder

    def save(
        self, path: str, write: Callable[[Path], None], optimizer: Mapping[str, np.ndarray] | None, overwrite: bool
    ) -> None:
        """Saves a checkpoint.

        Args:
            path: the protocol's.
            write: writes the adapter into the folder that it is called with.
            optimizer: its state by name; None for a checkpoint to sample from.
            overwrite: whether another checkpoint of that path is replaced.

        Raises:
            UserError: this is no path, or taken; or the disk refuses.
        """
        folder = self._place(path)
        if folder.exists() and not overwrite:
            raise UserError(f"{path} is there already: choose another name, or set overwrite")
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = folder.with_name(f".{folder.name}")
        shutil.rmtree(fresh, ignore_errors=True)
        with atomic_folder(fresh) as temporary:
            write(temporary)
            if optimizer is not None:
                save_file(dict(optimizer), temporary / OPTIMIZER)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)

    def optimizer(self, path: str) -> dict[str, np.ndarray]:
        """The state of the optimizer in a checkpoint.

        Raises:
            UserError: it holds none, or is damaged.
        """
        file = self.folder(path) / OPTIMIZER
        if not file.is_file():
            raise UserError(f"{path} holds weights to sample from: training goes on from one of save_state")
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    def _place(self, path: str) -> Path:
        if (parts := PATH.fullmatch(path)) is None:
            raise UserError(f"{path!r} is no path of a checkpoint: tinker://RUN/weights/NAME, or sampler_weights")
        return self._folder.joinpath(*parts.groups())
