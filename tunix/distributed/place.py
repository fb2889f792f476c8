"""Where a process stands among those of its run: as it is told, as its environment says, or as a scheduler does."""

import os
from dataclasses import dataclass

from jax._src.clusters import ClusterEnv  # what JAX knows of schedulers has no public name

from tunix.errors import UserError

MEETING = 300.0
"""Seconds in which all processes have to meet."""


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
            address = cluster.get_coordinator_address(int(MEETING), os.environ.get("JAX_COORDINATOR_PORT"))
            return Place(address, cluster.get_process_count(), cluster.get_process_id())
    return None
