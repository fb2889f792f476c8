"""Devices that need not be here, for their compilers: names such as `v5e:4x4` and `h100:8`, and published peaks.

TPU programs are compiled by libtpu, programs of NVIDIA's GPUs by jax's CUDA plugin; both run on a CPU. They are set up
once in a process, before JAX is used (`prepare`).
"""

import os
import re
from importlib.resources import files
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from tunix.errors import UserError, nearest

TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
"""Environment in which libtpu looks for no device."""
GPUS_OF_A_HOST = 8


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


CHIPS = {
    "v5e": Chip("tpu", 197e12, 16 * 2**30, 819e9, 200e9),
    "v5p": Chip("tpu", 459e12, 95 * 2**30, 2765e9, 600e9),
    "v6e": Chip("tpu", 918e12, 32 * 2**30, 1640e9, 448e9),
    "h100": Chip("gpu", 989e12, 80e9, 3350e9, 450e9),
    "h200": Chip("gpu", 989e12, 141e9, 4800e9, 450e9),
}
"""Google's and NVIDIA's data sheets: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm,
https://www.nvidia.com/en-us/data-center/h100/, https://www.nvidia.com/en-us/data-center/h200/."""


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


def prepare() -> None:
    """Lets this process compile for devices that are not here; it computes on its CPU."""
    os.environ.update(TPU)
    jax.config.update("jax_platforms", "cpu")


def devices_of(topology: str) -> list[Any]:
    """The devices of a topology such as `v5e:4x4` or `h100:8`; `prepare` comes first.

    Raises:
        UserError: the name or the shape is not known, or the compiler is not installed.
    """
    chip = chip_of(topology)
    name, _, shape = topology.partition(":")
    if chip.platform == "tpu":
        return _described(topology, platform="tpu")
    if not re.fullmatch(r"[1-9]\d*", shape or "1"):
        raise UserError(f"topology {topology!r}: after {name}: comes the number of GPUs, e.g. {name}:8.")
    number = int(shape or "1")
    hosts = -(-number // GPUS_OF_A_HOST)
    if number % hosts:
        raise UserError(f"topology {topology!r}: more than {GPUS_OF_A_HOST} GPUs come in hosts of {GPUS_OF_A_HOST}.")
    config = files("tunix.plan").joinpath("h100.textproto").read_text()
    config = re.sub(r"device_memory_size: \d+", f"device_memory_size: {int(chip.memory)}", config)
    config = re.sub(r"memory_bandwidth: \d+", f"memory_bandwidth: {int(chip.bandwidth)}", config)
    return _described(topology, platform="cuda", target_config=config, topology=f"1x{hosts}x{number // hosts}")


def _described(name: str, **settings: str) -> list[Any]:
    try:
        return list(topologies.get_topology_desc(name, **settings).devices)
    except Exception as error:  # each compiler has errors of its own
        extra = "plan-tpu" if settings["platform"] == "tpu" else "plan-gpu"
        raise UserError(
            f"topology {name!r} cannot be described: {str(error).splitlines()[0]}. Is the compiler installed "
            f"(pip install 'tunix[{extra}]'), and is the shape one of this chip's?"
        ) from error
