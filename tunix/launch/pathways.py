"""A job through Pathways: one process on a CPU node drives the TPUs of all slices.

The PathwaysJob adds Pathways' own servers to the pod and sets JAX_PLATFORMS=proxy in its container, by which tunix
knows (`util/pathways.py`). It has a number of restarts and no rule for exit codes, so that a user error is restarted as
well.
"""

from tunix.errors import UserError
from tunix.launch.job import Job
from tunix.launch.kubernetes import CONTAINER, Tree, container, metadata, pod, written

MACHINES = {
    ("v5e", 4): "ct5lp-hightpu-4t",
    ("v5e", 8): "ct5lp-hightpu-8t",
    ("v5p", 4): "ct5p-hightpu-4t",
    ("v6e", 4): "ct6e-standard-4t",
    ("v6e", 8): "ct6e-standard-8t",
}
"""Chip and number of them in a host -> the machine, of those that a PathwaysJob takes."""


def manifest(job: Job) -> str:
    """The manifest of a job through Pathways.

    Raises:
        UserError: Pathways has no such machines.
    """
    return written(job, pathways_job(job))


def pathways_job(job: Job) -> Tree:
    """The PathwaysJob: its workers are the slices, its controller runs the recipe.

    Raises:
        UserError: Pathways has no such machines.
    """
    place = job.placement
    machine = MACHINES.get((place.chip, place.per_host))
    if machine is None:
        known = ", ".join(f"{number} x {chip}" for chip, number in MACHINES)
        raise UserError(f"--topology {place.topology}: Pathways has hosts of {known}, and not of {place.per_host}")
    workers = {
        "type": machine,
        "topology": place.shape,
        "numSlices": place.slices,
    }
    return {
        "apiVersion": "pathways-job.pathways.domain/v1",
        "kind": "PathwaysJob",
        "metadata": metadata(job),
        "spec": {
            "maxRestarts": job.options.restarts,
            "pathwaysDir": job.options.pathways_dir,
            "workers": [workers],
            "controller": {
                "deploymentMode": "default",
                "mainContainerName": CONTAINER,
                "template": {"spec": pod(job, container(job, {}))},
            },
        },
    }
