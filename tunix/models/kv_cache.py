"""The decoder with a cache of keys and values, or of states: new tokens see earlier ones without recomputing them.

Weights are stored layer by layer (`unstack`), because layers run unrolled here: a scan would copy the caches. Each
layer has pages (`attention/pages.py`); layers of one kind use the same numbers of pages for the same tokens. A DeltaNet
has a state for each slot instead (`deltanet.py`).

Axes: B rows, C tokens at a time, D model width, K kv heads, H head dim, Pg pages, Pt tokens of a page, L layers,
Dp width of inputs of layers, k chosen experts of a token.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from tunix.config import CacheType, DType
from tunix.mesh import Axes, constrain, platform, shards
from tunix.models.attention.inputs import DecodeSpec
from tunix.models.attention.pages import CachedView, Columns, Pages, placed
from tunix.models.attention.tokamax_ops import capability
from tunix.models.blocks import NAMES, Cache, Kept, layer_inputs
from tunix.models.config import SHARED, DecoderConfig
from tunix.models.deltanet import PieceStates, SlotStates, StepView
from tunix.models.layers import RopeTables, rms_norm, rope_tables
from tunix.models.model import Model, Params, embedded
from tunix.models.moe import CHOSEN
from tunix.models.quantization.formats import SCALE, in_compute, rounded_matrix
from tunix.models.vision import with_pictures
from tunix.types import Pictures
from tunix.util.exact import once

LAYERS = "layers/"
BY_ADAPTER = ("_lora_share", "_lora_gain")
"""Suffixes of weights that have a first entry for no adapter, then one for each adapter of a mixture."""


class Weights(NamedTuple):
    """A model's weights for decoding, in the dtype in which they are multiplied; quantized ones as they are."""

    top: Params
    """The tables, the final norm, the tower that sees pictures, and the head that drafts tokens."""
    layers: tuple[Params, ...]
    """The parameters of each layer, named without `layers/`."""


def is_top(name: str) -> bool:
    """Whether decoding reads this parameter outside of the layers: any but a value head."""
    return not name.startswith((LAYERS, "value/"))


def unstack(model: Model, params: Params) -> Weights:
    """Copies of the weights (or of some), layer by layer, in the compute dtype, or in the 8 bits that are multiplied.

    Wide matrices are stored with their contracted axes last (`Model.turned`).
    """

    def view(name: str, x: jax.Array) -> Params:
        """A parameter as it is stored, and its scales where it is in 8 bits."""
        views, module = {name: in_compute(name, model.on_grid(name, x), model.dtype)}, module_of(name)
        if module in model.in_fp8:
            rounded = partial(rounded_matrix, contracted=model.matrices[module].contracted)
            rounded = jax.vmap(rounded) if model.matrices[module].stacked else rounded
            views[name], views[name + SCALE] = rounded(views[name])
        if module in model.turned:
            inputs = range(model.matrices[module].contracted)
            views[name] = jnp.moveaxis(views[name], inputs, range(-len(inputs), 0))
        return {name: constrain(jnp.copy(view), *view_axes(model, name)) for name, view in views.items()}

    top = {name: view(name, x)[name] for name, x in params.items() if is_top(name)}
    stacked = [name for name in params if name.startswith(LAYERS)]
    layers: list[Params] = [{} for _ in range(model.config.num_layers)]
    for name in stacked:
        for index, number in enumerate(model.layers_of[name]):
            views = view(name, params[name][index])
            layers[number] |= {stored.removeprefix(LAYERS): x for stored, x in views.items()}
    return Weights(top, tuple(layers))


def module_of(name: str) -> str:
    """The module whose matrix a stacked parameter is, as `q` of `layers/q/w`."""
    return name.removeprefix(LAYERS).removesuffix("/w")


def view_axes(model: Model, name: str) -> Axes:
    """Logical axes of a parameter as `unstack` stores it, given its stacked name."""
    of_scales = name not in model.axes  # of a matrix in 8 bits, one for each output
    name = name.removesuffix(SCALE) if of_scales else name
    axes, module = model.axes[name][name.startswith(LAYERS) :], module_of(name)
    if not (of_scales or module in model.turned):
        return axes
    inputs, stacked = model.matrices[module].contracted, model.matrices[module].stacked
    return (*axes[:stacked], None, *axes[stacked + inputs :]) if of_scales else (*axes[inputs:], *axes[:inputs])


def magnified(model: Model) -> bool:
    """Whether an adapter has magnitudes (DoRA)."""
    return any(name.endswith("_lora_m") for name in model.shapes)


def gains(model: Model, weights: Weights) -> tuple[Params, ...]:
    """DoRA's gains in each layer, for weights that do not change; decoding reads them in place of the magnitudes."""
    x = jnp.zeros((), model.dtype)

    by_layer: list[Params] = []
    for layer_weights, kind in zip(weights.layers, model.config.kinds, strict=True):
        projections = model.layer(layer_weights, kind.mixer, has_gains=False).projections().items()
        adapted = {name: part for name, part in projections if part.adapter and part.adapter.magnitude}
        by_layer.append({f"{name}/w_lora_m": part.gain(x) for name, part in adapted.items()})
    return tuple(by_layer)


def empty(
    config: DecoderConfig,
    numbers: Sequence[int],
    size: int,
    kind: CacheType,
    layout: type[Pages] = Columns,
    *,
    slots: int,
    dtype: DType,
) -> tuple[Cache | None, ...]:
    """Empty pages or states, those of each layer and then of the head that drafts (`DecoderConfig.cached_kinds`); None
    where a layer reads the keys and values of another.

    Args:
        config: of the decoder.
        numbers: Pg for each kind of layer with pages, over all shards of the rows.
        size: Pt.
        kind: what keys and values are kept in.
        layout: how they lie, as whoever decodes reads them (`attention/decoding.py`).
        slots: Sl, of layers with states.
        dtype: of the model, in which these hold the inputs of their convolutions.
    """

    caches: list[Cache | None] = []
    for of in config.cached_kinds:
        if of.mixer in SHARED:
            caches.append(None)
        elif of.paged:
            pages = layout.empty(numbers[config.paged_kinds.index(of)], of.kv_heads, of.head_dim, size, kind)
            caches.append(placed(pages, lambda x, axes: constrain(x, *axes)))
        else:
            assert config.delta is not None, "its sizes come with the layers"
            caches.append(SlotStates.empty(config.delta, slots, dtype))
    return tuple(caches)


def decode_specs(
    config: DecoderConfig, mesh: Mesh, dtype: DType, cache: CacheType, page: int
) -> tuple[DecodeSpec, ...]:
    """What is read on each device of a mesh, for each shape of the heads: pages of `page` tokens by queries of this
    dtype."""
    kinds, specs = config.paged_kinds, []
    with jax.set_mesh(mesh):
        for kv_heads, head_dim in dict.fromkeys((kind.kv_heads, kind.head_dim) for kind in kinds):
            parts = shards("kv_heads") if kv_heads % shards("kv_heads") == 0 else 1
            spec = DecodeSpec(
                config.num_heads // parts,
                kv_heads // parts,
                head_dim,
                dtype,
                config.attention_softcap,
                platform(),
                capability(),
                cache,
                page,
                tuple(kind.window for kind in kinds if (kind.kv_heads, kind.head_dim) == (kv_heads, head_dim)),
                config.sinks,
            )
            specs.append(spec)
    return tuple(specs)


def embeddings(
    model: Model, weights: Weights, tokens: Int[Array, "B C"], pictures: Pictures | None = None
) -> Float[Array, "B C D"]:
    """The embedded tokens, with those of pictures, which are whole, in the places of theirs."""
    x = embedded(model.config, weights.top["embed/w"], tokens, model.dtype)
    if pictures is not None:

        def seen(x: Float[Array, "B C D"]) -> Float[Array, "B C D"]:
            return with_pictures(x, model.soft_tokens(weights.top, pictures), pictures)

        # The tower does not run where there are none.
        x = jax.lax.cond(jnp.any(jnp.asarray(pictures.places) > 0), seen, lambda x: x, x)
    return constrain(x, "rows", None, None)


def extend(
    model: Model,
    weights: Weights,
    caches: tuple[Cache | None, ...],
    tokens: Int[Array, "B C"],
    positions: Int[Array, "B C ..."],
    views: Sequence[CachedView],
    states: StepView | PieceStates | None = None,
    adapters: Int[Array, "B"] | None = None,
    inputs: Float[Array, "B C D"] | None = None,
) -> tuple[Float[Array, "B C D"], tuple[Cache | None, ...], Int[Array, "B C L k"] | None]:
    """Hidden states of new tokens after the final norm, the caches with them, and the experts that each token used.

    Those are int16, of the layers with several; None where no layer has.

    Args:
        tokens: one new token of each slot, or packed pieces of prompts.
        positions: where rope turns each token to, as in `rope_tables`; states of padding mean nothing.
        views: where the tokens are written and what they see, for each kind of layer with pages.
        states: the same for layers with states, where there are any.
        adapters: the number of each row's adapter where there are several (`lora/multi_lora.py`), from 1; 0 for none.
        inputs: their embeddings, with pictures that the views know too; None for those of the tokens alone.
    """
    c = model.config
    ropes = [rope_tables(positions, kind.rope, kind.head_dim) for kind in c.distinct_kinds]
    x = embeddings(model, weights, tokens) if inputs is None else inputs
    inputs_of_layers: Any = [None] * c.num_layers
    if c.layer_inputs:
        table, context, norm = (weights.top[name] for name in NAMES)
        inputs_of_layers = layer_inputs(c, table, context, norm, tokens, x)
    new, kept, chosen = [], {}, []
    for kind, layer_weights, cache, layer_input in zip(c.kinds, weights.layers, caches, inputs_of_layers, strict=True):
        view = views[c.paged_kinds.index(kind.source)] if kind.source.paged else states
        assert view is not None, "layers with states have a view of them"
        rope = ropes[c.distinct_kinds.index(kind)]
        read = kept[kind.source] if kind.mixer in SHARED else cache
        with jax.named_scope(f"layer{len(new)}"):
            x, cache, experts = _layer(
                model, platform(), kind.mixer, layer_weights, x, rope, view, read, layer_input, adapters
            )
        if isinstance(cache, Kept):
            kept[kind], cache = cache, cache.pages
        new.append(cache)
        chosen += [] if experts is None else [experts.astype(jnp.int16)]
    hidden = rms_norm(x, weights.top["norm/w"], eps=c.norm_eps, offset=c.norm_offset)
    return hidden, tuple(new), constrain(jnp.stack(chosen, axis=2), "rows", None, None, None) if chosen else None


def draft(
    model: Model,
    weights: Weights,
    cache: Cache | None,
    hidden: Float[Array, "B C D"],
    x: Float[Array, "B C D"],
    positions: Int[Array, "B C ..."],
    view: CachedView,
) -> tuple[Float[Array, "B C D"], Cache | None]:
    """States from which the tokens after these are drafted, and the pages of the head that does so.

    Args:
        cache: its pages.
        hidden: of each token the backbone's state before it, or what this returned for the token before.
        x: the embeddings of these tokens.
        positions: where rope turns the tokens before them to, under which the head keeps each.
        view: where these are written and what they see.
    """
    assert isinstance(cache, Pages), "the head has attention"
    kind = model.config.cached_kinds[-1]
    rope = rope_tables(positions, kind.rope, kind.head_dim)
    return model.draft_head(weights.top)(x, hidden, rope, view, cache)


@partial(once, static=("model", "where", "mixer"))
def _layer(
    model: Model,
    where: str,
    mixer: str,
    layer_weights: Params,
    x: Float[Array, "B C D"],
    rope: RopeTables,
    view: CachedView | StepView | PieceStates,
    cache: Cache | None,
    layer_input: Float[Array, "B C Dp"] | None,
    adapters: Int[Array, "B"] | None,
) -> tuple[Float[Array, "B C D"], Cache | None, Int[Array, "B C k"] | None]:
    """A layer's output, its cache, and the experts of each token, where it has several.

    As a program within another, it is traced once for each kind of layer.

    Args:
        where: the platform, by which kernels are chosen: what was traced for one serves no other.
    """
    del where
    if adapters is not None:  # the entry of each row's adapter, `[B ...]`
        layer_weights = {name: w[adapters] if name.endswith(BY_ADAPTER) else w for name, w in layer_weights.items()}
    x, new, auxiliary = model.layer(layer_weights, mixer)(x, rope, view, cache, layer_input=layer_input)
    return x, new, auxiliary.get(CHOSEN)
