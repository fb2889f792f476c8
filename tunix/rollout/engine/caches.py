"""What a dispatch takes out of the layers' caches, where its tokens go, and how the caches get it back.

Pages are read in their places, or gathered so that each slot has its own; states are those of the dispatch's slots.

Axes: Sl slots, C tokens at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tunix.models.attention.attend import at_each_device
from tunix.models.attention.pages import NOWHERE, Gathered, Pages, SlotsView, Table, Writes, brought_back, gathered
from tunix.models.deltanet import SlotStates


def view(reads: Any, positions: Int[Array, "Sl C"], live: jax.Array, size: int, window: int | None) -> SlotsView:
    """Where new tokens of each slot go, and what they see; slots that are not at work write nothing.

    Guesses behind the last token that may be sampled have no page, and are not written either.
    """
    column = positions // size - reads.first[:, None]
    inside = (column >= 0) & (column < reads.places.shape[1])
    place = jnp.take_along_axis(reads.places, jnp.where(inside, column, 0), axis=1)
    place = jnp.where(live[:, None] & inside & (place >= 0), place, NOWHERE)
    own = None if reads.sources is None else Gathered(reads.sources, reads.owners, reads.starts)
    return SlotsView(Writes(place, positions % size), positions, Table(reads.places, reads.first), own, window)


def written_to(reads: Any, held: Int[Array, "Sl"], steps: int, size: int) -> Int[Array, "Sl c"]:
    """The places of all pages that a dispatch may write to."""
    columns = (held // size - reads.first)[:, None] + jnp.arange((steps + size - 2) // size + 1)
    places = jnp.take_along_axis(reads.places, jnp.clip(columns, 0, reads.places.shape[1] - 1), axis=1)
    return jnp.where(columns < reads.places.shape[1], places, -1)


def taken_out(cache: Any, reads: Any, slots: Any) -> Any:
    """What a layer keeps, as the steps of a dispatch read and write it: states of its slots, and pages gathered, or all
    of them in their places; None of a layer that keeps nothing."""
    if isinstance(cache, SlotStates):
        return SlotStates(*(x[slots] for x in cache)).placed()
    return cache if cache is None or reads.sources is None else at_each_device(gathered, cache, reads.sources)


def put_back(cache: Any, taken: Any, slots: Any, paged: Any) -> Any:
    """What a layer keeps, with what a dispatch has written to.

    Args:
        cache: of all slots.
        taken: what the dispatch has taken out.
        slots: `[Sl]`, those of the dispatch.
        paged: what its slots read, and the places of all pages that may have been written to; None of other layers.
    """
    if cache is None:
        return None
    if isinstance(cache, SlotStates):
        both = zip(cache, taken, strict=True)
        return SlotStates(*(all.at[slots].set(mine, unique_indices=True) for all, mine in both)).placed()
    reads, places = paged

    def part(both: tuple[Pages, Pages], places: jax.Array, sources: jax.Array) -> Pages:
        return brought_back(*both, places, sources)

    return taken if reads.sources is None else at_each_device(part, (cache, taken), places, reads.sources)
