"""Attention as plain batched products that write their scores: for every call and platform, and exact by definition.

All other implementations are compared with this one. Scores `[B K J Q T]` of a block of queries exist at a time, so its
memory grows with the square of a row's length.

Axes: B rows, T time, N query heads, K kv heads, J query heads of a kv head, Q queries of a block, H head dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.models.attention.inputs import (
    HIDDEN,
    Gradients,
    Mixed,
    Segments,
    grouped,
    scaled,
    ungrouped,
)

BLOCK_Q = 128
"""Queries of a block at least: a block skips the keys that come after what it sees, nearly half of all scores."""
MOST_BLOCKS = 4
"""Blocks of a row at most; each is compiled on its own."""


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    view: Segments,
    *,
    scale: float,
    softcap: float | None,
) -> Mixed:
    """Attention within packed rows, by blocks of queries; as `attend.Implementation.forward`."""
    queries = grouped(scaled(q, scale), k.shape[2])
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    length, mixed, mass = q.shape[1], [], []
    size = max(BLOCK_Q, -(-length // MOST_BLOCKS))
    for start in range(0, length, size):
        stop = min(start + size, length)
        # A finite bias: it is added once per pair, where a select would compare again for every head.
        bias = jnp.where(view.seen(start, stop), 0.0, HIDDEN)
        end = view.end(stop)
        inputs = queries[:, :, :, start:stop], k[:, :, :end], v[:, :, :end], bias
        block, lse = _block(*inputs, "BKQH,BKTH->BKQT", softcap)
        mixed.append(block)
        mass.append(lse)
    return ungrouped(jnp.concatenate(mixed, axis=3)), ungrouped(jnp.concatenate(mass, axis=3)[..., None])[..., 0]


def backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    view: Segments,
    result: Mixed,
    d_mixed: Float[Array, "B T N H"],
    *,
    scale: float,
    softcap: float | None,
) -> Gradients:
    """The gradients of `forward`, which is computed again; as `attend.Implementation.backward`."""

    def again(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mixed, own = forward(q, k, v, view, scale=scale, softcap=softcap)
        # The result's log-sum-exp, sinks included, moves with that of the keys by the keys' share of it.
        now = jax.lax.stop_gradient(own)
        whole = result[1] + jnp.exp(now - result[1]) * (own - now)
        return (mixed * jnp.exp(own - whole)[..., None]).astype(mixed.dtype)

    return jax.vjp(again, q, k, v)[1](d_mixed)


def _block(
    q: Float[Array, "B K J Q H"],
    k: jax.Array,
    v: Float[Array, "B K T H"],
    bias: Float[Array, "B Q T"],
    product: str,
    softcap: float | None,
) -> tuple[Float[Array, "B K J Q H"], Float[Array, "B K J Q"]]:
    """Attention of a block of queries and the log-sum-exp of its scores; the einsum `product` states the keys' layout.

    Scores and softmax are float32.
    """
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
    return mixed.reshape(rows, kv_heads, -1, number, dim), jax.nn.logsumexp(scores, axis=-1)
