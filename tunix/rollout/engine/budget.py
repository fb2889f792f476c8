"""How many slots and pages a sampler has, by the bytes that there are for keys and values.

Where a dispatch gathers the pages of its slots, each page counts twice; where a kernel reads them in place, once.

Axes: Pt tokens of a page.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.errors import UserError
from tunix.models.attention.pages import SCALE_BYTES, STORED
from tunix.models.config import DELTANET, DecoderConfig, LayerKind
from tunix.models.deltanet import SlotStates
from tunix.rollout.engine.shapes import Sizes, usual_slots

MOST_SLOTS = 1024
"""Slots of a shard at most: with so many, reading the weights is a small part of a token's time."""
MOST_NUMBERS = 2**31
"""Numbers of the keys of a layer's pages on a device: kernels count them in 32 bits."""


class NoRoom(UserError):
    """There is no room for one request."""

    def __init__(self, message: str, need: float):
        """`need` bytes for keys and values on each device would be enough."""
        super().__init__(message)
        self.need = need


def page_bytes(config: DecoderConfig, mesh: Mesh, sizes: Sizes) -> tuple[int, ...]:
    """Bytes of a page (Pt) in all layers of each kind with pages, on each device."""
    number, scale = jnp.dtype(STORED[sizes.cache]).itemsize, SCALE_BYTES if sizes.cache == "int8" else 0

    def layer(kind: LayerKind) -> int:
        return 2 * _heads(kind, mesh) * sizes.page * (kind.head_dim * number + scale)

    return tuple(layer(kind) * config.kinds.count(kind) for kind in config.paged_kinds)


def state_bytes(config: DecoderConfig, mesh: Mesh) -> int:
    """Bytes of the states of a slot in all layers that have some, on each device, at most; 0 where none has."""
    delta, tensor = config.delta, mesh.shape["tensor"]
    if delta is None:
        return 0
    held = jax.eval_shape(lambda: SlotStates.empty(delta, 1, "float32"))
    each = sum(x.size * x.dtype.itemsize for x in held)
    split = tensor if delta.key_heads % tensor == 0 else 1
    return each // split * len(config.layers_with(DELTANET))


def _heads(kind: LayerKind, mesh: Mesh) -> int:
    """Kv heads of which a device has the keys and values."""
    tensor = mesh.shape["tensor"]
    return kind.kv_heads // (tensor if kind.kv_heads % tensor == 0 else 1)


def within(sizes: Sizes, config: DecoderConfig, mesh: Mesh, slots: int | None, room: float | None) -> Sizes:
    """The shapes with as many slots and pages as there is room for.

    Args:
        sizes: the other shapes.
        config: of the decoder that is sampled from.
        mesh: the sampler's.
        slots: as the user wants them; None for as many as have half of the longest sequence each, beside the whole
            window of layers with one, and no more than this kind of device can use.
        room: bytes for keys and values on each device; None where that is not known, and all that slots can need
            is taken.

    Raises:
        NoRoom: there is no room for one request.
    """
    kinds, times = range(len(sizes.windows)), 1 if sizes.in_place else 2
    states = 2 * state_bytes(config, mesh)  # a dispatch takes those of its slots out
    each = [times * number for number in page_bytes(config, mesh, sizes)]
    local = sum(sizes.columns(kind) * each[kind] for kind in kinds if sizes.windows[kind] is not None)
    longest = sum(sizes.columns(kind) * each[kind] for kind in kinds if sizes.windows[kind] is None)
    if slots is None and room is not None:
        # Windows are never short, and a slot more has one (`Sizes.most_pages`).
        slots = sizes.shards * max(1, min(int((room - local) / (local + states + longest / 2)), MOST_SLOTS))
    slots = -(-(slots or usual_slots(mesh.devices.flat[0].platform)) // sizes.shards) * sizes.shards
    counted = MOST_NUMBERS // max(_heads(kind, mesh) * sizes.page * kind.head_dim for kind in config.paged_kinds)
    # Layers with a window are never short of pages: slots give way (`Sizes.most_pages`).
    widest = max((sizes.columns(kind) for kind in kinds if sizes.windows[kind] is not None), default=1)
    slots = min(slots, sizes.shards * max(1, counted // widest - 1))
    most = tuple(min(number, counted) for number in sizes.most_pages(slots // sizes.shards))
    if room is None:
        return replace(sizes, slots=slots, pages=most)
    taken = sum(most[kind] * each[kind] for kind in kinds if sizes.windows[kind] is not None)
    taken += slots // sizes.shards * states
    whole = [kind for kind in kinds if sizes.windows[kind] is None]
    pages = int((room - taken) / max(sum(each[kind] for kind in whole), 1))
    if room < taken or any(pages < sizes.columns(kind) for kind in whole):
        need = taken + longest
        raise NoRoom(
            f"rollout.memory: {max(room, 0) / 1e9:.3g} GB are left for keys and values on each device, and one request "
            f"of {sizes.length} tokens beside {slots} slot(s) takes {need / 1e9:.3g} GB; allow more memory, fewer "
            "rollout.slots, a larger rollout.mesh.tensor or a shorter data.max_length",
            float(need),
        )
    return replace(
        sizes, slots=slots, pages=tuple(min(most[kind], pages) if kind in whole else most[kind] for kind in kinds)
    )
