"""What this machine has to compute on, as far as its files and its environment say it: JAX is not asked, which would
take the devices and seconds."""

import os
import re
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
    """Refuses an NVIDIA driver that JAX's wheel cannot run with: JAX itself ends in a traceback, or takes the CPU.

    `JAX_SKIP_CUDA_CONSTRAINTS_CHECK`, JAX's own variable, is for those who have CUDA's compatibility libraries.

    Args:
        file: what the driver says of itself.

    Raises:
        UserError: it is too old, and what to install.
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


def installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that would hold it
        return False
