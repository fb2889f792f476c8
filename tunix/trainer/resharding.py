"""Hands the policy's weights to a sampler on other devices: one parameter at a time, each byte once to each copy.

A parameter is what the layers hold of one kind, such as all queries. Where it is, it is cast to the dtype of the
computation, unless it has to be rounded to a grid before; it is moved to how the sampler splits it, and compared: a
checksum of every bit is computed on both sides.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.distributed import processes
from tunix.distributed.global_arrays import Own, own_part
from tunix.mesh import partition
from tunix.models.model import Model
from tunix.models.quantization.formats import in_compute
from tunix.trainer.digest import checksum
from tunix.util.exact import jit

Bring = Callable[[str, jax.Array], jax.Array]
"""(name, array on the trainer's devices) -> the array on the sampler's."""


class Resharding:
    """Brings parameters from the devices that train to those that sample."""

    def __init__(self, model: Model, trainer: Mesh, sampler: Mesh):
        """Brings nothing yet.

        Args:
            model: says how parameters are split, and the dtype of the computation.
            trainer: the mesh of training, over all processes.
            sampler: the mesh that samples, of this process's devices.
        """
        self._model, self._sampler, self._trainer = model, sampler, own_part(trainer)
        self._together = Own(trainer, self._trainer, _axes(model, self._trainer))
        self._on_grid = {f"layers/{name}/w" for name, _ in model.simulated}

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        """The parameter of a name on the sampler's devices, once it is there; to be called by all processes.

        Raises:
            RuntimeError: it is not what was sent.
        """
        if processes.number() > 1:
            x = self._together(name, x)
        with jax.set_mesh(self._trainer):
            sent = x if name in self._on_grid else _cast(name, x, self._model.dtype)
            before = checksum(sent)
        with jax.set_mesh(self._sampler):
            where = NamedSharding(self._sampler, partition(self._model.axes[name], x.shape, self._sampler))
            there = jax.device_put(sent, where)
            after = checksum(there)
        # Reading both also waits, so that no more than one parameter is on its way.
        if int(after) != int(before):
            raise RuntimeError(f"{name} has other bits on the sampler's devices than on the trainer's")
        return there


def bring_of(model: Model, trainer: Mesh, sampler: Mesh) -> Bring | None:
    """How parameters are brought to a sampler's mesh; None where it reads them on the trainer's devices."""
    if processes.number() == 1 and set(trainer.devices.flat) == set(sampler.devices.flat):
        return None
    if processes.number() > 1 and set(own_part(trainer).devices.flat) == set(sampler.devices.flat):
        return Own(trainer, sampler, _axes(model, sampler))
    return Resharding(model, trainer, sampler)


def _axes(model: Model, mesh: Mesh) -> Callable[[str, jax.Array], PartitionSpec]:
    """(name, parameter) -> how it is split over a mesh."""
    return lambda name, x: partition(model.axes[name], x.shape, mesh)


_cast = jit(in_compute, static_argnums=(0, 2))
