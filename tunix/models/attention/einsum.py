"""Attention as plain batched products that write their scores: for every call and platform, and exact by definition.

All other implementations are compared with this one. Scores `[B K J Q T]` of a block of queries exist at a time, so its
memory grows with the square of a row's length.

Axes: B rows, T time, N query heads, K kv heads, J query heads of a kv head, Q queries of a block, H head dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.models.attention.inputs import HIDDEN, Gradients, Keys, Mixed, Queries, Segments, grouped, scaled, ungrouped

BLOCK_Q = 128
"""Queries of a block at least: a block skips the keys that come after what it sees, nearly half of all scores."""
MOST_BLOCKS = 4
"""Blocks of a row at most; each is compiled on its own."""
MixedBlock = tuple[Float[Array, "B K J Q H"], Float[Array, "B K J Q"]]
"""What the queries of a block mix of the values, and the log-sum-exp of their scores."""


def forward(q: Queries, k: Keys, v: Keys, view: Segments, scale: float, softcap: float | None) -> Mixed:
    """Attention within packed rows, by blocks of queries; as `attend.Implementation.forward`."""
    return _by_blocks(_mixed, q, k, v, view, scale, softcap)


def backward(
    q: Queries, k: Keys, v: Keys, view: Segments, result: Mixed, d_mixed: Queries, scale: float, softcap: float | None
) -> Gradients:
    """The gradients of `forward`, which is computed again; as `attend.Implementation.backward`."""

    def again(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mixed, lse = _by_blocks(_mixed_by_softmax, q, k, v, view, scale, softcap)
        # The result's log-sum-exp, sinks included, moves with that of the keys by the keys' share of it.
        now = jax.lax.stop_gradient(lse)
        whole = result[1] + jnp.exp(now - result[1]) * (lse - now)
        return (mixed * jnp.exp(lse - whole)[..., None]).astype(mixed.dtype)

    return jax.vjp(again, q, k, v)[1](d_mixed)


def _by_blocks(mix: Callable[..., MixedBlock], q, k, v, view: Segments, scale: float, softcap: float | None) -> Mixed:
    """What `mix` returns for each block of queries, side by side."""
    queries = grouped(scaled(q, scale), k.shape[2])
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    length, mixed, mass = q.shape[1], [], []
    size = max(BLOCK_Q, -(-length // MOST_BLOCKS))
    for start in range(0, length, size):
        stop = min(start + size, length)
        # A finite bias: it is added once per pair, where a select would compare again for every head.
        bias = jnp.where(view.seen(start, stop), 0.0, HIDDEN)
        end = view.end(stop)
        block_q, block_k = queries[:, :, :, start:stop], k[:, :, :end]
        # In the products Q runs over the block's queries of all J heads.
        scores = jnp.einsum("BKQH,BKTH->BKQT", _flat(block_q), block_k, preferred_element_type=jnp.float32)
        scores = scores.reshape(*block_q.shape[:-1], end)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        block, lse = mix(scores + bias[:, None, None], v[:, :, :end])
        mixed.append(block)
        mass.append(lse)
    return ungrouped(jnp.concatenate(mixed, axis=3)), ungrouped(jnp.concatenate(mass, axis=3)[..., None])[..., 0]


def _mixed(scores: Float[Array, "B K J Q T"], v: Float[Array, "B K T H"]) -> MixedBlock:
    """The mean of the values of a block of queries, and the log-sum-exp of its scores.

    Weights are rounded for the product before they are divided by their sum, as those of tokens that are decoded are
    (`pages.py`): a softmax that is rounded differs from them by a last bit of each.
    """
    peak = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - peak[..., None])
    mass = jnp.sum(weights, axis=-1)
    sums = jnp.einsum("BKQT,BKTH->BKQH", _flat(weights.astype(v.dtype)), v, preferred_element_type=jnp.float32)
    sums = sums.reshape(*scores.shape[:-1], v.shape[-1])
    return (sums / mass[..., None]).astype(v.dtype), peak + jnp.log(mass)


def _mixed_by_softmax(scores: Float[Array, "B K J Q T"], v: Float[Array, "B K T H"]) -> MixedBlock:
    """As `_mixed`, but for rounding: the derivative's products have operands of the values' dtype alone."""
    mixed = jnp.einsum("BKQT,BKTH->BKQH", _flat(jax.nn.softmax(scores, axis=-1).astype(v.dtype)), v)
    return mixed.reshape(*scores.shape[:-1], v.shape[-1]), jax.nn.logsumexp(scores, axis=-1)


def _flat(x: Float[Array, "B K J Q width"]) -> Float[Array, "B K queries width"]:
    """The queries of all heads of a kv head along one axis."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
