"""What this machine has to compute on, as far as its files and its environment say it: JAX is not asked, which would
take the devices and seconds."""

import os
import re
from glob import glob

DEVICES = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Device files of NVIDIA's GPUs and of TPUs."""


def accelerated() -> bool:
    """Whether this machine has a GPU or a TPU that JAX may use."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    return wanted != "cpu" and any(glob(pattern) for pattern in DEVICES)


def cpu_devices() -> int:
    """How many devices JAX makes of the CPU: one, unless the environment asks for more to try a mesh."""
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    number = os.environ.get("JAX_NUM_CPU_DEVICES") or (forced and forced[1]) or "1"
    return int(number) if number.isdigit() and int(number) > 0 else 1
