"""The checkpoints of all training runs, as folders:

    FOLDER/RUN/run.json                     the base, rank, modules and metadata of a run
    FOLDER/RUN/weights/NAME/                a PEFT folder, and optimizer.safetensors: what training goes on from
    FOLDER/RUN/sampler_weights/NAME/        a PEFT folder

The protocol's path of the second is `tinker://RUN/weights/NAME`. Both are adapters that transformers, vLLM and
`tunix generate --adapter` read. A checkpoint appears complete or not at all, and stays until it is deleted, whatever
time to live it was saved with.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tunix.errors import UserError
from tunix.util.atomic_io import atomic_folder, write_text_atomic

KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""The middle part of a path, and what the protocol calls such checkpoints."""
PATH = re.compile(r"tinker://([^/]+)/([^/]+)/([^/]+)")
NAME = re.compile(r"(?!\.)[\w.:-]{1,200}")
"""What a run or a checkpoint may be called: a folder of that name lies below its own."""
OPTIMIZER, ABOUT = "optimizer.safetensors", "checkpoint.json"


@dataclass(frozen=True)
class Run:
    """What is known of a training run."""

    base_model: str
    """The base, as clients name it."""
    rank: int
    """Of its adapter, e.g. 32."""
    modules: tuple[str, ...]
    """What it adapts, by short Hugging Face names, e.g. `("q_proj", "k_proj")`."""
    user_metadata: Mapping[str, Any] | None = None
    """Whatever its client noted, e.g. `{"renderer_name": "qwen3"}`."""


class Checkpoints:
    """All checkpoints below a folder; one thread writes."""

    def __init__(self, folder: Path):
        """Makes the folder if it is not there."""
        self._folder = folder.expanduser().resolve()
        self._folder.mkdir(parents=True, exist_ok=True)

    def begin(self, name: str, run: Run) -> None:
        """Notes a new run."""
        self._of(name).mkdir(parents=True, exist_ok=True)
        write_text_atomic(self._of(name) / "run.json", json.dumps(asdict(run), indent=2) + "\n")

    def run(self, name: str) -> Run:
        """A run.

        Raises:
            UserError: there is none of that name.
        """
        file = self._of(name) / "run.json"
        if not file.is_file():
            raise UserError(f"there is no training run {name}")
        run = Run(**json.loads(file.read_text(encoding="utf-8")))
        return Run(run.base_model, run.rank, tuple(run.modules), run.user_metadata)

    def runs(self) -> list[str]:
        """The names of all runs, the newest first."""
        files = sorted(self._folder.glob("*/run.json"), key=lambda file: -file.stat().st_mtime)
        return [file.parent.name for file in files]

    def path(self, run: str, kind: str, name: str, *, overwrite: bool = False) -> str:
        """The path of a checkpoint to be saved.

        Raises:
            UserError: it cannot be called so, or is there already and `overwrite` is not set.
        """
        path = f"tinker://{run}/{kind}/{name}"
        if self.folder(path).exists() and not overwrite:
            raise UserError(f"{path} is there already: choose another name, or set overwrite")
        return path

    def folder(self, path: str) -> Path:
        """The folder of a checkpoint's path, whether it is there or not.

        Raises:
            UserError: it is no such path.
        """
        parts = PATH.fullmatch(path)
        if parts is None or parts[2] not in KINDS:
            raise UserError(f"{path!r} is no path of a checkpoint: tinker://RUN/{{{'|'.join(KINDS)}}}/NAME")
        if not NAME.fullmatch(parts[3]):
            raise UserError(f"{parts[3]!r} cannot be a checkpoint's name: letters, digits and _ . : - can")
        return self._of(parts[1]) / parts[2] / parts[3]

    def existing(self, path: str) -> Path:
        """The folder of a checkpoint.

        Raises:
            UserError: there is none.
        """
        if not (folder := self.folder(path)).is_dir():
            raise UserError(f"there is no checkpoint {path}")
        return folder

    def save(
        self, path: str, write: Any, optimizer: Mapping[str, np.ndarray] | None, metadata: Mapping[str, Any] | None
    ) -> None:
        """Saves a checkpoint, in place of another one of its path.

        Args:
            path: from `path`.
            write: writes the adapter into the folder that it is called with.
            optimizer: its state by name; None for a checkpoint to sample from.
            metadata: whatever the client noted.

        Raises:
            UserError: the disk refuses.
        """
        folder = self.folder(path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = folder.with_name(f".{folder.name}")
        shutil.rmtree(fresh, ignore_errors=True)
        with atomic_folder(fresh) as temporary:
            write(temporary)
            if optimizer is not None:
                save_file(dict(optimizer), temporary / OPTIMIZER)
            about = {"time": datetime.now(UTC).isoformat(), "user_metadata": metadata}
            (temporary / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)

    def optimizer(self, path: str) -> dict[str, np.ndarray]:
        """The state of the optimizer in a checkpoint.

        Raises:
            UserError: it holds none, or is damaged.
        """
        file = self.existing(path) / OPTIMIZER
        if not file.is_file():
            raise UserError(f"{path} holds weights to sample from: training goes on from one of save_state")
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    def listed(self, run: str | None = None) -> list[dict[str, Any]]:
        """The checkpoints of a run, or of all, as the protocol describes them, the newest first."""
        described = [
            self._described(name, folder) for name in ([run] if run else self.runs()) for folder in self._folders(name)
        ]
        return sorted(described, key=lambda about: about["time"], reverse=True)

    def delete(self, path: str) -> None:
        """Deletes a checkpoint.

        Raises:
            UserError: there is none.
        """
        shutil.rmtree(self.existing(path))

    def _of(self, run: str) -> Path:
        if not NAME.fullmatch(run):
            raise UserError(f"{run!r} is no name of a training run")
        return self._folder / run

    def _folders(self, run: str) -> Iterator[Path]:
        for kind in KINDS:
            yield from (file.parent for file in self._of(run).glob(f"{kind}/*/{ABOUT}") if file.parent.name[0] != ".")

    def _described(self, run: str, folder: Path) -> dict[str, Any]:
        kind, about = folder.parent.name, json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        return {
            "checkpoint_id": f"{kind}/{folder.name}",
            "checkpoint_type": KINDS[kind],
            "tinker_path": f"tinker://{run}/{kind}/{folder.name}",
            "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
            "public": False,
            **about,
        }
