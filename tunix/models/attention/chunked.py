"""Attention by blocks of queries and keys with a running softmax: memory grows with a row's length, not its square.

A block of queries meets only the blocks of keys that some query of it sees: other documents of a packed row, keys
after the queries and keys before the window cost nothing. For every platform, without a kernel of its own (the scheme
is Dao's, https://arxiv.org/abs/2307.08691).

Axes: B rows, T time, N query heads, K kv heads, Q queries of a block (of all heads that share a kv head, where it
follows K), C tokens at a time (keys), H head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix.models.attention.inputs import (
    HIDDEN,
    Gradients,
    Keys,
    Mixed,
    Queries,
    Segments,
    Tokens,
    inner_products,
    scaled,
)
from tunix.util.loops import add_at, loop

BLOCK = 512
"""Queries and keys of a block."""
LAST = 2**30
"""Stands for the segment of padding, so that the segments of a block are a narrow range."""


class _Blocks(NamedTuple):
    """The rows of a call, cut into blocks."""

    q: Float[Array, "parts B K Q H"]
    k: Float[Array, "blocks B K C H"]
    v: Float[Array, "blocks B K C H"]
    tokens: Tokens
    """`[blocks B C]` each."""
    first: Int[Array, ""] | int
    """The block of keys that the first block of queries is at."""


def forward(q: Queries, k: Keys, v: Keys, view: Segments, scale: float, softcap: float | None) -> Mixed:
    """As `attend.Implementation.forward`."""
    size = block_size(q.shape[1], k.shape[1])
    blocks = _cut(scaled(q, scale), k, v, view, size)
    order, counts = met(blocks, view, size)

    def of_queries(i: Int[Array, ""]) -> tuple[Float[Array, "B K Q H"], Float[Array, "B K Q"]]:
        def meet(n: Int[Array, ""], running: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, mixed = running
            j = order[i, n]
            scores, _ = _scores(blocks, view, i, j, size, softcap)
            new_top = jnp.maximum(top, jnp.max(scores, -1))
            # What a query does not see at all counts as 1 until it meets itself, and is multiplied by 0 then.
            shrink, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
            new = jnp.einsum(
                "BKQC,BKCH->BKQH", weights.astype(v.dtype), blocks.v[j], preferred_element_type=jnp.float32
            )
            return new_top, total * shrink + jnp.sum(weights, -1), mixed * shrink[..., None] + new

        shape = blocks.q.shape[1:]
        nothing = jnp.zeros(shape[:-1], jnp.float32)
        start = (nothing + HIDDEN, nothing, jnp.zeros(shape, jnp.float32))
        top, total, mixed = loop(counts[i], meet, start, usual=usual(len(blocks.k), size, view.window))
        return (mixed / total[..., None]).astype(q.dtype), top + jnp.log(total)

    mixed, mass = jax.lax.map(of_queries, jnp.arange(len(blocks.q)))
    return _joined(mixed, q.shape), _joined(mass[..., None], (*q.shape[:3], 1))[..., 0]


def backward(
    q: Queries, k: Keys, v: Keys, view: Segments, result: Mixed, d_mixed: Queries, scale: float, softcap: float | None
) -> Gradients:
    """As `attend.Implementation.backward`: each block's weights are made again from the log-sum-exp of its queries."""
    size, kv_heads = block_size(q.shape[1], k.shape[1]), k.shape[2]
    blocks = _cut(scaled(q, scale), k, v, view, size)
    order, counts = met(blocks, view, size)
    d_mixed_blocks = _queries(d_mixed, kv_heads, size)
    per_query = (result[1], inner_products(result[0], d_mixed))
    mass_blocks, inner_blocks = (_queries(x[..., None], kv_heads, size)[..., 0] for x in per_query)

    def of_queries(sums: tuple[jax.Array, jax.Array], i: Int[Array, ""]):
        def meet(n: Int[Array, ""], sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_q, d_k, d_v = sums
            j = order[i, n]
            scores, slope = _scores(blocks, view, i, j, size, softcap)
            weights = jnp.exp(scores - mass_blocks[i][..., None])
            d_weights = jnp.einsum(
                "BKQH,BKCH->BKQC", d_mixed_blocks[i], blocks.v[j], preferred_element_type=jnp.float32
            )
            d_scores = (weights * (d_weights - inner_blocks[i][..., None]) * slope).astype(q.dtype)
            d_q += jnp.einsum("BKQC,BKCH->BKQH", d_scores, blocks.k[j], preferred_element_type=jnp.float32)
            new_k = jnp.einsum("BKQC,BKQH->BKCH", d_scores, blocks.q[i], preferred_element_type=jnp.float32)
            new_v = jnp.einsum(
                "BKQC,BKQH->BKCH", weights.astype(v.dtype), d_mixed_blocks[i], preferred_element_type=jnp.float32
            )
            return d_q, add_at(d_k, j, new_k), add_at(d_v, j, new_v)

        start = (jnp.zeros(blocks.q.shape[1:], jnp.float32), *sums)
        d_q, d_k, d_v = loop(counts[i], meet, start, usual=usual(len(blocks.k), size, view.window))
        return (d_k, d_v), (d_q * scale).astype(q.dtype)

    nothing = jnp.zeros(blocks.k.shape, jnp.float32)
    (d_k, d_v), d_q = jax.lax.scan(of_queries, (nothing, nothing), jnp.arange(len(blocks.q)))
    return _joined(d_q, q.shape), _joined(d_k.astype(k.dtype), k.shape), _joined(d_v.astype(v.dtype), v.shape)


def block_size(queries: int, keys: int) -> int:
    """Queries and keys of a block, for so many of each in a row; where queries are a part of it, whole blocks are."""
    if queries == keys:
        return min(BLOCK, keys)
    return max(size for size in range(1, min(BLOCK, queries) + 1) if queries % size == 0)


def usual(blocks: int, size: int, window: int | None) -> int:
    """How many blocks of keys a block of queries meets in a row of one document, in the mean, rounded up."""
    most = blocks if window is None else min(blocks, -(-(window - 1) // size) + 1)
    return -(-sum(min(i + 1, most) for i in range(blocks)) // blocks)


def met(blocks: _Blocks, view: Segments, size: int) -> tuple[Int[Array, "parts blocks"], Int[Array, "parts"]]:
    """For each block of queries: the blocks of keys in the order in which it meets them, and how many it meets.

    It meets those of which it may see some key, judged by the ranges of their segments.
    """

    def ranges(ids: Int[Array, "blocks B C"]) -> tuple[Int[Array, "blocks B"], Int[Array, "blocks B"]]:
        real = jnp.where(ids > 0, ids, LAST)
        return jnp.min(real, -1), jnp.max(real, -1)

    tokens = blocks.tokens
    low, high = ranges(tokens.ids)
    needed = (low[:, None] <= high[None]) & (low[None] <= high[:, None])
    index = jnp.arange(len(tokens.ids))
    if tokens.parents is not None:
        first, last = ranges(tokens.parents)
        needed |= (first[:, None] <= high[None]) & (low[None] <= last[:, None])
    ahead = (index[:, None] - index[None])[..., None]
    needed &= ahead >= -((view.ahead + size - 1) // size)
    if view.window is not None and tokens.parents is None:
        # From the first query of a block to the last key of another.
        needed &= (ahead - 1) * size + 1 < view.window
    elif view.window is not None:
        nearest = jnp.min(tokens.positions, -1)[:, None] - jnp.max(tokens.positions, -1)[None]
        needed &= nearest < view.window
    needed = jax.lax.dynamic_slice_in_dim(jnp.any(needed, axis=-1), blocks.first, len(blocks.q))
    return jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32), jnp.sum(needed, axis=1, dtype=jnp.int32)


def _scores(
    blocks: _Blocks, view: Segments, i: Int[Array, ""], j: Int[Array, ""], size: int, softcap: float | None
) -> tuple[Float[Array, "B K Q C"], Float[Array, "B K Q C"] | float]:
    """Float32 scores of the queries of block i with the keys of block j, and their derivative by the plain product."""
    scores = jnp.einsum("BKQH,BKCH->BKQC", blocks.q[i], blocks.k[j], preferred_element_type=jnp.float32)
    slope: jax.Array | float = 1.0
    if softcap is not None:
        bent = jnp.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    at, place = i + blocks.first, jnp.arange(size)
    queries = jax.tree.map(lambda x: x[at][:, :, None], blocks.tokens)
    keys = jax.tree.map(lambda x: x[j][:, None], blocks.tokens)
    columns = (at - j) * size + place[:, None] - place[None]
    bias = jnp.where(queries.see(keys, columns, view.window), 0.0, HIDDEN)
    by_head = scores.reshape(*scores.shape[:2], -1, size, scores.shape[3])
    return (by_head + bias[:, None, None]).reshape(scores.shape), slope


def _cut(q: jax.Array, k: jax.Array, v: jax.Array, view: Segments, size: int) -> _Blocks:
    """The rows in blocks; what fills the last one is a segment of its own."""
    kv_heads = k.shape[2]

    def in_blocks(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=-1)
        return padded.reshape(len(x), -1, size).swapaxes(0, 1)

    q, k, v = (_queries(x, kv_heads, size) for x in (q, k, v))
    return _Blocks(q, k, v, jax.tree.map(in_blocks, view.tokens), view.first // size)


def _queries(x: Float[Array, "B T N H"], kv_heads: int, size: int) -> Float[Array, "blocks B K Q H"]:
    """Vectors of heads in blocks of tokens; the heads that share a kv head are one axis with the block's tokens."""
    rows, _, _, dim = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)))
    heads = padded.reshape(rows, -1, size, kv_heads, x.shape[2] // kv_heads, dim)
    return heads.transpose(1, 0, 3, 4, 2, 5).reshape(-1, rows, kv_heads, x.shape[2] // kv_heads * size, dim)


def _joined(blocks: Float[Array, "blocks B K Q H"], shape: tuple[int, ...]) -> Float[Array, "B T N H"]:
    """The inverse of `_queries`: vectors `[B T N H]` of this shape."""
    rows, length, heads, dim = shape
    number, _, kv_heads, _, _ = blocks.shape
    split = blocks.reshape(number, rows, kv_heads, heads // kv_heads, -1, dim).transpose(1, 0, 4, 2, 3, 5)
    return split.reshape(rows, -1, heads, dim)[:, :length]
