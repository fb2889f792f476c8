"""Attention by Mosaic kernels for NVIDIA's Hopper and Blackwell GPUs: tokamax's (`pip install '.[gpu]'`) and ours.

The forward kernel is tokamax's. Its backward kernels visit every block before a query's, other documents of the row
included; on Hopper ours (`mosaic_backward.py`) visit what is seen, and tokamax's replace them where they are wrong.

Each query sees an interval of keys, by its columns: from the start of its segment or of its window up to itself. Where
segments share a prompt, a second call lets each query see its interval of the prompt, and both are merged by their
log-sum-exp. The forward and the backward kernel are called apart, so that what is kept between them is named in one
place (`attend.py`).

Axes: B rows, T time, Q queries of a block, N query heads, K kv heads, H head dim.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tunix.models.attention.inputs import (
    LANES,
    AttentionSpec,
    Gradients,
    Keys,
    Mixed,
    Queries,
    Segments,
    inner_products,
    merged,
)
from tunix.models.attention.tokamax_ops import attention_mask, for_the_device_in_use, missing, operation

CAPABILITIES = range(9, 11)
"""Compute capabilities that the kernels are written for: 9.x of Hopper, 10.x of Blackwell."""
HOPPER = 9
"""That which our backward kernels are written for: Blackwell's tensor cores have other instructions."""
WIDEST = 256
"""Numbers of a head up to which the kernels' blocks fit an SM's shared memory: at 512 they ask for 395 KB of 232 (told
by the compiler, tokamax 0.0.12)."""
NEVER = 1e30
"""A log-sum-exp beside which every weight is 0."""


class _Interval(NamedTuple):
    """The keys that each query sees of one part of its row."""

    start: Int[Array, "B Q"]
    """The first column."""
    stop: Int[Array, "B Q"]
    """The column after the last."""
    some: Bool[Array, "B Q"] | None = None
    """Whether there are any; None where there always are."""


def lacks(spec: AttentionSpec) -> str | None:
    """Why the kernel cannot compute a call; None where it can."""
    if spec.capability is None or int(spec.capability) not in CAPABILITIES:
        return "it needs an NVIDIA GPU of compute capability 9 or 10 (Hopper, Blackwell)"
    if spec.pictures:
        return "tokens of a picture see later ones"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16, not {spec.dtype}"
    if spec.queries != spec.keys and spec.queries % LANES:
        return f"parts of rows of {spec.queries} tokens are no multiple of {LANES}"
    if spec.head_dim > WIDEST:
        return f"heads of {spec.head_dim} numbers are wider than {WIDEST}"
    return missing("attention")


def lacks_hopper(spec: AttentionSpec) -> str | None:
    """Why our backward kernels cannot compute a call; None where they can."""
    if reason := lacks(spec):
        return reason
    return None if int(spec.capability or 0) == HOPPER else "its backward kernels are written for Hopper"


def forward(q: Queries, k: Keys, v: Keys, view: Segments, scale: float, softcap: float | None) -> Mixed:
    """As `attend.Implementation.forward`."""
    op, parts = operation("attention"), []
    k, v = (_by_segment(x, view) for x in (k, v))
    for interval in intervals(view, q.shape[1]):
        call = partial(op, mask=_mask(interval, q, k, view), logits_scale=scale, logits_soft_cap=softcap)
        with for_the_device_in_use():
            mixed, (top, total) = call(q, k, v, return_residuals=True)
        lse = (top + jnp.log(total)).swapaxes(1, 2)
        parts.append((mixed, lse if interval.some is None else jnp.where(interval.some[..., None], lse, -jnp.inf)))
    return reduce(merged, parts)


def backward(
    q: Queries, k: Keys, v: Keys, view: Segments, result: Mixed, d_mixed: Queries, scale: float, softcap: float | None
) -> Gradients:
    """As `attend.Implementation.backward`, by our kernels.

    Of two merged calls each adds its keys' part, by the merged log-sum-exp.
    """
    from tunix.models.attention.mosaic_backward import gradients  # half a second of jax's modules

    inner = inner_products(result[0], d_mixed)

    def of_interval(interval: _Interval, k: jax.Array, v: jax.Array) -> Gradients:
        stop = interval.stop if interval.some is None else jnp.where(interval.some, interval.stop, interval.start)
        inputs = (q, k, v, d_mixed, result[1], inner, interval.start, stop)
        return gradients(*inputs, scale=scale, softcap=softcap)

    return _over_intervals(of_interval, q, k, v, view)


def backward_of_tokamax(
    q: Queries, k: Keys, v: Keys, view: Segments, result: Mixed, d_mixed: Queries, scale: float, softcap: float | None
) -> Gradients:
    """As `backward`, by tokamax's kernels."""
    op, (mixed, lse) = operation("attention"), result

    def of_interval(interval: _Interval, k: jax.Array, v: jax.Array) -> Gradients:
        mass = lse if interval.some is None else jnp.where(interval.some[..., None], lse, NEVER)
        # The kernel takes the largest score and the sum of the others by it; of all that is known, the sum is 1.
        residuals = (mass.swapaxes(1, 2), jnp.ones_like(mass.swapaxes(1, 2)))
        with for_the_device_in_use():
            call = op.bind(q, k, v, mask=_mask(interval, q, k, view), logits_scale=scale, logits_soft_cap=softcap)
            settings = {name: value for name, value in call.kwargs.items() if name != "return_residuals"}
            by_name = op.vjp(residuals, mixed, d_mixed, *call.args, **settings)
        return by_name["q"], by_name["k"], by_name["v"]

    return _over_intervals(of_interval, q, k, v, view)


def _over_intervals(
    gradients_of: Callable[[_Interval, jax.Array, jax.Array], Gradients], q: Queries, k: Keys, v: Keys, view: Segments
) -> Gradients:
    """The sum of the gradients over the intervals that each query sees."""
    sorted_k, sorted_v = (_by_segment(x, view) for x in (k, v))
    parts = [gradients_of(interval, sorted_k, sorted_v) for interval in intervals(view, q.shape[1])]
    d_q, d_k, d_v = (reduce(jnp.add, part) for part in zip(*parts, strict=True))
    d_k, d_v = (_by_segment(x, view, back=True) for x in (d_k, d_v))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _by_segment(x: jax.Array, view: Segments, back: bool = False) -> jax.Array:
    """`[B T ...]` of the keys with each segment's tokens side by side, or as they were before that."""
    if not view.interleaved:
        return x
    order = jnp.argsort(view.ids, axis=1, stable=True)
    order = jnp.argsort(order, axis=1) if back else order
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)


def intervals(view: Segments, queries: int) -> list[_Interval]:
    """What each of the queries sees: of its own segment and, where prompts are shared, of its prompt.

    Where segments are interleaved, columns are those of the keys `_by_segment`.
    """
    columns = jnp.broadcast_to(jnp.arange(view.ids.shape[1]), view.ids.shape)
    ids, positions = (_by_segment(x, view) for x in (view.ids, view.positions))
    new = jnp.concatenate([jnp.ones_like(ids[:, :1]), jnp.diff(ids)], axis=1) != 0
    start = jax.lax.cummax(jnp.where(new, columns, 0), axis=1)
    first = start if view.window is None else jnp.maximum(start, columns - view.window + 1)
    seen = [_Interval(first, columns + 1)]
    length = view.ids.shape[1]

    @jax.vmap
    def of_prompt(ids, parents, positions, start):
        """The columns of each token's prompt in a row, within its window by positions."""
        begin = jax.ops.segment_min(start, ids, num_segments=length + 1)[parents]
        stop = jax.ops.segment_max(jnp.arange(length), ids, num_segments=length + 1)[parents] + 1
        # A prompt's positions are its columns, moved. A branch sees those before its own.
        moved = begin - positions[jnp.clip(begin, 0, length - 1)]
        stop = jnp.minimum(stop, positions[start] + moved)
        near = begin if view.window is None else jnp.maximum(begin, positions - view.window + 1 + moved)
        some = (parents != ids) & (near < stop)
        return _Interval(jnp.where(some, near, 0), jnp.where(some, stop, 1), some)

    if view.parents is not None:
        seen.append(of_prompt(ids, _by_segment(view.parents, view), positions, start))

    def of_queries(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(_by_segment(x, view, back=True), view.first, queries, axis=1)

    return jax.tree.map(of_queries, seen)


def _mask(interval: _Interval, q: jax.Array, k: jax.Array, view: Segments) -> Any:
    """tokamax's mask. Where queries are the keys' tokens it is said to be causal, so that later blocks are left out."""
    same_tokens = interval.some is None and q.shape[1] == k.shape[1] and not view.interleaved
    return attention_mask(
        k_start=interval.start[:, None], k_end=None if same_tokens else interval.stop[:, None], is_causal=same_tokens
    )
