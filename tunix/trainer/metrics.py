"""Destinations of metrics: `metrics.jsonl` always, trackers (`trackers.py`) where configured, with the same names.

A row is one JSON object per logged step, `{"step": 7, "time/seconds": 3.1, "train/loss": 2.04, ...}`. A resumed run
first drops the rows after its checkpoint, so that every step is logged once.
"""

import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from tunix.errors import UserError, install_command
from tunix.trainer.config import LoggingConfig
from tunix.util.atomic_io import append_rows, forget_after

EXTRAS = {"trackio": "trackio", "mlflow": "mlflow", "tensorboard": "tensorboardX"}
"""Key of `logging`, which is also the extra's name, -> the module that it needs."""


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


def require_trackers(config: LoggingConfig) -> None:
    """Checks what can be checked of the trackers without a network.

    Raises:
        UserError: a package is not installed, or a key or an address is not set.
    """
    for name, module in EXTRAS.items():
        if getattr(config, name) and importlib.util.find_spec(module) is None:
            raise UserError(f"logging.{name}: {module} is not installed: {install_command(name)}")
    if config.wandb:
        import wandb

        if wandb.setup().settings.mode in ("online", "shared", None) and not wandb.login(prompt=False, verify=False):
            raise UserError(
                f"logging.wandb: {config.wandb} needs a key: set WANDB_API_KEY, run `wandb login`, or set "
                "WANDB_MODE=offline"
            )
    if config.trackio and os.environ.get("TRACKIO_SPACE_ID"):
        from huggingface_hub import get_token

        if get_token() is None:
            raise UserError("logging.trackio: TRACKIO_SPACE_ID needs a key: set HF_TOKEN, or run `hf auth login`")
    if config.mlflow and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise UserError(
            f"logging.mlflow: {config.mlflow} needs an address: set MLFLOW_TRACKING_URI, as in http://localhost:5000"
        )


def perplexity(loss: float) -> float:
    """The exponential of a mean loss in nats; infinite where a float overflows."""
    return math.exp(loss) if loss < 700 else math.inf
