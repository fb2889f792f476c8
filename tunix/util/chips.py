"""Devices by name: their published figures, and topologies such as `v5e:4x4` and `h100:8`, which need not be here.

TPU programs are compiled by libtpu, programs of NVIDIA's GPUs by jax's CUDA plugin; both run on a CPU. They are set up
once in a process, before JAX is used (`prepare`). Loads without jax.
"""

import math
import os
import re
from importlib.resources import files
from typing import Any, NamedTuple

from tunix.errors import UserError, install_command, nearest
from tunix.util.accelerators import FRACTION, OLDEST_DRIVERS, installed

GPUS_OF_A_HOST = 8
CHIPS_OF_A_HOST = 4


class Chip(NamedTuple):
    """Published figures of one device."""

    kind: str
    """What the name begins with that JAX gives it; of NVIDIA's, whole words of it."""
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
    Chip("NVIDIA L40", 181e12, 864e9, "gpu"),
    Chip("NVIDIA L40S", 362e12, 864e9, "gpu"),
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
    chips = (*CHIPS.values(), *OTHERS)
    return next((x for x in chips if re.match(x.kind + (r"\b" if x.platform == "gpu" else ""), kind)), None)


def chip_of(topology: str) -> Chip:
    """The chip of a topology; raises UserError where there is none of this name."""
    name = topology.split(":")[0]
    if name not in CHIPS:
        known = ", ".join(CHIPS)
        raise UserError(f"topology {topology!r}: {name!r} is not known.{nearest(name, CHIPS)} There are {known}.")
    return CHIPS[name]


def number_of(topology: str) -> int:
    """The number of devices of a topology."""
    return math.prod(int(size) for size in re.findall(r"\d+", topology.partition(":")[2])) if ":" in topology else 1


# --- Topologies for compilers ---------------------------------------------------------------------------------------

TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
"""Environment in which libtpu looks for no device."""
SHARE = {"gpu": FRACTION, "tpu": 0.98}
"""Share of the memory that programs may take, by platform: what the command line asks of JAX for a GPU
(`accelerators.py`); a TPU's compiler keeps 0.25 to 0.75 GiB for itself (its messages: 15.75 of a v5e's 16)."""
COMPILERS = {"tpu": ("libtpu",), "gpu": tuple(OLDEST_DRIVERS)}
"""Modules of which one has the compiler of a platform."""
EFFORT = "jax_exec_time_optimization_effort"


def prepare() -> None:
    """Lets this process compile for devices that are not here; it computes on its CPU."""
    import jax

    os.environ.update(TPU)
    jax.config.update("jax_platforms", "cpu")


def hasten(platform: str) -> None:
    """Lets a TPU's compiler spend less on this process's programs: a fifth of the time or less.

    Their memory is the same to two percent; what is left out is prefetching and the last search for a faster schedule
    (docs/log.md). jax 0.12 has no such setting any more.
    """
    import jax

    if platform == "tpu" and hasattr(jax.config, EFFORT):
        jax.config.update(EFFORT, -1.0)


def devices_of(topology: str) -> list[Any]:
    """The devices of a topology such as `v5e:4x4` or `h100:8`; `prepare` comes first.

    Raises:
        UserError: the name or the shape is not known, or the compiler is not installed.
    """
    from jax.experimental import topologies

    chip, number = chip_of(topology), number_of(topology)
    if not any(installed(module) for module in COMPILERS[chip.platform]):
        raise UserError(
            f"topology {topology!r}: its compiler is not installed. It runs on any machine: "
            + install_command(f"plan-{chip.platform}")
        )
    name, _, shape = topology.partition(":")
    if chip.platform == "tpu":
        topology = topology if shape else f"{name}:{SHAPES[name][0]}"
        # Less than a host's chips have to be said to be all that it has.
        alone = {"chips_per_host_bounds": (1, 1, 1)} if number < CHIPS_OF_A_HOST else {}
        settings: dict[str, Any] = {"platform": "tpu", **alone}
    else:
        if not re.fullmatch(r"[1-9]\d*", shape or "1"):
            raise UserError(f"topology {topology!r}: after {name}: comes the number of GPUs, e.g. {name}:8.")
        hosts = -(-number // GPUS_OF_A_HOST)
        if number % hosts:
            of_hosts = f"more than {GPUS_OF_A_HOST} GPUs come in hosts of {GPUS_OF_A_HOST}"
            raise UserError(f"topology {topology!r}: {of_hosts}.")
        config = files("tunix.util").joinpath("h100.textproto").read_text()
        config = re.sub(r"device_memory_size: \d+", f"device_memory_size: {int(chip.memory)}", config)
        config = re.sub(r"memory_bandwidth: \d+", f"memory_bandwidth: {int(chip.bandwidth)}", config)
        settings = {"platform": "cuda", "target_config": config, "topology": f"1x{hosts}x{number // hosts}"}
    try:
        return list(topologies.get_topology_desc(topology, **settings).devices)
    except Exception as error:  # each compiler has errors of its own
        # GPUs are only counted.
        shapes = f". Shapes of {name} are {', '.join(SHAPES[name])}." if name in SHAPES else ""
        raise UserError(f"topology {topology!r} cannot be described: {str(error).splitlines()[0]}{shapes}") from error


def limit_of(topology: str) -> int:
    """Bytes that programs may take on each device."""
    chip = chip_of(topology)
    return int(chip.memory * SHARE[chip.platform])
