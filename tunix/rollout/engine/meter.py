"""What a batch of requests takes of the devices: slots that had something to sample, and bytes that had to be read.

Axes: Sl slots, Pt tokens of a page.
"""

import jax
import numpy as np

from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.rollout.engine.budget import page_bytes, state_bytes
from tunix.rollout.engine.shapes import Sizes
from tunix.types import Usage


class Meter:
    """Counts the dispatches of one batch."""

    def __init__(self, model: Model, weights: Weights, sizes: Sizes, requests: int):
        """Nothing has been counted.

        Args:
            model: what is sampled from.
            weights: its weights; each device reads its part of them in every step.
            sizes: the shapes of the batch.
            requests: how many there are: slots beyond them are never counted as idle.
        """
        read = (x for x in jax.tree.leaves(weights) if x is not weights.top["embed/w"] or model.config.tied)
        self._weights = sum(x.addressable_shards[0].data.nbytes for x in read)
        mesh = jax.sharding.get_mesh()
        self._token = [size / sizes.page for size in page_bytes(model.config, mesh, sizes)]
        self._states = state_bytes(model.config, mesh)
        self._sizes, self._slots = sizes, min(sizes.slots, requests)
        self._tokens = self._steps = 0
        self._bytes = 0.0

    def add(self, held: np.ndarray, counts: np.ndarray) -> None:
        """Counts a dispatch.

        Args:
            held: `[Sl]` tokens in the cache of each slot before it.
            counts: `[Sl]` tokens that it sampled in each.
        """
        steps = int(counts.max(initial=0))
        self._tokens, self._steps = self._tokens + int(counts.sum()), self._steps + steps
        self._bytes += steps * self._weights + self._states * int(counts.sum()) / self._sizes.shards
        for window, each in zip(self._sizes.windows, self._token, strict=True):
            # A slot that samples c tokens from h on reads h + 1, ..., h + c of them: c h + c (c + 1) / 2.
            seen = counts * (held + (counts + 1) / 2)
            if window is not None:
                seen = np.minimum(seen, counts * window)
            self._bytes += each * float(seen.sum()) / self._sizes.shards

    @property
    def usage(self) -> Usage:
        """All that was counted."""
        return Usage(self._tokens, self._steps * self._slots, self._bytes)
