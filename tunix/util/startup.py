"""What JAX is told before it takes a device: how much of a GPU's memory is ours, and where compiled programs are kept.

No flags for the overlap of communication and computation are among it. The scheduler that hides latency is a GPU
compiler's default by now (the flag leaves our programs as they are, on or off), and a TPU's compiler refuses those that
are usually set for it on other chips than v5e, for fear of wrong results (docs/log.md).
"""

import importlib
import os
from pathlib import Path

import jax
from jax._src.distributed import global_state  # neither has a public name
from jax._src.xla_bridge import backends_are_initialized

from tunix.errors import UserError, install_command
from tunix.util.accelerators import FRACTION, MEMORY, check_cards, check_driver

THRESHOLD = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
"""Seconds of compiling below which JAX does not keep a program; its own default is 1."""


def prepare_jax() -> None:
    """Sets what is not set yet; has to come before JAX's first use of a device.

    Compiled programs are kept, however quickly they compiled, so that a second start is faster: in the user's cache
    folder, or where `JAX_COMPILATION_CACHE_DIR` says. Processes may share that folder; what one of them reads of an
    entry that another is still writing does not pass its checksum, and JAX warns and compiles.

    Raises:
        UserError: the GPU's driver is too old for JAX's wheel, or others have taken most of its memory.
    """
    check_driver()
    # What this process has taken is not another's; nor is what other processes of this run have, each on its own GPU.
    if not backends_are_initialized() and global_state.num_processes in (None, 1):
        check_cards()
    os.environ.setdefault(MEMORY, str(FRACTION))
    # The ignored rule: jax gives its config these names when it is imported, so pyright cannot know them.
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/tunix/compiled").expanduser()))
    if THRESHOLD not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def begin_pathways() -> bool:
    """Prepares JAX for Pathways where it is asked for; has to come before JAX's first use of a device.

    Under Pathways one process drives the devices of all hosts, which it reaches through a proxy. `JAX_PLATFORMS=proxy`
    asks for it, which a PathwaysJob sets; pathwaysutils then makes the proxy a backend of JAX. Everything after that is
    the same code as for devices of this machine. Returns whether the devices are Pathways'.

    Raises:
        UserError: pathwaysutils is not installed.
    """
    # What pathwaysutils itself goes by; the ignored rule: jax gives its config these names when it is imported.
    platforms = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
    if "proxy" not in platforms.split(","):
        return False
    try:
        utils = importlib.import_module("pathwaysutils")
    except ImportError as error:
        raise UserError(
            f"JAX_PLATFORMS={platforms} asks for Pathways, whose package is missing: {install_command('pathways')}"
        ) from error
    utils.initialize()
    return True
