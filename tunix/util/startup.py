"""What JAX is told before it takes a device: how much of a GPU's memory is ours, and where compiled programs are kept.

No flags for the overlap of communication and computation are among it. The scheduler that hides latency is a GPU
compiler's default by now (the flag leaves our programs as they are, on or off), and a TPU's compiler refuses those that
are usually set for it on other chips than v5e, for fear of wrong results (docs/log.md).
"""

import os
from pathlib import Path

import jax

MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
FRACTION = 0.92
"""Share of a GPU's memory that JAX takes, unless `MEMORY` says another; JAX's own default is 0.75. The rest is for the
driver, for libraries such as NCCL, and for fragments (recipes' hardware lines count on this)."""


def prepare_jax() -> None:
    """Sets what is not set yet; has to come before JAX's first use of a device.

    Compiled programs are kept in the user's cache folder, so that a second start is faster.
    """
    os.environ.setdefault(MEMORY, str(FRACTION))
    # The ignored rule: jax gives its config these names when it is imported, so pyright cannot know them.
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(Path("~/.cache/tunix/compiled").expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
