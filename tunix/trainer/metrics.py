"""Where numbers go: `metrics.jsonl` always, wandb and TensorBoard when asked, under the same names.

A row is one JSON object per logged step, `{"step": 7, "time/seconds": 3.1, "train/loss": 2.04, ...}`. A resumed run
first drops the rows behind its checkpoint, so that every step is there once.
"""

import json
import math
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunix.errors import UserError
from tunix.trainer.config import LoggingConfig
from tunix.util.atomic_io import write_text_atomic


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

    def __init__(self, path: Path, resume_at: int | None):
        forget_after(path, resume_at)
        self._path = path

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one row."""
        # JSON has no NaN; null is read everywhere.
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        append_rows(self._path, [{"step": step, **clean}])

    def close(self) -> None:
        """Nothing is held open: every row is with the system already."""


class Wandb:
    """A Weights & Biases run; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]):
        import wandb

        # Kept in the folder: a resumed run goes on with its curves, and no other of the same name joins them.
        kept = folder / "wandb" / "run-id"
        if not kept.is_file():
            kept.parent.mkdir(exist_ok=True)
            write_text_atomic(kept, secrets.token_hex(4))
        name, own = folder.name, kept.read_text()
        try:
            self._run = wandb.init(
                project=project, dir=folder, name=name, config=dict(settings), id=own, resume="allow"
            )
        except wandb.Error as error:
            raise UserError(
                f"logging.wandb: {project!r} cannot be logged to ({error}). Log in (`wandb login`), or set "
                "WANDB_MODE=offline, or logging.wandb=null"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queues one row; wandb sends it in the background."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Waits until it is sent or stored."""
        self._run.finish()


class TensorBoard:
    """Event files in `tensorboard/`."""

    def __init__(self, folder: Path, resume_at: int | None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UserError(
                "logging.tensorboard: tensorboardX is not installed. pip install 'tunix[tensorboard]'"
            ) from error
        # What an interrupted start wrote behind its checkpoint is hidden, as it is dropped from metrics.jsonl.
        purged = None if resume_at is None else resume_at + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purged)

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


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows and hands them to the system, so that a killed process loses nothing.

    Raises:
        UserError: the disk refuses.
    """
    try:
        with path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise UserError(
            f"{path} could not be written: {error.strerror}. Make room and run the same command: it goes on from the "
            "last checkpoint."
        ) from error


def forget_after(path: Path, step: int | None) -> None:
    """Drops the rows of steps behind `step`, which will be made again, atomically; all of them where it is None."""
    kept = [row for row in read_rows(path) if step is not None and row["step"] <= step]
    write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))


def open_sinks(folder: Path, config: LoggingConfig, settings: Mapping[str, Any], resume_at: int | None) -> list[Sink]:
    """All the places that a recipe asks for.

    Args:
        settings: the recipe, shown beside the curves.
        resume_at: the step that the run goes on from; None for a new one.
    """
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", resume_at)]
    if config.wandb:
        sinks.append(Wandb(folder, config.wandb, settings))
    if config.tensorboard:
        sinks.append(TensorBoard(folder, resume_at))
    return sinks
