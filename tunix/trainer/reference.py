"""The frozen reference model of a policy: the initial weights, or another model of the same structure.

Axes: T time.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
from jax.sharding import Mesh

from tunix.models.model import Model, Params, is_own
from tunix.trainer.logprobs import Scorer
from tunix.trainer.spec import TrainerSpec
from tunix.types import Sequence
from tunix.util.exact import jit


@dataclass(frozen=True)
class Reference:
    """Frozen weights, and the log-probs of sequences under them."""

    spec: TrainerSpec
    """The policy's spec, whose model structure and micro-batches the reference shares."""
    params: Params
    """All weights, without an adapter's and without a value head."""

    def logprobs(self, sequences: List[Sequence], temperature: float = 1.0) -> list[np.ndarray]:
        """The `[T]` log-probs of each sequence's tokens, 0 for the first."""
        return self._scorer.logprobs(self.params, sequences, temperature=temperature)

    @cached_property
    def _scorer(self) -> Scorer:
        model = replace(self.spec.model, adapt=None, has_scalar_head=False)
        return Scorer(model, self.spec.microbatcher, self.spec.length)


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


def initial_reference(spec: TrainerSpec, params: Params, frozen: Params) -> Reference:
    """The initial weights of a policy as its reference: the base under an adapter, else a copy of the weights.

    Args:
        params: the trainable weights, before the first step.
        frozen: the other weights.
    """
    return Reference(spec, snapshot(spec.model, spec.mesh, params) if spec.adapter is None else frozen)
