"""Prefill and decode as two pure functions of flat trees, with every shape fixed: what `stablehlo` exports.

They are the engine's functions (`models.kv_cache`), with the books that it keeps on the host left out: each row has one
page, as long as a sequence may become, so that where a token goes and what it sees follow from its position alone.
Prompts are one packed piece, as the engine prefills them; layers with states hold those of each row.

Axes: B rows, C tokens at a time, V vocabulary; C are those of the longest prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tunix.models.attention.pages import (
    NOWHERE,
    Gathered,
    PieceView,
    SlotsView,
    Table,
    Visits,
    Writes,
)
from tunix.models.deltanet import PIECE_CHUNK, PieceStates, StepView
from tunix.models.kv_cache import Weights, empty, extend
from tunix.models.model import Model

STEP = 64
"""A prompt's length is a multiple of it, since attention reads a piece in blocks of so many."""
Flat = dict[str, jax.Array]
"""Weights by name: `embed/w`, and those of a layer as `layers/3/q/w`."""
Found = tuple[Float[Array, "B V"], list[jax.Array]]
"""Logits of the next tokens in float32, and the arrays of the cache."""


@dataclass(frozen=True)
class Shapes:
    """The fixed sizes of both programs."""

    batch: int
    """B, e.g. 1."""
    prompt: int
    """C, e.g. 512."""
    length: int
    """Tokens of prompt and answer together, e.g. 1024."""


def flat(weights: Weights) -> Flat:
    """Weights for decoding by name."""
    layers = enumerate(weights.layers)
    return {**weights.top, **{f"layers/{n}/{name}": x for n, layer in layers for name, x in layer.items()}}


def unflat(weights: Flat, layers: int) -> Weights:
    """The inverse of `flat`."""
    top = {name: x for name, x in weights.items() if not name.startswith("layers/")}
    found: list[dict[str, jax.Array]] = [{} for _ in range(layers)]
    for name, x in weights.items():
        if name not in top:
            _, number, rest = name.split("/", 2)
            found[int(number)][rest] = x
    return Weights(top, tuple(found))


@dataclass(frozen=True)
class Programs:
    """The two functions of one model."""

    model: Model
    shapes: Shapes

    def prefill(self, weights: Flat, tokens: Int[Array, "B C"], lengths: Int[Array, "B"]) -> Found:
        """Reads a prompt into each row of an empty cache.

        Args:
            weights: by name.
            tokens: the prompts, each from the first column on; what is behind its length means nothing.
            lengths: tokens of each prompt, from 1 to C.

        Returns:
            Logits of the token after each prompt, and the cache.
        """
        s, own = self.shapes, unflat(weights, self.model.config.num_layers)
        columns, rows = (jnp.arange(number, dtype=jnp.int32) for number in (s.prompt, s.batch))
        ids = jnp.where(columns < lengths[:, None], rows[:, None] + 1, 0).reshape(1, -1)
        positions, last = jnp.tile(columns, s.batch)[None], rows * s.prompt + lengths - 1
        # Nothing came before the piece, and each row is written to its own page, from the first place on.
        none, begins = jnp.zeros((1, 1), jnp.int32), jnp.zeros_like(ids)
        visits = Visits(none, none, none, none, none[0])
        writes = Writes(jnp.where(ids > 0, ids - 1, NOWHERE), positions)
        windows = [kind.window for kind in self.model.config.paged_kinds]
        views = [PieceView(ids, positions, begins, visits, writes, window) for window in windows]
        chunks = np.full((s.batch, s.prompt // PIECE_CHUNK), -2, np.int32)  # each continues the one before
        chunks[:, 0] = -1  # or is its sequence's first
        states = PieceStates(ids, jnp.asarray(chunks.reshape(1, -1)), last)
        hidden, caches, _ = extend(self.model, own, self._empty(), tokens.reshape(1, -1), positions, views, states)
        logits = self.model.logits(own.top, hidden[0, last][:, None])[:, 0]
        return logits, jax.tree.leaves(caches)

    def decode(
        self, weights: Flat, cache: list[jax.Array], tokens: Int[Array, "B"], positions: Int[Array, "B"]
    ) -> Found:
        """Reads one more token in each row.

        Args:
            weights: by name.
            cache: of the call before.
            tokens: the next tokens.
            positions: how many tokens each row has before them; a token behind `Shapes.length` is not kept.

        Returns:
            Logits of the token after that, and the cache.
        """
        s, own = self.shapes, unflat(weights, self.model.config.num_layers)
        rows, at = jnp.arange(s.batch)[:, None], positions[:, None]
        writes = Writes(jnp.where(at < s.length, rows, NOWHERE), at)
        # Each row's page is where its number says, and begins at position 0.
        gathered, table = Gathered(rows.T, rows.T, 0 * rows.T), Table(rows, 0 * rows[:, 0])
        paged = self.model.config.paged_kinds
        views = [SlotsView(writes, at, table, gathered, kind.window) for kind in paged]
        caches = jax.tree.unflatten(self._tree, cache)
        live = StepView(jnp.ones(s.batch, bool))
        hidden, caches, _ = extend(self.model, own, caches, tokens[:, None], at, views, live)
        return self.model.logits(own.top, hidden)[:, 0], jax.tree.leaves(caches)

    def _empty(self) -> Any:
        c, s = self.model.config, self.shapes
        numbers = [s.batch] * len(c.paged_kinds)
        return empty(c, numbers, s.length, self.model.dtype, slots=s.batch, dtype=self.model.dtype)

    @property
    def _tree(self) -> Any:
        return jax.tree.structure(jax.eval_shape(self._empty))

    def arguments(self, weights: Flat) -> dict[str, tuple[Callable, tuple]]:
        """Both functions by name, and what they are called with, as shapes.

        Args:
            weights: arrays, or their shapes and dtypes.
        """
        s = self.shapes

        def ids(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        of_weights = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in weights.items()}
        cache = jax.tree.leaves(jax.eval_shape(self._empty))
        return {
            "prefill": (self.prefill, (of_weights, ids(s.batch, s.prompt), ids(s.batch))),
            "decode": (self.decode, (of_weights, cache, ids(s.batch), ids(s.batch))),
        }
