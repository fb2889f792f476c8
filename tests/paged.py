"""Slots with one page each, for tests that run the decoder token by token without an engine.

Axes: B rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tunix.config import DType
from tunix.models.attention.pages import Columns, Gathered, Pages, SlotsView, Table, Writes
from tunix.models.blocks import Cache
from tunix.models.config import DecoderConfig
from tunix.models.deltanet import StepView
from tunix.models.kv_cache import Weights, empty, extend
from tunix.models.model import Model


def pages_of(config: DecoderConfig, rows: int, length: int, dtype: DType = "float32") -> tuple[Cache, ...]:
    """Empty pages: row r has page r, of `length` tokens."""
    return empty(config, [rows] * len(config.paged_kinds), length, dtype, slots=rows, dtype=dtype)


def next_token(
    model: Model, weights: Weights, caches: tuple[Cache, ...], tokens: Int[Array, "B"], at: Int[Array, "B"]
) -> tuple[jax.Array, tuple[Cache, ...]]:
    """Hidden states `[B 1 D]` of one new token of each row at these positions, and the pages with it."""
    rows = jnp.arange(len(tokens))
    table, positions = Table(rows[:, None], 0 * rows), at[:, None]
    own = Gathered(rows[None], rows[None], 0 * rows[None])
    views = [
        SlotsView(Writes(rows[:, None], positions), positions, table, own, kind.window)
        for kind in model.config.paged_kinds
    ]
    return extend(model, weights, caches, tokens[:, None], positions, views, StepView(rows >= 0))[:2]


def slots_of_row(k: jax.Array, v: jax.Array) -> tuple[Pages, SlotsView]:
    """A slot for each token of a row `[T K H]`, whose page holds the whole row: token t is what slot t decodes."""
    number = len(k)
    pages = Columns(*(jnp.stack([x] * number) for x in (k.transpose(1, 2, 0), v.transpose(1, 0, 2))))
    rows = jnp.arange(number)
    own = Gathered(rows[None], rows[None], 0 * rows[None])
    return pages, SlotsView(Writes(rows[:, None], rows[:, None]), rows[:, None], Table(rows[:, None], 0 * rows), own)
