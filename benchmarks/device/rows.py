"""The records that pass from a part's process to the command: the machine, and one row of a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tunix.config import DType

Status = Literal["ok", "failed", "late", "skipped"]


@dataclass(frozen=True)
class Machine:
    """The device that is measured, and the versions on it."""

    kind: str
    """As JAX names it, e.g. `NVIDIA H200`."""
    platform: str
    """cpu, gpu or tpu."""
    number: int
    """Devices that JAX sees; one of them is used."""
    memory: int | None
    """Bytes that JAX may use of its memory; None where the device does not say."""
    flops: float | None
    """Published dense bfloat16 products a second; None where none are known, as of CPUs."""
    bandwidth: float | None
    """Published bytes of its memory a second; None likewise."""
    versions: dict[str, str] = field(default_factory=dict)
    """E.g. `{"jax": "0.11.2"}`."""


@dataclass(frozen=True)
class Setting:
    """How the parts are to run."""

    small: bool
    """Small shapes of everything, as on a CPU."""
    platform: str
    """cpu, gpu or tpu."""

    @property
    def dtype(self) -> DType:
        """Of the computation, where speed is measured."""
        return "float32" if self.small else "bfloat16"


@dataclass(frozen=True)
class Work:
    """What a stretch of a program's time is spent on, for its roofline."""

    flops: float
    bytes: float
    """Read from memory and written to it."""

    def seconds(self, flops: float, bandwidth: float) -> float:
        """The least time that a device with these peaks takes."""
        return max(self.flops / flops, self.bytes / bandwidth)


@dataclass(frozen=True)
class Profile:
    """Where a device's time goes in one turn."""

    launches: float
    """Kernels and copies."""
    busy: float
    """Their share of the time from the first one's start to the last one's end."""
    kernels: tuple[tuple[str, float, float], ...]
    """Name, seconds and launches of those that take the longest."""


@dataclass(frozen=True)
class Row:
    """One check or one measurement; what a row has not is None or empty."""

    name: str
    """E.g. `SFT 1 x 16384`."""
    status: Status = "ok"
    """`late`: stopped at its own deadline; `skipped`: the minutes were over, or the device lacks what it takes."""
    message: str = ""
    """Why it failed, or what there is to know besides the numbers."""
    difference: float | None = None
    """What a check found, in units of its limit's."""
    limit: float | None = None
    """The difference from which a check fails."""
    seconds: float | None = None
    """Median of the turns."""
    turns: int = 0
    tokens: int = 0
    """Tokens of a turn."""
    flops: float = 0.0
    """FLOPs of a turn that the model needs (`trainer.perf.training_flops`), by which the MFU counts."""
    memory: int | None = None
    """Peak bytes of the process."""
    planned_memory: int | None = None
    """Peak bytes of the program by its compiler."""
    work: tuple[Work, ...] = ()
    """The compiled program's account, or arithmetic, one stretch after the other; its roofline is the prediction."""
    profile: Profile | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Row":
        """The row of a record that `dataclasses.asdict` and JSON made."""
        work = tuple(Work(**stretch) for stretch in record["work"])
        profile = record["profile"]
        if profile is not None:
            profile = Profile(**{**profile, "kernels": tuple(map(tuple, profile["kernels"]))})
        return cls(**{**record, "work": work, "profile": profile})


def check(name: str, difference: float, limit: float, message: str = "") -> Row:
    """A row that fails where the difference is above its limit, or no number."""
    passed = difference <= limit
    return Row(name, "ok" if passed else "failed", message, float(difference), limit)


def attempt(name: str, make: Callable[[], Row]) -> Row:
    """The row, or one that says why it could not be made, so that others still are."""
    try:
        return make()
    except Exception as error:  # of every library, and of memory that is not there
        return Row(name, "failed", brief(error))


def brief(error: BaseException) -> str:
    """An error's kind and its first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
