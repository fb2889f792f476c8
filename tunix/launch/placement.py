"""`Placement`: how many hosts with how many devices a job takes, from the recipe's mesh and a topology."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from tunix.config import MeshConfig
from tunix.errors import UserError
from tunix.plan.chips import CHIPS, CHIPS_OF_A_HOST, GPUS_OF_A_HOST, SHAPES, chip_of, number_of
from tunix.recipe.recipe import Recipe

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
    def processes(self) -> int:
        """Number of processes, one for each host."""
        return self.slices * self.hosts

    @property
    def devices(self) -> int:
        """Number of devices of all processes."""
        return self.processes * self.per_host


class Wanted(NamedTuple):
    """Devices that a mesh of the recipe asks for."""

    where: str
    """Its key, e.g. `mesh` or `stages.0.mesh`."""
    size: int
    """Product of its sizes, without the one that is left open."""
    apart: int
    """Devices beside them that only teach or only sample; 0 without."""
    is_open: bool
    """Whether one size is -1, what is left."""


def placement(recipe: Recipe, platform: str, topology: str | None, slices: int, per_host: int | None) -> Placement:
    """Where a recipe runs.

    Args:
        platform: `gpu` or `tpu`, what the target has.
        topology: devices of a slice, e.g. `h100:16`; the number may be left out where the recipe's mesh has it.
        slices: slices of TPUs.
        per_host: devices of a host; None for 8 GPUs, or 4 TPUs.

    Raises:
        UserError: the number of devices stays open, or differs from that of the mesh.
    """
    if topology is None:
        fixed = [f"{mesh.where} is for {mesh.size + mesh.apart}" for mesh in _meshes(recipe) if not mesh.is_open]
        known = f" ({', '.join(fixed)})" if fixed else ""
        raise UserError(f"--topology is missing: say which devices, e.g. --topology {EXAMPLES[platform]}{known}")
    if chip_of(topology).platform != platform:
        chips = ", ".join(name for name, chip in CHIPS.items() if chip.platform == platform)
        raise UserError(f"--topology {topology}: this target has {platform.upper()}s, one of {chips}")
    if slices > 1 and platform == "gpu":
        raise UserError(f"--slices {slices}: only TPUs come in slices; GPUs are counted, e.g. --topology h100:16")
    chip, _, shape = topology.partition(":")
    shape = shape or _shape(recipe, chip, slices)
    _check_shape(chip, shape)
    found = _hosts(chip, shape, slices, per_host)
    _check_mesh(recipe, found)
    return found


def _meshes(recipe: Recipe) -> list[Wanted]:
    """The meshes of a recipe; `auto` leaves everything open."""
    found = []
    for index, stage in enumerate(recipe.stages or (recipe,)):
        sizes = [size for _, size in stage.mesh] if isinstance(stage.mesh, MeshConfig) else [-1]
        where = f"stages.{index}.mesh" if recipe.stages else "mesh"
        teaching = stage.teacher.mesh.size if stage.teacher and stage.teacher.mesh else 0
        sampling = stage.rollout.devices.devices or 0 if stage.rollout.devices else 0
        size = math.prod(size for size in sizes if size != -1)
        found.append(Wanted(where, size, teaching + sampling, -1 in sizes))
    return found


def _shape(recipe: Recipe, chip: str, slices: int) -> str:
    """The shape of a chip that has as many devices as the recipe's mesh.

    Raises:
        UserError: the mesh leaves the number open, or there is no slice of this size.
    """
    fixed = [mesh for mesh in _meshes(recipe) if not mesh.is_open]
    if not fixed:
        example = EXAMPLES[CHIPS[chip].platform].partition(":")[2]
        raise UserError(f"--topology {chip}: the recipe's mesh leaves the number open; give it, e.g. {chip}:{example}")
    number = fixed[0].size + fixed[0].apart
    if CHIPS[chip].platform == "gpu":
        return str(number)
    shapes = [shape for shape in SHAPES[chip] if slices * number_of(f"{chip}:{shape}") == number]
    if not shapes:
        raise UserError(f"--topology {chip}: no slice has {number} devices, as {fixed[0].where} asks for")
    return shapes[0]


def _check_shape(chip: str, shape: str) -> None:
    """Checks that there are such devices.

    Raises:
        UserError: there are none.
    """
    if CHIPS[chip].platform == "tpu" and shape not in SHAPES[chip]:
        raise UserError(f"--topology {chip}:{shape}: shapes of {chip} are {', '.join(SHAPES[chip])}")
    if CHIPS[chip].platform == "gpu" and not re.fullmatch(r"[1-9]\d*", shape):
        raise UserError(f"--topology {chip}:{shape}: after {chip}: comes the number of GPUs, e.g. {chip}:8")


def _hosts(chip: str, shape: str, slices: int, per_host: int | None) -> Placement:
    """Divides the devices of a slice over its hosts.

    Raises:
        UserError: they do not fill their hosts.
    """
    number = number_of(f"{chip}:{shape}")
    usual = GPUS_OF_A_HOST if CHIPS[chip].platform == "gpu" else CHIPS_OF_A_HOST
    each = min(number, per_host or usual)
    if number % each:
        raise UserError(f"--topology {chip}:{shape}: {number} devices do not fill hosts of {each}; see --per-host")
    return Placement(chip, shape, slices, number // each, each)


def _check_mesh(recipe: Recipe, found: Placement) -> None:
    """Checks that the recipe's meshes take all devices.

    Raises:
        UserError: one does not.
    """
    for mesh in _meshes(recipe):
        left = found.devices - mesh.apart
        if left < mesh.size or left % mesh.size or (left > mesh.size and not mesh.is_open):
            times = f" x {found.slices} slices" if found.slices > 1 else ""
            wants = f"needs a multiple of {mesh.size}" if mesh.is_open else f"is for {mesh.size}"
            apart = f" beside the {mesh.apart} that only teach or sample" if mesh.apart else ""
            raise UserError(
                f"{mesh.where} {wants} devices{apart}, and --topology {found.topology}{times} has {found.devices}: "
                f"change one of them, e.g. {mesh.where}=auto"
            )
