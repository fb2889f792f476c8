"""Attention by jax's splash kernel for TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`).

The kernel's forward and backward parts are called apart, so that what is kept between them is named in one place
(`attend.py`). Segments, causality and windows are its own masks; blocks that no query sees are skipped. Where segments
share a prompt, a second call lets each query see the segment of its prompt, and both are merged by their log-sum-exp.

Axes: B rows, T time, N query heads, K kv heads, H head dim.
"""

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info
from jaxtyping import Array, Float

from tunix.models.attention.inputs import AttentionSpec, Gradients, Mixed, Segments, scaled

LANES = 128
"""Rows are whole numbers of these; so are blocks."""
BLOCK = 512
"""Queries and keys of a block at most."""
NOBODY = -2
"""The segment that a query looks for which shares no prompt: no key has it."""


class _Masks(NamedTuple):
    """Which blocks the kernels visit, which go by queries or, for the gradients of keys and values, by keys."""

    by_q: Any
    by_kv: Any
    function: Callable | None


def lacks(spec: AttentionSpec) -> str | None:
    """Why the kernel cannot compute a call; None where it can."""
    if spec.platform != "tpu":
        return "it needs a TPU"
    return unfit(spec)


def unfit(spec: AttentionSpec) -> str | None:
    """Why the kernel cannot compute a call on any device."""
    if spec.cached:
        return "it reads no cache"
    if spec.queries != spec.keys:
        return "its masks are of whole rows, and the mesh splits rows over context"
    if spec.keys % LANES:
        return f"rows of {spec.keys} tokens are no multiple of {LANES}"
    if spec.branched and spec.window is not None:
        return "its windows count columns, and between a prompt and its completion there may be others"
    return None


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    view: Segments,
    *,
    scale: float,
    softcap: float | None,
    interpret: bool = False,
) -> Mixed:
    """As `attend.Implementation.forward`; `interpret` runs the kernel's text on any device, slowly."""
    found, sizes = _masks(q.shape[1], q.shape[2], view.window), _sizes(q.shape[1])

    def one(ids: splash.SegmentIds, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed, (lse,) = splash._splash_attention_forward(
            found.by_q,
            q,
            k,
            v,
            ids,
            sinks=None,
            mask_value=splash.DEFAULT_MASK_VALUE,
            is_mqa=False,
            block_sizes=sizes,
            residual_checkpoint_name=None,
            save_residuals=True,
            mask_function=found.function,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )
        return mixed, lse

    heads = _heads(scaled(q, scale), k, v)
    parts = [jax.vmap(one)(ids, *heads) for ids in _segments(view)]
    mixed, lse = parts[0] if len(parts) == 1 else _merged(*parts)
    return mixed.swapaxes(1, 2).astype(q.dtype), lse.swapaxes(1, 2)


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
    interpret: bool = False,
) -> Gradients:
    """As `attend.Implementation.backward`. Of two merged calls each adds its keys' part, by the merged log-sum-exp."""
    found, sizes = _masks(q.shape[1], q.shape[2], view.window), _sizes(q.shape[1])
    settings = {
        "is_mqa": False,
        "mask_value": splash.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": softcap,
        "q_layout": sizes.q_layout,
        "k_layout": sizes.k_layout,
        "v_layout": sizes.v_layout,
        "mask_function": found.function,
        "interpret": interpret,
    }

    def one(ids: splash.SegmentIds, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, *rest = inputs
        blocks = {"bq": sizes.block_q_dq, "bkv": sizes.block_kv_dq}
        d_q = splash._splash_attention_bwd_dq(q, k, v, ids, None, *rest, **blocks, mask_info=found.by_q, **settings)
        blocks = {
            "bq": sizes.block_q_dkv,
            "bkv": sizes.block_kv_dkv,
            "bkv_compute": sizes.block_kv_dkv_compute,
            "use_fused_bwd_kernel": False,
        }
        _, d_k, d_v = splash._splash_attention_bwd_dkv(
            q, k, v, ids, None, *rest, **blocks, mask_info=found.by_kv, **settings
        )
        return d_q, d_k, d_v

    mixed, lse = result
    inner = jnp.sum(mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32), -1)
    rest = (lse.swapaxes(1, 2), d_mixed.swapaxes(1, 2), inner.swapaxes(1, 2))
    parts = [jax.vmap(one)(ids, *_heads(scaled(q, scale), k, v), *rest) for ids in _segments(view)]
    d_q, d_k, d_v = _heads(*(reduce(jnp.add, part) for part in zip(*parts, strict=True)))
    return scaled(d_q, scale).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _heads(*inputs: jax.Array) -> tuple[jax.Array, ...]:
    """`[B T N H]` as `[B N T H]`."""
    return tuple(x.swapaxes(1, 2) for x in inputs)


def _segments(view: Segments) -> list[splash.SegmentIds]:
    """What queries and keys compare: their own segments and, where prompts are shared, those of the prompts."""
    own = splash.SegmentIds(q=view.ids, kv=view.ids)
    if view.parents is None:
        return [own]
    prompts = jnp.where(view.parents == view.ids, NOBODY, view.parents)
    return [own, splash.SegmentIds(q=prompts, kv=view.ids)]


def _merged(
    one: tuple[Float[Array, "B N T H"], Float[Array, "B N T"]], other: tuple[jax.Array, jax.Array]
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Attention over two sets of keys from that over each."""
    lse = jnp.logaddexp(one[1], other[1])
    shares = (jnp.exp(part - lse)[..., None] for _, part in (one, other))
    first, second = (jnp.where(share > 0, share * x, 0.0) for share, (x, _) in zip(shares, (one, other), strict=True))
    return first + second, lse


def _sizes(length: int) -> splash.BlockSizes:
    """The blocks of rows of this length: the largest that divide it."""
    size = next(size for size in range(min(BLOCK, length), 0, -LANES) if length % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    return splash.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), size))


@lru_cache(maxsize=32)
def _masks(length: int, heads: int, window: int | None) -> _Masks:
    """The kernel's masks of causal rows; computed once for each shape, with numpy."""
    shape, sizes = (length, length), _sizes(length)
    one = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    mask, settings = masks.MultiHeadMask([one] * heads), {"head_shards": 1, "q_seq_shards": 1}
    by_q, function = info.process_mask(mask, (sizes.block_q, sizes.block_kv), **settings)
    by_kv, _ = info.process_mask_dkv(mask, (sizes.block_q_dkv, sizes.block_kv_dkv), **settings)
    return _Masks(by_q, by_kv, function)
