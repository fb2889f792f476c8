"""The gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464): a state `S` per head in place of a cache.

Each token decays the state, then replaces what is stored under its key by its value, as far as `beta` says:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q.

`recurrent` computes it token by token, `chunked` in chunks of tokens, whose products with each other are matrices (the
WY form of section 3.3). In packed rows a segment never sees another: a chunk passes on the state of the segment that
its last token belongs to, tokens of other segments neither read nor change it, and pairs of tokens of two segments are
masked. `convolved` is the short causal convolution before it, whose taps stop at a segment's start likewise. All of it
is computed in float32.

Axes: B rows, T time, C tokens at a time, c chunks, Hk key heads, Jv value heads of a key head, Dk and Dv widths of
keys and values, Ch channels.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64
"""Tokens of a chunk in packed rows."""
State = Float[Array, "B Hk Jv Dk Dv"]
# On GPUs and TPUs float32 products are rounded to fewer bits otherwise, and states add the errors of all tokens up.
_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Gates(NamedTuple):
    """What each token does to the state."""

    decay: Float[Array, "B T Hk Jv"]
    """g: the logarithm of what is left of it; at most 0."""
    beta: Float[Array, "B T Hk Jv"]
    """How much of what is stored under the key is replaced, between 0 and 1."""


class Chunks(NamedTuple):
    """Which tokens of chunks see each other and the state, as segments have it."""

    pairs: Bool[Array, "B c C C"]
    """Whether a token sees another of its chunk: an earlier one of its segment, or itself."""
    carried: Bool[Array, "B c C"]
    """Tokens that see the state from before the chunk."""
    kept: Bool[Array, "B c C"]
    """Tokens that change the state after the chunk."""
    through: Bool[Array, "B c"]
    """Whether the state from before the chunk is part of the one after it."""

    @classmethod
    def packed(cls, ids: Int[Array, "B T"], size: int) -> "Chunks":
        """Those of packed rows, whose length is a multiple of `size`."""
        ids = ids.reshape(len(ids), -1, size)
        last = ids[..., -1:]
        before = jnp.pad(last[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=-1)
        carried = ids == before
        pairs = (ids[..., :, None] == ids[..., None, :]) & jnp.tri(size, dtype=bool)
        return cls(pairs, carried, ids == last, carried[..., -1])

    @classmethod
    def aligned(cls, ids: Int[Array, "B T"], size: int) -> "Chunks":
        """Those of segments that each begin with a chunk of their own; padding follows them."""
        real = ids.reshape(len(ids), -1, size) > 0
        pairs = real[..., :, None] & real[..., None, :] & jnp.tri(size, dtype=bool)
        return cls(pairs, real, real, jnp.ones(real.shape[:2], bool))


class Begins(NamedTuple):
    """Chunks that begin a segment, with the state from before it."""

    here: Bool[Array, "B c"]
    states: Float[Array, "B c Hk Jv Dk Dv"]


def chunked(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hk Jv Dv"],
    gates: Gates,
    chunks: Chunks,
    begins: Begins | None = None,
) -> tuple[Float[Array, "B T Hk Jv Dv"], Float[Array, "B c Hk Jv Dk Dv"] | None]:
    """What each token reads; with `begins` also the state after each chunk.

    Args:
        q: scaled queries of unit length; T is a multiple of C.
        k: keys of unit length.
        v: values.
        gates: of the tokens; of padding both are 0.
        chunks: which tokens see each other.
        begins: states of earlier tokens; without, all segments start with a state of zeros.
    """
    size = chunks.pairs.shape[-1]
    q, k = (_heads_first(x, size, 1) for x in (q, k))
    v, decay, beta = (_heads_first(x, size, 2) for x in (v, gates.decay, gates.beta))
    # [B c Hk Jv C]: the logarithm of what is left at a token of the state from before its chunk.
    total = jnp.cumsum(decay, axis=-1)
    pairs = chunks.pairs[:, :, None, None]
    between = jnp.exp(jnp.where(pairs, total[..., :, None] - total[..., None, :], -jnp.inf))
    seen = _product("BcKid,BcKjd->BcKij", q, k)[:, :, :, None] * between
    overlap = beta[..., None] * _product("BcKid,BcKjd->BcKij", k, k)[:, :, :, None] * between
    left = jnp.exp(total) * chunks.carried[:, :, None, None]
    wanted = jnp.concatenate([beta[..., None] * v, (beta * left)[..., None] * k[:, :, :, None]], axis=-1)
    # Forward substitution, and no product of powers: where keys repeat, these are large and cancel.
    solved = jax.lax.linalg.triangular_solve(overlap, wanted, left_side=True, lower=True, unit_diagonal=True)
    new, read = jnp.split(solved, [v.shape[-1]], axis=-1)
    end = total[..., -1:]
    kept = jnp.exp(end - total) * chunks.kept[:, :, None, None]
    inputs = (
        new,
        read,
        left[..., None] * q[:, :, :, None],
        seen,
        kept[..., None] * k[:, :, :, None],
        jnp.exp(end[..., 0]) * chunks.through[:, :, None, None],
        begins,
    )
    start = jnp.zeros((v.shape[0], *v.shape[2:4], k.shape[-1], v.shape[-1]), jnp.float32)
    _, (mixed, states) = jax.lax.scan(_chunk, start, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
    mixed = mixed.transpose(1, 0, 4, 2, 3, 5)  # from [c B Hk Jv C Dv]
    return mixed.reshape(len(mixed), -1, *mixed.shape[3:]), None if states is None else jnp.moveaxis(states, 0, 1)


def _chunk(state: State, inputs: tuple) -> tuple[State, tuple[jax.Array, State | None]]:
    """The state after a chunk, and what its tokens read."""
    new, read, queries, seen, keys, left, begins = inputs
    if begins is not None:
        state = jnp.where(begins.here[:, None, None, None, None], begins.states, state)
    new = new - _product("BKJid,BKJdv->BKJiv", read, state)
    mixed = _product("BKJid,BKJdv->BKJiv", queries, state) + _product("BKJij,BKJjv->BKJiv", seen, new)
    state = left[..., None, None] * state + _product("BKJid,BKJiv->BKJdv", keys, new)
    return state, (mixed, None if begins is None else state)


def _heads_first(x: Float[Array, "B T *heads_and_width"], size: int, heads: int) -> jax.Array:
    """`[B T heads ...]` as `[B c heads C ...]` in float32: the tokens of a chunk stand after the heads."""
    x = x.astype(jnp.float32).reshape(len(x), -1, size, *x.shape[2:])
    return jnp.moveaxis(x, 2, 2 + heads)


def recurrent(
    q: Float[Array, "B Hk Dk"],
    k: Float[Array, "B Hk Dk"],
    v: Float[Array, "B Hk Jv Dv"],
    decay: Float[Array, "B Hk Jv"],
    beta: Float[Array, "B Hk Jv"],
    state: State,
) -> tuple[Float[Array, "B Hk Jv Dv"], State]:
    """What one token of each row reads, and the state after it."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    state = jnp.exp(decay)[..., None, None] * state
    stored = jnp.sum(state * k[:, :, None, :, None], axis=-2)
    change = beta[..., None] * (v - stored)
    state = state + k[:, :, None, :, None] * change[..., None, :]
    return jnp.sum(state * q[:, :, None, :, None], axis=-2), state


def unit(x: Float[Array, "*at Dk"]) -> jax.Array:
    """Vectors of unit length, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def convolved(
    x: Float[Array, "B T *channels"], taps: Float[Array, "*channels n"], ids: Int[Array, "B T"]
) -> Float[Array, "B T *channels"]:
    """Each channel's sum over its last `n` tokens of the same segment, times its taps, the present token's last."""
    x32, taps = x.astype(jnp.float32), taps.astype(jnp.float32)
    found = x32 * taps[..., -1]
    for lag in range(1, taps.shape[-1]):
        earlier = jnp.pad(x32, ((0, 0), (lag, 0), *((0, 0),) * (x.ndim - 2)))[:, : x.shape[1]]
        same = jnp.pad(ids, ((0, 0), (lag, 0)), constant_values=-1)[:, : x.shape[1]] == ids
        found += jnp.where(_over(same, x), earlier, 0.0) * taps[..., -1 - lag]
    return found


def convolved_after(
    x: Float[Array, "B C *channels"], taps: Float[Array, "*channels n"], before: Float[Array, "B m *channels"]
) -> Float[Array, "B C *channels"]:
    """As `convolved`, for tokens of one segment a row whose `n - 1` earlier ones are `before`."""
    whole, taps = jnp.concatenate([before, x], axis=1).astype(jnp.float32), taps.astype(jnp.float32)
    lags = [whole[:, lag : lag + x.shape[1]] * taps[..., lag] for lag in range(taps.shape[-1])]
    return jnp.sum(jnp.stack(lags), axis=0)


def _over(mask: Bool[Array, "B T"], x: jax.Array) -> jax.Array:
    """A mask of tokens, with as many axes as `x`."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
