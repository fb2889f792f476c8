"""The decoder with a cache of keys and values: new tokens meet those before them without computing them again.

Weights come as per-layer views (`unstack`), because layers run unrolled here: a scan would copy the caches. Each layer
holds keys `[B K H T]` and values `[B K T H]`; local layers hold a ring, in which position p stands in column p mod T.
New tokens are written first and attend afterwards, so the ring is as long as the window and the longest piece together.

Axes: B rows, C new tokens, T columns of a cache, D model, N query heads, K kv heads, H head dim, L layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tunix.config import DType
from tunix.mesh import Axes, constrain
from tunix.models.config import DecoderConfig
from tunix.models.decoder import embedded
from tunix.models.layers import HIDDEN, rms_norm, rope_tables, scaled
from tunix.models.model import Model, Params
from tunix.models.quantization.formats import in_compute

TOP = ("embed/w", "head/w", "norm/w")
"""The parameters outside of the layers that decoding reads."""
LAYERS = "layers/"
BY_ADAPTER = ("_lora_share", "_lora_gain")
"""Ends of the names of weights that have one entry for each adapter of a mixture, and one before them for none."""

Cache = tuple[jax.Array, jax.Array]
"""Keys `[B K H T]` and values `[B K T H]` of one layer: both products of attention read them as they lie."""


class Weights(NamedTuple):
    """A model's weights for decoding, in the compute dtype; quantized ones as they are."""

    top: Params
    """The tables and the final norm."""
    layers: tuple[Params, ...]
    """Of each layer its own, named without `layers/`."""


def unstack(model: Model, params: Params) -> Weights:
    """Copies of the weights (or of some), layer by layer, in the compute dtype. Wide matrices are turned
    (`Model.turned`)."""

    def view(name: str, x: jax.Array, axes: Axes) -> jax.Array:
        held = in_compute(name, model.on_grid(name, x), model.dtype)
        if name.removeprefix(LAYERS).removesuffix("/w") in model.turned:
            held, axes = jnp.moveaxis(held, 0, -1), (*axes[1:], axes[0])
        return constrain(jnp.copy(held), *axes)

    top = {name: view(name, params[name], model.axes[name]) for name in TOP if name in params}
    stacked = [name for name in params if name.startswith(LAYERS)]

    def layer(index: int) -> Params:
        return {name.removeprefix(LAYERS): view(name, params[name][index], model.axes[name][1:]) for name in stacked}

    return Weights(top, tuple(layer(index) for index in range(model.config.num_layers)))


def magnified(model: Model) -> bool:
    """Whether an adapter has magnitudes (DoRA)."""
    return any(name.endswith("_lora_m") for name in model.shapes)


def gains(model: Model, weights: Weights) -> tuple[Params, ...]:
    """What DoRA's magnitudes are for weights that do not change; decoding reads these in their place."""
    x = jnp.zeros((), model.dtype)

    def of_layer(own: Params) -> Params:
        found = model.layer(own, settled=False).projections().items()
        return {f"{name}/w_lora_m": one.gain(x) for name, one in found if one.adapter and one.adapter.magnitude}

    return tuple(map(of_layer, weights.layers))


def is_local(config: DecoderConfig, layer: int) -> bool:
    """Whether a layer sees its window only."""
    return config.window is not None and bool(config.local_layers) and config.local_layers[layer]


def columns(config: DecoderConfig, layer: int, length: int, piece: int) -> int:
    """T of a layer's cache for sequences of `length`, where at most `piece` tokens are new at a time.

    A ring forgets position p when p + T is written: `piece` columns beside the window keep what the first of the new
    tokens still sees, and what a sequence sees that is cut by as many tokens.
    """
    return min(length, config.window + piece) if config.window and is_local(config, layer) else length


def empty(config: DecoderConfig, rows: int, length: int, piece: int, dtype: DType) -> tuple[Cache, ...]:
    """Caches that hold nothing yet."""

    def one(layer: int) -> Cache:
        outer, size = (rows, config.num_kv_heads), columns(config, layer, length, piece)
        keys, values = (*outer, config.head_dim, size), (*outer, size, config.head_dim)
        return placed(jnp.zeros(keys, dtype)), placed(jnp.zeros(values, dtype))

    return tuple(one(layer) for layer in range(config.num_layers))


def placed(cache: jax.Array) -> jax.Array:
    """A cache where it lives on the mesh."""
    return constrain(cache, "rows", "kv_heads", None, None)


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
        start: tokens that a row's cache holds already.
        count: how many of a row's are real, 0 to C; the others are not written, and their states mean nothing.
        adapters: of a mixture (`lora/mixture.py`) the number of each row's, from 1; 0 for the bare base.
    """
    c = model.config
    offsets = jnp.arange(tokens.shape[1], dtype=start.dtype)
    positions, real = start[:, None] + offsets, offsets < count[:, None]
    ropes = _ropes(c, positions)
    views: dict[tuple[int, bool], _View] = {}
    x = constrain(embedded(c, weights.top["embed/w"], tokens, model.dtype), "rows", None, None)
    new = []
    for layer, (own, (keys, values)) in enumerate(zip(weights.layers, caches, strict=True)):
        kind = (values.shape[2], is_local(c, layer))
        if kind not in views:
            views[kind] = _view(positions, real, start + count, kind[0], c.window if kind[1] else None)
        block, view = model.layer(_of_rows(own, adapters)), views[kind]
        q, k, v = block.heads(x, ropes[kind[1]])
        keys, values = _write_keys(keys, k, view.columns), _write_values(values, v, view.columns)
        mixed = _attend(q, keys, values, view.bias, scale=c.scale, softcap=c.attention_softcap)
        x = block.rest(x, mixed)
        new.append((keys, values))
    return rms_norm(x, weights.top["norm/w"], eps=c.norm_eps, offset=c.norm_offset), tuple(new)


def _of_rows(own: Params, adapters: Int[Array, "B"] | None) -> Params:
    """A layer's weights with what each row takes of a mixture's adapters, `[B ...]`."""
    if adapters is None:
        return own
    return {name: x[adapters] if name.endswith(BY_ADAPTER) else x for name, x in own.items()}


class _View(NamedTuple):
    """What new tokens write to and see of one kind of cache."""

    columns: Int[Array, "B C"]
    """Where each is written; T, which is nowhere, for padding."""
    bias: Float[Array, "B C T"]
    """0 where the column is seen, else HIDDEN."""


def _view(
    positions: Int[Array, "B C"], real: Bool[Array, "B C"], end: Int[Array, "B"], size: int, window: int | None
) -> _View:
    last = end[:, None] - 1
    # Column j holds the latest position p <= last with p = j mod T; a negative one where nothing was written yet.
    held = last - (last - jnp.arange(size, dtype=last.dtype)) % size
    behind = positions[:, :, None] - held[:, None]
    seen = (behind >= 0) & (held >= 0)[:, None]
    if window is not None:
        seen &= behind < window
    return _View(jnp.where(real, positions % size, size), jnp.where(seen, 0.0, HIDDEN))


def _ropes(config: DecoderConfig, positions: Int[Array, "B C"]) -> dict[bool, tuple[jax.Array, jax.Array]]:
    """Rope tables by whether a layer is local."""
    everywhere = rope_tables(positions, config.rope, config.head_dim)
    near = config.rope_local
    return {False: everywhere, True: everywhere if near is None else rope_tables(positions, near, config.head_dim)}


def _write_keys(cache: Float[Array, "B K H T"], new: Float[Array, "B C K H"], at: Int[Array, "B C"]) -> jax.Array:
    """The cache with the new tokens' columns."""
    # Mapped over rows, so that a row's write stays with the devices that hold it.
    write = jax.vmap(lambda row, x, columns: row.at[:, :, columns].set(x, mode="drop"))
    return placed(write(cache, new.transpose(0, 2, 3, 1).astype(cache.dtype), at))


def _write_values(cache: Float[Array, "B K T H"], new: Float[Array, "B C K H"], at: Int[Array, "B C"]) -> jax.Array:
    write = jax.vmap(lambda row, x, columns: row.at[:, columns].set(x, mode="drop"))
    return placed(write(cache, new.transpose(0, 2, 1, 3).astype(cache.dtype), at))


def _attend(
    q: Float[Array, "B C N H"],
    keys: Float[Array, "B K H T"],
    values: Float[Array, "B K T H"],
    bias: Float[Array, "B C T"],
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B C N H"]:
    """`layers.attention` over a cache."""
    rows, new, heads, dim = q.shape
    kv_heads, size = values.shape[1], values.shape[2]
    q = scaled(q, scale).reshape(rows, new, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    queries = q.reshape(rows, kv_heads, -1, dim)
    scores = jnp.einsum("BKMH,BKHT->BKMT", queries, keys.astype(q.dtype), preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, kv_heads, -1, new, size)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores += bias[:, None, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(rows, kv_heads, -1, size)
    mixed = jnp.einsum("BKMT,BKTH->BKMH", weights, values.astype(q.dtype))
    return mixed.reshape(rows, kv_heads, -1, new, dim).transpose(0, 3, 1, 2, 4).reshape(rows, new, heads, dim)
