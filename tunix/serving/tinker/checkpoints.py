"""What is on disk of training runs, as folders:

    FOLDER/RUN/run.json                  the base, rank, modules and metadata of a run
    FOLDER/RUN/weights/NAME/             a PEFT folder, and optimizer.safetensors: what training goes on from
    FOLDER/RUN/sampler_weights/NAME/     a PEFT folder

The protocol's path of the second is `tinker://RUN/weights/NAME`. Both are adapters that transformers, vLLM and
`tunix generate --adapter` read. A checkpoint appears complete or not at all, and stays until it is deleted, whatever
time to live it was saved with.
"""

import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tunix.errors import UserError
from tunix.util.atomic_io import atomic_folder, write_text_atomic

NAME = re.compile(r"(?!\.)[\w.:-]{1,200}")
"""The name of a run or a checkpoint: what a folder can be called."""
PATH = re.compile(rf"tinker://({NAME.pattern})/(weights|sampler_weights)/({NAME.pattern})")
KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Folders of checkpoints within that of a run -> the protocol's types."""
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
        self._changing = threading.Lock()
        """Held while a checkpoint comes or goes, so that a listing sees whole ones."""

    def begin(self, name: str, run: Run) -> None:
        """Notes a new run."""
        (self._folder / name).mkdir(exist_ok=True)
        write_text_atomic(self._folder / name / "run.json", json.dumps(asdict(run), indent=2) + "\n")

    def run(self, name: str) -> Run:
        """A run.

        Raises:
            UserError: there is none of that name.
        """
        if not NAME.fullmatch(name) or not (file := self._folder / name / "run.json").is_file():
            raise UserError(f"there is no training run {name}")
        values = json.loads(file.read_text(encoding="utf-8"))
        return Run(**{**values, "modules": tuple(values["modules"])})

    @property
    def runs(self) -> list[str]:
        """The names of all runs, the last one first."""
        return [file.parent.name for file in sorted(self._folder.glob("*/run.json"), key=_time, reverse=True)]

    def described(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A run and its checkpoints, the last one first, as the protocol describes them.

        Raises:
            UserError: there is no such run.
        """
        run, folder, checkpoints = self.run(name), self._folder / name, list[dict[str, Any]]()
        with self._changing:
            for place in sorted((x for kind in KINDS for x in (folder / kind).glob("[!.]*")), key=_time, reverse=True):
                kind = place.parent.name
                checkpoints.append(
                    {
                        "checkpoint_id": f"{kind}/{place.name}",
                        "checkpoint_type": KINDS[kind],
                        "time": _time(place).isoformat(),
                        "tinker_path": f"tinker://{name}/{kind}/{place.name}",
                        "size_bytes": sum(file.stat().st_size for file in place.iterdir()),
                    }
                )
        last = {x["checkpoint_type"]: x for x in reversed(checkpoints)}
        about = {
            "training_run_id": name,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run.rank,
            "last_request_time": checkpoints[0]["time"] if checkpoints else _time(folder / "run.json").isoformat(),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": run.user_metadata,
        }
        return about, checkpoints

    def delete(self, path: str) -> None:
        """Deletes a checkpoint; samplers that have read it go on.

        Raises:
            UserError: there is none.
        """
        with self._changing:
            folder = self.folder(path)
            gone = folder.rename(folder.with_name(f".{folder.name}.deleted"))
        shutil.rmtree(gone)

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
        with self._changing:
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


def _time(place: Path) -> datetime:
    return datetime.fromtimestamp(place.stat().st_mtime, UTC)
