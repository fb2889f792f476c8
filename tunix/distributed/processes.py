"""The processes of one run: how many there are, and how they agree and hand small things around.

Every process holds the same state on its host and runs the same programs in the same order; what is divided (rendering
rows, sampling, rewards) is exchanged. So a split changes nothing, and whatever one process decides from that state all
decide. What depends on a clock or a signal is decided by process 0, the lead, and told to the others.

Messages go through the key-value store of the coordinator (`coordinator`): it needs no device, may be used in threads,
and every wait has a deadline.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed as runtime  # the client of the coordinator's store has no public name

from tunix.errors import UserError

MEETING = 300.0
"""Seconds in which all processes have to meet."""
PATIENCE = 3600.0
"""Seconds that a message is waited for while its sender is alive."""
DONE, FAILED = b"+", b"-"
"""How a message begins of a process that has done something, or has failed: then its error follows."""
SLICE = 1.0
"""Seconds of a wait, after which a signal's handler may run, and it is looked whether the wait is over."""
SPREAD = 0.5
"""Seconds after which it is looked whether something has happened in another process."""
_calls: dict[str, Iterator[int]] = {}


class Stopped(Exception):
    """What was waited for is not wanted any more."""


class _Scope(threading.local):
    name = ""
    stopped: threading.Event | None = None


_scope = _Scope()
"""How the messages of a thread begin, and what ends its waits."""


def number() -> int:
    """The number of processes."""
    return runtime.global_state.num_processes or 1


def index() -> int:
    """The number of this process, from 0."""
    return runtime.global_state.process_id or 0


def lead() -> bool:
    """Whether this process writes the run's files and decides what a clock or a signal decides."""
    return index() == 0


def agree(about: Mapping[str, str]) -> None:
    """Compares something of all processes, such as their versions and recipes.

    `about`: what it is -> its value, the same in all of them.

    Raises:
        UserError: a process has another value, or did not answer.
    """
    answers = [json.loads(answer) for answer in allgathered("agree", json.dumps(dict(about)).encode(), MEETING)]
    for other, answer in enumerate(answers):
        for name in about:
            first, theirs = answers[0].get(name), answer.get(name)
            if theirs != first:
                raise UserError(f"process {other} has another {name} than process 0: {theirs}, not {first}")


def allgathered(name: str, value: bytes, deadline: float = PATIENCE) -> list[bytes]:
    """Hands something to all processes, and returns what each has given, in their order.

    All processes make the same calls of a name in the same order; names are independent of each other.

    Raises:
        UserError: a process gave nothing in time.
        Stopped: see `scope`.
    """
    if number() == 1:
        return [value]
    name = _scope.name + name
    turn = turn_of(name)
    store().key_value_set_bytes(f"tunix/{name}/{turn}/{index()}", value, allow_overwrite=True)
    values = [value if i == index() else _received(f"{name}/{turn}", i, deadline) for i in range(number())]
    if turn:
        # All have come to this turn, so that all have read the one before.
        store().key_value_delete(f"tunix/{name}/{turn - 1}/{index()}")
    return values


@contextmanager
def scope(name: str, stopped: threading.Event) -> Iterator[None]:
    """What this thread exchanges in the `with` block has names that begin with this one, e.g. `ahead/0`, and is waited
    for until an event, which ends the waits with `Stopped`."""
    before = _scope.name, _scope.stopped
    _scope.name, _scope.stopped = f"{name}/", stopped
    try:
        yield
    finally:
        _scope.name, _scope.stopped = before


def spread(name: str, event: threading.Event) -> None:
    """Waits for an event that happens in one process or more, and has it happen in all that call this, e.g. in a
    thread; by a name that is used once."""
    begin = f"tunix/{name}/happened/"
    try:
        while not event.wait(SPREAD):
            if store().key_value_dir_get(begin):
                event.set()
        store().key_value_set(f"{begin}{index()}", "", allow_overwrite=True)
    except (jax.errors.JaxRuntimeError, AttributeError):
        return  # the coordinator is gone, or was left; `watch` ends the run


def turn_of(name: str) -> int:
    """How often this process has exchanged something of a name before."""
    return next(_calls.setdefault(name, itertools.count()))


def all_done(name: str, act: Callable[[], bytes]) -> list[bytes]:
    """Hands what `act` returns to all processes, as `allgathered` does, once it has ended well in all of them.

    Raises:
        UserError: it failed in some; all raise the error of the first of these.
    """
    error: UserError | None = None
    try:
        answer = DONE + act()
    except UserError as raised:
        answer, error = FAILED + str(raised).encode(), raised
    answers = allgathered(name, answer)
    for process, received in enumerate(answers):
        if received.startswith(FAILED):
            raise (error if process == index() else None) or UserError(received.removeprefix(FAILED).decode())
    return [received.removeprefix(DONE) for received in answers]


def broadcast(name: str, decide: Callable[[], Any]) -> Any:
    """What the lead decides, as JSON values; the others wait for it.

    Raises:
        UserError: the lead's, in all processes.
    """
    return json.loads(all_done(f"told/{name}", lambda: json.dumps(decide()).encode() if lead() else b"")[0])


def any_of(name: str, holds: bool) -> bool:
    """Whether something holds in any of the processes."""
    return any(allgathered(f"any/{name}", b"1" if holds else b""))


def barrier(name: str) -> None:
    """Waits until all processes have come here."""
    allgathered(f"meet/{name}", b"")


def _received(key: str, sender: int, deadline: float) -> bytes:
    started = time.monotonic()
    while True:
        left = deadline - (time.monotonic() - started)
        try:
            milliseconds = int(1000 * max(min(left, SLICE), 0.1))
            return store().blocking_key_value_get_bytes(f"tunix/{key}/{sender}", milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if _scope.stopped is not None and _scope.stopped.is_set():
                raise Stopped from error
            if "DEADLINE_EXCEEDED" not in str(error) or left <= SLICE:
                raise UserError(f"process {sender} did not answer ({key}, {first_line(error)})") from error


def store() -> Any:
    """JAX's client of the coordinator."""
    return runtime.global_state.client


def first_line(error: BaseException) -> str:
    """The first line of what an error says, shortened in the middle; its kind where it says nothing."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) < 300 else f"{text[:120]} ... {text[-160:]}"  # the cause is at the end
