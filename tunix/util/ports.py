"""Listening at a port, and the key of who may come: what is wrong with them is said before anything that takes long."""

import errno
import os
import socket
from pathlib import Path

from tunix.errors import UserError

KEY = "TUNIX_API_KEY"
"""The environment's variable with the key that a server wants, where it wants one."""
ANY = ""
"""The host that stands for all addresses of this machine."""


def listen(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens.

    Args:
        host: an address or a name of this machine; `ANY` for all addresses, of IPv6 too where it has them.
        port: from 1 to 65535.
        option: how the user gave the port, e.g. `--port 8000`.

    Raises:
        UserError: another program listens there, the address is not this machine's, or the port is no port.
    """
    if not 0 < port < 2**16:
        raise UserError(f"{option}: ports are numbers from 1 to {2**16 - 1}")
    both = host == ANY and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"another program listens at port {port}: choose another port, or end that program"
        elif error.errno == errno.EACCES:
            why = "choose a port above 1023"
        else:
            why = "choose another address"
        # Python adds where it was attempting to bind.
        said = str(error.strerror or error).partition(" (while")[0]
        raise UserError(f"{option}: {said}: {why}") from error


def refuse_taken(address: str) -> None:
    """Raises a UserError where another program listens at the port of a coordinator, e.g. `10.0.0.1:8476`; addresses
    but those of loopback stand for all of this machine."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `distributed.place` says what an address is
    listen(host if is_loopback(host) else ANY, int(port), f"--coordinator {address}").close()


def is_loopback(host: str) -> bool:
    """Whether a host is reached from this machine alone."""
    return host in ("localhost", "127.0.0.1", "::1")


def read_key(file: Path | None, host: str) -> str | None:
    """The key that clients have to send: of a file, else of the environment; None where there is none.

    Raises:
        UserError: the file cannot be read or is empty, or the address is reached from other machines without a key.
    """
    key = os.environ.get(KEY)
    if file is not None:
        try:
            key = file.expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--api-key-file {file} cannot be read: {error}") from None
        if not key:
            raise UserError(f"--api-key-file {file} is empty: write a key into it")
    if not key and not is_loopback(host):
        raise UserError(
            f"--host {host} is reached from other machines: give a key that clients have to send, as --api-key-file "
            f"FILE or in the environment as {KEY}"
        )
    return key or None
