"""The decoder with a cache of keys and values: new tokens attend to earlier ones without recomputing them.

Weights are stored layer by layer (`unstack`), because layers run unrolled here: a scan would copy the caches. Each
layer has keys `[B K H T]` and values `[B K T H]`; local layers have a ring, in which position p is in column p mod T.
New tokens are written first and attend afterwards, so the ring is as long as the window and the longest piece together.

Axes: B rows, C tokens at a time, T time (columns of a cache), D model width, N query heads, K kv heads, H head dim, L
layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.config import DType
from tunix.mesh import Axes, constrain
from tunix.models.attention.inputs import Cache, CacheView, placed
from tunix.models.config import DecoderConfig
from tunix.models.decoder import embedded
from tunix.models.layers import rms_norm, rope_tables
from tunix.models.model import Model, Params
from tunix.models.quantization.formats import in_compute

TOP = ("embed/w", "head/w", "norm/w")
"""The parameters outside of the layers that decoding reads."""
LAYERS = "layers/"
BY_ADAPTER = ("_lora_share", "_lora_gain")
"""Suffixes of weights that have a first entry for no adapter, then one for each adapter of a mixture."""


class Weights(NamedTuple):
    """A model's weights for decoding, in the compute dtype; quantized ones as they are."""

    top: Params
    """The tables and the final norm."""
    layers: tuple[Params, ...]
    """The parameters of each layer, named without `layers/`."""


def unstack(model: Model, params: Params) -> Weights:
    """Copies of the weights (or of some), layer by layer, in the compute dtype.

    Wide matrices are stored with their contracted axes last (`Model.turned`).
    """

    def view(name: str, x: jax.Array) -> jax.Array:
        w = in_compute(name, model.on_grid(name, x), model.dtype)
        if name.removeprefix(LAYERS).removesuffix("/w") in model.turned:
            w = jnp.moveaxis(w, 0, -1)
        return constrain(jnp.copy(w), *view_axes(model, name))

    top = {name: view(name, params[name]) for name in TOP if name in params}
    stacked = [name for name in params if name.startswith(LAYERS)]

    def layer(index: int) -> Params:
        return {name.removeprefix(LAYERS): view(name, params[name][index]) for name in stacked}

    return Weights(top, tuple(layer(index) for index in range(model.config.num_layers)))


def view_axes(model: Model, name: str) -> Axes:
    """Logical axes of a parameter as `unstack` stores it, given its stacked name."""
    axes = model.axes[name][name.startswith(LAYERS) :]
    return (*axes[1:], axes[0]) if name.removeprefix(LAYERS).removesuffix("/w") in model.turned else axes


def magnified(model: Model) -> bool:
    """Whether an adapter has magnitudes (DoRA)."""
    return any(name.endswith("_lora_m") for name in model.shapes)


def gains(model: Model, weights: Weights) -> tuple[Params, ...]:
    """DoRA's gains in each layer, for weights that do not change; decoding reads them in place of the magnitudes."""
    x = jnp.zeros((), model.dtype)

    def of_layer(own: Params) -> Params:
        projections = model.layer(own, settled=False).projections().items()
        return {f"{name}/w_lora_m": one.gain(x) for name, one in projections if one.adapter and one.adapter.magnitude}

    return tuple(map(of_layer, weights.layers))


def columns(config: DecoderConfig, layer: int, length: int, piece: int) -> int:
    """T of a layer's cache for sequences of `length`, where at most `piece` tokens are new at a time.

    A ring forgets position p when p + T is written: `piece` columns more than the window keep what the first new token
    still sees, and what a sequence sees after its last `piece` tokens are cut off.
    """
    window = config.kinds[layer].window
    return length if window is None else min(length, window + piece)


def empty(config: DecoderConfig, rows: int, length: int, piece: int, dtype: DType) -> tuple[Cache, ...]:
    """Empty caches, one for each layer."""

    def one(layer: int) -> Cache:
        outer, size = (rows, config.num_kv_heads), columns(config, layer, length, piece)
        keys, values = (*outer, config.head_dim, size), (*outer, size, config.head_dim)
        return placed(jnp.zeros(keys, dtype)), placed(jnp.zeros(values, dtype))

    return tuple(one(layer) for layer in range(config.num_layers))


def extend(
    model: Model,
    weights: Weights,
    caches: tuple[Cache, ...],
    tokens: Int[Array, "B C"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    adapters: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B C D"], tuple[Cache, ...]]:
    """Hidden states of new tokens after the final norm, and the caches with them.

    Args:
        tokens: the new ones of each row, padded on the right.
        start: tokens that each row's cache holds already.
        count: how many of a row's tokens are real, 0 to C; padding is not written, and its states mean nothing.
        adapters: the number of each row's adapter where there are several (`lora/multi_lora.py`), from 1; 0 for none.
    """
    c = model.config
    offsets = jnp.arange(tokens.shape[1], dtype=start.dtype)
    positions, real = start[:, None] + offsets, offsets < count[:, None]
    ropes = {rope: rope_tables(positions, rope, c.head_dim) for rope in dict.fromkeys(x.rope for x in c.distinct_kinds)}
    views: dict[tuple[int, int | None], CacheView] = {}
    x = constrain(embedded(c, weights.top["embed/w"], tokens, model.dtype), "rows", None, None)
    new = []
    for kind, own, cache in zip(c.kinds, weights.layers, caches, strict=True):
        place = (cache[1].shape[2], kind.window)
        if place not in views:
            views[place] = _view(positions, real, start + count, *place)
        block = model.layer(_of_rows(own, adapters))
        x, cache, _ = block(x, ropes[kind.rope], views[place], cache)
        new.append(cache)
    return rms_norm(x, weights.top["norm/w"], eps=c.norm_eps, offset=c.norm_offset), tuple(new)


def _of_rows(own: Params, adapters: Int[Array, "B"] | None) -> Params:
    """A layer's weights, with the entry of each row's adapter `[B ...]` where adapters are mixed."""
    if adapters is None:
        return own
    return {name: x[adapters] if name.endswith(BY_ADAPTER) else x for name, x in own.items()}


def _view(
    positions: Int[Array, "B C"], real: Bool[Array, "B C"], end: Int[Array, "B"], size: int, window: int | None
) -> CacheView:
    """The view that new tokens have of a cache of `size` columns."""
    last = end[:, None] - 1
    # Column j holds the latest position p <= last with p = j mod T; a negative one where nothing was written yet.
    held = last - (last - jnp.arange(size, dtype=last.dtype)) % size
    return CacheView(jnp.where(real, positions % size, size), positions, held, window)
