"""Log-probs and values of given sequences: packed, computed in micro-batches, and unpacked again.

Nothing waits for the devices: the arrays are read when the first of them is looked at.

Axes: B rows, T time, S sequences, M micro-batches, R rows of a micro-batch.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, overload

import jax
import numpy as np
from jaxtyping import Array, Float

from tunix.data.packing import pack
from tunix.distributed.global_arrays import everywhere
from tunix.mesh import compiler_options
from tunix.models.model import Model, Params
from tunix.trainer.microbatches import Microbatcher, Microbatches
from tunix.trainer.step import forward_of
from tunix.types import Batch, Sequence
from tunix.util.exact import jit
from tunix.util.loops import loop

Scores = Literal["logprobs", "values"]
"""What is computed of each token of a sequence."""


class Later(List[np.ndarray]):
    """Arrays of sequences, `[T]` each, which may be on their way: waited for when one is looked at."""

    def __init__(self, number: int, at: Callable[[int], np.ndarray]):
        """`at` waits for the array of a sequence, of which there are `number`."""
        self._number, self._at = number, at

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        chosen = range(self._number)[index]
        return self._at(chosen) if isinstance(chosen, int) else [self._at(i) for i in chosen]


@dataclass(frozen=True)
class Scorer:
    """Computes per-token log-probs and values of sequences with one model."""

    model: Model
    microbatcher: Microbatcher
    length: int
    """T, the maximum tokens of a sequence."""

    def lowered(
        self,
        kind: Scores,
        params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
        microbatches: Microbatches,
        temperature: float = 1.0,
    ) -> jax.stages.Lowered:
        """The program that `scores` runs on such arrays, which may be shapes, lowered but not compiled."""
        with jax.set_mesh(self.microbatcher.mesh):
            if kind == "values":
                return self._values.lower(params, microbatches)
            return self._logprobs.lower(params, microbatches, temperature=temperature)

    def scores(
        self,
        kind: Scores,
        params: Params,
        sequences: List[Sequence],
        size: int | None = None,
        temperature: float = 1.0,
    ) -> List[np.ndarray]:
        """`[T]` numbers of each sequence, 0 for its first token, and for untrained ones where transcripts share some.

        `logprobs` are those of each token given the tokens before; `values` are at t of the state before token t, and
        require a value head.

        Args:
            kind: what is computed.
            params: all weights.
            sequences: at least one.
            size: number of sequences that the compiled shape is made for; calls of one size compile once.
            temperature: divides the logits.
        """
        batch, lengths = self.packed(sequences, size), [len(x.tokens) for x in sequences]
        with jax.set_mesh(self.microbatcher.mesh):
            microbatches = self.microbatcher.place(batch)
            if kind == "values":
                scores = self._values(params, microbatches)
            else:
                scores = self._logprobs(params, microbatches, temperature=temperature)
            stacked = everywhere(scores)
        stacked.copy_to_host_async()

        @cache
        def arrived() -> list[np.ndarray]:
            values = np.asarray(stacked)
            return unpack(values.reshape(-1, values.shape[-1])[: batch.tokens.shape[0]], batch, lengths)

        return Later(len(lengths), lambda i: arrived()[i])

    def packed(self, sequences: List[Sequence], size: int | None) -> Batch:
        """The sequences in rows, as many as `size` of them can need."""
        splits = self.microbatcher
        return pack(
            [replace(x, per_token={}, per_sequence={}) for x in sequences],
            size or len(sequences),
            self.length,
            multiple=splits.multiple,
            pictures=splits.pictures,
            trie=splits.trie and splits.unit == 1,
        )

    @cached_property
    def _logprobs(self):
        def compute_logprobs(params: Params, microbatches: Microbatches, temperature: float) -> jax.Array:
            def of_rows(rows: Batch) -> jax.Array:
                hidden, _ = forward_of(self.model, params, rows)
                tokens, positions, needed = map(jax.numpy.asarray, (rows.tokens, rows.positions, rows.segment_ids > 0))
                candidates = jax.tree.map(jax.numpy.asarray, rows.candidates)
                return self.model.logprobs_of(
                    params, hidden, tokens, positions, needed, temperature=temperature, candidates=candidates
                )[0]

            return each_microbatch(of_rows, microbatches)

        options = compiler_options(self.microbatcher.mesh, self.model.dtype)
        return jit(compute_logprobs, static_argnames="temperature", options=options)

    @cached_property
    def _values(self):
        def compute_values(params: Params, microbatches: Microbatches) -> jax.Array:
            def of_rows(rows: Batch) -> jax.Array:
                hidden, _ = forward_of(self.model, params, rows)
                return self.model.values_of(params, hidden, jax.numpy.asarray(rows.positions))

            return each_microbatch(of_rows, microbatches)

        return jit(compute_values)


def each_microbatch(compute: Callable[[Batch], jax.Array], microbatches: Microbatches) -> Float[Array, "M R T *width"]:
    """Applies `compute` to each filled micro-batch and stacks its per-token scalars or vectors; zeros elsewhere."""

    def body(index: jax.Array, stacked: jax.Array) -> jax.Array:
        return stacked.at[index].set(compute(microbatches.at(index)))

    each = jax.eval_shape(compute, microbatches.at(0))
    empty = jax.numpy.zeros((microbatches.number, *each.shape), each.dtype)
    return loop(microbatches.filled, body, empty, usual=microbatches.number)


def unpack(rows: np.ndarray, batch: Batch, lengths: List[int]) -> list[np.ndarray]:
    """Splits per-token values `[B T *width]` of a packed batch into one array for each sequence, of these lengths.

    Of a trie, where a token may be left out or stand behind another branch, those that are trained; the others have 0.
    """
    real, starts = np.asarray(batch.loss_mask if batch.interleaved else batch.segment_ids > 0), np.cumsum([0, *lengths])
    owners, places = (np.asarray(x)[real] for x in (batch.sequence_ids, batch.places))
    values = np.zeros((starts[-1], *rows.shape[2:]), rows.dtype)
    values[starts[owners] + places] = rows[real]
    return np.split(values, starts[1:-1])
