"""Log-probs, entropies and values of given sequences: packed, computed in micro-batches, and unpacked again.

Axes: B rows, T time, S sequences, M micro-batches, R rows of a micro-batch.
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
from tunix.trainer.microbatches import Microbatcher
from tunix.trainer.step import Microbatches
from tunix.types import Batch, Sequence
from tunix.util.exact import jit
from tunix.util.loops import loop


@dataclass(frozen=True)
class Scorer:
    """Computes per-token log-probs, entropies and values of sequences with one model."""

    model: Model
    microbatcher: Microbatcher
    length: int
    """T, the maximum tokens of a sequence."""

    def logprobs(
        self, params: Params, sequences: List[Sequence], size: int | None = None, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """The `[T]` log-probs of each sequence's tokens given the tokens before, 0 for the first.

        Args:
            params: all weights.
            sequences: at least one.
            size: number of sequences that the compiled shape is made for; calls of one size compile once.
            temperature: divides the logits.
        """
        return self._scored(partial(self._logprobs, temperature=temperature), params, sequences, size)

    def entropies(
        self, params: Params, sequences: List[Sequence], size: int | None = None, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """The `[T]` entropies in nats of the distributions of each sequence's tokens, 0 for the first.

        Args:
            params: all weights.
            sequences: at least one.
            size: as in `logprobs`.
            temperature: divides the logits.
        """
        return self._scored(partial(self._logprobs, temperature=temperature, entropy=True), params, sequences, size)

    def values(self, params: Params, sequences: List[Sequence], size: int | None = None) -> list[np.ndarray]:
        """The `[T]` values of states: at t, of the state before token t, 0 for the first. Requires a value head.

        Args:
            params: all weights.
            sequences: at least one.
            size: as in `logprobs`.
        """
        return self._scored(self._values, params, sequences, size)

    def _scored(
        self, compiled: Callable, params: Params, sequences: List[Sequence], size: int | None
    ) -> list[np.ndarray]:
        batch = pack(sequences, size or len(sequences), self.length, packing=True, multiple=self.microbatcher.multiple)
        with jax.set_mesh(self.microbatcher.mesh):
            values = np.asarray(compiled(params, self.microbatcher.place(batch)))
        return unpack(values.reshape(-1, values.shape[-1])[: batch.tokens.shape[0]], batch, len(sequences))

    def compute_logprobs(
        self, params: Params, microbatches: Microbatches, temperature: float, entropy: bool = False
    ) -> Float[Array, "M R T"]:
        """The log-probs of all tokens, or the entropies: the pure function that is compiled."""

        def one(rows: Batch) -> jax.Array:
            read = map(jax.numpy.asarray, (rows.tokens, rows.positions, rows.segment_ids, rows.segment_ids > 0))
            return self.model.logprobs(params, *read, entropy=entropy, temperature=temperature)[int(entropy)]

        return each_microbatch(one, microbatches)

    def compute_values(self, params: Params, microbatches: Microbatches) -> Float[Array, "M R T"]:
        """The values of all states: the pure function that is compiled."""

        def one(rows: Batch) -> jax.Array:
            tokens, positions, segments = map(jax.numpy.asarray, (rows.tokens, rows.positions, rows.segment_ids))
            hidden = self.model.hidden(params, tokens, positions, segments)
            return self.model.values_of(params, hidden, positions)

        return each_microbatch(one, microbatches)

    @property
    def options(self) -> dict[str, str]:
        """The options of XLA with which log-probs are compiled."""
        return fast_products(self.microbatcher.mesh, self.model.dtype)

    @cached_property
    def _logprobs(self):
        return jit(self.compute_logprobs, static_argnames=("temperature", "entropy"), options=self.options)

    @cached_property
    def _values(self):
        return jit(self.compute_values)


def each_microbatch(one: Callable[[Batch], jax.Array], microbatches: Microbatches) -> Float[Array, "M R T *width"]:
    """Applies `one` to each filled micro-batch and stacks its per-token scalars or vectors; zeros elsewhere."""

    def body(index: jax.Array, stacked: jax.Array) -> jax.Array:
        return stacked.at[index].set(one(microbatches.at(index)))

    each = jax.eval_shape(one, microbatches.at(0))
    empty = jax.numpy.zeros((microbatches.number, *each.shape), each.dtype)
    return loop(microbatches.filled, body, empty, usual=microbatches.number)


def unpack(rows: np.ndarray, batch: Batch, number: int) -> list[np.ndarray]:
    """Splits per-token values `[B T]` of a packed batch into one array for each sequence, in their order."""
    real = np.asarray(batch.segment_ids) > 0
    owners, values = np.asarray(batch.sequence_ids)[real], rows[real]
    # Rows are read left to right, so a stable sort by owner keeps each sequence's own order.
    order = np.argsort(owners, kind="stable")
    return np.split(values[order], np.cumsum(np.bincount(owners, minlength=number))[:-1])
