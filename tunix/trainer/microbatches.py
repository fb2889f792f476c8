"""A packed batch, cut into passes of equal shape and placed on the mesh.

Packing makes as many rows as it needs; a compiled function wants one shape. So rows are padded to M passes of R rows,
and the number of passes that are filled travels along: the loop of `step.py` stops there.

Axes: B rows as packed, M passes, R rows of a pass, T time, S sequences.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.data.packing import row_length
from tunix.mesh import RULES, row_shards
from tunix.models.config import DecoderConfig
from tunix.trainer.perf import layer_weights
from tunix.trainer.step import Passes
from tunix.types import Batch

TOKENS_PER_PASS = {"cpu": 2048}
"""Enough tokens to fill the matrix units, by platform; more only costs memory."""
TOKENS_ELSEWHERE = 8192
SCORES = 4
"""By how much dearer an operation of attention is than one of a matrix product, since its scores pass through memory: 3
in docs/log.md's row lengths on a CPU."""

PER_TOKEN = ("tokens", "positions", "segment_ids", "loss_mask", "sequence_ids")
"""A batch's own `[B T]` arrays, beside `parents`."""


@dataclass(frozen=True)
class Cut:
    """How batches are cut on a mesh."""

    rows: int
    """R: rows of a pass over all devices."""
    mesh: Mesh
    unit: int = 1
    """Sequences that share a row where a batch has `parents`."""

    def place(self, batch: Batch) -> Passes:
        """The batch on the devices, as passes; returns before the copy is done."""
        rows, size = batch.tokens.shape[0], batch.weights.shape[0]
        # As many passes as the fullest batch of this size can need, so that there is one shape.
        most = size if batch.parents is None else -(-size // self.unit)
        number = -(-max(most, rows) // self.rows)
        cut = partial(_cut, number, self.rows)
        own = PER_TOKEN if batch.parents is None else (*PER_TOKEN, "parents")
        rows_by_name = {name: cut(np.asarray(getattr(batch, name))) for name in own}
        values = {name: cut(np.asarray(x)) for name, x in batch.per_token.items()}
        by_rows = NamedSharding(self.mesh, PartitionSpec(None, RULES["rows"]))
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        filled = np.int32(-(-rows // self.rows))
        whole = (batch.weights, batch.lengths, dict(batch.counts), dict(batch.per_sequence), filled)
        return Passes(*jax.device_put((rows_by_name, values), by_rows), *jax.device_put(whole, everywhere))


def _cut(number: int, rows: int, x: np.ndarray) -> np.ndarray:
    """`[B ...]` as `[number rows ...]`, zeros behind."""
    padded = np.zeros((number * rows, *x.shape[1:]), x.dtype)
    padded[: len(x)] = x
    return padded.reshape(number, rows, *x.shape[1:])


def answers_per_row(
    mesh: Mesh, config: DecoderConfig, group: int, number: int, longest: int, completion: int, micro: int | None
) -> int:
    """How many answers to a prompt lie in one row, where the prompt is computed once: what takes the fewest operations.

    Longer rows compute a prompt less often. But attention multiplies a query with all keys before it in its row, those
    of other answers too; and there are fewer rows to be split over the mesh.

    Args:
        group: answers to a prompt.
        number: sequences of an update.
        longest: tokens of one at most.
        completion: tokens of its answer at most.
        micro: `micro_batch_size`, which a row does not exceed.
    """
    shards, filling = row_shards(mesh), _filling(mesh)
    # Of a layer, in operations a token; attention's two products see half of a row on average.
    weights, attention = 2 * layer_weights(config), 2 * SCORES * config.num_heads * config.head_dim

    def cost(together: int) -> int:
        length = row_length(together, longest, completion)
        return -(-number // (together * shards)) * length * (weights + attention * length)

    def fits(together: int) -> bool:
        return row_length(together, longest, completion) <= filling and together <= (micro or group)

    return min((k for k in range(1, group + 1) if group % k == 0 and (k == 1 or fits(k))), key=cost)


def rows_per_pass(mesh: Mesh, batch_size: int, micro_batch_size: int | None, length: int, packing: bool) -> int:
    """R, a multiple of the row shards of the mesh.

    Args:
        micro_batch_size: sequences of a pass as the recipe says, or None for what fills this kind of device.
        length: T.
        packing: packed batches have fewer rows than sequences, and the last pass is partly empty; so several
            passes are made of one batch.
    """
    shards = row_shards(mesh)
    if micro_batch_size is None:
        most = _filling(mesh) * shards // length
        micro_batch_size = min(most, _rows_of_a_part(batch_size, most) if packing else batch_size)
    return -(-max(micro_batch_size, 1) // shards) * shards


def _rows_of_a_part(batch_size: int, most: int) -> int:
    """R where a packed batch is computed in several passes, so that a last one with few rows wastes little.

    Each pass reads all weights and adds to all gradients: so a sixteenth of the batch, or a quarter of `most` (the rows
    that fill the devices) where that is more; half of the batch at most. Rounded up to what divides the batch evenly.
    """
    least = max(batch_size // 16, min(most // 4, batch_size // 2), 1)
    return -(-batch_size // max(batch_size // least, 1))


def _filling(mesh: Mesh) -> int:
    """Tokens that fill a device of this kind."""
    return TOKENS_PER_PASS.get(mesh.devices.flat[0].platform, TOKENS_ELSEWHERE)
