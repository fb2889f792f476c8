"""Who is let in, and how much they may bring."""

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunix.errors import UserError
from tunix.util.ports import KEY, is_loopback


@dataclass(frozen=True)
class Gate:
    """Who is let in, and how much they may bring."""

    key: str | None = None
    """What a client has to send, e.g. from `read_key`; None where everybody is let in."""
    body: int = 8 << 20
    """Bytes of a request's body at most."""
    streams: int = 1024
    """Answers that are streamed at a time, at most."""
    seconds: float = 3600.0
    """From a request to its whole answer at most; then it is given up."""

    def admits(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request with these headers has the key; how long that takes says nothing of it."""
        sent = headers.get(b"x-api-key") or headers.get(b"authorization", b"").partition(b"Bearer ")[2]
        return self.key is None or hmac.compare_digest(sent, self.key.encode())


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
