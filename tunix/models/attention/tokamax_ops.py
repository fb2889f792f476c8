"""What is private of tokamax (`pip install '.[gpu]'`): where its kernels for NVIDIA's GPUs are, and in which versions.

tokamax 0.0.17 has a public module of operations, `tokamax.ops.gpu`, but it cannot be imported without jax_triton and
Triton itself, which tokamax does not install; versions before have none. tokamax also reads its settings from absl's
flags, tells every call that nobody has tuned it for, and asks JAX's default device what it is. Whoever calls a kernel
of it asks `missing` first, takes the operation from `operation` and traces the call within `for_the_device_in_use`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import jax

from tunix.errors import install_command
from tunix.mesh import device_in_use

Name = Literal["attention", "ragged_dot"]
TRIED = (0, 0, 12), (0, 0, 17)
"""The oldest and the newest version that the tests ran with: the extras of pyproject.toml install one of them."""
OPERATIONS: dict[Name, str] = {
    "attention": "PallasMosaicGpuFlashAttention",
    "ragged_dot": "PallasMosaicGpuRaggedDot",
}
"""The Mosaic kernels' classes, in `tokamax._src.ops.NAME.pallas_mosaic_gpu` of the versions that were tried."""


def capability(device: Any = None) -> float | None:
    """The compute capability of a GPU, e.g. 9.0 of an H100, by default of that which is compiled for; else None."""
    value = getattr(device or device_in_use(), "compute_capability", None)
    return None if value is None else float(value)


@cache
def missing(name: Name) -> str | None:
    """Why an operation cannot be had: tokamax is not installed, is a version that was not tried, or is broken."""
    try:
        installed = version("tokamax")
    except PackageNotFoundError:
        return f"it needs tokamax: {install_command('gpu')}"
    numbers = tuple(int(part) if part.isdigit() else 0 for part in installed.split(".")[:3])
    oldest, newest = (".".join(map(str, tried)) for tried in TRIED)
    if not TRIED[0] <= numbers <= TRIED[1]:
        return f"tokamax {installed} was not tried, {oldest} to {newest} were: {install_command('gpu')}"
    try:
        operation(name)
    except Exception as error:  # importing another's private module may raise anything, and the next best is there
        return f"tokamax {installed} has no {OPERATIONS[name]} here ({str(error).splitlines()[0]})"
    return None


@cache
def operation(name: Name) -> Any:
    """An operation of tokamax with its own settings."""
    from absl.flags import FLAGS

    FLAGS.mark_as_parsed()  # they refuse to be read before
    logging.getLogger("absl").addFilter(lambda record: "Autotuning cache miss" not in record.getMessage())
    return getattr(import_module(f"tokamax._src.ops.{name}.pallas_mosaic_gpu"), OPERATIONS[name])()


def attention_mask(**bounds: Any) -> Any:
    """tokamax's mask of the keys that queries see: `k_start`, `k_end` and `is_causal`."""
    from tokamax._src.ops.attention.base import Mask

    return Mask(**bounds)


@contextmanager
def for_the_device_in_use() -> Iterator[None]:
    """Makes the device that a program is compiled for JAX's default one: it may not be here."""
    if jax.default_backend() == "gpu":
        yield
        return
    with jax.default_device(device_in_use()):
        yield
