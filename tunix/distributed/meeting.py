"""How the processes of a run meet: process 0 starts the coordinator, and all of them connect to it."""

import os
import subprocess
import sys

from jax._src import distributed as runtime  # where JAX keeps its client has no public name
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from tunix.distributed.place import MEETING, Place
from tunix.errors import UserError
from tunix.util.ports import is_loopback, refuse_taken

SILENCE = 30.0
"""Seconds without a sign of life after which a process is taken for dead."""


def join(place: Place, deadline: float = MEETING) -> None:
    """Meets the other processes; has to come before JAX's first use of a device.

    Raises:
        UserError: they were not there in time, or the coordinator's port is taken.
    """
    state = runtime.global_state
    try:
        if place.process == 0:
            refuse_taken(place.coordinator)
            _serve(place)
        # As `jax.distributed.initialize` does, but for the coordinator, which it would put into process 0.
        client = _jax.get_distributed_runtime_client(
            place.coordinator,
            place.process,
            init_timeout=int(deadline),
            heartbeat_timeout=int(2 * SILENCE),
            # With one, a failure to connect is raised; without, JAX ends the process.
            missed_heartbeat_callback=_unheard,
            use_compression=True,
        )
        client.connect()
    except UserError:
        raise
    except Exception as error:  # jaxlib raises its own kinds
        end_service()
        raise UserError(_late(place, deadline, error)) from error
    state.coordinator_address, state.client = place.coordinator, client
    state.process_id, state.num_processes = place.process, place.processes


def _unheard(status: object) -> None:
    """What JAX calls when it has lost the coordinator."""
    print(f"the coordinator is lost: {status}", file=sys.stderr, flush=True)


def _serve(place: Place) -> None:
    """Starts the coordinator, which outlives this process by some seconds.

    Raises:
        OSError: nothing can listen at its address.
    """
    host, _, port = place.coordinator.rpartition(":")
    # On a machine's own address it listens at all of them: which one others see it by is not known here.
    address = place.coordinator if is_loopback(host) else f"[::]:{port}"
    words = [sys.executable, "-m", "tunix.distributed.coordinator", address, str(place.processes)]
    command = [*words, str(int(2 * SILENCE)), str(2 * SILENCE)]
    # It says nothing of processes that end: the others do.
    environment, pipe = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}, subprocess.PIPE
    # In a session of its own: ctrl-c in the terminal is for the processes of the run.
    service = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, env=environment)
    assert service.stdin is not None
    assert service.stdout is not None
    if service.stdout.readline().strip() != "ready":
        raise OSError(f"nothing can listen at {address}: another process does, or it is not this machine's")
    _services.append(service)


_services: list[subprocess.Popen[str]] = []
"""The coordinator that this process has started."""


def _late(place: Place, deadline: float, error: Exception) -> str:
    # Of a failure to connect JAX tells nothing here.
    why = str(error) if isinstance(error, OSError) else f"waited {deadline:.0f} s"
    who = f"process {place.process} of {place.processes}"
    if place.process == 0:
        return (
            f"{who}: not all processes came to {place.coordinator} ({why}). Start them with the same --coordinator and "
            "--processes, and --process 0, 1, ..."
        )
    return f"{who}: no coordinator answers at {place.coordinator} ({why}). Start process 0 there, and open the port"


def end_service() -> None:
    """Ends the coordinator where this process has started it: all have ended well."""
    while _services:
        _services.pop().communicate("over")
