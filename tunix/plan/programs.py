"""A run's programs lowered from shapes alone: no weight is made and no device touched.

Axes: M micro-batches, R rows of a micro-batch, T time, S sequences.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from tunix.config import DType
from tunix.mesh import by_rows, fast_products
from tunix.models.model import Model, Params
from tunix.trainer.learner import abstract_moments
from tunix.trainer.microbatches import PER_TOKEN
from tunix.trainer.spec import TrainerSpec
from tunix.trainer.step import Compute, FrozenInputs, Microbatches, TrainState
from tunix.types import Loss
from tunix.util.exact import jit

Shapes = dict[str, jax.ShapeDtypeStruct]
"""Parameters by name: shape, dtype and sharding."""


class BatchShape(NamedTuple):
    """The shape of an update's batch."""

    number: int
    """M."""
    rows: int
    """R."""
    length: int
    """T."""
    sequences: int
    """S."""
    parents: bool = False
    """Whether segments share a prompt."""
    pairs: bool = False
    """Whether sequences 2 i and 2 i + 1 are a pair."""


def parameters(model: Model, mesh: Mesh, dtypes: Mapping[str, DType]) -> Shapes:
    """The shapes of the parameters named in `dtypes`, with their shardings."""
    places = model.shardings(mesh)
    return {
        name: jax.ShapeDtypeStruct(model.shapes[name], model.kinds.get(name, dtype), sharding=places[name])
        for name, dtype in dtypes.items()
    }


def step(spec: TrainerSpec, params: Shapes, frozen: Shapes, batch: BatchShape, loss: Loss) -> jax.stages.Lowered:
    """The training step of a learner with these parameters, as `Learner.step` runs it."""
    everywhere = NamedSharding(spec.mesh, PartitionSpec())
    drops = bool(spec.adapter and spec.adapter.dropout)
    compute = Compute(spec.model, spec.optimizer, spec.schedule, drops=drops)

    # Records hold arrays, so they are made while the program is traced.
    def run(state: tuple, frozen: Params, batch: tuple, key: PRNGKeyArray) -> tuple:
        new, metrics = compute.step(TrainState(*state), FrozenInputs(frozen), Microbatches(*batch), key, loss)
        return (new.params, new.moments, new.step), metrics

    number, key = jax.eval_shape(lambda: (jnp.int32(0), jax.random.key(0)))
    number, key = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in (number, key))
    state = (params, abstract_moments(spec.optimizer, params, everywhere), number)
    compiled = jit(run, donate_argnums=0, options=fast_products(spec.mesh, spec.model.dtype))
    with jax.set_mesh(spec.mesh):
        return compiled.lower(state, frozen, _microbatches(spec.mesh, batch), key)


def _microbatches(mesh: Mesh, batch: BatchShape) -> tuple:
    """The fields of `Microbatches`: shapes of a batch as `Microbatcher.place` puts it on the mesh."""
    places = by_rows(mesh, batch.length)
    everywhere = NamedSharding(mesh, PartitionSpec())
    names = (*PER_TOKEN, "parents") if batch.parents else PER_TOKEN
    shape = (batch.number, batch.rows, batch.length)

    def token(name: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, bool if name == "loss_mask" else jnp.int32, sharding=places)

    def scalars(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=everywhere)

    counts = {name: scalars() for name in ("tokens", "sequences", *(["pairs"] if batch.pairs else []))}
    filled = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    each = scalars(batch.sequences)
    return {name: token(name) for name in names}, {}, each, each, counts, {}, filled
