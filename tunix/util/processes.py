"""The processes of one run, by JAX's own distributed runtime: how they meet, agree, hand small things around, and end.

Every process holds the same state on its host and runs the same programs in the same order; what is divided (rendering
rows, sampling, rewards) is exchanged. So a split changes nothing, and whatever one process decides from that state all
decide. What depends on a clock or a signal is decided by process 0, the lead, and told to the others.

Messages go through the key-value store of the coordinator, a service in the lead: it needs no device, may be used in
threads, and every wait has a deadline.
"""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the client of the coordinator's store has no public name
from jax._src.clusters import ClusterEnv  # nor has what JAX knows of schedulers
from jax._src.lib import _jax

from tunix.errors import UserError

MEETING = 300.0
"""Seconds in which all processes have to meet."""
PULSE = 2.0
"""Seconds between two signs of life."""
SILENCE = 30.0
"""Seconds without a sign of life after which a process is taken for dead."""
PATIENCE = 3600.0
"""Seconds that a message is waited for while its sender is alive."""
LOST = 75
"""Exit code where another process was lost: EX_TEMPFAIL of sysexits.h, a failure that may not come again."""
_calls: dict[str, Iterator[int]] = {}


class Stopped(Exception):
    """What was waited for is not wanted any more."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of its run."""

    coordinator: str
    """Address of process 0, e.g. `10.0.0.1:8476`."""
    processes: int
    """Number of processes."""
    process: int
    """The number of this one, from 0."""


def place_of(coordinator: str | None, processes: int | None, process: int | None) -> Place | None:
    """The place of this process: as given, as in the environment, or as a cluster's scheduler says; None for one alone.

    The environment has `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. SLURM, Kubernetes (JobSet),
    MPI and TPU pods are known to JAX.

    Raises:
        UserError: something of it is missing or wrong.
    """
    given = {
        "--coordinator (JAX_COORDINATOR_ADDRESS)": coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "--processes (JAX_NUM_PROCESSES)": processes or os.environ.get("JAX_NUM_PROCESSES"),
        "--process (JAX_PROCESS_ID)": os.environ.get("JAX_PROCESS_ID") if process is None else process,
    }
    if all(value is None for value in given.values()):
        return _scheduled()
    if missing := [name for name, value in given.items() if value is None]:
        raise UserError(f"a run of several processes needs {', '.join(missing)} too")
    address, most, own = given.values()
    try:
        place = Place(str(address), int(str(most)), int(str(own)))
    except ValueError as error:
        raise UserError(f"--processes {most} and --process {own} have to be numbers") from error
    if not 0 <= place.process < place.processes:
        raise UserError(f"--process {place.process}: they are counted from 0 to {place.processes - 1}")
    if not place.coordinator.rpartition(":")[2].isdigit() or ":" not in place.coordinator:
        raise UserError(f"--coordinator {place.coordinator}: has to be an address with a port, e.g. 10.0.0.1:8476")
    return place if place.processes > 1 else None


def _scheduled() -> Place | None:
    """The place that a cluster's scheduler gives, where it started several processes."""
    for cluster in ClusterEnv._cluster_types:
        if not cluster.opt_in_only_method and cluster.is_env_present() and cluster.get_process_count() > 1:
            address = cluster.get_coordinator_address(timeout_secs=int(MEETING))
            return Place(address, cluster.get_process_count(), cluster.get_process_id())
    return None


def number() -> int:
    """The number of processes."""
    return distributed.global_state.num_processes or 1


def index() -> int:
    """The number of this process, from 0."""
    return distributed.global_state.process_id or 0


def lead() -> bool:
    """Whether this process writes the run's files and decides what a clock or a signal decides."""
    return index() == 0


def join(place: Place, deadline: float = MEETING) -> None:
    """Meets the other processes; has to come before JAX's first use of a device.

    Raises:
        UserError: they were not there in time.
    """
    state = distributed.global_state
    try:
        if place.process == 0:
            _serve(place)
        # As `jax.distributed.initialize` does, but for the coordinator, which it would put into process 0.
        client = _jax.get_distributed_runtime_client(
            place.coordinator,
            place.process,
            init_timeout=int(deadline),
            heartbeat_timeout=int(2 * SILENCE),
            use_compression=True,
        )
        client.connect()
    except Exception as error:  # jaxlib raises its own kinds
        raise UserError(_late(place, deadline, error)) from error
    state.coordinator_address, state.client = place.coordinator, client
    state.process_id, state.num_processes = place.process, place.processes


def _serve(place: Place) -> None:
    """Starts the coordinator, which outlives this process by some seconds.

    Raises:
        OSError: nothing can listen at its address.
    """
    host, _, port = place.coordinator.rpartition(":")
    # On a machine's own address it listens at all of them: which one others see it by is not known here.
    address = place.coordinator if host in ("localhost", "127.0.0.1") else f"[::]:{port}"
    words = [sys.executable, "-m", "tunix.util.coordinator", address, str(place.processes)]
    command = [*words, str(int(2 * SILENCE)), str(2 * SILENCE)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    service = subprocess.Popen(
        command, **pipes, text=True, start_new_session=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert service.stdin is not None
    assert service.stdout is not None
    if service.stdout.readline().strip() != "ready":
        raise OSError(f"nothing can listen at {address}: another process does, or it is not this machine's")
    _services.append(service)


_services: list[subprocess.Popen[str]] = []
"""The coordinator that this process has started."""


def _late(place: Place, deadline: float, error: Exception) -> str:
    who, why = f"process {place.process} of {place.processes}", f"{deadline:.0f} s; {_first_line(error)}"
    if place.process == 0:
        return (
            f"{who}: not all processes came to {place.coordinator} ({why}). Start them with the same --coordinator and "
            "--processes, and --process 0, 1, ..."
        )
    return f"{who}: no coordinator answers at {place.coordinator} ({why}). Start process 0 there, and open the port"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def agree(about: Mapping[str, str], deadline: float = MEETING) -> None:
    """Compares something of all processes, such as their versions and recipes.

    Args:
        about: what it is -> its value, the same in all of them.
        deadline: seconds in which all have to answer.

    Raises:
        UserError: a process has another value, or did not answer.
    """
    answers = [json.loads(answer) for answer in exchanged("agree", json.dumps(dict(about)).encode(), deadline)]
    for other, answer in enumerate(answers):
        for name in about:
            first, theirs = answers[0].get(name), answer.get(name)
            if theirs != first:
                raise UserError(f"process {other} has another {name} than process 0: {theirs}, not {first}")


def exchanged(name: str, own: bytes, deadline: float = PATIENCE) -> list[bytes]:
    """Hands something to all processes, and returns what each has given, in their order.

    All processes make the same calls of a name in the same order; names are independent of each other.

    Raises:
        UserError: a process gave nothing in time.
    """
    if number() == 1:
        return [own]
    turn = next(_calls.setdefault(name, itertools.count()))
    found = shared(f"{name}/{turn}", own, deadline)
    if turn:
        # All have come to this turn, so that all have read the one before.
        forget(f"{name}/{turn - 1}")
    return found


def shared(key: str, own: bytes, deadline: float = PATIENCE, stopped: threading.Event | None = None) -> list[bytes]:
    """As `exchanged`, under a key that is used once; what was handed out stays until it is forgotten.

    Args:
        key: the same in all processes, e.g. `rows/0/17`.
        own: what this one gives.
        deadline: seconds to wait for the others.
        stopped: ends the waiting.

    Raises:
        UserError: a process gave nothing in time.
        Stopped: the event happened.
    """
    _store().key_value_set_bytes(_key(key, index()), own, allow_overwrite=True)
    return [own if i == index() else _received(key, i, deadline, stopped) for i in range(number())]


def forget(key: str) -> None:
    """Deletes what this process has `shared` under a key, which all have received."""
    _store().key_value_delete(_key(key, index()))


def told(name: str, decide: Callable[[], Any]) -> Any:
    """What the lead decides, as JSON values; the others wait for it."""
    own = json.dumps(decide()).encode() if lead() else b""
    return json.loads(exchanged(f"told/{name}", own)[0])


def any_of(name: str, own: bool) -> bool:
    """Whether something holds in any of the processes."""
    return any(exchanged(f"any/{name}", b"1" if own else b""))


def meet(name: str) -> None:
    """Waits until all processes have come here."""
    exchanged(f"meet/{name}", b"")


def _received(key: str, sender: int, deadline: float, stopped: threading.Event | None) -> bytes:
    started, slice_ = time.monotonic(), 60.0 if stopped is None else 1.0
    while True:
        left = deadline - (time.monotonic() - started)
        try:
            return _store().blocking_key_value_get_bytes(_key(key, sender), int(1000 * max(min(left, slice_), 0.1)))
        except jax.errors.JaxRuntimeError as error:
            if stopped is not None and stopped.is_set():
                raise Stopped from error
            if "DEADLINE_EXCEEDED" not in str(error) or left <= slice_:
                raise UserError(f"process {sender} did not answer ({key}, {_first_line(error)})") from error


def _key(key: str, sender: int) -> str:
    return f"tunix/{key}/{sender}"


def _store() -> Any:
    return distributed.global_state.client


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
        _store().key_value_set(f"tunix/over/{index()}", reason, allow_overwrite=True)
        # At its exit JAX would wait for all processes; without its client it does not.
        _left.append(distributed.global_state.client)
        distributed.global_state.client = None

    def _run(self) -> None:
        beats, answered = itertools.count(), time.monotonic()
        while not self._over.wait(PULSE):
            try:
                _store().key_value_set(f"tunix/pulse/{index()}", str(next(beats)), allow_overwrite=True)
                pulses = dict(_store().key_value_dir_get("tunix/pulse/"))
                reasons = dict(_store().key_value_dir_get("tunix/over/"))
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


@contextmanager
def together(say: Callable[[str], None]) -> Iterator[None]:
    """Watches the other processes meanwhile; where this one fails, they are told.

    Raises:
        UserError: as in the block, or another process is gone.
    """
    if number() == 1:
        yield
        return
    watch = Watch(say)
    try:
        yield
        meet("end")
        watch.close()
        distributed.global_state.shutdown()
        for service in _services:
            service.communicate("over")
    except jax.errors.JaxRuntimeError as error:
        # Most likely a connection that a dead process has left: the watch knows within `SILENCE` which one.
        time.sleep(SILENCE + 3 * PULSE)
        watch.give_up(_first_line(error))
        raise
    except BaseException as error:
        watch.give_up(_first_line(error))
        raise
