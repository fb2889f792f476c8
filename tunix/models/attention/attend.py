"""Attention: the calls that training, prefill and decoding make, and the table of its implementations.

To add a kernel, write one file, `models/attention/NAME.py`, with three functions, and one line of `IMPLEMENTATIONS`:

    def lacks(spec: AttentionSpec) -> str | None     # why it cannot compute a call; None where it can
    def forward(q, k, v, view, scale, softcap)       # `Mixed`: what `einsum.forward` returns
    def backward(q, k, v, view, result, d_mixed, scale, softcap)     # `Gradients`

The derivative is taken here, around the choice among kinds of layers, and keeps q, k, v and the result: a kernel's
forward pass never runs twice, whatever else is recomputed. Prompts are computed by the same code as rows of training;
tokens that are decoded read pages (`pages.py`), and their log-probs have to agree (the metrics `mismatch/*`).

Axes: B rows, T time, N query heads, K kv heads, H head dim.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from tunix.mesh import partition, platform, shards
from tunix.models.attention import chunked, einsum, mosaic, splash
from tunix.models.attention.decoding import of_slots, reader_of
from tunix.models.attention.inputs import (
    LANES,
    AttentionSpec,
    ByKind,
    Gradients,
    Mixed,
    Queries,
    Segments,
    because,
    inner_products,
    merged,
    past_sinks,
)
from tunix.models.attention.pages import CachedView, Pages, PieceView, kind_of, placed, rounded
from tunix.models.attention.tokamax_ops import capability
from tunix.util.loops import switch

CONTEXT = "context"
"""The mesh axis over which the tokens of rows are split."""
KEPT = ("mixed", "lse")
"""Names of what the backward pass reads of the forward pass, besides q, k and v."""
NOWHERE = -3
"""The segment of what fills a row: no implementation gives another this number."""
SHORT = 1024
"""Tokens of a row up to which the einsums are taken where no kernel is: the scores of so short rows cost less than the
chunks' loops."""


class Implementation(NamedTuple):
    """One way to compute attention within packed rows."""

    name: str
    lacks: Callable[[AttentionSpec], str | None]
    """Why it cannot compute a call, e.g. "it needs a TPU"; None where it can."""
    forward: Callable[..., Mixed]
    """Called as `forward(q, k, v, view, scale=..., softcap=...)` with `Segments`."""
    backward: Callable[..., Gradients]
    """Called as `backward(q, k, v, view, result, d_mixed, scale=..., softcap=...)`: the result of `forward`, past the
    sinks where there are some, and the gradient by what it mixed. A sink is a key without a value, so that weights made
    again from its log-sum-exp have the right gradients."""
    local: bool = False
    """Whether each device calls it for its own rows and heads; else it is written for all, and XLA splits it."""
    kernel: bool = False
    """Whether it is a device's own, to be compared with the einsums there before use (`models/kernel_gates.py`)."""


class _Call(NamedTuple):
    """What is known of a call while its program is traced, for each kind of layer."""

    implementations: tuple[Implementation, ...]
    windows: tuple[int | None, ...]
    layers: tuple[int, ...]
    """How many layers there are of each kind; nothing where there is one."""
    scale: float
    softcap: float | None
    ahead: int
    interleaved: bool
    """Both as in `Segments`."""


def attend(
    q: Queries,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    view: Segments | ByKind,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Queries:
    """`softmax(scale q.k) v` over the keys of the same rows that each query sees.

    Args:
        q: rotated queries.
        k: rotated keys of the same tokens.
        v: their values.
        view: which tokens see each other, the window, and which implementation computes it.
        scale: multiplies q.k.
        softcap: `softcap * tanh(scores / softcap)` before the mask.
        sinks: a score of each head that takes part in the softmax and mixes no value: weights may sum to less than 1.

    Raises:
        ValueError: the implementation that the view names cannot compute the call.
    """
    return _within_rows(q, k, v, view, scale, softcap, sinks)[0]


def attend_cached(
    q: Float[Array, "B C N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    cache: Pages,
    view: CachedView,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    written: bool = False,
) -> tuple[Float[Array, "B C N H"], Pages]:
    """Attention of new tokens to their sequences, whose earlier tokens are in pages; and the pages with the new ones.

    Args:
        q: rotated queries, one of each slot or those of packed pieces (`view`).
        k, v, scale, softcap, sinks: as in `attend`.
        cache: the layer's pages.
        view: where the tokens are written and which pages they see.
        written: whether the pages have the new tokens already, as another layer's whose keys and values these are.
    """
    new = rounded(k, v, kind_of(cache))

    def part(cache, q, new, view):
        # Written before they are read, which changes nothing of earlier tokens, so that pages are changed in place.
        if not written:
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), new)
            cache = cache.with_tokens(view.writes.pages.reshape(-1), view.writes.offsets.reshape(-1), flat)
        if isinstance(view, PieceView):
            return cache, reader_of(cache).before_piece(q, cache, view, scale=scale, softcap=softcap)
        return cache, of_slots(q, cache, view, scale=scale, softcap=softcap)

    cache, result = at_each_device(part, cache, q, new, view, mixes=True)
    if isinstance(view, PieceView):
        k, v = new.exact(q.dtype)
        result = merged(_within_rows(q, k, v, view.segments, scale, softcap), result)
    return past_sinks(result, sinks)[0], cache


def at_each_device(part: Callable, cache: Pages | tuple[Pages, Pages], *more: Any, mixes: bool = False) -> Any:
    """What each device of the mesh in use computes with its part of a layer's pages.

    Args:
        part: returns pages, such as the first ones it is given; or pages and `Mixed`.
        cache: the pages, which are split over rows and kv heads.
        more: arrays, or trees of them, that `part` is given too: over rows, and heads where they have so many axes.
        mixes: whether there is a `Mixed`, for the queries that come first in `more`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return part(cache, *more)
    first = cache if isinstance(cache, Pages) else cache[0]
    heads = "heads" if first.kv_heads % shards("heads") == 0 else None

    def place(x: jax.Array) -> jax.sharding.PartitionSpec:
        axes = ("rows", None) if x.ndim <= 2 else ("rows", None, heads, None)
        return partition(axes[: x.ndim], x.shape, mesh)

    # Views are opened up: their fields would not take places for arrays.
    leaves, tree = jax.tree.flatten(more)
    placement = placed(first, lambda x, axes: partition(axes, x.shape, mesh))
    held = placement if isinstance(cache, Pages) else (placement, placement)
    results = (placement, (place(leaves[0]), place(leaves[0][..., 0]))) if mixes else placement
    by_device = jax.shard_map(
        lambda cache, *leaves: part(cache, *jax.tree.unflatten(tree, leaves)),
        mesh=mesh,
        in_specs=(held, *map(place, leaves)),
        out_specs=results,
        check_vma=False,
    )
    return by_device(cache, *leaves)


def _within_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    view: Segments | ByKind,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None = None,
) -> Mixed:
    """Attention within packed rows by the implementation that the view names; what it mixed has a derivative."""
    views, kind, layers = view if isinstance(view, ByKind) else ((view,), None, ())
    specs = [spec_of(q, k, one, softcap) for one in views]
    chosen = tuple(implementation(spec, one.attention) for spec, one in zip(specs, views, strict=True))
    windows, first = tuple(one.window for one in views), views[0]
    call = _Call(chosen, windows, layers, scale, softcap, first.ahead, first.interleaved)
    tokens, length = first.tokens, q.shape[1]
    if any(one.kernel for one in chosen) and length % LANES and parts_of(length) == 1:
        # Kernels want whole blocks: what is added to rows is a segment of its own.
        def fill(x: jax.Array, value: int) -> jax.Array:
            return jnp.pad(x, ((0, 0), (0, -length % LANES), *((0, 0),) * (x.ndim - 2)), constant_values=value)

        q, k, v = (fill(x, 0) for x in (q, k, v))
        tokens = jax.tree.map(partial(fill, value=NOWHERE), tokens)
    mixed, lse = cast(Mixed, _attend(call, q, k, v, tokens, kind, sinks))
    return mixed[:, :length], lse[:, :length]


def implementation(spec: AttentionSpec, wanted: str = "auto") -> Implementation:
    """The implementation of a call: the one that is wanted or, by `auto`, the first of the table that can compute it.

    `auto` takes the einsums for rows of at most SHORT tokens where only they and chunks remain.

    Raises:
        ValueError: the one that is wanted cannot, and why.
    """
    if wanted != "auto":
        named = BY_NAME[wanted]
        if reason := named.lacks(spec):
            raise ValueError(f"attention: {wanted} cannot be used here: {reason}")
        return named
    able = [one for one in IMPLEMENTATIONS if one.lacks(spec) is None]
    short = spec.keys <= SHORT and spec.queries == spec.keys
    return BY_NAME["einsum"] if able[0].name == "chunked" and short else able[0]


def described(specs: Sequence[AttentionSpec], wanted: str = "auto") -> str:
    """Which implementation computes each of these calls, and why not a faster one: `einsum (splash: it needs a TPU)`.

    Raises:
        ValueError: the one that is wanted cannot compute one of them, and why.
    """
    by_text: dict[str, list[AttentionSpec]] = {}
    for spec in specs:
        chosen = implementation(spec, wanted)
        faster = IMPLEMENTATIONS[: IMPLEMENTATIONS.index(chosen)] if wanted == "auto" else ()
        text = because(chosen.name, ((kernel.name, kernel.lacks(spec)) for kernel in faster))
        by_text.setdefault(text, []).append(spec)
    if len(by_text) == 1:
        return next(iter(by_text))
    windows = {text: ", ".join(f"{spec.window or 'whole'}" for spec in those) for text, those in by_text.items()}
    return "; ".join(f"windows {windows[text]}: {text}" for text in by_text)


def spec_of(
    q: jax.Array | jax.ShapeDtypeStruct, k: jax.Array | jax.ShapeDtypeStruct, view: Segments, softcap: float | None
) -> AttentionSpec:
    """The spec of a call of `attend`, on the mesh in use."""
    return AttentionSpec(
        queries=q.shape[1] // parts_of(q.shape[1]),
        keys=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        dtype=str(q.dtype),
        branched=view.parents is not None,
        pictures=view.pictures is not None,
        window=view.window,
        softcap=softcap,
        platform=platform(),
        capability=capability(),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, q, k, v, tokens, kind, sinks) -> Mixed:
    return past_sinks(_by_kind(call, "forward", kind, q, k, v, tokens), sinks)


def _by_kind(call: _Call, name: Literal["forward", "backward"], kind, q, k, v, tokens, *more):
    def branch(method: Implementation, window: int | None) -> Callable:
        def compute(q, k, v, tokens, *more, first=0):
            view = Segments(*tokens[:3], window=window, first=first, pictures=tokens.pictures, ahead=call.ahead)
            view = view._replace(interleaved=call.interleaved)
            return getattr(method, name)(q, k, v, view, *more, scale=call.scale, softcap=call.softcap)

        return partial(_on_each_device, compute, name) if method.local else compute

    branches = list(map(branch, call.implementations, call.windows))
    if kind is None:
        return branches[0](q, k, v, tokens, *more)
    return switch(kind, branches, q, k, v, tokens, *more, times=call.layers)


def _on_each_device(compute: Callable, name: Literal["forward", "backward"], q, k, v, tokens, *more) -> Any:
    """What `compute` returns, computed by each device of the mesh in use for the rows, queries and heads that it has.

    Heads stay whole where the mesh does not divide the kv heads. Where rows are split over `context`, a device attends
    with its queries to the keys of whole rows, which it gathers, and adds its share to their gradients.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return compute(q, k, v, tokens, *more)
    heads = "heads" if k.shape[2] % shards("heads") == 0 else None
    split = parts_of(q.shape[1]) > 1

    def part(q, k, v, tokens, *more):
        if not split:
            return compute(q, k, v, tokens, *more)
        k, v, tokens = jax.tree.map(partial(jax.lax.all_gather, axis_name=CONTEXT, axis=1, tiled=True), (k, v, tokens))
        result = compute(q, k, v, tokens, *more, first=jax.lax.axis_index(CONTEXT) * q.shape[1])
        if name == "forward":
            return result
        shares = partial(jax.lax.psum_scatter, axis_name=CONTEXT, scatter_dimension=1, tiled=True)
        return result[0], shares(result[1]), shares(result[2])

    def place(x: jax.Array) -> jax.sharding.PartitionSpec:
        axes = ("rows", "time") if x.ndim == 2 else ("rows", "time", heads, None)
        return partition(axes[: x.ndim], x.shape, mesh)

    inputs = (q, k, v, tokens, *more)
    results = (place(q), place(q[..., 0])) if name == "forward" else tuple(map(place, (q, k, v)))
    specs = jax.tree.map(place, inputs)
    return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)(*inputs)


def parts_of(length: int) -> int:
    """Into how many parts the mesh in use splits rows of this length."""
    return shards("time") if length % shards("time") == 0 else 1


def _forward(call: _Call, q, k, v, tokens, kind, sinks):
    result = tuple(map(checkpoint_name, _attend(call, q, k, v, tokens, kind, sinks), KEPT))
    return result, (q, k, v, tokens, kind, sinks, result)


def _backward(call: _Call, saved, d_result):
    q, k, v, tokens, kind, sinks, (mixed, lse) = saved
    d_mixed, _ = d_result  # nobody differentiates the log-sum-exp
    gradients = _by_kind(call, "backward", kind, q, k, v, tokens, (mixed, lse), d_mixed)
    if sinks is None:
        return *gradients, None, None, None
    d_sinks = -jnp.sum(jnp.exp(sinks - lse) * inner_products(mixed, d_mixed), axis=(0, 1))
    return *gradients, None, None, d_sinks.astype(sinks.dtype)


_attend.defvjp(_forward, _backward)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("splash", splash.lacks, splash.forward, splash.backward, local=True, kernel=True),
    Implementation("mosaic", mosaic.lacks_hopper, mosaic.forward, mosaic.backward, local=True, kernel=True),
    Implementation("tokamax", mosaic.lacks, mosaic.forward, mosaic.backward_of_tokamax, local=True, kernel=True),
    Implementation("chunked", lambda spec: None, chunked.forward, chunked.backward, local=True),
    Implementation("einsum", lambda spec: None, einsum.forward, einsum.backward),
)
"""The implementations of attention, the fastest first; the last ones compute every call."""
BY_NAME = {one.name: one for one in IMPLEMENTATIONS}
