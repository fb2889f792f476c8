"""The step that anyone would write in JAX in an hour: a list of layers, all logits at once, one `jax.jit`.

The yardstick for ours: same shapes, same optimizer (AdamW, clipped), no packing, no chunked head, no stacked layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.shapes import Shape


def plain_step(shape: Shape) -> tuple[Callable, Any]:
    """A jitted, donated `step(state, tokens) -> (state, loss)` and its first state."""
    c = shape.config
    keys = iter(jax.random.split(jax.random.key(1), 16 * c.num_layers))

    def matrix(*size: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), size)

    def layer() -> dict[str, jax.Array]:
        wide, narrow = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return {
            "q": matrix(c.d_model, wide),
            "k": matrix(c.d_model, narrow),
            "v": matrix(c.d_model, narrow),
            "o": matrix(wide, c.d_model),
            "gate": matrix(c.d_model, c.ffn),
            "up": matrix(c.d_model, c.ffn),
            "down": matrix(c.ffn, c.d_model),
            "norm1": jnp.ones(c.d_model),
            "norm2": jnp.ones(c.d_model),
        }

    params = {
        "embed": matrix(c.vocab_size, c.d_model),
        "head": matrix(c.d_model, c.vocab_size),
        "norm": jnp.ones(c.d_model),
        "layers": [layer() for _ in range(c.num_layers)],
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))

    def loss(params: dict, tokens: jax.Array) -> jax.Array:
        logits = forward(params, tokens, shape)[:, :-1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    def step(state: tuple, tokens: jax.Array) -> tuple:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return jax.jit(step, donate_argnums=0), (params, optimizer.init(params))


def forward(params: dict, tokens: jax.Array, shape: Shape) -> jax.Array:
    """Logits `[B T V]`."""
    c, (rows, length) = shape.config, tokens.shape
    angles = jnp.arange(length)[:, None] * c.rope.theta ** (-jnp.arange(0, c.head_dim, 2) / c.head_dim)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    causal = jnp.tril(jnp.ones((length, length), bool))

    def norm(x: jax.Array, w: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + c.norm_eps) * w

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = params["embed"][tokens]
    for w in params["layers"]:
        h = norm(x, w["norm1"])
        q = rotate((h @ w["q"]).reshape(rows, length, c.num_heads, c.head_dim))
        k = rotate((h @ w["k"]).reshape(rows, length, c.num_kv_heads, c.head_dim))
        v = (h @ w["v"]).reshape(rows, length, c.num_kv_heads, c.head_dim)
        k, v = (jnp.repeat(y, c.num_heads // c.num_kv_heads, axis=2) for y in (k, v))
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * c.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
        x = x + jnp.einsum("bnqk,bknh->bqnh", weights, v).reshape(rows, length, -1) @ w["o"]
        h = norm(x, w["norm2"])
        x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return norm(x, params["norm"]) @ params["head"]
