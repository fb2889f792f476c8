"""How tokamax's kernels for NVIDIA's GPUs are called (`pip install '.[gpu]'`).

tokamax reads its settings from absl's flags, tells every call that nobody has tuned it for, and asks JAX's default
device what it is. Whoever calls a kernel of it takes the operation from `operation` and traces the call within
`for_the_device_in_use`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax

from tunix.mesh import device_in_use


def installed() -> bool:
    """Whether tokamax is."""
    return find_spec("tokamax") is not None


def capability() -> float | None:
    """The compute capability of the GPU that is compiled for, e.g. 9.0 of an H100; None on other devices."""
    found = getattr(device_in_use(), "compute_capability", None)
    return None if found is None else float(found)


@cache
def operation(module: str, name: str) -> Any:
    """An operation of tokamax with its own settings.

    Args:
        module: where it is, below `tokamax._src.ops`, e.g. "ragged_dot.pallas_triton".
        name: its class there.
    """
    from absl.flags import FLAGS

    FLAGS.mark_as_parsed()  # they refuse to be read before
    logging.getLogger("absl").addFilter(lambda record: "Autotuning cache miss" not in record.getMessage())
    return getattr(import_module(f"tokamax._src.ops.{module}"), name)()


@contextmanager
def for_the_device_in_use() -> Iterator[None]:
    """Makes the device that a program is compiled for JAX's default one: it may not be here."""
    if jax.default_backend() == "gpu":
        yield
        return
    with jax.default_device(device_in_use()):
        yield
