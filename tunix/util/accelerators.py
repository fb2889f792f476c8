"""Whether a machine has an accelerator, asked of its device files: JAX, which would take it, is not imported."""

import os
from glob import glob

DEVICES = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Device files of NVIDIA's GPUs and of TPUs."""


def accelerated() -> bool:
    """Whether this machine has a GPU or a TPU that JAX may use."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    return wanted != "cpu" and any(glob(pattern) for pattern in DEVICES)
