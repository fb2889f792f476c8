"""A frozen teacher model: computes log-probs, or hidden states that the student's step compares with its own.

Its states `[M R T Te]` are much smaller than its logits `[B T V]`, so they are copied to the student's mesh, which
may consist of other devices; the matrix of the head is copied there once. The teacher is not part of a checkpoint.

Axes: B rows, T time, M micro-batches, R rows of a micro-batch, V vocabulary, Te teacher's width.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from tunix.mesh import by_rows, sharding
from tunix.models.model import Model, Params
from tunix.trainer.frozen_model import FrozenModel
from tunix.trainer.logprobs import each_microbatch
from tunix.trainer.step import Microbatches, TeacherStates, hidden_of
from tunix.types import Batch
from tunix.util.exact import jit


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
