"""What this machine has to compute on, as far as its files and its environment say it: JAX is not asked, which would
take the devices and seconds."""

import os
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from glob import glob
from importlib.util import find_spec
from pathlib import Path

from tunix.errors import UserError, install_command

DEVICES = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Device files of NVIDIA's GPUs and of TPUs."""
DRIVER = Path("/proc/driver/nvidia/version")
"""Where NVIDIA's driver says which it is."""
OLDEST_DRIVERS = {"jax_plugins.xla_cuda13": (13, 580), "jax_plugins.xla_cuda12": (12, 525)}
"""CUDA and the oldest driver that it runs with, by the module of JAX's wheel for it
(https://docs.jax.dev/en/latest/installation.html)."""


def accelerated() -> bool:
    """Whether this machine has a GPU or a TPU that JAX may use."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    return wanted != "cpu" and any(glob(pattern) for pattern in DEVICES)


def cpu_devices() -> int:
    """How many devices JAX makes of the CPU: one, unless the environment asks for more to try a mesh."""
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    number = os.environ.get("JAX_NUM_CPU_DEVICES") or (forced and forced[1]) or "1"
    return int(number) if number.isdigit() and int(number) > 0 else 1


def check_driver(file: Path = DRIVER) -> None:
    """Raises a UserError where NVIDIA's driver, by the `file` in which it says its version, is older than JAX's wheel
    wants, with what to install: JAX itself ends in a traceback, or takes the CPU.

    `JAX_SKIP_CUDA_CONSTRAINTS_CHECK`, JAX's own variable, is for those who have CUDA's compatibility libraries.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if "cpu" in platforms or os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") or not file.exists():
        return
    version = re.search(r"Kernel Module.*?\s(\d+)\.[\d.]+", file.read_text())
    wheels = [needs for module, needs in OLDEST_DRIVERS.items() if installed(module)]
    if version is None or not wheels or int(version[1]) >= min(driver for _, driver in wheels):
        return
    cuda, driver = min(wheels, key=lambda needs: needs[1])
    other = (
        f", or {install_command('gpu-cuda12')} in a new environment" if cuda == 13 and int(version[1]) >= 525 else ""
    )
    raise UserError(
        f"the NVIDIA driver here is {version[1]}, and JAX's CUDA {cuda} wants {driver} or newer: update it{other}; "
        "JAX_PLATFORMS=cpu leaves the GPU out"
    )


@dataclass(frozen=True)
class Card:
    """One of NVIDIA's GPUs, as its driver describes it."""

    number: int
    """In the order of the bus, e.g. 0."""
    uuid: str
    name: str
    """e.g. `NVIDIA H100 80GB HBM3`."""
    total: float
    """Bytes of its memory, e.g. 85.5e9."""
    free: float
    """Bytes that nobody has taken."""


QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
"""Prints a line for each GPU; sizes in MiB."""


@lru_cache
def cards() -> tuple[Card, ...]:
    """The GPUs that JAX would use, as they were when this was first asked; none where that is not known, or where JAX
    has no support for them.

    `CUDA_VISIBLE_DEVICES` may name them by numbers in an order that CUDA makes, so that of several kinds of GPU it is
    not known which they are.
    """
    if not accelerated() or not any(map(installed, OLDEST_DRIVERS)):
        return ()
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True).stdout
        every = []
        for line in answer.splitlines():
            number, uuid, name, total, free = line.split(", ")
            every.append(Card(int(number), uuid, name, float(total) * 2**20, float(free) * 2**20))
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return tuple(every)
    wanted = visible.split(",")
    if len({card.name for card in every}) == 1:
        return tuple(card for card in every if {str(card.number), card.uuid} & set(wanted))
    return tuple(card for card in every if card.uuid in wanted)


MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
FRACTION = 0.92
"""Share of a GPU's memory that JAX takes, unless `MEMORY` says another; JAX's own default is 0.75. The rest is for the
driver, for libraries such as NCCL, and for fragments (recipes' hardware lines count on this)."""
TAKEN = 0.5
"""The share of a GPU's memory that others may hold where JAX is to take most of it."""


def check_cards() -> None:
    """Raises a UserError where a GPU's memory is mostly another's: JAX would read all weights before it ends for want
    of memory.

    Whoever says how much memory JAX may take (`XLA_PYTHON_CLIENT_MEM_FRACTION`) or has it take no more than it needs
    (`XLA_PYTHON_CLIENT_PREALLOCATE=false`) is not refused.
    """
    sparing = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0")
    if sparing or MEMORY in os.environ:
        return
    for card in cards():
        if card.free < (1 - TAKEN) * card.total:
            taken, total = ((x / 2**30) for x in (card.total - card.free, card.total))
            raise UserError(
                f"GPU {card.number} ({card.name}): other processes have taken {taken:.1f} of {total:.1f} GiB. End them "
                "(nvidia-smi lists them), choose other GPUs with CUDA_VISIBLE_DEVICES, or take what is left with "
                f"{MEMORY}={0.9 * card.free / card.total:.2f}"
            )


def installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that would hold it
        return False
