"""Devices by name: their published figures, and topologies such as `v5e:4x4` and `h100:8`. Loads without jax."""

import math
import re
from typing import NamedTuple

from tunix.errors import UserError, nearest

GPUS_OF_A_HOST = 8
CHIPS_OF_A_HOST = 4


class Chip(NamedTuple):
    """Published figures of one device."""

    kind: str
    """What the name begins with that JAX gives it."""
    flops: float
    """Dense bfloat16 products a second."""
    bandwidth: float
    """Bytes of its memory a second; of cards with several memories the fastest."""
    platform: str
    memory: float = 0.0
    """Bytes of its memory; 0 where no topology is made of it."""
    link: float = 0.0
    """Bytes that it sends to its neighbours a second; 0 as above."""
    reached: tuple[float, float] = (1.0, 1.0)
    """Shares of `flops` and `bandwidth` that long runs of the card reach, where that was measured."""

    @property
    def fastest(self) -> "Chip":
        """The same with the figures that a card reaches."""
        flops, bandwidth = self.reached
        return self._replace(flops=flops * self.flops, bandwidth=bandwidth * self.bandwidth, reached=(1.0, 1.0))


CHIPS = {
    "v5e": Chip("TPU v5 lite", 197e12, 819e9, "tpu", 16 * 2**30, 200e9),
    "v5p": Chip("TPU v5", 459e12, 2765e9, "tpu", 95 * 2**30, 600e9),
    "v6e": Chip("TPU v6 lite", 918e12, 1640e9, "tpu", 32 * 2**30, 448e9),
    "h100": Chip("NVIDIA H100", 989e12, 3350e9, "gpu", 80e9, 450e9),
    "h200": Chip("NVIDIA H200", 989e12, 4800e9, "gpu", 141e9, 450e9, (790 / 989, 4.3 / 4.8)),
}
"""Those that topologies are made of. Google's and NVIDIA's data sheets:
https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, https://www.nvidia.com/en-us/data-center/h100/,
https://www.nvidia.com/en-us/data-center/h200/. What an H200 reaches was measured on 2026-11-26: 790 TFLOP/s of bfloat16
products, 4.3 TB/s of a copy."""
OTHERS = (
    Chip("NVIDIA A100", 312e12, 2039e9, "gpu"),
    Chip("NVIDIA L4", 121e12, 300e9, "gpu"),
    Chip("TPU v4", 275e12, 1228e9, "tpu"),
)
SHAPES = {
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
"""Slices of TPUs that can be had; their compiler takes others as well."""


def chip_named(kind: str) -> Chip | None:
    """The chip of a device by the kind that JAX gives it, e.g. `NVIDIA H100 80GB HBM3`; None for CPUs and others."""
    return next((chip for chip in (*CHIPS.values(), *OTHERS) if kind.startswith(chip.kind)), None)


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
