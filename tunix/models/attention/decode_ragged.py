"""Decoding on TPUs by the kernel that JAX ships, `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.

It reads each slot's pages where they are, a few of them at a time; here each sequence has one query.

Axes: B rows, N query heads, K kv heads, H head dim, Pt tokens of a page.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jaxtyping import Array, Float

from tunix.models.attention.decode_spec import DecodeSpec
from tunix.models.attention.inputs import LANES, Mixed, scaled
from tunix.models.attention.layouts import STORED, Interleaved
from tunix.models.attention.pages import SlotsView

TOKENS = 1024
"""Tokens of a sequence that are fetched at a time."""
QUERIES = 8
"""Queries, each of a slot, of one step of the kernel's grid."""
VMEM = 64 * 2**20
"""Bytes of the chip's vector memory that the kernel may take."""


def lacks(spec: DecodeSpec) -> str | None:
    """Why the kernel cannot read a cache; None where it can."""
    if spec.platform != "tpu":
        return "it needs a TPU"
    if spec.head_dim % LANES:
        return f"a head dim of {spec.head_dim} is no multiple of {LANES}"
    if spec.sinks:
        return "it tells no log-sum-exp, by which sinks take their share"
    if spec.cache == "int8":
        return "it knows one scale for a whole cache, and int8 has one for each token and head"
    packed = 4 // jnp.dtype(STORED[spec.cache]).itemsize
    tiled = 2 * spec.kv_heads / packed
    if tiled not in (1, 2, 4, 8) and tiled % 8:
        return f"{spec.kv_heads} kv heads of {spec.cache} on a device fill no tile"
    return None


def of_slots(
    q: Float[Array, "B 1 N H"], pages: Interleaved, view: SlotsView, *, scale: float, softcap: float | None
) -> Mixed:
    """As `pages.of_slots`, over pages that stay where they are; the kernel tells no log-sum-exp, which is nan."""
    table, slots = view.table.pages, len(q)
    held = view.positions[:, 0] + 1 - view.table.first * pages.size
    # Idle slots read a token: a sequence without one would leave what was in the kernel's memory.
    held = jnp.clip(held, 1, table.shape[1] * pages.size)
    eight_bits = pages.kind == "fp8"
    mixed = ragged_paged_attention(
        scaled(q, scale)[:, 0],
        pages.both,
        held.astype(jnp.int32),
        jnp.maximum(table, 0),
        jnp.arange(slots + 1, dtype=jnp.int32),
        jnp.full(1, slots, jnp.int32),
        sliding_window=view.window,
        soft_cap=softcap,
        k_scale=1.0 if eight_bits else None,
        v_scale=1.0 if eight_bits else None,
        num_kv_pages_per_block=min(max(TOKENS // pages.size, 1), table.shape[1]),
        num_queries_per_block=min(QUERIES, slots),
        vmem_limit_bytes=VMEM,
    )
    return mixed[:, None], jnp.full(q.shape[:-1], jnp.nan)
