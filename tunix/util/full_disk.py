"""How a disk says that it is full, by Python's errors and by those of libraries in other languages."""

import errno
import os

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space is left on the disk, or in the user's quota; a file is larger than its file system or its limit allows."""
ROOM = "Make room and run the same command"
"""The remedy."""


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk is what an error comes from, or one of the errors that it was raised from.

    Libraries in Rust and C++ (tokenizers, safetensors, tensorstore) raise errors of their own, whose texts have the
    system's.
    """
    texts = [os.strerror(code) for code in REFUSALS]
    while error is not None:
        if isinstance(error, OSError) and error.errno in REFUSALS:
            return True
        if any(text in str(error) for text in texts):
            return True
        error = error.__cause__ or error.__context__
    return False
