"""Splits a packed batch into micro-batches of equal shape and places them on the mesh; `TrainerSpec`, what stays fixed.

The number of packed rows varies, but a compiled function needs one shape. So rows are padded to M micro-batches of R
rows, and the number of filled micro-batches is passed along: the loop of `step.py` stops there.

Axes: B rows (as packed), M micro-batches, R rows of a micro-batch, T time, S sequences.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num

from tunix.data.packing import row_length
from tunix.distributed.global_arrays import placed
from tunix.lora.config import AdapterConfig
from tunix.mesh import RULES, by_rows, row_shards
from tunix.models.config import DecoderConfig
from tunix.models.model import Model
from tunix.trainer.perf import matmul_weights
from tunix.types import Batch, Pictures

Index = Int[Array, ""] | int
described = no_type_check
"""Marks records of arrays into which jax puts descriptions of arrays too, where a program is lowered and not called."""

TOKENS_PER_MICROBATCH = {"cpu": 2048}
"""Enough tokens to fill the matrix units, by platform; more only costs memory."""
TOKENS_ELSEWHERE = 8192
SCORES = 4
"""Cost of an operation of attention relative to one of a matrix product, since its scores are written to memory: 3 was
measured on a CPU (docs/log.md, row lengths)."""

PER_TOKEN = ("tokens", "positions", "segment_ids", "loss_mask", "sequence_ids")
"""The `[B T]` arrays that every batch has."""
OPTIONAL = ("parents", "experts", "candidates", "stored")
"""Arrays `[B T]`, `[B T L k]`, `[B T A]` and `[B T 2 A]` that only some have."""


@jax.tree_util.register_dataclass
@described
@dataclass(frozen=True)
class Microbatches:
    """A batch split into micro-batches of equal shape."""

    rows: Mapping[str, Num[Array, "M R T *replayed"] | Bool[Array, "M R T"]]
    """The batch's per-token fields by name, e.g. `tokens`; without those of `OPTIONAL` that it does not have."""
    values: Mapping[str, Num[Array, "M R T"]]
    """The batch's `per_token` values by name."""
    weights: Float[Array, "S"]
    lengths: Float[Array, "S"]
    counts: Mapping[str, Float[Array, ""]]
    per_sequence: Mapping[str, Num[Array, "S"]]
    filled: Int[Array, ""]
    """Number of micro-batches that hold rows, e.g. 3; the loop stops there."""
    pictures: Pictures | None = None
    """The batch's pictures, by micro-batches: each array is `[M R ...]`; None without any."""
    interleaved: bool = field(default=False, metadata={"static": True})
    """As the batch has it."""

    @property
    def number(self) -> int:
        """M, the number of micro-batches."""
        return self.rows["tokens"].shape[0]

    def at(self, index: Index) -> Batch:
        """The rows of one micro-batch `[R T]`, with the whole batch's per-sequence arrays and counts."""
        return Batch(
            **{name: rows[index] for name, rows in self.rows.items()},
            weights=self.weights,
            lengths=self.lengths,
            counts=self.counts,
            per_token={name: values[index] for name, values in self.values.items()},
            per_sequence=self.per_sequence,
            pictures=jax.tree.map(lambda x: x[index], self.pictures),
            interleaved=self.interleaved,
            places=None,
            teacher=None,  # it has read the batch by then
        )


@dataclass(frozen=True)
class Microbatcher:
    """How batches are split into micro-batches on a mesh."""

    rows: int
    """R, the rows of a micro-batch over all devices, e.g. 8."""
    mesh: Mesh
    unit: int = 1
    """Sequences that share a row in a batch with `parents`, e.g. 4."""
    pictures: int = 0
    """Pictures of a row at most where sequences are packed one by one, e.g. 2; 0 where the model sees none."""
    trie: bool = False
    """Whether transcripts of an episode share what they begin with; see `pack`."""

    @property
    def multiple(self) -> int:
        """What the number of packed rows is a multiple of: on several devices no micro-batch is partly empty."""
        return self.rows if row_shards(self.mesh) > 1 else 1

    def place(self, batch: Batch, put: Callable[[Any, NamedSharding], Any] = placed) -> Microbatches:
        """Copies the batch to the devices as micro-batches; returns before the copy is done.

        Args:
            batch: the packed rows.
            put: what is done with a tree of arrays; a plan only describes them.
        """
        number, rows = self.number(batch), batch.tokens.shape[0]

        def split(x: np.ndarray) -> np.ndarray:
            """Reshapes `[B ...]` to `[M R ...]`, padded with zeros at the end."""
            padded = np.zeros((number * self.rows, *x.shape[1:]), x.dtype)
            padded[: len(x)] = x
            return padded.reshape(number, self.rows, *x.shape[1:])

        names = (*PER_TOKEN, *(name for name in OPTIONAL if getattr(batch, name) is not None))
        rows_by_name = {name: split(np.asarray(getattr(batch, name))) for name in names}
        values = {name: split(np.asarray(x)) for name, x in batch.per_token.items()}
        places = by_rows(self.mesh, batch.tokens.shape[1])
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        filled = np.int32(-(-rows // self.rows))
        whole = (batch.weights, batch.lengths, dict(batch.counts), dict(batch.per_sequence), filled)
        pictures = None
        if batch.pictures is not None:
            seen, by_row = batch.pictures, NamedSharding(self.mesh, PartitionSpec(None, RULES["rows"]))
            pixels, grids = (put(split(np.asarray(x)), by_row) for x in (seen.pixels, seen.grids))
            rope = None if seen.rope is None else put(split(np.asarray(seen.rope)), places)
            pictures = Pictures(pixels, grids, put(split(np.asarray(seen.places)), places), rope)
        return Microbatches(
            *put((rows_by_name, values), places),
            *put(whole, everywhere),
            pictures=pictures,
            interleaved=batch.interleaved,
        )

    def number(self, batch: Batch) -> int:
        """M: the most micro-batches that a batch of this size can need, so that there is one shape."""
        rows, size = batch.tokens.shape[0], batch.weights.shape[0]
        most = size if batch.parents is None else -(-size // self.unit)
        return -(-max(most, rows) // self.rows)


def answers_per_row(
    mesh: Mesh, config: DecoderConfig, group: int, number: int, longest: int, completion: int, micro: int | None
) -> int:
    """The number of answers to a prompt that share a row, and its prompt, with the fewest operations.

    Longer rows compute a prompt less often. But attention multiplies a query with all keys before it in its row, also
    those of other answers, and there are fewer rows to split over the mesh.

    Args:
        group: answers to a prompt.
        number: sequences of an update.
        longest: maximum tokens of a sequence.
        completion: maximum tokens of its answer.
        micro: `micro_batch_size`, the maximum answers of a row.
    """
    shards, capacity = row_shards(mesh), _tokens_per_device(mesh)
    # Operations of a layer for a token; attention's two products span half of a row on average.
    of_layer = matmul_weights(config, head=False) // config.num_layers  # the mean where layers differ
    # Numbers of a token's queries, the mean over layers that have some.
    queries = float(np.mean([config.num_heads * kind.head_dim for kind in config.kinds if kind.head_dim]))
    weights, attention = 2 * of_layer, 2 * SCORES * queries

    limit, costs = group if micro is None else micro // shards, dict[int, float]()
    for together in (k for k in range(1, group + 1) if group % k == 0):
        length = row_length(together, longest, completion)
        if together == 1 or (length <= capacity and together <= limit):
            costs[together] = -(-number // (together * shards)) * length * (weights + attention * length)
    return min(costs, key=costs.__getitem__)


def rows_per_microbatch(mesh: Mesh, batch_size: int, micro_batch_size: int | None, length: int, packing: bool) -> int:
    """R, the rows of a micro-batch: a multiple of the row shards of the mesh.

    Args:
        micro_batch_size: sequences of a micro-batch as configured, or None for what fills this kind of device.
        length: T, tokens of a row.
        packing: packed batches have fewer rows than sequences, and the last micro-batch is partly empty; so a batch
            is split into several micro-batches.
    """
    shards = row_shards(mesh)
    rows = micro_batch_size
    if rows is None:
        most = _tokens_per_device(mesh) * shards * mesh.shape["context"] // length
        rows = batch_size
        if packing:
            # A partly filled last one has to waste little, but each micro-batch reads all weights and adds to all
            # gradients. So R is a sixteenth of the batch, or a quarter of `most` (the rows that fill the devices) where
            # that is more, and at most half of the batch, rounded up so that it divides the batch evenly.
            least = max(batch_size // 16, min(most // 4, batch_size // 2), 1)
            rows = -(-batch_size // max(batch_size // least, 1))
        rows = min(most, rows)
    return -(-max(rows, 1) // shards) * shards


def _tokens_per_device(mesh: Mesh) -> int:
    """Tokens of a micro-batch that keep one device of this mesh busy."""
    return TOKENS_PER_MICROBATCH.get(mesh.devices.flat[0].platform, TOKENS_ELSEWHERE)


@dataclass(frozen=True)
class TrainerSpec:
    """A model, its optimizer and its mesh, fixed while it trains."""

    model: Model
    mesh: Mesh
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    """Updates done -> learning rate, reported as `train/learning_rate`."""
    microbatcher: Microbatcher
    length: int
    """T of packed rows, e.g. 2048."""
    seed: int
    """Seed of everything random during training, e.g. 0."""
    adapter: AdapterConfig | None = None
    """The adapter that trains on a frozen base; None where all weights train."""
    skips_nonfinite: bool = False
    """Whether an update whose loss or gradients are not finite changes nothing."""
    remat_reason: str | None = None
    """Why the model's `remat` was chosen, for the run's first lines; None where the recipe names it."""
