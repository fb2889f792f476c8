"""Log-probs, entropies and values of given sequences: packed, computed pass by pass, and unpacked again.

Axes: B rows, T time, S sequences, M passes, R rows of a pass.
"""

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import numpy as np
from jaxtyping import Array, Float

from tunix.data.packing import pack
from tunix.mesh import fast_products
from tunix.models.model import Model, Params
from tunix.trainer.microbatches import Cut
from tunix.trainer.step import Passes
from tunix.types import Batch, Sequence
from tunix.util.exact import jit


@dataclass(frozen=True)
class Scorer:
    """Scores sequences under one model's weights."""

    model: Model
    cut: Cut
    length: int
    """T: the longest sequence that fits."""

    def logprobs(
        self, params: Params, sequences: List[Sequence], size: int | None = None, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """`[T]` log-probs of each sequence's tokens given those before, 0 for the first.

        Args:
            params: all weights.
            sequences: at least one.
            size: sequences that the compiled shape is made for; calls of one size compile once.
            temperature: divides the logits.
        """
        return self._scored(partial(self._logprobs, temperature=temperature), params, sequences, size)

    def entropies(
        self, params: Params, sequences: List[Sequence], size: int | None = None, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """`[T]` entropies in nats of the distributions that each sequence's tokens are drawn from, 0 for the first.

        Args:
            params: all weights.
            sequences: at least one.
            size: as in `logprobs`.
            temperature: divides the logits.
        """
        return self._scored(partial(self._logprobs, temperature=temperature, entropy=True), params, sequences, size)

    def values(self, params: Params, sequences: List[Sequence], size: int | None = None) -> list[np.ndarray]:
        """`[T]` values: at t of the state before token t, 0 for the first. The model must have a value head.

        Args:
            params: all weights.
            sequences: at least one.
            size: as in `logprobs`.
        """
        return self._scored(self._values, params, sequences, size)

    def _scored(
        self, compiled: Callable, params: Params, sequences: List[Sequence], size: int | None
    ) -> list[np.ndarray]:
        batch = pack(sequences, size or len(sequences), self.length, packing=True)
        with jax.set_mesh(self.cut.mesh):
            found = np.asarray(compiled(params, self.cut.place(batch)))
        return unpack(found.reshape(-1, found.shape[-1])[: batch.tokens.shape[0]], batch, len(sequences))

    @cached_property
    def _logprobs(self):
        def one(params: Params, rows: Batch, temperature: float, entropy: bool) -> jax.Array:
            read = map(jax.numpy.asarray, (rows.tokens, rows.positions, rows.segment_ids, rows.segment_ids > 0))
            return self.model.logprobs(params, *read, entropy=entropy, temperature=temperature)[int(entropy)]

        def compute(params: Params, passes: Passes, temperature: float, entropy: bool = False) -> Float[Array, "M R T"]:
            return each_pass(lambda rows: one(params, rows, temperature, entropy), passes)

        options = fast_products(self.cut.mesh, self.model.dtype)
        return jit(compute, static_argnames=("temperature", "entropy"), options=options)

    @cached_property
    def _values(self):
        def one(params: Params, rows: Batch) -> jax.Array:
            tokens, positions, segments = map(jax.numpy.asarray, (rows.tokens, rows.positions, rows.segment_ids))
            hidden = self.model.hidden(params, tokens, positions, segments)
            return self.model.values_of(params, hidden, positions)

        return jit(lambda params, passes: each_pass(lambda rows: one(params, rows), passes))


def each_pass(one: Callable[[Batch], jax.Array], passes: Passes) -> Float[Array, "M R T *width"]:
    """Per-token values of the filled passes, numbers or vectors; zeros elsewhere."""

    def body(index: jax.Array, found: jax.Array) -> jax.Array:
        return found.at[index].set(one(passes.at(index)))

    each = jax.eval_shape(one, passes.at(0))
    empty = jax.numpy.zeros((passes.number, *each.shape), each.dtype)
    return jax.lax.fori_loop(0, passes.filled, body, empty)


def unpack(rows: np.ndarray, batch: Batch, number: int) -> list[np.ndarray]:
    """Per-token values `[B T]` of a packed batch as one array a sequence, in the sequences' order."""
    real = np.asarray(batch.segment_ids) > 0
    owners, values = np.asarray(batch.sequence_ids)[real], rows[real]
    # Rows are read left to right, so a stable sort by owner keeps each sequence's own order.
    order = np.argsort(owners, kind="stable")
    return np.split(values[order], np.cumsum(np.bincount(owners, minlength=number))[:-1])
