"""Attention by jax's splash kernel for TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`).

The kernel's forward and backward parts are called apart, so that what is kept between them is named in one place
(`attend.py`). Segments, causality and windows are its own masks. Which blocks it visits is known before a program
runs: those after the queries or before the window are skipped, those of other documents are not. Where segments share
a prompt, a second call lets each query see the segment of its prompt, and both are merged by their log-sum-exp.

Axes: B rows, T time, N query heads, K kv heads, H head dim.
"""

from collections.abc import Callable
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info
from jaxtyping import Array, Float

from tunix.mesh import platform
from tunix.models.attention.inputs import (
    LANES,
    AttentionSpec,
    Gradients,
    Keys,
    Mixed,
    Queries,
    Segments,
    inner_products,
    merged,
    scaled,
)

BLOCK = 512
"""Queries and keys of a block at most."""
NOBODY = -2
"""The segment that a query looks for which shares no prompt: no key has it."""


class _ByBlock(masks.Mask):
    """A mask that knows blocks which are seen whole, or not at all, by their distances.

    Splash asks its masks for every block of a row, before anything is compiled: for 128k tokens comparing each pair of
    tokens took 100 s.
    """

    window: int

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        q, k = (range(*part.indices(size)) for part, size in zip(index, self.shape, strict=True))
        nearest, farthest = q[0] - k[-1], q[-1] - k[0]
        if nearest >= 0 and farthest < self.window:
            return _whole(True, len(q), len(k))
        if farthest < 0 or nearest >= self.window:
            return _whole(False, len(q), len(k))
        return super().__getitem__(index)


class _Causal(_ByBlock, masks.CausalMask):
    def __init__(self, length: int) -> None:
        super().__init__((length, length))
        self.window = length


class _Local(_ByBlock, masks.LocalMask):
    def __init__(self, length: int, window: int) -> None:
        super().__init__((length, length), (window - 1, 0), 0)
        self.window = window


@lru_cache(maxsize=8)
def _whole(seen: bool, queries: int, keys: int) -> np.ndarray:
    """A block whose pairs are all alike."""
    return np.full((queries, keys), seen)


class _Masks(NamedTuple):
    """Which blocks the kernels visit, which go by queries or, for the gradients of keys and values, by keys."""

    by_q: Any
    by_kv: Any
    function: Callable | None


def lacks(spec: AttentionSpec) -> str | None:
    """Why the kernel cannot compute a call; None where it can."""
    if spec.platform != "tpu":
        return "it needs a TPU"
    if spec.pictures:
        return "tokens of a picture see later ones"
    if spec.queries != spec.keys and spec.queries % LANES:
        return f"parts of rows of {spec.queries} tokens are no multiple of {LANES}"
    if spec.branched and spec.window is not None:
        return "its windows count columns, and between a prompt and its completion there may be others"
    return None


def forward(q: Queries, k: Keys, v: Keys, view: Segments, scale: float, softcap: float | None) -> Mixed:
    """As `attend.Implementation.forward`; on a CPU the kernel is interpreted, for tests."""
    block_masks, sizes = _masks_of(q, k, view), _sizes(q.shape[1])

    def of_row(ids: splash.SegmentIds, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed, (lse,) = splash._splash_attention_forward(
            block_masks.by_q,
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
            mask_function=block_masks.function,
            attn_logits_soft_cap=softcap,
            interpret=platform() == "cpu",
        )
        return mixed, lse

    heads = _heads(scaled(q, scale), k, v)
    parts = [jax.vmap(of_row)(ids, *heads) for ids in _segments(view, q.shape[1])]
    mixed, lse = reduce(merged, parts)
    return mixed.swapaxes(1, 2).astype(q.dtype), lse.swapaxes(1, 2)


def backward(
    q: Queries, k: Keys, v: Keys, view: Segments, result: Mixed, d_mixed: Queries, scale: float, softcap: float | None
) -> Gradients:
    """As `attend.Implementation.backward`. Of two merged calls each adds its keys' part, by the merged log-sum-exp."""
    block_masks, sizes = _masks_of(q, k, view), _sizes(q.shape[1])

    def set_up(kernel: Callable) -> Callable:
        return partial(
            kernel,
            is_mqa=False,
            mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=softcap,
            q_layout=sizes.q_layout,
            k_layout=sizes.k_layout,
            v_layout=sizes.v_layout,
            mask_function=block_masks.function,
            interpret=platform() == "cpu",
        )

    by_queries, by_keys = set_up(splash._splash_attention_bwd_dq), set_up(splash._splash_attention_bwd_dkv)

    def of_row(ids: splash.SegmentIds, q, k, v, lse, d_mixed, inner) -> tuple[jax.Array, ...]:
        d_q = by_queries(
            *(q, k, v, ids, None, lse, d_mixed, inner),
            bq=sizes.block_q_dq,
            bkv=sizes.block_kv_dq,
            mask_info=block_masks.by_q,
        )
        _, d_k, d_v = by_keys(
            *(q, k, v, ids, None, lse, d_mixed, inner),
            bq=sizes.block_q_dkv,
            bkv=sizes.block_kv_dkv,
            bkv_compute=sizes.block_kv_dkv_compute,
            use_fused_bwd_kernel=False,
            mask_info=block_masks.by_kv,
        )
        return d_q, d_k, d_v

    inputs = _heads(scaled(q, scale), k, v, result[1], d_mixed, inner_products(result[0], d_mixed))
    parts = [jax.vmap(of_row)(ids, *inputs) for ids in _segments(view, q.shape[1])]
    d_q, d_k, d_v = _heads(*(reduce(jnp.add, part) for part in zip(*parts, strict=True)))
    return scaled(d_q, scale).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _heads(*inputs: jax.Array) -> tuple[jax.Array, ...]:
    """`[B T N ...]` as `[B N T ...]`."""
    return tuple(x.swapaxes(1, 2) for x in inputs)


def _segments(view: Segments, queries: int) -> list[splash.SegmentIds]:
    """What queries and keys compare: their own segments and, where prompts are shared, those of the prompts."""
    sought = [view.ids]
    if view.parents is not None:
        sought.append(jnp.where(view.parents == view.ids, NOBODY, view.parents))
    parts = (jax.lax.dynamic_slice_in_dim(ids, view.first, queries, axis=1) for ids in sought)
    return [splash.SegmentIds(q=ids, kv=view.ids) for ids in parts]


def _masks_of(q: Float[Array, "B T N H"], k: Float[Array, "B keys K H"], view: Segments) -> _Masks:
    """The kernel's masks of these queries, which may be a part of their rows."""
    queries, keys = q.shape[1], k.shape[1]
    block_masks = _masks(keys, keys // queries, q.shape[2], view.window)
    if queries == keys:
        return block_masks
    part, of_part = view.first // queries, []
    for mask in (block_masks.by_q, block_masks.by_kv):
        for name, axis in (("data_next", 1), ("mask_next", 1), ("block_mask", 1), ("q_sequence", 0)):
            if (x := getattr(mask, name)) is not None:
                size = x.shape[axis] // (keys // queries)
                x = jax.lax.dynamic_slice_in_dim(jnp.asarray(x), part * size, size, axis)
                mask = mask._replace(**{name: x})
        of_part.append(mask)
    return _Masks(of_part[0], of_part[1], block_masks.function)


def _sizes(length: int) -> splash.BlockSizes:
    """The blocks of rows of this length: the largest that divide it."""
    size = next(size for size in range(min(BLOCK, length), 0, -LANES) if length % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    return splash.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), size))


@lru_cache(maxsize=32)
def _masks(length: int, parts: int, heads: int, window: int | None) -> _Masks:
    """The kernel's masks of causal rows, one after the other for each part; made once for each shape, with numpy."""
    sizes = _sizes(length // parts)
    causal = _Causal(length) if window is None else _Local(length, window)
    mask, blocks_of_keys = masks.MultiHeadMask([causal] * heads), (sizes.block_q_dkv, sizes.block_kv_dkv)
    by_q, function = info.process_mask(mask, (sizes.block_q, sizes.block_kv), head_shards=1, q_seq_shards=parts)
    by_kv, _ = info.process_mask_dkv(mask, blocks_of_keys, head_shards=1, q_seq_shards=parts)
    return _Masks(by_q, by_kv, function)
