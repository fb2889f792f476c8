"""Devices that need not be here, for their compilers (`util/chips.py` has their names and figures).

TPU programs are compiled by libtpu, programs of NVIDIA's GPUs by jax's CUDA plugin; both run on a CPU. They are set up
once in a process, before JAX is used (`prepare`).
"""

import os
import re
from importlib.resources import files
from typing import Any

import jax
from jax.experimental import topologies

from tunix.errors import UserError, install_command
from tunix.util import startup
from tunix.util.accelerators import installed
from tunix.util.chips import CHIPS_OF_A_HOST, GPUS_OF_A_HOST, SHAPES, chip_of, number_of

TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
"""Environment in which libtpu looks for no device."""
SHARE = {"gpu": startup.FRACTION, "tpu": 0.98}
"""Share of the memory that programs may take, by platform: what the command line asks of JAX for a GPU
(`util/startup.py`); a TPU's compiler keeps 0.25 to 0.75 GiB for itself (its messages: 15.75 of a v5e's 16)."""
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")}
"""Modules of which one has the compiler of a platform."""
EFFORT = "jax_exec_time_optimization_effort"


def prepare() -> None:
    """Lets this process compile for devices that are not here; it computes on its CPU."""
    os.environ.update(TPU)
    jax.config.update("jax_platforms", "cpu")


def hasten(platform: str) -> None:
    """Lets a TPU's compiler spend less on this process's programs: a fifth of the time or less.

    Their memory is the same to two percent; what is left out is prefetching and the last search for a faster schedule
    (docs/log.md). jax 0.12 has no such setting any more.
    """
    if platform == "tpu" and hasattr(jax.config, EFFORT):
        jax.config.update(EFFORT, -1.0)


def devices_of(topology: str) -> list[Any]:
    """The devices of a topology such as `v5e:4x4` or `h100:8`; `prepare` comes first.

    Raises:
        UserError: the name or the shape is not known, or the compiler is not installed.
    """
    chip = chip_of(topology)
    if not any(installed(module) for module in COMPILERS[chip.platform]):
        raise UserError(
            f"topology {topology!r}: its compiler is not installed. It runs on any machine: "
            + install_command(f"plan-{chip.platform}")
        )
    name, _, shape = topology.partition(":")
    if chip.platform == "tpu":
        # Less than a host's chips have to be said to be all that it has.
        alone = {"chips_per_host_bounds": (1, 1, 1)} if number_of(topology) < CHIPS_OF_A_HOST else {}
        return _described(topology if shape else f"{name}:{SHAPES[name][0]}", platform="tpu", **alone)
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


def _described(name: str, **settings: Any) -> list[Any]:
    try:
        return list(topologies.get_topology_desc(name, **settings).devices)
    except Exception as error:  # each compiler has errors of its own
        chip, why = name.split(":")[0], str(error).splitlines()[0]
        # GPUs are only counted.
        shapes = f". Shapes of {chip} are {', '.join(SHAPES[chip])}." if chip in SHAPES else ""
        raise UserError(f"topology {name!r} cannot be described: {why}{shapes}") from error


def limit_of(topology: str) -> int:
    """Bytes that programs may take on each device."""
    chip = chip_of(topology)
    return int(chip.memory * SHARE[chip.platform])
