"""A job on GKE: a ConfigMap with the recipe and a JobSet of one pod for each host.

TPU pods find each other by the variables that GKE gives them (TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, and between slices
MEGASCALE_*), which JAX reads. GPU pods have none: their JobSet names the coordinator and numbers the processes.

A pod that ends with an error ends its Job, and the JobSet starts all pods again, up to a number of times; a user error
(exit code 2) ends the JobSet.

Through Pathways one process on a CPU node drives the TPUs of all slices. Its PathwaysJob adds Pathways' own servers to
the pod and sets JAX_PLATFORMS=proxy in its container, by which tunix knows (`util/startup.py`). It has a number of
restarts and no rule for exit codes, so that a user error is restarted as well.
"""

import re
from pathlib import PurePosixPath
from typing import Any

from tunix import __version__
from tunix.errors import UserError
from tunix.launch.job import USER_ERROR, Job
from tunix.util.chips import CHIPS
from tunix.util.yaml_io import write_yaml

ACCELERATORS = {
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb",
}
"""Chip -> the value of GKE's node label."""
FILES = "/etc/tunix"
"""Where the recipe and the files that go along are: the working folder, so that relative paths mean them."""
RECIPE = ".tunix-recipe.yaml"
"""The recipe's path from there: not a name that a file which goes along may have."""
SCRATCH = "/tmp"
"""The only folder on the pod's own disk that can be written."""
MACHINES = {
    ("v5e", 4): "ct5lp-hightpu-4t",
    ("v5e", 8): "ct5lp-hightpu-8t",
    ("v5p", 4): "ct5p-hightpu-4t",
    ("v6e", 4): "ct6e-standard-4t",
    ("v6e", 8): "ct6e-standard-8t",
}
"""Chip and number of them in a host -> the machine, of those that a PathwaysJob takes."""
CONTAINER, HOST = "tunix", "host"
PORT = 8476
"""Where the coordinator of GPU pods listens."""

Tree = dict[str, Any]
"""A part of a manifest."""


def manifest(job: Job) -> str:
    """The manifest of a job, as YAML: a ConfigMap with the recipe, and a JobSet or a PathwaysJob.

    Raises:
        UserError: Pathways has no such machines.
    """
    place = job.placement
    if job.options.target == "pathways":
        # Its workers are the slices, its controller runs the recipe.
        machine = MACHINES.get((place.chip, place.per_host))
        if machine is None:
            known = ", ".join(f"{number} x {chip}" for chip, number in MACHINES)
            raise UserError(f"--topology {place.topology}: Pathways has hosts of {known}, and not of {place.per_host}")
        workload: Tree = {
            "apiVersion": "pathways-job.pathways.domain/v1",
            "kind": "PathwaysJob",
            "metadata": _metadata(job, job.name),
            "spec": {
                "maxRestarts": job.options.restarts,
                "pathwaysDir": job.options.pathways_dir,
                "workers": [{"type": machine, "topology": place.shape, "numSlices": place.slices}],
                "controller": {
                    "deploymentMode": "default",
                    "mainContainerName": CONTAINER,
                    "template": {"spec": _pod(job, {})},
                },
            },
        }
    else:
        workload = job_set(job)
    data = {key: job.files.get(path, job.recipe) for key, path in _keys(job).items()}
    about = _metadata(job, f"{job.name}-recipe")
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}
    title = f"# {job.name}: {place.described}, written by `tunix launch` {__version__}."
    return "\n".join((title, write_yaml(config_map) + "---", write_yaml(workload)))


def job_set(job: Job) -> Tree:
    """The JobSet: a Job for each slice of TPUs, or for all GPUs, with a pod for each of its hosts."""
    place, about = job.placement, _metadata(job, job.name)
    if CHIPS[place.chip].platform == "tpu":
        if place.hosts > 1:
            # A slice is a node pool: the pods of one Job have to be on the hosts of one slice.
            about["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        node = {"gke-tpu-accelerator": ACCELERATORS[place.chip], "gke-tpu-topology": place.shape}
        limits, ports = {"google.com/tpu": str(place.per_host)}, (8471, 8482)  # libtpu's, and the coordinator's
    else:
        node = {"gke-accelerator": ACCELERATORS[place.chip]}
        limits, ports = {"nvidia.com/gpu": str(place.per_host)}, (PORT,)
    variables: Tree = {}
    if CHIPS[place.chip].platform == "gpu" or place.processes == 1:
        # By these the processes of GPU pods meet; to a pod alone they say that there is no other to look for.
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        variables = {
            "JAX_COORDINATOR_ADDRESS": f"{job.name}-{HOST}-0-0.{job.name}:{PORT}",
            "JAX_NUM_PROCESSES": str(place.processes),
            "JAX_PROCESS_ID": {"fieldRef": {"fieldPath": index}},
        }
    pod = _pod(job, variables)
    (container,) = pod["containers"]
    container |= {"resources": {"limits": limits}, "ports": [{"containerPort": port} for port in ports]}
    if CHIPS[place.chip].platform == "gpu":
        # NCCL's processes and threads share memory there; a container has 64 MiB by itself.
        container["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})
        pod["volumes"].append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    selector = {f"cloud.google.com/{label}": value for label, value in node.items()}
    fatal = {"containerName": CONTAINER, "operator": "In", "values": [USER_ERROR]}
    of_slice = {
        "backoffLimit": 0,  # one pod cannot go on without the others
        "completionMode": "Indexed",
        "completions": place.hosts,
        "parallelism": place.hosts,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": fatal}]},
        "template": {"spec": {"nodeSelector": selector, **pod}},
    }
    final = {"name": "userError", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": about,
        "spec": {
            "failurePolicy": {
                "maxRestarts": job.options.restarts,
                # New pods have the names of the old ones, which have to be gone.
                "restartStrategy": "BlockingRecreate",
                "rules": [final],
            },
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": HOST, "replicas": place.slices, "template": {"spec": of_slice}}],
        },
    }


def _metadata(job: Job, name: str) -> Tree:
    where = {} if job.options.namespace is None else {"namespace": job.options.namespace}
    return {"name": name, **where, "labels": {"app.kubernetes.io/name": "tunix"}}


def _pod(job: Job, variables: Tree) -> Tree:
    """A pod with its volumes, its grace period, and one container that runs tunix as its first process, so that SIGTERM
    reaches it, with variables: name -> text, or where the value comes from."""
    options = job.options
    kept = options.mounts[0][1] if options.mounts else SCRATCH
    caches = {"HF_HOME": f"{kept}/.cache/huggingface", "JAX_COMPILATION_CACHE_DIR": f"{kept}/.cache/jax"}
    known: Tree = {"HOME": SCRATCH, "PYTHONUNBUFFERED": "1", **caches, **variables}
    for variable, place in options.secrets:  # the key of one is the variable's name unless another is given
        name, _, key = place.partition("/")
        known[variable] = {"secretKeyRef": {"name": name, "key": key or variable}}
    # The recipe and the files that go along, each at its path; a disk that goes with the pod; the volumes.
    items = [{"key": key, "path": path} for key, path in _keys(job).items()]
    volumes: list[Tree] = [
        {"name": "files", "configMap": {"name": f"{job.name}-recipe", "items": items}},
        {"name": "scratch", "emptyDir": {}},
    ]
    mounts: list[Tree] = [
        {"name": "files", "mountPath": FILES, "readOnly": True},
        {"name": "scratch", "mountPath": SCRATCH},
    ]
    for i, (claim, path) in enumerate(options.mounts):
        volumes.append({"name": f"mount-{i}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"mount-{i}", "mountPath": path})
    container = {
        "name": CONTAINER,
        "image": options.image,
        "command": ["tunix", "run", f"{FILES}/{RECIPE}", "--no-plan"],
        "workingDir": FILES,
        "env": [
            {"name": name, "value" if isinstance(value, str) else "valueFrom": value} for name, value in known.items()
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True},
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        **({} if options.service_account is None else {"serviceAccountName": options.service_account}),
        "containers": [container],
        "volumes": volumes,
    }


def _keys(job: Job) -> dict[str, str]:
    """Keys of the ConfigMap -> paths; a key has no slashes."""
    keys = {
        f"{i}-{re.sub(r'[^-.A-Za-z0-9_]', '_', PurePosixPath(path).name)}": path for i, path in enumerate(job.files)
    }
    return {"recipe.yaml": RECIPE, **keys}
