"""The fastest step that we know how to write in plain JAX: a list of layers, all logits at once, one `jax.jit`.

The yardstick for tunix: same shapes, same optimizer (AdamW, clipped), no packing, no chunked head, no stacked layers.
It has what is fast without a framework: states as one matrix, so that no product has two batch axes; q, k and v as one
product, and gate and up; heads first, so that attention is two plain batched products; a log-sum-exp and a gather
instead of `log_softmax`; the library of products that is faster on a CPU. docs/log.md has the slower variants.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.shapes import Shape
from tunix.mesh import PRODUCTS


def plain_step(shape: Shape) -> tuple[Callable, Any]:
    """A jitted, donated `step(state, tokens) -> (state, loss)` and its first state."""
    c = shape.config
    keys = iter(jax.random.split(jax.random.key(1), 16 * c.num_layers))

    def matrix(*size: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), size)

    def layer() -> dict[str, jax.Array]:
        wide, narrow = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return {
            "qkv": matrix(c.d_model, wide + 2 * narrow),
            "o": matrix(wide, c.d_model),
            "gate_up": matrix(c.d_model, 2 * c.ffn),
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
        taken = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - taken).mean()

    def step(state: tuple, tokens: jax.Array) -> tuple:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    options = PRODUCTS.get((jax.default_backend(), "float32"), {})
    return jax.jit(step, donate_argnums=0, compiler_options=options), (params, optimizer.init(params))


def plain_work(shape: Shape) -> Callable[[], None]:
    """A function that runs one plain step on the shape's batch to its end."""
    tokens = jnp.asarray(shape.tokens())
    step, state = plain_step(shape)
    held = {"state": state}

    def plain() -> None:
        held["state"], loss = step(held["state"], tokens)
        jax.block_until_ready((held["state"], loss))

    return plain


def forward(params: dict, tokens: jax.Array, shape: Shape) -> jax.Array:
    """Logits `[B T V]`."""
    c, (rows, length) = shape.config, tokens.shape
    heads, kv_heads, dim = c.num_heads, c.num_kv_heads, c.head_dim
    angles = jnp.arange(length)[:, None] * c.rope.theta ** (-jnp.arange(0, dim, 2) / dim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    bias = jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e30)

    def norm(x: jax.Array, w: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + c.norm_eps) * w

    def heads_first(x: jax.Array, number: int) -> jax.Array:
        return x.reshape(rows, length, number, dim).transpose(0, 2, 1, 3)

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = params["embed"][tokens.reshape(-1)]
    for w in params["layers"]:
        h = norm(x, w["norm1"])
        q, k, v = jnp.split(h @ w["qkv"], [heads * dim, (heads + kv_heads) * dim], -1)
        q = rotate(heads_first(q, heads)).reshape(rows, kv_heads, -1, dim)
        k, v = rotate(heads_first(k, kv_heads)), heads_first(v, kv_heads)
        scores = jnp.einsum("bkmh,bkth->bkmt", q, k).reshape(rows, heads, length, length) * dim**-0.5
        weights = jax.nn.softmax(scores + bias, -1).reshape(rows, kv_heads, -1, length)
        mixed = jnp.einsum("bkmt,bkth->bkmh", weights, v).reshape(rows, heads, length, dim)
        x = x + mixed.transpose(0, 2, 1, 3).reshape(rows * length, -1) @ w["o"]
        gate, up = jnp.split(norm(x, w["norm2"]) @ w["gate_up"], 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ w["down"]
    return (norm(x, params["norm"]) @ params["head"]).reshape(rows, length, -1)
