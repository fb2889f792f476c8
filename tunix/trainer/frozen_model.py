"""Models that are never trained: log-probs of sequences under them, the policy's reference, and a teacher's states.

The reference is the policy's initial weights. A teacher's states `[M R T Te]`
are much smaller than its logits `[B T V]`, so they are copied to the student's mesh, which may consist of other
devices; the matrix of the head is copied there once. The teacher is not part of a checkpoint.

Experts that the sampler recorded (`rollout/engine/experts.py`) are replayed by the policy's routers alone
(`unreplayed`): nobody sampled from another model, so there is no choice of its own to replay, and its experts of one
number need not do what the policy's do.

Axes: B rows, T time, M micro-batches, R rows of a micro-batch, V vocabulary, Te teacher's width.
"""

from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from tunix.mesh import by_rows, sharding
from tunix.models.model import Model, Params
from tunix.trainer.logprobs import Scorer, each_microbatch
from tunix.trainer.microbatches import Microbatcher, Microbatches, TrainerSpec
from tunix.trainer.step import TeacherStates, hidden_of
from tunix.types import Batch, Sequence
from tunix.util.exact import jit


@dataclass(frozen=True)
class FrozenModel:
    """A model with its weights."""

    model: Model
    params: Params
    """All weights, in the compute dtype, since they are never updated."""
    microbatcher: Microbatcher
    """Splits batches on the model's mesh."""
    length: int
    """T, the maximum tokens of a sequence, e.g. 2048."""

    def logprobs(
        self, sequences: List[Sequence], temperature: float = 1.0, size: int | None = None
    ) -> List[np.ndarray]:
        """The `[T]` log-probs of each sequence's tokens, 0 for the first; `size` as in `Scorer.scores`."""
        return self.scorer.scores("logprobs", self.params, unreplayed(sequences), size, temperature)

    @cached_property
    def scorer(self) -> Scorer:
        return Scorer(self.model, self.microbatcher, self.length)


def not_shared(base: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a reference that are not the base's own arrays, as all are where it is the base under an adapter.

    A program is given them once: of arrays given twice a TPU's compiler counts both, and a copy that it makes, too.
    """
    return {name: x for name, x in reference.items() if base.get(name) is not x}


def unreplayed(sequences: List[Sequence]) -> list[Sequence]:
    """Sequences as models other than the policy read them: without the policy's experts."""
    return [replace(sequence, experts=None) for sequence in sequences]


@dataclass(frozen=True)
class Teacher(FrozenModel):
    """A frozen model on a separate mesh or the student's."""

    students: Mesh
    """The student's mesh."""

    def states(self, batch: Batch, microbatches: Microbatches) -> TeacherStates:
        """The teacher's hidden states for a batch, with its head; returns before the devices are done.

        Args:
            microbatches: the same batch, placed on the student's mesh.
        """
        number, rows, _ = microbatches.rows["tokens"].shape
        with jax.set_mesh(self.microbatcher.mesh):
            states = self._states(self.params, self.microbatcher.place(batch), number=number, rows=rows)
        places = by_rows(self.students, states.shape[2])
        return TeacherStates(jax.device_put(states, places), self._table, self.model.config.logit_softcap)

    @cached_property
    def _table(self) -> Float[Array, "V Te"]:
        """The matrix of the head, on the student's mesh."""
        table = self.model.table(self.params)
        return jax.device_put(table, sharding(("vocab", "embed"), table.shape, self.students))

    @cached_property
    def _states(self):
        return jit(partial(compute_states, self.model), static_argnames=("number", "rows"))


def compute_states(
    model: Model, params: Params, microbatches: Microbatches, number: int, rows: int
) -> Float[Array, "M R T Te"]:
    """A teacher's states for its own micro-batches, in the student's: `number` of `rows` rows.

    Rows beyond the batch are padding on both sides.
    """
    hidden = each_microbatch(partial(hidden_of, model, params), microbatches)
    flat = hidden.reshape(-1, *hidden.shape[2:])[: number * rows]
    padded = jnp.pad(flat, ((0, number * rows - len(flat)), (0, 0), (0, 0)))
    return padded.reshape(number, rows, *flat.shape[1:])


def reference_of(spec: TrainerSpec, params: Params) -> FrozenModel:
    """A reference of the policy's structure, without an adapter and without a value head."""
    model = replace(spec.model, adapt=None, has_scalar_head=False)
    return FrozenModel(model, params, spec.microbatcher, spec.length)
