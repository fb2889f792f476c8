"""What a chat template may cost: it comes with a model's folder, and is a program of whoever made that.

jinja's sandbox keeps it from Python's objects, and a `range` from more than 100,000 steps. Loops within loops, powers
and repeated texts remain: a rendering has seconds, and a product a size. Padding, as by `center`, has none.
"""

import ctypes
import threading
import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from functools import cache
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST, LARGEST = 10.0, 1_000_000
"""Seconds of a rendering, and characters, items or bits of a product, at most."""


class Late(TemplateError):
    """A rendering that takes too long."""

    def __init__(self) -> None:
        """Takes no arguments: `PyThreadState_SetAsyncExc` gives none."""
        super().__init__(f"it takes more than {LONGEST:g} seconds")


class Limited(ImmutableSandboxedEnvironment):
    """The sandbox, with products and powers of a size."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The product or power; raises SecurityError where it is too large."""
        size, (many, number) = 0, (left, right) if isinstance(left, Sized) else (right, left)
        if isinstance(many, Sized) and isinstance(number, int):
            size = len(many) * number
        elif isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if size > LARGEST:
            raise SecurityError(f"it makes something of more than {LARGEST} characters, items or bits")
        return super().call_binop(context, operator, left, right)


class _Watch(threading.Thread):
    """Raises `Late` in threads whose rendering has had its time: a template need not call anything that could look."""

    def __init__(self) -> None:
        super().__init__(name="templates", daemon=True)
        self.lock, self.ends = threading.Lock(), dict[int, float]()
        self.start()

    def run(self) -> None:
        while True:
            time.sleep(0.5)
            with self.lock:
                for thread in [thread for thread, end in self.ends.items() if time.monotonic() > end]:
                    del self.ends[thread]
                    _raise(thread, Late)


def _raise(thread: int, error: type[Exception] | None) -> None:
    """Has a thread raise an error at its next step; None takes back one that it has not come to."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


@cache
def _watch() -> _Watch:
    """What watches. transformers compiles a template in an environment that it makes itself, where constants are
    multiplied already: from here on of our class."""
    from transformers.utils import chat_template_utils

    setattr(chat_template_utils, "ImmutableSandboxedEnvironment", Limited)  # noqa: B010 (no name of its interface)
    return _Watch()


@contextmanager
def limited() -> Iterator[None]:
    """Ends what is rendered below it after `LONGEST` seconds, in any thread.

    Raises:
        TemplateError: it took longer, or is wrong in any way: divides by 0, calls itself without end, takes all memory.
    """
    watch, thread = _watch(), threading.get_ident()
    try:
        with watch.lock:
            watch.ends[thread] = time.monotonic() + LONGEST
        try:
            yield
        finally:
            with watch.lock:
                if watch.ends.pop(thread, None) is None:
                    _raise(thread, None)
    except TemplateError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError) as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error
