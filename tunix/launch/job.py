"""`Job`: everything that a cluster has to know of a run, whatever its scheduler.

First what a job leaves behind and what it reads: a pod's disk goes with the pod, and a restart is a new pod, so
checkpoints and the run folder have to be on a volume or on gs://, and files that the recipe names have to be on a
volume, or small enough to be sent along. Then how many hosts with how many devices it takes (`placement`), and at the
end the job itself.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tunix.config import MeshConfig
from tunix.errors import UserError, install_command
from tunix.recipe.recipe import Recipe
from tunix.util.chips import CHIPS, CHIPS_OF_A_HOST, GPUS_OF_A_HOST, SHAPES, chip_of, number_of
from tunix.util.object_store import url_of
from tunix.util.plugins import is_reference

OWN_DISKS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every node of a cluster has for itself."""
MOST_BYTES = 900_000
"""Most bytes of the recipe and the files that go along: Kubernetes takes 1 MiB, with everything around them."""
WRITTEN = ("output", "folder")
"""Last part of the keys that name what a run writes."""


@dataclass(frozen=True)
class Mount:
    """A volume that all pods of a job see."""

    claim: str
    """Name of a PersistentVolumeClaim, e.g. `runs`; many pods have to be allowed to write (ReadWriteMany)."""
    path: str
    """Where it is mounted, e.g. `/runs`."""


def mount_of(text: str) -> Mount:
    """Reads `CLAIM:/path`.

    Raises:
        UserError: it is written otherwise.
    """
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/") or path == "/":
        raise UserError(f"--mount {text}: write CLAIM:/path, a PersistentVolumeClaim and where it is mounted")
    return Mount(claim, path.rstrip("/"))


def sent_along(recipe: Recipe, volumes: list[str]) -> dict[str, str]:
    """Small files that the recipe names and that are on no volume, code (`judge.py:short`) and chat templates: path,
    from the current folder -> text.

    Raises:
        UserError: a file of this machine cannot go along, so that the pods would not find it.
    """
    texts: dict[str, str] = {}
    for key, value in _named(recipe.sections()):
        code = is_reference(value) and value.rpartition(":")[0].endswith(".py")
        place = value.rpartition(":")[0] if code else value
        if key.rpartition(".")[2] in WRITTEN or _within(place, volumes) or not Path(place).expanduser().exists():
            continue
        if not (code or place.endswith(".jinja")):
            raise UserError(
                f"{key}: {place} is on this machine, and the pods do not see it: copy it to a volume (--mount "
                "CLAIM:/data) and name it there, or take a hub id, or for a model gs://"
            )
        if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            raise UserError(f"{key}: {place} goes along with the job, from the current folder down: name it from there")
        texts[str(PurePosixPath(place))] = Path(place).read_text(encoding="utf-8")
    if (size := sum(len(text.encode()) for text in texts.values())) > MOST_BYTES:
        raise UserError(f"{', '.join(texts)}: {size:,} bytes, and {MOST_BYTES:,} go along: put them into the image")
    return texts


def _named(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested values, with its dotted key."""
    if isinstance(value, str):
        yield path, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        yield from _named(item, f"{path}.{key}".lstrip("."))


def _within(place: str, folders: Iterable[str]) -> bool:
    return any(PurePosixPath(place).is_relative_to(folder) for folder in folders)


EXAMPLES = {"gpu": "h100:16", "tpu": "v5e:4x4"}


@dataclass(frozen=True)
class Placement:
    """The devices of a job: slices of hosts of chips."""

    chip: str
    """A chip that `tunix plan` knows, e.g. `h100` or `v5e`."""
    shape: str
    """TPUs of a slice, e.g. `4x4`; the number of GPUs, e.g. `16`."""
    slices: int
    """Slices of TPUs; 1 for GPUs."""
    hosts: int
    """Hosts of a slice: each runs one process."""
    per_host: int
    """Devices of a host."""

    @property
    def topology(self) -> str:
        """One slice in the words of `tunix plan`, e.g. `v5e:4x4`."""
        return f"{self.chip}:{self.shape}"

    @property
    def described(self) -> str:
        """Its hosts in words, e.g. `2 host(s) with 8 x h100 each`."""
        return f"{self.processes} host(s) with {self.per_host} x {self.chip} each"

    @property
    def processes(self) -> int:
        """Number of processes, one for each host."""
        return self.slices * self.hosts

    @property
    def devices(self) -> int:
        """Number of devices of all processes."""
        return self.processes * self.per_host


def placement(recipe: Recipe, platform: str, topology: str | None, slices: int, per_host: int | None) -> Placement:
    """Where a recipe runs on a platform, `gpu` or `tpu`; of a topology the number may be left out where the recipe's
    mesh has it. A host has 8 GPUs, or 4 TPUs, unless `per_host` says otherwise.

    Raises:
        UserError: the number of devices stays open, differs from that of the mesh, or does not fill its hosts; or there
            are no such devices.
    """
    # What each mesh asks for: its key, the product of its sizes without one that is left open, devices beside them that
    # only teach or only sample, and whether one size is -1, what is left. `auto` leaves everything open.
    meshes: list[tuple[str, int, int, bool]] = []
    for index, stage in enumerate(recipe.stages or (recipe,)):
        sizes = [size for _, size in stage.mesh] if isinstance(stage.mesh, MeshConfig) else [-1]
        where = f"stages.{index}.mesh" if recipe.stages else "mesh"
        teaching = stage.teacher.mesh.size if stage.teacher and stage.teacher.mesh else 0
        sampling = stage.rollout.devices.devices or 0 if stage.rollout.devices else 0
        size = math.prod(size for size in sizes if size != -1)
        meshes.append((where, size, teaching + sampling, -1 in sizes))
    fixed = {where: size + apart for where, size, apart, is_open in meshes if not is_open}
    if topology is None:
        known = f" ({', '.join(f'{where} is for {number}' for where, number in fixed.items())})" if fixed else ""
        raise UserError(f"--topology is missing: say which devices, e.g. --topology {EXAMPLES[platform]}{known}")
    if chip_of(topology).platform != platform:
        chips = ", ".join(name for name, chip in CHIPS.items() if chip.platform == platform)
        raise UserError(f"--topology {topology}: this target has {platform.upper()}s, one of {chips}")
    chip, _, shape = topology.partition(":")
    if not shape:
        # The one that has as many devices as the recipe's mesh.
        if not fixed:
            example = EXAMPLES[platform].partition(":")[2]
            raise UserError(
                f"--topology {chip}: the recipe's mesh leaves the number open; give it, e.g. {chip}:{example}"
            )
        where, number = next(iter(fixed.items()))
        shapes = [shape for shape in SHAPES.get(chip, ()) if slices * number_of(f"{chip}:{shape}") == number]
        if platform == "tpu" and not shapes:
            raise UserError(f"--topology {chip}: no slice has {number} devices, as {where} asks for")
        shape = str(number) if platform == "gpu" else shapes[0]
    if platform == "tpu" and shape not in SHAPES[chip]:
        raise UserError(f"--topology {chip}:{shape}: shapes of {chip} are {', '.join(SHAPES[chip])}")
    if platform == "gpu" and not re.fullmatch(r"[1-9]\d*", shape):
        raise UserError(f"--topology {chip}:{shape}: after {chip}: comes the number of GPUs, e.g. {chip}:8")
    number = number_of(f"{chip}:{shape}")
    each = min(number, per_host or (GPUS_OF_A_HOST if platform == "gpu" else CHIPS_OF_A_HOST))
    if number % each:
        raise UserError(f"--topology {chip}:{shape}: {number} devices do not fill hosts of {each}; see --per-host")
    place = Placement(chip, shape, slices, number // each, each)
    for where, size, apart, is_open in meshes:  # all devices have to be taken
        left = place.devices - apart
        if left < size or left % size or (left > size and not is_open):
            times = f" x {slices} slices" if slices > 1 else ""
            wants = f"needs a multiple of {size}" if is_open else f"is for {size}"
            beside = f" beside the {apart} that only teach or sample" if apart else ""
            raise UserError(
                f"{where} {wants} devices{beside}, and --topology {place.topology}{times} has {place.devices}: "
                f"change one of them, e.g. {where}=auto"
            )
    return place


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
    # In letters that every scheduler takes.
    words = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(recipe.output).name.lower()).strip("-")
    words = words if words[:1].isalpha() else f"run-{words}"
    name = options.name or words[:LONGEST_NAME].strip("-")
    if options.target == "slurm":
        for stage in recipe.stages or (recipe,):
            for key, folder in (("output", recipe.output), ("checkpoint.folder", stage.checkpoint.folder)):
                if folder is not None and _within(folder, OWN_DISKS):
                    raise UserError(
                        f"{key}: {folder} is on each node's own disk: a job that is started again may get other nodes. "
                        "Take a folder that all nodes share, such as one in your home folder"
                    )
        return Job(name, recipe.to_yaml(), {}, place, options)
    # A pod's end must lose nothing that the next one needs.
    volumes, lost = [mount.path for mount in options.mounts], list[str]()
    if not _within(recipe.output, volumes):
        lost.append(
            f"output: {recipe.output} is on the pod's own disk: checkpoints stay, but metrics.jsonl, samples and "
            "export/ go with the pod; --mount CLAIM:/runs output=/runs/... keeps them"
        )
    for stage in recipe.stages or (recipe,):
        folder = stage.checkpoint.folder
        if lost if folder is None else url_of(folder) is None and not _within(folder, volumes):
            where = f"output: {recipe.output}" if folder is None else f"checkpoint.folder: {folder}"
            stem = PurePosixPath(recipe.output).name
            raise UserError(
                f"{where} is on the pod's own disk, which goes with the pod: a restart would begin again. Put the run "
                f"on a volume, --mount CLAIM:/runs output=/runs/{stem}, or its checkpoints on "
                f"checkpoint.folder=gs://BUCKET/{stem}"
            )
    return Job(name, recipe.to_yaml(), sent_along(recipe, volumes), place, options, tuple(lost))


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
    if wrong := [flag for flag, value in foreign.items() if value]:
        raise UserError(f"{', '.join(wrong)}: it means nothing with --target {target}; leave it out")
    if not slurm and options.image is None:
        extra = {"gke-gpu": "gpu", "gke-tpu": "tpu"}.get(target, "pathways,gcs")
        raise UserError(
            f"--image is missing: there is no public one. Build an image with {install_command(extra)}, "
            "push it to where the cluster pulls from, and name it: --image REGISTRY/tunix:TAG"
        )
    if target == "pathways" and not (options.pathways_dir or "").startswith("gs://"):
        raise UserError("--pathways-dir is missing: a folder that exists for Pathways' own files, gs://BUCKET/pathways")
    if options.name is not None and not re.fullmatch(
        rf"[a-z]([-a-z0-9]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?", options.name
    ):
        raise UserError(
            f"--name {options.name}: at most {LONGEST_NAME} lower-case letters, digits and hyphens, from a letter to a "
            "letter or digit"
        )
    for variable, place in options.secrets:
        # What was given may be the secret itself, so no message repeats it.
        if not re.fullmatch(r"[A-Za-z_]\w*", variable):
            raise UserError("--secret: write VARIABLE=WHERE, e.g. HF_TOKEN=hf/token")
        if slurm and "/" not in place:
            raise UserError(
                f"--secret {variable}=...: name the file that holds it, e.g. ~/.hf_token, not the secret itself"
            )
        if not slurm and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[-\w.]+)?", place):
            raise UserError(f"--secret {variable}=...: name a Secret and its key, e.g. hf/token, not the secret itself")
