"""`Job`: everything that a cluster has to know of a run, whatever its scheduler."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from tunix.errors import UserError, install_command
from tunix.launch.placement import Placement, placement
from tunix.launch.storage import Mount, require_lasting, require_shared, sent_along
from tunix.recipe.recipe import Recipe

PLATFORMS = {"slurm": "gpu", "gke-tpu": "tpu", "gke-gpu": "gpu", "pathways": "tpu"}
"""Target -> the devices that it has."""
USER_ERROR = 2
"""Exit code of `tunix run` after which a restart would end the same way; after any other but 0 it may go on: 75 where a
process was lost, 130 after SIGTERM, with a checkpoint."""
LONGEST_NAME = 40
"""Letters of a name: Kubernetes takes 63 for a pod's, which is longer by `-host-0-1023`."""


@dataclass(frozen=True)
class Options:
    """What the command line says of a job."""

    target: str
    """One of `PLATFORMS`."""
    topology: str | None = None
    """Devices of a slice, e.g. `h100:16`."""
    slices: int = 1
    """Slices of TPUs."""
    per_host: int | None = None
    """Devices of a host; None for the usual number."""
    name: str | None = None
    """Name of the job; None for that of the run folder."""
    image: str | None = None
    """Container image, e.g. `europe-docker.pkg.dev/me/images/tunix:1`; on Kubernetes only."""
    mounts: tuple[Mount, ...] = ()
    """Volumes; on Kubernetes only."""
    secrets: tuple[tuple[str, str], ...] = ()
    """Variable -> where its value is: `(("HF_TOKEN", "hf/token"),)`, a Secret and its key; on SLURM a file."""
    namespace: str | None = None
    """Namespace, on Kubernetes; None for that of kubectl's context."""
    service_account: str | None = None
    """Service account of the pods, for access to gs://."""
    pathways_dir: str | None = None
    """Folder on gs:// for Pathways' own files."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the run, on SLURM, e.g. `source ~/tunix/bin/activate`."""
    sbatch: tuple[str, ...] = ()
    """More options of sbatch, e.g. `partition=gpu`."""
    restarts: int = 20
    """Most restarts."""
    grace: int = 120
    """Seconds between SIGTERM and SIGKILL, in which a checkpoint is written."""


@dataclass(frozen=True)
class Job:
    """A run for a cluster."""

    name: str
    """Lower-case letters, digits and hyphens, e.g. `sft-gemma`."""
    recipe: str
    """The resolved recipe, as YAML."""
    files: dict[str, str]
    """Files that go along: path from the working folder -> text."""
    placement: Placement
    """Its devices."""
    options: Options
    """What else the command line says."""
    warnings: tuple[str, ...] = ()
    """What may not be as wanted, one sentence each."""


def job_of(recipe: Recipe, options: Options) -> Job:
    """The job of a recipe.

    Raises:
        UserError: something is missing, contradicts the recipe, or would be lost with a pod.
    """
    _check(options)
    place = placement(recipe, PLATFORMS[options.target], options.topology, options.slices, options.per_host)
    name = _name(recipe, options)
    if options.target == "slurm":
        require_shared(recipe)
        return Job(name, recipe.to_yaml(), {}, place, options)
    lost = require_lasting(recipe, options.mounts)
    files = sent_along(recipe, options.mounts)
    return Job(name, recipe.to_yaml(), files, place, options, tuple(lost))


def _name(recipe: Recipe, options: Options) -> str:
    """The job's name, in letters that every scheduler takes.

    Raises:
        UserError: a given name has others.
    """
    if options.name is not None:
        if not re.fullmatch(rf"[a-z]([-a-z0-9]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?", options.name):
            raise UserError(
                f"--name {options.name}: at most {LONGEST_NAME} lower-case letters, digits and hyphens, from a letter "
                "to a letter or digit"
            )
        return options.name
    words = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(recipe.output).name.lower()).strip("-")
    return (words if words[:1].isalpha() else f"run-{words}")[:LONGEST_NAME].strip("-")


def _check(options: Options) -> None:
    """Checks what needs no recipe.

    Raises:
        UserError: an option is missing, or is another target's.
    """
    slurm, target = options.target == "slurm", options.target
    foreign = {
        "--image": slurm and options.image,
        "--mount": slurm and options.mounts,
        "--namespace": slurm and options.namespace,
        "--service-account": slurm and options.service_account,
        "--setup": not slurm and options.setup,
        "--sbatch": not slurm and options.sbatch,
        "--pathways-dir": target != "pathways" and options.pathways_dir,
        "--slices": PLATFORMS[target] == "gpu" and options.slices > 1,
    }
    if wrong := [flag for flag, given in foreign.items() if given]:
        raise UserError(f"{', '.join(wrong)}: it means nothing with --target {target}; leave it out")
    if not slurm and options.image is None:
        extra = {"gke-gpu": "gpu", "gke-tpu": "tpu"}.get(target, "pathways,gcs")
        raise UserError(
            f"--image is missing: there is no public one. Build an image with {install_command(extra)}, "
            "push it to where the cluster pulls from, and name it: --image REGISTRY/tunix:TAG"
        )
    if target == "pathways" and not (options.pathways_dir or "").startswith("gs://"):
        raise UserError("--pathways-dir is missing: a folder that exists for Pathways' own files, gs://BUCKET/pathways")
    for variable, place in options.secrets:
        _check_secret(variable, place, slurm)


def _check_secret(variable: str, place: str, slurm: bool) -> None:
    """Checks that a secret is named and not given.

    Raises:
        UserError: it is neither a file, on SLURM, nor a Secret of Kubernetes.
    """
    # What was given may be the secret itself, so no message repeats it.
    if not re.fullmatch(r"[A-Za-z_]\w*", variable):
        raise UserError("--secret: write VARIABLE=WHERE, e.g. HF_TOKEN=hf/token")
    if slurm and "/" not in place:
        raise UserError(
            f"--secret {variable}=...: name the file that holds it, e.g. ~/.hf_token, not the secret itself"
        )
    if not slurm and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[-\w.]+)?", place):
        raise UserError(f"--secret {variable}=...: name a Secret and its key, e.g. hf/token, not the secret itself")
