"""The mesh on which a policy samples: the devices of its training, with copies of the weights on few of them each.

Training splits weights over `fsdp` and gathers a matrix before it is multiplied, which costs little for thousands of
tokens. A sampler multiplies by every matrix for one token of each slot: gathering them would cost many times as much.
"""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.distributed import processes
from tunix.distributed.global_arrays import own_part
from tunix.errors import UserError
from tunix.mesh import AXES, groups_of, row_shards
from tunix.models.model import Model
from tunix.rollout.config import RolloutMeshConfig
from tunix.trainer.mesh_choice import WORDS, Demand, near_divisors
from tunix.util.trees import bytes_of

SHARE = 0.25
"""Share of a device's memory that a copy of the weights may take: beside it are the state of training, of which `auto`
leaves half of the memory, and the caches."""


def sampler_mesh(
    mesh: Mesh, config: RolloutMeshConfig | None, model: Model, memory: float | None
) -> tuple[Mesh, str | None]:
    """The mesh that samples, and what it is in a line; None where it is that of training, or a single device.

    Args:
        mesh: that of training.
        config: how the recipe divides it; None for the fewest devices to a copy of the weights that have room for it.
        model: what is sampled from.
        memory: bytes of a device; None where that is not known, and a copy is taken to fit.

    Raises:
        UserError: the sizes do not divide the devices or the model.
    """
    # Requests end at any time: programs over the devices of several processes would have to wait for each other.
    several, mesh = processes.number() > 1, own_part(mesh)
    sizes = Demand(model.config).split_by("tensor")
    tensor = _fewest(mesh, sizes, model, memory) if config is None else _checked(mesh, sizes, config.tensor)
    shape = (mesh.size // tensor, 1, 1, 1, tensor)
    if mesh.size == 1 or mesh.devices.shape == shape:
        return mesh, None
    each = "each" if tensor == 1 else f"each {tensor}"
    size = f"{copy_bytes(model, model.shapes) / 1e9:.3g} GB in all of it"
    where = f"{mesh.size} device(s)" + (f" of each of {processes.number()} processes" if several else "")
    line = f"sampling: a copy of the weights on {each} of {where}, {size}"
    return Mesh(mesh.devices.reshape(shape), AXES, axis_types=mesh.axis_types), line


def check_slots(slots: int, mesh: Mesh) -> None:
    """Refuses slots that are not split evenly over the copies of the weights.

    Raises:
        UserError: with the next numbers that would be.
    """
    copies = row_shards(mesh)
    if slots % copies:
        below = slots // copies * copies
        near = " or ".join(str(number) for number in (below, below + copies) if number)
        raise UserError(
            f"rollout.slots: {slots} slots are not split evenly over {copies} copies of the weights; {near} would be"
        )


def copy_bytes(model: Model, names: Iterable[str]) -> int:
    """Bytes of a copy of these weights in the compute dtype; quantized ones stay as they are."""
    dtypes = {name: model.kinds.get(name, jnp.dtype(model.dtype)) for name in names}
    return bytes_of([jax.ShapeDtypeStruct(model.shapes[name], dtype) for name, dtype in dtypes.items()])


def _fewest(mesh: Mesh, sizes: dict[str, int], model: Model, memory: float | None) -> int:
    """The fewest devices to a copy that have room for it; as many as can be where none have."""
    near = mesh.size // len(groups_of(mesh.devices.flatten().tolist()))
    common = math.gcd(near, *sizes.values())
    fitting = [tensor for tensor in range(1, common + 1) if common % tensor == 0]
    copy = copy_bytes(model, model.shapes)
    room = [tensor for tensor in fitting if memory is None or copy / tensor <= SHARE * memory]
    return room[0] if room else fitting[-1]


def _checked(mesh: Mesh, sizes: dict[str, int], tensor: int) -> int:
    named = {"devices": mesh.size, **sizes}
    if whole := [f"{size} {WORDS.get(name, name)}" for name, size in named.items() if size % tensor]:
        near = near_divisors("tensor", tensor, named)
        raise UserError(f"rollout.mesh: tensor {tensor} does not divide {', '.join(whole)}; {near}")
    return tensor
