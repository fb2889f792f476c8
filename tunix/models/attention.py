"""Attention: the one call that training, prefill and decoding make, and the table of its implementations.

To add a kernel, write one file, `models/NAME.py`, with two functions, and one line of `IMPLEMENTATIONS` at the end of
this one:

    def supports(spec: AttentionSpec) -> bool           # what it computes, e.g. `spec.platform == "gpu" and ...`
    def attend(q, k, v, view, *, scale, softcap)        # the result of `einsum` below, in the dtype of q

The first entry that supports a call's spec computes it, so a special kernel comes before a general one. Training and
decoding may then be computed by different entries, whose log-probs have to agree (the metrics `mismatch/*`).

Axes: B rows, T time, N query heads, K kv heads, J query heads of a kv head, Q queries of a block, H head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.models.attention_inputs import HIDDEN, AttentionSpec, ByKind, CacheView, Segments

BLOCK_Q = 128
"""Queries of an attention block at least: a block skips the keys after its last query, nearly half of all scores."""
MOST_BLOCKS = 4
"""Blocks of a row at most; each is compiled on its own."""


class Implementation(NamedTuple):
    """One way to compute attention."""

    name: str
    supports: Callable[[AttentionSpec], bool]
    attend: Callable[..., jax.Array]
    """Called as `attend(q, k, v, view, scale=..., softcap=...)`."""


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B _ _ _"],
    v: Float[Array, "B _ _ _"],
    view: Segments | ByKind | CacheView,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """`softmax(scale q.k) v` over the keys that each query sees, by the first implementation that supports the call.

    Args:
        q: rotated queries.
        k: rotated keys: `[B T K H]` of the same tokens, or the cache's `[B K H T]` with the new tokens in it.
        v: values: `[B T K H]`, or the cache's `[B K T H]`.
        view: which tokens see each other, and the window.
        scale: multiplies q.k.
        softcap: `softcap * tanh(scores / softcap)` before the mask.

    Raises:
        ValueError: no implementation supports it.
    """
    if isinstance(view, ByKind):
        # A branch is recomputed in the backward pass, which keeps q, k and v alone: else each would also store what
        # the others keep, filled with zeros.
        branches = [partial(attend, view=one, scale=scale, softcap=softcap) for one in view.views]
        recomputed = [jax.checkpoint(branch, prevent_cse=False) for branch in branches]
        return jax.lax.switch(view.kind, recomputed, q, k, v)
    spec = spec_of(q, k, view, softcap)
    for one in IMPLEMENTATIONS:
        if one.supports(spec):
            return one.attend(q, k, v, view, scale=scale, softcap=softcap)
    names = ", ".join(one.name for one in IMPLEMENTATIONS)
    raise ValueError(f"no implementation of attention ({names}) supports {spec}: add one to models/attention.py")


def spec_of(q: jax.Array, k: jax.Array, view: Segments | CacheView, softcap: float | None) -> AttentionSpec:
    """The spec of a call of `attend`."""
    cached = isinstance(view, CacheView)
    kv_heads, keys = (k.shape[1], k.shape[3]) if cached else (k.shape[2], k.shape[1])
    return AttentionSpec(
        queries=q.shape[1],
        keys=keys,
        heads=q.shape[2],
        kv_heads=kv_heads,
        head_dim=q.shape[3],
        dtype=str(q.dtype),
        cached=cached,
        branched=not cached and view.parents is not None,
        window=view.window,
        softcap=softcap,
        platform=jax.default_backend(),
    )


def einsum(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B _ _ _"],
    v: Float[Array, "B _ _ _"],
    view: Segments | CacheView,
    *,
    scale: float,
    softcap: float | None,
) -> Float[Array, "B T N H"]:
    """Attention as plain batched products, for every spec and platform; arguments as in `attend`."""
    rows, length, heads, dim = q.shape
    cached = isinstance(view, CacheView)
    # Heads first, and the queries of a group as one matrix: plain batched products, which every backend does best.
    grouped = scaled(q, scale).reshape(rows, length, k.shape[1 if cached else 2], -1, dim).transpose(0, 2, 3, 1, 4)
    mixed = _cached(grouped, k, v, view, softcap) if cached else _packed(grouped, k, v, view, softcap)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, dim)


def scaled(q: Float[Array, "B T N H"], scale: float) -> Float[Array, "B T N H"]:
    """Queries times `scale`, multiplied in float32: Gemma 2 27B's 144^-0.5 in bfloat16 is 0.195 % too large."""
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


def _packed(
    q: Float[Array, "B K J T H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Segments,
    softcap: float | None,
) -> Float[Array, "B K J T H"]:
    """Attention within packed rows, by blocks of queries: a block skips the keys after its last query."""
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    length, blocks = q.shape[3], []
    size = max(BLOCK_Q, -(-length // MOST_BLOCKS))
    for start in range(0, length, size):
        stop = min(start + size, length)
        # A finite bias: it is added once per pair, where a select would compare again for every head.
        bias = jnp.where(segments.seen(start, stop), 0.0, HIDDEN)
        blocks.append(_block(q[:, :, :, start:stop], k[:, :, :stop], v[:, :, :stop], bias, "BKQH,BKTH->BKQT", softcap))
    return jnp.concatenate(blocks, axis=3)


def _cached(
    q: Float[Array, "B K J T H"], k: jax.Array, v: jax.Array, view: CacheView, softcap: float | None
) -> Float[Array, "B K J T H"]:
    """Attention of new queries over the whole cache, in whose layout both products read it without a transpose."""
    return _block(q, k.astype(q.dtype), v.astype(q.dtype), view.bias, "BKQH,BKHT->BKQT", softcap)


def _block(
    q: Float[Array, "B K J Q H"],
    k: jax.Array,
    v: Float[Array, "B K T H"],
    bias: Float[Array, "B Q T"],
    product: str,
    softcap: float | None,
) -> Float[Array, "B K J Q H"]:
    """Attention of a block of queries; the einsum `product` states the keys' layout. Scores and softmax are float32."""
    rows, kv_heads, _, number, dim = q.shape
    # In the products Q runs over the block's queries of all J heads.
    queries = q.reshape(rows, kv_heads, -1, dim)
    scores = jnp.einsum(product, queries, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, kv_heads, -1, number, v.shape[2])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores += bias[:, None, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(rows, kv_heads, -1, v.shape[2])
    mixed = jnp.einsum("BKQT,BKTH->BKQH", weights, v)
    return mixed.reshape(rows, kv_heads, -1, number, dim)


IMPLEMENTATIONS: tuple[Implementation, ...] = (Implementation("einsum", lambda spec: True, einsum),)
"""The implementations of attention, in the order in which they are tried; the last one supports every spec."""
