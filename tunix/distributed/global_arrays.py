"""Arrays over the devices of all processes: made of what every process has on its host, and read there again."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.distributed import processes
from tunix.mesh import AXES
from tunix.util.exact import jit


def placed(tree: Any, where: Any) -> Any:
    """A tree of numpy arrays, the same in every process, on the devices; returns before they are copied.

    Args:
        tree: numpy arrays.
        where: a sharding for all of them, or a tree of shardings.
    """
    if processes.number() == 1:
        return jax.device_put(tree, where)
    if isinstance(where, jax.sharding.Sharding):
        return jax.tree.map(lambda x: _placed(np.asarray(x), where), tree)
    return jax.tree.map(lambda x, place: _placed(np.asarray(x), place), tree, where)


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


class Own:
    """Brings arrays over the devices of all processes to those of each, where they are whole."""

    def __init__(self, every: Mesh, local: Mesh, axes: Callable[[str, jax.Array], PartitionSpec]):
        """Brings nothing yet.

        Args:
            every: the mesh of all processes; each has as many devices of it.
            local: the mesh of this process's devices.
            axes: (name, array) -> how it is split over `local`.
        """
        by_process: dict[int, list[Any]] = {}
        for device in every.devices.flat:
            by_process.setdefault(device.process_index, []).append(device)
        rows = [by_process[number] for number in sorted(by_process)]
        shape = (len(rows), *local.devices.shape)
        self._every = Mesh(np.asarray(rows).reshape(shape), ("process", *local.axis_names))
        self._own, self._axes = local, axes

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        """The array of a name; to be called by all processes."""
        spec = self._axes(name, x)
        # Whole in each process: the first axis of the mesh is not named.
        with jax.set_mesh(self._every):
            there = jax.device_put(x, NamedSharding(self._every, spec))
        parts = [shard.data for shard in there.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(self._own, spec), parts)


def _placed(x: np.ndarray, where: jax.sharding.Sharding) -> jax.Array:
    # `device_put` would compare the processes' arrays: a blocking exchange for each of them.
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def _whole(where: NamedSharding) -> Any:
    if where not in _copies:
        _copies[where] = jit(lambda x: x, out_shardings=where)
    return _copies[where]


_copies: dict[NamedSharding, Any] = {}
