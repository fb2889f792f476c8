"""How slots that decode, and pieces of prompts, read pages: the table of implementations, chosen once for an engine.

An implementation comes with the layout of pages that it reads. To add a kernel, write one file with `lacks` and
`of_slots`, and one line of `IMPLEMENTATIONS`.

Axes: B rows, C tokens at a time, N query heads, H head dim.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxtyping import Array, Float

from tunix.models.attention import decode_ragged, decode_triton, pages
from tunix.models.attention.decode_spec import DecodeSpec
from tunix.models.attention.inputs import Mixed
from tunix.models.attention.layouts import LARGEST, Columns, Interleaved, Pages, Rows
from tunix.models.attention.pages import SlotsView


class Reader(NamedTuple):
    """One way to read the pages of slots that decode."""

    name: str
    lacks: Callable[[DecodeSpec], str | None]
    """Why it cannot read a cache, e.g. "it needs a TPU"; None where it can."""
    layout: type[Pages]
    """The layout that it reads, which no other one does."""
    of_slots: Callable[..., Mixed]
    """Called as `of_slots(q, pages, view, scale=..., softcap=...)` on each device, with a `SlotsView`."""
    before_piece: Callable[..., Mixed] = pages.before_piece
    """Called likewise with a `PieceView`: what the tokens of a piece see of earlier ones."""
    in_place: bool = True
    """Whether it reads pages where they are; else they are gathered once a dispatch, and are there twice."""


IMPLEMENTATIONS: tuple[Reader, ...] = (
    Reader("ragged", decode_ragged.lacks, Interleaved, decode_ragged.of_slots),
    Reader("triton", decode_triton.lacks, Rows, decode_triton.of_slots, decode_triton.before_piece),
    Reader("gathered", lambda spec: None, Columns, pages.of_slots, in_place=False),
)
"""The implementations, the fastest first; the last one reads every cache."""
BY_NAME = {one.name: one for one in IMPLEMENTATIONS}


def reader(specs: Sequence[DecodeSpec]) -> Reader:
    """The first implementation of the table that can read a cache, given the spec of each shape of its heads."""
    return next(one for one in IMPLEMENTATIONS if _lacks(one, specs) is None)


def _lacks(one: Reader, specs: Sequence[DecodeSpec]) -> str | None:
    """Why an implementation cannot read a cache: what it lacks for the first shape of heads that it cannot read."""
    return next(filter(None, map(one.lacks, specs)), None)


def described(specs: Sequence[DecodeSpec], chosen: str) -> str:
    """The implementation that was chosen, and why no faster one: `triton (ragged: it needs a TPU)`."""
    faster = IMPLEMENTATIONS[: IMPLEMENTATIONS.index(BY_NAME[chosen])]
    reasons = [f"{one.name}: {_lacks(one, specs) or 'it gives other numbers on this device'}" for one in faster]
    return chosen + (f" ({'; '.join(reasons)})" if reasons else "")


def unsaved(specs: Sequence[DecodeSpec]) -> str | None:
    """Why a cache of 8 bits would save nothing on this platform; None where it does, and for other caches.

    Where pages are gathered they are there twice. A CPU does so with every cache.
    """
    if specs[0].cache not in LARGEST or specs[0].platform == "cpu" or reader(specs).in_place:
        return None
    kernel = IMPLEMENTATIONS[0 if specs[0].platform == "tpu" else 1]
    return f"{kernel.name} cannot read it in its place: {_lacks(kernel, specs)}"


def of_slots(
    q: Float[Array, "B C N H"], cache: Pages, view: SlotsView, *, scale: float, softcap: float | None
) -> Mixed:
    """Attention of new tokens of slots to their pages, on each device, by who reads pages of this layout."""
    own, (slots, number) = reader_of(cache), q.shape[:2]
    if number == 1 or not own.in_place:
        return own.of_slots(q, cache, view, scale=scale, softcap=softcap)
    # Kernels read for one query: guesses have slots of their own.
    found = own.of_slots(q.reshape(-1, 1, *q.shape[2:]), cache, view.apart(), scale=scale, softcap=softcap)
    mixed, lse = found
    return mixed.reshape(q.shape), lse.reshape(slots, number, -1)


def reader_of(cache: Pages) -> Reader:
    """The implementation that reads pages of this layout."""
    return next(one for one in IMPLEMENTATIONS if one.layout is type(cache))
