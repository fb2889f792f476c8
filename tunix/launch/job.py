"""`Job`: everything that a cluster has to know of a run, whatever its scheduler.

First how many hosts with how many devices it takes (`placement`), then what the command line says of it, and the job
itself. `submit.py` makes it of a recipe, `slurm.py` and `kubernetes.py` write it down.
"""

import math
import re
from dataclasses import dataclass

from tunix.config import MeshConfig
from tunix.errors import UserError
from tunix.recipe.recipe import Recipe
from tunix.util.chips import CHIPS, CHIPS_OF_A_HOST, GPUS_OF_A_HOST, SHAPES, chip_of, number_of

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
    mounts: tuple[tuple[str, str], ...] = ()
    """PersistentVolumeClaims, which many pods have to be allowed to write (ReadWriteMany), and where they are mounted,
    e.g. `(("runs", "/runs"),)`; on Kubernetes only."""
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
