"""The frozen reference model of a policy: the initial weights, or another model of the same structure.

Axes: T time.
"""

from dataclasses import replace

import jax
from jax.sharding import Mesh

from tunix.models.model import Model, Params
from tunix.models.param_names import is_own
from tunix.trainer.frozen_model import FrozenModel
from tunix.trainer.spec import TrainerSpec
from tunix.util.exact import jit


def snapshot(model: Model, mesh: Mesh, params: Params) -> Params:
    """A copy of the current weights in the compute dtype, without a value head.

    A copy, since training donates the buffers of the originals. Matrices with simulated rounding keep their dtype:
    after a cast they would round to another grid.
    """
    on_grid, names = {f"layers/{name}/w" for name, _ in model.simulated}, [x for x in params if not is_own(x)]

    def copied(params: Params) -> Params:
        return {name: (x if name in on_grid else x.astype(model.dtype)).copy() for name, x in params.items()}

    with jax.set_mesh(mesh):
        return jit(copied)({name: params[name] for name in names})


def initial_reference(spec: TrainerSpec, params: Params, frozen: Params) -> FrozenModel:
    """The initial weights of a policy as its reference: the base under an adapter, else a copy of the weights.

    Args:
        params: the trainable weights, before the first step.
        frozen: the other weights.
    """
    return reference_of(spec, snapshot(spec.model, spec.mesh, params) if spec.adapter is None else frozen)


def reference_of(spec: TrainerSpec, params: Params) -> FrozenModel:
    """A reference of the policy's structure, without an adapter and without a value head."""
    model = replace(spec.model, adapt=None, has_scalar_head=False)
    return FrozenModel(model, params, spec.microbatcher, spec.length)
