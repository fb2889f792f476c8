"""The parity gate of the exchange of tokens: a mixture is split over devices only where they send what they should.

As for products (`grouped_gate.py`), of the whole mesh and by all processes at every start: none may take part alone.

Axes: s shards of the rows.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.models.expert_exchange import AXIS, combine, destinations, dispatch
from tunix.util.exact import jit

TOKENS, WIDTH, OWN, CHOSEN = 24, 128, 2, 3
"""Tokens of a shard and their width, experts of a device and of a token."""


def exchange_difference(mesh: Mesh) -> float:
    """How far results and gradients of tokens that devices exchange are from those computed at home, relative to the
    largest; NaN where they are no numbers.

    Device d multiplies what it is sent by d + 1, so that a row which goes astray is off by a whole.

    Args:
        mesh: with an axis `expert`.
    """
    rows = jax.P(AXIS)

    def part(x: jax.Array, experts: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        where = destinations(experts, real, OWN)

        def multiplied(x: jax.Array) -> jax.Array:
            came = jnp.where(where.arrived[..., None], dispatch(x, where), jnp.nan)
            return combine((jax.lax.axis_index(AXIS) + 1.0) * came, where)

        y, back = jax.vjp(multiplied, x)
        return y, back(x)[0]

    def apart() -> jax.Array:
        shards = mesh.shape[AXIS]
        of_tokens, of_experts, of_padding = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(of_tokens, (shards * TOKENS, WIDTH))
        every = jnp.broadcast_to(jnp.arange(shards * OWN), (len(x), shards * OWN))
        experts = jax.random.permutation(of_experts, every, axis=1, independent=True)[:, :CHOSEN]
        real = jax.random.bernoulli(of_padding, 0.8, (len(x),))
        exchange = jax.shard_map(part, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        goes = jnp.any(experts[..., None] // OWN == jnp.arange(shards), axis=1) & real[:, None]
        right = jnp.sum(jnp.where(goes, jnp.arange(1.0, 1 + shards), 0.0), axis=1, keepdims=True) * x
        return jnp.max(jnp.abs(jnp.stack(exchange(x, experts, real)) - right)) / jnp.max(jnp.abs(right))

    with jax.set_mesh(mesh):
        return float(jit(apart, out_shardings=jax.NamedSharding(mesh, jax.P()))())
