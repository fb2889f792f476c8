"""How the processes of a run find their places, meet, watch each other, and end.

A process's place is as given, as its environment says, or as a scheduler does. Process 0 starts the coordinator, and
all of them connect to it (`join`). They end together where all goes well, and soon where one is lost (`together`).
"""

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax._src import distributed as runtime  # where JAX keeps its client has no public name
from jax._src.clusters import ClusterEnv  # what JAX knows of schedulers has no public name
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from tunix.distributed.processes import MEETING, allgathered, barrier, first_line, index, number, store
from tunix.errors import Interrupted, UserError
from tunix.util.ports import is_loopback, refuse_taken


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
    settings = {
        "--coordinator (JAX_COORDINATOR_ADDRESS)": coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "--processes (JAX_NUM_PROCESSES)": processes or os.environ.get("JAX_NUM_PROCESSES"),
        "--process (JAX_PROCESS_ID)": os.environ.get("JAX_PROCESS_ID") if process is None else process,
    }
    if all(value is None for value in settings.values()):
        for cluster in ClusterEnv._cluster_types:
            if not cluster.opt_in_only_method and cluster.is_env_present() and cluster.get_process_count() > 1:
                address = cluster.get_coordinator_address(int(MEETING), os.environ.get("JAX_COORDINATOR_PORT"))
                return Place(address, cluster.get_process_count(), cluster.get_process_id())
        return None
    if missing := [name for name, value in settings.items() if value is None]:
        raise UserError(f"a run of several processes needs {', '.join(missing)} too")
    address, most, number = settings.values()
    try:
        place = Place(str(address), int(str(most)), int(str(number)))
    except ValueError as error:
        raise UserError(f"--processes {most} and --process {number} have to be numbers") from error
    if not 0 <= place.process < place.processes:
        raise UserError(f"--process {place.process}: they are counted from 0 to {place.processes - 1}")
    if not place.coordinator.rpartition(":")[2].isdigit() or ":" not in place.coordinator:
        raise UserError(f"--coordinator {place.coordinator}: has to be an address with a port, e.g. 10.0.0.1:8476")
    return place if place.processes > 1 else None


SILENCE = 30.0
"""Seconds without a sign of life after which a process is taken for dead."""


def join(place: Place, deadline: float = MEETING) -> None:
    """Meets the other processes; has to come before JAX's first use of a device.

    Raises:
        UserError: they were not there in time, or the coordinator's port is taken.
    """
    state, silence = runtime.global_state, int(2 * SILENCE)
    try:
        if place.process == 0:
            refuse_taken(place.coordinator)
            # On a machine's own address it listens at all of them: which one others see it by is not known here.
            host, _, port = place.coordinator.rpartition(":")
            address = place.coordinator if is_loopback(host) else f"[::]:{port}"
            # It outlives this process by some seconds of silence, and says nothing of processes that end: others do.
            words = [sys.executable, "-m", "tunix.distributed.coordinator", address, str(place.processes)]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
            service = subprocess.Popen(
                [*words, str(silence), str(silence)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # ctrl-c in the terminal is for the processes of the run
                env=environment,
            )
            assert service.stdout is not None
            if service.stdout.readline().strip() != "ready":
                raise OSError(f"nothing can listen at {address}: another process does, or it is not this machine's")
            _services.append(service)
        # As `jax.distributed.initialize` does, but for the coordinator, which it would put into process 0.
        client = _jax.get_distributed_runtime_client(
            place.coordinator,
            place.process,
            init_timeout=int(deadline),
            heartbeat_timeout=silence,
            # With one, a failure to connect is raised; without, JAX ends the process.
            missed_heartbeat_callback=lambda status: print(
                f"the coordinator is lost: {status}", file=sys.stderr, flush=True
            ),
            use_compression=True,
        )
        client.connect()
    except UserError:
        raise
    except Exception as error:  # jaxlib raises its own kinds, and tells nothing of a failure to connect
        end_service()
        why = str(error) if isinstance(error, OSError) else f"waited {deadline:.0f} s"
        who = f"process {place.process} of {place.processes}"
        if place.process == 0:
            message = (
                f"not all processes came to {place.coordinator} ({why}). Start them with the same --coordinator and "
                "--processes, and --process 0, 1, ..."
            )
        else:
            message = f"no coordinator answers at {place.coordinator} ({why}). Start process 0 there, and open the port"
        raise UserError(f"{who}: {message}") from error
    state.coordinator_address, state.client = place.coordinator, client
    state.process_id, state.num_processes = place.process, place.processes


_services: list[subprocess.Popen[str]] = []
"""The coordinator that this process has started."""


def end_service() -> None:
    """Ends the coordinator where this process has started it: all have ended well."""
    while _services:
        _services.pop().communicate("over")


PULSE = 2.0
"""Seconds between two signs of life."""
LOST = 75
"""Exit code where another process was lost: EX_TEMPFAIL of sysexits.h, a failure that may not come again."""


class Watch:
    """Ends this process where another one died or gave up: a program on all devices would wait for it for ever."""

    def __init__(self, say: Callable[[str], None]):
        """Starts to watch, in a thread."""
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
                now, pulse = time.monotonic(), pulses.get(f"tunix/pulse/{other}", "")
                before, since = self._seen.get(other, ("", now))
                if pulse != before or other not in self._seen:
                    self._seen[other] = pulse, now
                elif now - since > SILENCE:
                    self._end(other, f"no sign of life for {SILENCE:.0f} s")

    def _end(self, other: int, reason: str) -> NoReturn:
        try:
            self._say(
                f"process {other} of {number()} is gone ({reason}): process {index()} stops. The same command goes on "
                "from the last checkpoint"
            )
        finally:  # also where the line cannot be written, such as on a full disk
            # The main thread may wait for a device that waits for the dead process: nothing but this ends it.
            os._exit(LOST)


_left: list[Any] = []
"""The client of a run that this process has left: to be deleted with the process, since its end would wait too."""


def _part(watch: Watch) -> None:
    """Ends the watch and the coordinator once all processes have come here."""
    barrier("end")
    watch.close()
    runtime.global_state.shutdown()
    end_service()


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
        try:
            allgathered("failed", b"", SILENCE)
        except UserError:  # the others have not failed, soon
            _let_it_look(began)
            watch.give_up(first_line(error))
        else:
            _part(watch)
        raise
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            _let_it_look(time.monotonic())
        watch.give_up(first_line(error))
        raise
