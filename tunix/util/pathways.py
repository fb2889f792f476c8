"""Pathways: one process drives the devices of all hosts, which it reaches through a proxy.

`JAX_PLATFORMS=proxy` asks for it, which a PathwaysJob sets; pathwaysutils then makes the proxy a backend of JAX.
Everything after that is the same code as for devices of this machine.
"""

import importlib

import jax

from tunix.errors import UserError, install_command


def begin() -> bool:
    """Prepares JAX for Pathways where it is asked for; has to come before JAX's first use of a device.

    Returns:
        Whether the devices are Pathways'.

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
