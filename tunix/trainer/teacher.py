"""A frozen model beside the one that trains: asked for log-probs, or for states, which meet the student's in its step.

Its states `[M R T E]` are small beside its logits `[B T V]`, so they are what goes over to the student's mesh, which
may be one of other devices; the head's table is there already, copied once. None of it is part of a checkpoint.

Axes: B rows, T time, M passes, R rows of a pass, V vocabulary, E teacher's width.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from tunix.mesh import RULES, sharding
from tunix.models.model import Model, Params
from tunix.trainer.logprobs import Scorer, each_pass
from tunix.trainer.microbatches import Cut
from tunix.trainer.step import Lesson, Passes, hidden_of
from tunix.types import Batch, Sequence
from tunix.util.exact import jit


@dataclass(frozen=True)
class Teacher:
    """One model with its weights, on its own mesh or the student's."""

    model: Model
    params: Params
    """In the compute dtype: they never change."""
    cut: Cut
    """How batches are cut on the teacher's mesh."""
    length: int
    """T: the longest sequence that fits."""
    students: Mesh
    """Where the student is."""

    def logprobs(self, sequences: List[Sequence], temperature: float = 1.0) -> list[np.ndarray]:
        """`[T]` log-probs of each sequence's tokens, 0 for the first."""
        return self._scorer.logprobs(self.params, sequences, temperature=temperature)

    def lesson(self, batch: Batch, passes: Passes) -> Lesson:
        """What a step of the student reads of a batch; returns before the devices are done.

        Args:
            passes: the batch as the student's mesh has it.
        """
        number, rows, _ = passes.rows["tokens"].shape
        with jax.set_mesh(self.cut.mesh):
            states = self._states(self.params, self.cut.place(batch), number=number, rows=rows)
        by_rows = NamedSharding(self.students, PartitionSpec(None, RULES["rows"]))
        return Lesson(jax.device_put(states, by_rows), self._table, self.model.config.logit_softcap)

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.model, self.cut, self.length)

    @cached_property
    def _table(self) -> Float[Array, "V E"]:
        """The head's table on the student's mesh."""
        table = self.model.table(self.params)
        return jax.device_put(table, sharding(("vocab", "embed"), table.shape, self.students))

    @cached_property
    def _states(self):
        def compute(params: Params, passes: Passes, number: int, rows: int) -> Float[Array, "M R T E"]:
            """In as many rows as the student's passes have: those of both hold the batch, the others nothing."""
            found = each_pass(partial(hidden_of, self.model, params), passes)
            flat = found.reshape(-1, *found.shape[2:])[: number * rows]
            padded = jnp.pad(flat, ((0, number * rows - len(flat)), (0, 0), (0, 0)))
            return padded.reshape(number, rows, *flat.shape[1:])

        return jit(compute, static_argnames=("number", "rows"))
