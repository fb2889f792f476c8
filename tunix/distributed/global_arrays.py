"""Arrays over the devices of all processes: made of what every process has on its host, and read there again."""

from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.distributed import processes
from tunix.mesh import AXES
from tunix.util.exact import jit


def placed(tree: Any, where: Any) -> Any:
    """A tree of numpy arrays, the same in every process, on the devices; returns before they are copied. `where` is a
    sharding for all of them, or a tree of shardings."""
    if processes.number() == 1:
        return jax.device_put(tree, where)

    def place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        # `device_put` would compare the processes' arrays: a blocking exchange for each of them.
        array = np.asarray(x)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    if isinstance(where, jax.sharding.Sharding):
        return jax.tree.map(lambda x: place(x, where), tree)
    return jax.tree.map(place, tree, where)


def everywhere(x: jax.Array) -> jax.Array:
    """The array, whole on every device where there are several processes; to be called by all of them."""
    if processes.number() == 1 or x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return _whole(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)


def own_part(mesh: Mesh) -> Mesh:
    """The devices of a mesh that belong to this process, all along the axis that weights are sharded over; the mesh
    itself where there is one process. Programs on them need not wait for other processes."""
    if processes.number() == 1:
        return mesh
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return Mesh(np.asarray(devices).reshape(1, -1, 1, 1, 1), AXES, axis_types=mesh.axis_types)


@cache
def _whole(where: NamedSharding) -> Any:
    return jit(lambda x: x, out_shardings=where)
