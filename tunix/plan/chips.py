"""Devices by name, such as `v5e:4x4` and `h100:8`: how many they are, and their figures. Loads without jax."""

import math
import re
from typing import NamedTuple

from tunix.errors import UserError, nearest

GPUS_OF_A_HOST = 8
CHIPS_OF_A_HOST = 4


class Chip(NamedTuple):
    """Published figures of one device."""

    platform: str
    flops: float
    """Dense bfloat16 products a second."""
    memory: float
    """Bytes of its memory."""
    bandwidth: float
    """Bytes of its memory a second."""
    link: float
    """Bytes that it sends to its neighbours a second."""
    reached: tuple[float, float] = (1.0, 1.0)
    """Shares of `flops` and `bandwidth` that long runs of the card reach, where that was measured."""

    @property
    def fastest(self) -> "Chip":
        """The same with the figures that a card reaches."""
        flops, bandwidth = self.reached
        return self._replace(flops=flops * self.flops, bandwidth=bandwidth * self.bandwidth, reached=(1.0, 1.0))


CHIPS = {
    "v5e": Chip("tpu", 197e12, 16 * 2**30, 819e9, 200e9),
    "v5p": Chip("tpu", 459e12, 95 * 2**30, 2765e9, 600e9),
    "v6e": Chip("tpu", 918e12, 32 * 2**30, 1640e9, 448e9),
    "h100": Chip("gpu", 989e12, 80e9, 3350e9, 450e9),
    "h200": Chip("gpu", 989e12, 141e9, 4800e9, 450e9, (790 / 989, 4.3 / 4.8)),
}
"""Google's and NVIDIA's data sheets: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm,
https://www.nvidia.com/en-us/data-center/h100/, https://www.nvidia.com/en-us/data-center/h200/. What an H200 reaches was
measured on 2026-11-26: 790 TFLOP/s of bfloat16 products, 4.3 TB/s of a copy."""
SHAPES = {
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
"""Slices of TPUs that can be had; their compiler takes others as well."""


def chip_of(topology: str) -> Chip:
    """The chip of a topology.

    Raises:
        UserError: there is none of this name.
    """
    name = topology.split(":")[0]
    if name not in CHIPS:
        known = ", ".join(CHIPS)
        raise UserError(f"topology {topology!r}: {name!r} is not known.{nearest(name, CHIPS)} There are {known}.")
    return CHIPS[name]


def number_of(topology: str) -> int:
    """The number of devices of a topology."""
    return math.prod(int(size) for size in re.findall(r"\d+", topology.partition(":")[2])) if ":" in topology else 1
