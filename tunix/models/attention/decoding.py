"""How slots that decode read their pages: the table of its implementations, chosen once for an engine.

An implementation comes with the layout of pages that it reads. To add a kernel, write one file with `lacks` and
`of_slots`, and one line of `IMPLEMENTATIONS`.

Axes: N query heads, K kv heads, H head dim, Pt tokens of a page.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from tunix.config import CacheType, DType
from tunix.mesh import partition
from tunix.models.attention import decode_ragged, decode_triton, pages
from tunix.models.attention.decode_spec import DecodeSpec
from tunix.models.attention.inputs import Mixed
from tunix.models.attention.layouts import LARGEST, Columns, Interleaved, Pages, Rows
from tunix.models.config import DecoderConfig


class Reader(NamedTuple):
    """One way to read the pages of slots that decode."""

    name: str
    lacks: Callable[[DecodeSpec], str | None]
    """Why it cannot read a cache, e.g. "it needs a TPU"; None where it can."""
    layout: type[Pages]
    """The layout that it reads, which no other one does."""
    of_slots: Callable[..., Mixed]
    """Called as `of_slots(q, pages, view, scale=..., softcap=...)` on each device, with a `SlotsView`."""
    in_place: bool = True
    """Whether it reads pages where they are; else they are gathered once a dispatch, and are there twice."""


IMPLEMENTATIONS: tuple[Reader, ...] = (
    Reader("ragged", decode_ragged.lacks, Interleaved, decode_ragged.of_slots),
    Reader("triton", decode_triton.lacks, Rows, decode_triton.of_slots),
    Reader("gathered", lambda spec: None, Columns, pages.of_slots, in_place=False),
)
"""The implementations, the fastest first; the last one reads every cache."""
BY_NAME = {one.name: one for one in IMPLEMENTATIONS}


def spec_of(config: DecoderConfig, mesh: Mesh, dtype: DType, cache: CacheType, page: int) -> DecodeSpec:
    """What is read on each device of a mesh: pages of `page` tokens by queries of this dtype."""
    device = mesh.devices.flat[0]
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    capability = getattr(device, "compute_capability", None) if platform == "gpu" else None
    split = partition(("kv_heads",), (config.num_kv_heads,), mesh)[0] is not None
    parts = mesh.shape["tensor"] if split else 1
    return DecodeSpec(
        config.num_heads // parts,
        config.num_kv_heads // parts,
        config.head_dim,
        dtype,
        cache,
        page,
        tuple(kind.window for kind in config.distinct_kinds),
        config.attention_softcap,
        platform,
        None if capability is None else float(capability),
    )


def reader(spec: DecodeSpec) -> Reader:
    """The first implementation of the table that can read a cache."""
    return next(one for one in IMPLEMENTATIONS if one.lacks(spec) is None)


def unsaved(spec: DecodeSpec) -> str | None:
    """Why a cache of 8 bits would save nothing on this platform; None where it does, and for other caches.

    Where pages are gathered they are there twice. A CPU does so with every cache.
    """
    if spec.cache not in LARGEST or spec.platform == "cpu" or reader(spec).in_place:
        return None
    kernel = IMPLEMENTATIONS[0 if spec.platform == "tpu" else 1]
    return f"{kernel.name} cannot read it in its place: {kernel.lacks(spec)}"


def reader_of(cache: Pages) -> Reader:
    """The implementation that reads pages of this layout."""
    return next(one for one in IMPLEMENTATIONS if one.layout is type(cache))
