"""Log-probs of the taken tokens, their entropy and both gradients, without ever holding logits `[B T V]`.

The tokens that count are moved to the front of each row; then one chunk of `[B C]` of them after the other meets the
head: logits -> log-sum-exp -> log-prob. The backward pass makes each chunk's logits again. A prompt that is not trained
costs nothing here: the number of chunks is that of the tokens that count, found at run time.

Axes: B rows, T time, C tokens of a chunk, V vocabulary, D model.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tunix.mesh import constrain

CHUNK_LOGITS = 1 << 24
"""Logits that exist at a time: 64 MiB in float32."""


class _Chunks(NamedTuple):
    """The order in which tokens are visited."""

    order: Int[Array, "B P"]
    """Token indices, those that count first; P is T rounded up to whole chunks."""
    back: Int[Array, "B T"]
    """Where token t stands in `order`."""
    number: Int[Array, ""]
    """Chunks that hold a token that counts."""


def chunk_length(rows: int, length: int, vocab: int) -> int:
    """Tokens of each row in a chunk: as many as CHUNK_LOGITS allows, a power of two."""
    fitting = max(CHUNK_LOGITS // (rows * vocab), 1)
    return min(1 << (fitting.bit_length() - 1), length)


def token_logprobs(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    needed: Bool[Array, "B T"],
    *,
    softcap: float | None,
    entropy: bool,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`log softmax(cap(hidden @ table.T))[target]` and the distribution's entropy in nats, float32, 0 where not needed.

    Args:
        hidden: states that predict `targets` (already shifted).
        table: the head, in the compute dtype; logits are float32.
        needed: tokens that count.
        softcap: `softcap * tanh(logits / softcap)` (Gemma 2), or None.
        entropy: whether the entropy is computed; zeros otherwise.
    """
    table = constrain(table, "vocab", None)
    return _token_logprobs(softcap, entropy, hidden, table, targets, needed)


def _visit(needed: jax.Array, chunk: int) -> _Chunks:
    rows, length = needed.shape
    padded = -(-length // chunk) * chunk
    order = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    back = jnp.zeros_like(order).at[jnp.arange(rows)[:, None], order].set(jnp.arange(length, dtype=jnp.int32))
    number = (jnp.max(jnp.sum(needed, axis=1)) + chunk - 1) // chunk
    return _Chunks(jnp.pad(order, ((0, 0), (0, padded - length))), back, number.astype(jnp.int32))


def _logits(hidden: jax.Array, table: jax.Array, softcap: float | None) -> jax.Array:
    logits = jnp.einsum("BCD,VD->BCV", hidden, table, preferred_element_type=jnp.float32)
    logits = constrain(logits, "rows", None, "vocab")
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _pick(values: jax.Array, order: jax.Array) -> jax.Array:
    """Rows' values at `order`, for `[B T]` and `[B T D]`."""
    index = order if values.ndim == 2 else order[..., None]
    return jnp.take_along_axis(values, index, axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_logprobs(softcap, entropy, hidden, table, targets, needed):
    return _forward(softcap, entropy, hidden, table, targets, needed)[0]


def _forward(softcap, entropy, hidden, table, targets, needed):
    rows, length, _ = hidden.shape
    chunk = chunk_length(rows, length, table.shape[0])
    visit = _visit(needed, chunk)

    def body(i, found):
        order = jax.lax.dynamic_slice_in_dim(visit.order, i * chunk, chunk, 1)
        logits = _logits(_pick(hidden, order), table, softcap)
        lse = jax.nn.logsumexp(logits, axis=-1)
        taken = jnp.take_along_axis(logits, _pick(targets, order)[..., None], axis=-1)[..., 0]
        spread = lse - jnp.sum(jnp.exp(logits - lse[..., None]) * logits, -1) if entropy else jnp.zeros_like(lse)
        values = (taken - lse, spread, lse)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new, i * chunk, 1) for old, new in zip(found, values, strict=True)
        )

    empty = jnp.zeros(visit.order.shape, jnp.float32)
    logprobs, spread, lse = jax.lax.fori_loop(0, visit.number, body, (empty, empty, empty))
    logprobs, spread = (jnp.where(needed, _pick(x, visit.back), 0.0) for x in (logprobs, spread))
    return (logprobs, spread), (hidden, table, targets, needed, visit, lse, spread)


def _backward(softcap, entropy, saved, cotangents):
    hidden, table, targets, needed, visit, lse, spread = saved
    rows, length, width = hidden.shape
    chunk = chunk_length(rows, length, table.shape[0])
    d_logprobs, d_spread = (jnp.where(needed, d, 0.0) for d in cotangents)

    def body(i, gradients):
        d_hidden, d_table = gradients
        order = jax.lax.dynamic_slice_in_dim(visit.order, i * chunk, chunk, 1)
        h = _pick(hidden, order)
        logits = _logits(h, table, softcap)
        log_p = logits - jax.lax.dynamic_slice_in_dim(lse, i * chunk, chunk, 1)[..., None]
        p = jnp.exp(log_p)
        # Padding of the last chunk repeats token 0: its cotangent counts only where the place in `order` is a real one.
        real = (i * chunk + jnp.arange(chunk)) < length
        weight = jnp.where(real, _pick(d_logprobs, order), 0.0)[..., None]
        d_logits = weight * ((jnp.arange(table.shape[0]) == _pick(targets, order)[..., None]) - p)
        if entropy:
            weight = jnp.where(real, _pick(d_spread, order), 0.0)[..., None]
            d_logits -= weight * p * (log_p + _pick(spread, order)[..., None])
        if softcap is not None:
            d_logits *= 1 - (logits / softcap) ** 2
        # The barrier has the gradient of the logits made once, not fused (and made again) into each product below.
        d_logits = jax.lax.optimization_barrier(d_logits.astype(table.dtype))
        new = jnp.einsum("BCV,VD->BCD", d_logits, table).astype(hidden.dtype)
        d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, new, i * chunk, 1)
        # As [D V]: the operand that a CPU has to transpose is then the narrow one.
        return d_hidden, d_table + jnp.einsum("BCD,BCV->DV", h, d_logits, preferred_element_type=jnp.float32)

    start = (jnp.zeros((rows, visit.order.shape[1], width), hidden.dtype), jnp.zeros(table.shape[::-1], jnp.float32))
    d_hidden, d_table = jax.lax.fori_loop(0, visit.number, body, start)
    d_hidden = jnp.where(needed[..., None], _pick(d_hidden, visit.back), 0)
    nothing = (np.zeros(targets.shape, jax.dtypes.float0), np.zeros(needed.shape, jax.dtypes.float0))
    return d_hidden, d_table.T.astype(table.dtype), *nothing


_token_logprobs.defvjp(_forward, _backward)
