"""The end of a run of several processes: together where all goes well, and soon where one of them is lost."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
from jax._src import distributed as runtime  # the client of the coordinator's store has no public name

from tunix.distributed.meeting import SILENCE, end_service
from tunix.distributed.processes import exchanged, first_line, index, meet, number, store
from tunix.errors import Interrupted, UserError

PULSE = 2.0
"""Seconds between two signs of life."""
LOST = 75
"""Exit code where another process was lost: EX_TEMPFAIL of sysexits.h, a failure that may not come again."""


class Watch:
    """Ends this process where another one died or gave up: a program on all devices would wait for it for ever."""

    def __init__(self, say: Callable[[str], None]):
        """Starts to watch, in a thread.

        Args:
            say: prints a line.
        """
        self._say, self._over = say, threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._over.set()
        self._thread.join()

    def give_up(self, reason: str) -> None:
        """Tells the others why this process ends, and leaves them."""
        self.close()
        store().key_value_set(f"tunix/over/{index()}", reason, allow_overwrite=True)
        # At its exit JAX would wait for all processes; without its client it does not.
        _left.append(runtime.global_state.client)
        runtime.global_state.client = None

    def _run(self) -> None:
        beats, answered = itertools.count(), time.monotonic()
        while not self._over.wait(PULSE):
            try:
                store().key_value_set(f"tunix/pulse/{index()}", str(next(beats)), allow_overwrite=True)
                pulses = dict(store().key_value_dir_get("tunix/pulse/"))
                reasons = dict(store().key_value_dir_get("tunix/over/"))
            except jax.errors.JaxRuntimeError:
                if time.monotonic() - answered > SILENCE:
                    self._end(0, f"its coordinator has not answered for {SILENCE:.0f} s")
                continue
            answered = time.monotonic()
            for other in set(range(number())) - {index()}:
                if reason := reasons.get(f"tunix/over/{other}"):
                    self._end(other, reason)
                self._listen(other, pulses.get(f"tunix/pulse/{other}", ""))

    def _listen(self, other: int, pulse: str) -> None:
        now = time.monotonic()
        before, since = self._seen.get(other, ("", now))
        if pulse != before or other not in self._seen:
            self._seen[other] = pulse, now
        elif now - since > SILENCE:
            self._end(other, f"no sign of life for {SILENCE:.0f} s")

    def _end(self, other: int, reason: str) -> NoReturn:
        self._say(
            f"process {other} of {number()} is gone ({reason}): process {index()} stops. The same command goes on from "
            "the last checkpoint"
        )
        # The main thread may wait for a device that waits for the dead process: nothing but this ends it.
        os._exit(LOST)


_left: list[Any] = []
"""The client of a run that this process has left: to be deleted with the process, since its end would wait too."""


def _part(watch: Watch) -> None:
    """Ends the watch and the coordinator once all processes have come here."""
    meet("end")
    watch.close()
    runtime.global_state.shutdown()
    end_service()


def _all_fail() -> bool:
    """Whether all processes come here, soon."""
    try:
        exchanged("failed", b"", SILENCE)
    except UserError:
        return False
    return True


def _let_it_look(since: float) -> None:
    """Waits until the watch would have seen that a process is dead, which then ends this one: an error that others do
    not have is most likely what a dead process has left, such as an answer that does not come."""
    time.sleep(max(SILENCE + 3 * PULSE - (time.monotonic() - since), 0.0))


@contextmanager
def together(say: Callable[[str], None]) -> Iterator[None]:
    """Watches the other processes meanwhile; where this one fails, they are told.

    Raises:
        UserError: as in the block, or another process is gone.
        Interrupted: as in the block; every process stops then.
    """
    if number() == 1:
        yield
        return
    watch = Watch(say)
    try:
        yield
        _part(watch)
    except Interrupted:  # all of them stop, at one step
        _part(watch)
        raise
    except UserError as error:
        # Most mistakes are found by all: then nobody is stopped while it saves what was trained.
        began = time.monotonic()
        if _all_fail():
            _part(watch)
        else:
            _let_it_look(began)
            watch.give_up(first_line(error))
        raise
    except jax.errors.JaxRuntimeError as error:
        _let_it_look(time.monotonic())
        watch.give_up(first_line(error))
        raise
    except BaseException as error:
        watch.give_up(first_line(error))
        raise
