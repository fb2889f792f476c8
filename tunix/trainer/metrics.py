"""Destinations of metrics: `metrics.jsonl` always, wandb and TensorBoard where configured, with the same names.

A row is one JSON object per logged step, `{"step": 7, "time/seconds": 3.1, "train/loss": 2.04, ...}`. A resumed run
first drops the rows after its checkpoint, so that every step is logged once.
"""

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunix.errors import UserError, install_command
from tunix.util.atomic_io import append_rows, forget_after, write_text_atomic


@runtime_checkable
class Sink(Protocol):
    """One destination of metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one row."""
        ...

    def close(self) -> None:
        """Flushes and closes the destination."""
        ...


class JsonLines:
    """The file `metrics.jsonl` of the run folder."""

    def __init__(self, path: Path, resume_at: int | None):
        """`resume_at`: the step that the run resumes from, after which rows are dropped; None for a new run."""
        forget_after(path, resume_at)
        self._path = path

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN; every reader accepts null.
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        append_rows(self._path, [{"step": step, **clean}])

    def close(self) -> None:
        """Does nothing: no file is held open, and every row has been written."""


class Wandb:
    """A Weights & Biases run; with `WANDB_MODE=offline` it is stored locally."""

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]):
        import wandb

        # The id is stored in the folder: a resumed run continues its curves, and no other run of that name joins them.
        id_file = folder / "wandb" / "run-id"
        if not id_file.is_file():
            id_file.parent.mkdir(exist_ok=True)
            write_text_atomic(id_file, secrets.token_hex(4))
        name, run_id = folder.name, id_file.read_text()
        try:
            self._run = wandb.init(
                project=project, dir=folder, name=name, config=dict(settings), id=run_id, resume="allow"
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
        """Waits until all rows are sent or stored."""
        self._run.finish()


class TensorBoard:
    """TensorBoard event files in the run folder's `tensorboard/`."""

    def __init__(self, folder: Path, resume_at: int | None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"logging.tensorboard: tensorboardX is not installed: {install_command('tensorboard')}"
            ) from error
        # Hides steps after the checkpoint of an interrupted start, as they are dropped from metrics.jsonl.
        purged = None if resume_at is None else resume_at + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purged)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def perplexity(loss: float) -> float:
    """The exponential of a mean loss in nats; infinite where a float overflows."""
    return math.exp(loss) if loss < 700 else math.inf
