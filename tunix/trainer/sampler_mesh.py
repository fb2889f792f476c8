"""Where a policy samples: the mesh, its memory for keys and values, and how weights get there from training.

Training splits weights over `fsdp` and gathers a matrix before it is multiplied, which costs little for thousands of
tokens. A sampler multiplies by every matrix for one token of each slot: gathering them would cost many times as much.
So the devices hold copies of the weights, on few of them each. Keys and values exist alongside the state of training,
but not alongside its activations.

A sampler on other devices gets one parameter (what the layers hold of one kind) at a time, each byte once to each copy:
cast to the dtype of the computation, unless it has to be rounded to a grid before, and compared by a checksum of every
bit on both sides.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tunix.distributed import processes
from tunix.distributed.global_arrays import own_part
from tunix.errors import UserError
from tunix.mesh import AXES, bytes_of, groups_of, partition
from tunix.models.model import Model
from tunix.models.quantization.formats import in_compute
from tunix.rollout.config import RolloutMeshConfig
from tunix.trainer.digest import checksum
from tunix.trainer.mesh_choice import Demand, undivided
from tunix.trainer.microbatches import TrainerSpec
from tunix.trainer.remat import held_by
from tunix.util.exact import jit

SHARE = 0.25
"""Share of a device's memory that a copy of the weights may take: beside it are the state of training, of which `auto`
leaves half of the memory, and the caches."""


def sampler_mesh(
    mesh: Mesh, config: RolloutMeshConfig | None, model: Model, memory: float | None, slots: int | None = None
) -> tuple[Mesh, str | None]:
    """The mesh that samples, and what it is in a line; None where it is that of training, or a single device.

    Args:
        mesh: that of training.
        config: how the recipe divides it; None for the fewest devices to a copy of the weights that have room for it.
        model: what is sampled from.
        memory: bytes of a device; None where that is not known, and a copy is taken to fit.
        slots: completions at a time, if the recipe says how many; they are split evenly over the copies.

    Raises:
        UserError: the sizes do not divide the devices or the model, or copies the slots.
    """
    # Requests end at any time: programs over the devices of several processes would have to wait for each other.
    several, mesh = processes.number() > 1, own_part(mesh)
    sizes, copy = Demand(model.config).split_by("tensor"), copy_bytes(model, model.shapes)
    if config is None:
        near = mesh.size // len(groups_of(mesh.devices.flatten().tolist()))
        common = math.gcd(near, *sizes.values())
        fitting = [tensor for tensor in range(1, common + 1) if common % tensor == 0]
        room = [tensor for tensor in fitting if memory is None or copy / tensor <= SHARE * memory]
        tensor = room[0] if room else fitting[-1]  # as many as can be where none have room
    else:
        tensor = config.tensor
        for problem in undivided("tensor", tensor, {"devices": mesh.size, **sizes}):
            raise UserError(f"rollout.mesh: {problem}")
    copies = mesh.size // tensor
    if slots is not None and slots % copies:
        below = slots // copies * copies
        near = " or ".join(str(number) for number in (below, below + copies) if number)
        raise UserError(
            f"rollout.slots: {slots} slots are not split evenly over {copies} copies of the weights; {near} would be"
        )
    shape = (copies, 1, 1, 1, tensor)
    if mesh.size == 1 or mesh.devices.shape == shape:
        return mesh, None
    each = "each" if tensor == 1 else f"each {tensor}"
    where = f"{mesh.size} device(s)" + (f" of each of {processes.number()} processes" if several else "")
    line = f"sampling: a copy of the weights on {each} of {where}, {copy / 1e9:.3g} GB in all of it"
    return Mesh(mesh.devices.reshape(shape), AXES, axis_types=mesh.axis_types), line


def copy_bytes(model: Model, names: Iterable[str]) -> int:
    """Bytes of a copy of these weights in the compute dtype; quantized ones stay as they are."""
    dtypes = {name: model.kinds.get(name, jnp.dtype(model.dtype)) for name in names}
    return bytes_of([jax.ShapeDtypeStruct(model.shapes[name], dtype) for name, dtype in dtypes.items()])


Shapes = Mapping[str, jax.ShapeDtypeStruct]


def room_of(
    share: float,
    memory: float | None,
    mesh: Mesh,
    model: Model,
    trained: Sequence[tuple[TrainerSpec, Shapes, Shapes]],
    *,
    references: int,
    newer: Collection[str] = (),
) -> float | None:
    """Bytes for keys and values on each device of the sampler's mesh; None where its memory is not known, as on a CPU.

    Args:
        share: of the memory that everything may take together, e.g. 0.85; the rest is for the sampler's activations.
        memory: bytes of a device.
        trained: spec, trainable and frozen weights of the policy and of a critic that is a model of its own, as far as
            these devices hold them; the policy is the first.
        references: copies of the policy's weights that are kept, 0 or 1.
        newer: names of the weights that arrive while those before them are sampled from.
    """
    if memory is None:
        return None
    held = sum(
        held_by(spec, params, {} if i else frozen, copies=0 if i else references).weights
        for i, (spec, params, frozen) in enumerate(trained)
    )
    copies = copy_bytes(model, model.shapes) + copy_bytes(model, newer)
    return share * memory - held - copies / mesh.shape["tensor"]


def shares(share: float, memory: float, room: float, need: float) -> str:
    """The arithmetic behind a refused share of a device's memory, which leaves `room` bytes for keys and values (less
    than 0 where not even the rest fits) where they `need` more, and the smallest share that is enough."""
    rest = share * memory - room
    least = math.ceil(1000 * (rest + need) / memory) / 1000
    verdict = f"the smallest that works is {least:g}" if least <= 1 else "no share of this device is enough"
    return (
        f"{share:g} of {memory / 1e9:.3g} GB is {share * memory / 1e9:.3g} GB, and the weights and the state of "
        f"training take {rest / 1e9:.3g} GB: {verdict}"
    )


def bring_of(model: Model, trainer: Mesh, sampler: Mesh) -> Callable[[str, jax.Array], jax.Array] | None:
    """How parameters are brought from the devices that train, of all processes, to those of this process that sample:
    (name, array there) -> the array here, to be called by all processes; a RuntimeError where it is not what was sent.
    None where the sampler reads them on the trainer's devices."""
    several, local = processes.number() > 1, own_part(trainer)

    def together(mesh: Mesh) -> Callable[[str, jax.Array], jax.Array]:
        """From the devices of all processes to those of each, where a parameter then is whole."""
        by_process: dict[int, list[Any]] = {}
        for device in trainer.devices.flat:
            by_process.setdefault(device.process_index, []).append(device)
        rows = np.asarray([by_process[number] for number in sorted(by_process)])
        every = Mesh(rows.reshape(len(rows), *mesh.devices.shape), ("process", *mesh.axis_names))

        def bring(name: str, x: jax.Array) -> jax.Array:
            spec = partition(model.axes[name], x.shape, mesh)
            # Whole in each process: the first axis of the mesh is not named.
            with jax.set_mesh(every):
                there = jax.device_put(x, NamedSharding(every, spec))
            parts = [shard.data for shard in there.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, spec), parts)

        return bring

    if set(local.devices.flat) == set(sampler.devices.flat):
        return together(sampler) if several else None
    of_all = together(local) if several else None
    on_grid = {f"layers/{name}/w" for name, _ in model.simulated}

    def bring(name: str, x: jax.Array) -> jax.Array:
        x = x if of_all is None else of_all(name, x)
        with jax.set_mesh(local):
            sent = x if name in on_grid else _cast(name, x, model.dtype)
            before = checksum(sent)
        with jax.set_mesh(sampler):
            there = jax.device_put(sent, NamedSharding(sampler, partition(model.axes[name], x.shape, sampler)))
            after = checksum(there)
        # Reading both also waits, so that no more than one parameter is on its way.
        if int(after) != int(before):
            raise RuntimeError(f"{name} has other bits on the sampler's devices than on the trainer's")
        return there

    return bring


_cast = jit(in_compute, static_argnums=(0, 2))
