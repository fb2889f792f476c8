"""The parity gates of experts, which train only where devices multiply and exchange them as they should.

Kernels have to give plain products' numbers. As for attention (`attention/gate.py`), they depend on a device, its
compiler and a library: the first start on a device multiplies some rows by a kernel and, group by group, by plain
products in float32, with both gradients. Devices have to send each other the tokens that they should, which is tried on
the whole mesh and by all processes at every start: none may take part alone.

Axes: E experts; D inputs and F outputs of a product, r rows; s shards of the rows.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tunix.models.attention.gate import MEASURED, off, remembered
from tunix.models.expert_exchange import AXIS, combine, destinations, dispatch
from tunix.models.grouped_products import grouped_gradients, grouped_products
from tunix.util.exact import jit

SIZES = (100, 0, 33, 27, 1, 60, 0, 19)
"""Rows of each group: some have none, one has a single one, and none is a whole number of a kernel's blocks."""
FOREIGN = 16
"""Rows after those of all groups, which hold NaN."""


def grouped_difference(d: int, f: int, dtype: str, measurements: Path = MEASURED) -> float:
    """How far grouped products and gradients are from plain ones on this device, relative to their size.

    Args:
        d: inputs of an expert's first products, e.g. 2048.
        f: their outputs, e.g. 768.
        dtype: of rows and matrices, e.g. "bfloat16".
        measurements: the file of what was found before.
    """
    return remembered(
        ["grouped", d, f, dtype],
        lambda: max(_measured(d, f, dtype), _measured(f, d, dtype)),
        measurements,
    )


def _measured(d: int, f: int, dtype: str) -> float:
    """The largest relative difference of a product and its two gradients."""
    shapes = ((sum(SIZES), d), (sum(SIZES), f), (len(SIZES), d, f))
    keys = jax.random.split(jax.random.key(0), 3)
    rows, pulls, matrices = (jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True))

    def results(rows: jax.Array, pulls: jax.Array, matrices: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        products = grouped_products(rows, matrices, sizes, transposed=False)
        back = grouped_products(pulls, matrices, sizes, transposed=True)
        return products, back, grouped_gradients(rows, pulls, matrices, sizes)

    with jax.set_mesh(Mesh(jax.local_devices()[:1], ("alone",))):
        foreign = (jnp.pad(x, ((0, FOREIGN), (0, 0)), constant_values=np.nan) for x in (rows, pulls))
        computed = jit(results)(*foreign, matrices, jnp.asarray(SIZES, jnp.int32))
    *by_row, of_groups = (np.asarray(x, np.float32) for x in computed)
    rows, pulls, matrices = (np.asarray(x, np.float32) for x in (rows, pulls, matrices))
    ends = np.cumsum(SIZES)
    groups = [np.s_[end - size : end] for size, end in zip(SIZES, ends, strict=True)]
    right = [
        np.concatenate([rows[group] @ w for group, w in zip(groups, matrices, strict=True)]),
        np.concatenate([pulls[group] @ w.T for group, w in zip(groups, matrices, strict=True)]),
        np.stack([rows[group].T @ pulls[group] for group in groups]),
    ]
    return max(map(off, [*(x[: sum(SIZES)] for x in by_row), of_groups], right))


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
