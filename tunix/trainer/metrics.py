"""Where numbers go: `metrics.jsonl` always, wandb and TensorBoard when asked, under the same names.

A row is one JSON object per logged step, `{"step": 7, "time/seconds": 3.1, "train/loss": 2.04, ...}`. A resumed run
first drops the rows behind its checkpoint, so that every step is there once.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunix.config import LoggingConfig
from tunix.errors import UserError
from tunix.files import write_text_atomic


@runtime_checkable
class Sink(Protocol):
    """One place that numbers go to."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one row."""
        ...

    def close(self) -> None:
        """Flushes and ends."""
        ...


class JsonLines:
    """The file of the run folder."""

    def __init__(self, path: Path, resume_at: int):
        write_rows(path, [row for row in read_rows(path) if row["step"] <= resume_at])
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one row and hands it to the system, so that a killed process loses nothing."""
        # JSON has no NaN; null is read everywhere.
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **clean}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file on disk."""
        os.fsync(self._file.fileno())
        self._file.close()


class Wandb:
    """A Weights & Biases run; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]):
        import wandb

        self._run = wandb.init(
            project=project, dir=folder, name=folder.name, config=dict(settings), id=folder.name, resume="allow"
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queues one row; wandb sends it in the background."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Waits until it is sent or stored."""
        self._run.finish()


class TensorBoard:
    """Event files in `tensorboard/`."""

    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UserError(
                "logging.tensorboard: tensorboardX is not installed. pip install 'tunix[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queues one row."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes the event file."""
        self._writer.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a metrics file; a last line that a kill cut short is left out. Empty where there is none."""
    if not path.exists():
        return []
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in complete]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replaces a file of rows, atomically."""
    write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))


def open_sinks(folder: Path, config: LoggingConfig, settings: Mapping[str, Any], resume_at: int) -> list[Sink]:
    """All the places that a recipe asks for.

    Args:
        settings: the recipe, shown beside the curves.
        resume_at: the step that the run goes on from; 0 for a new one.
    """
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", resume_at)]
    if config.wandb:
        sinks.append(Wandb(folder, config.wandb, settings))
    if config.tensorboard:
        sinks.append(TensorBoard(folder))
    return sinks
