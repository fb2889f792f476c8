"""The TPU kernel beside the einsums, its text run on a CPU (Pallas's interpret mode): values and gradients."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

from tests.marks import slow
from tests.models.attention.test_chunked import trie
from tunix.models.attention import einsum, splash
from tunix.models.attention.attend import spec_of
from tunix.models.attention.inputs import Segments, past_sinks

pytestmark = pytest.mark.models

B, T, N, K, H = 1, 256, 4, 2, 128


def rows(parents: bool) -> Segments:
    """A row of four documents and padding; with parents, a prompt with two completions, and one that stands alone."""
    ids, positions, above = (np.zeros((B, T), np.int32) for _ in range(3))
    start = 0
    for number, length in enumerate([70, 50, 30, 90], 1):
        here = np.s_[:, start : start + length]
        shared = parents and number in (2, 3)
        ids[here], above[here] = number, 1 if shared else number
        positions[here] = np.arange(length) + (70 if shared else 0)
        start += length
    return Segments(*map(jnp.asarray, (ids, positions)), jnp.asarray(above) if parents else None)


def results(
    module, view: Segments, dtype: str, softcap: float | None, sinks: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    q, k, v, pull = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))
    settings = {"scale": 0.1, "softcap": softcap}
    result = past_sinks(module.forward(q, k, v, view, **settings), sinks)
    return *result, *module.backward(q, k, v, view, result, pull, **settings)


CASES = [(True, None, None, "float32"), ("trie", None, None, "float32")]
MORE = [
    (False, None, None, "float32"),
    (False, 40, None, "float32"),
    (False, None, 2.0, "float32"),
    (True, None, 2.0, "bfloat16"),
]


@pytest.mark.parametrize(("parents", "window", "softcap", "dtype"), [*CASES, *slow(MORE)])
def test_values_and_gradients_are_those_of_the_einsums(parents, window, softcap, dtype):
    view = trie(B, T) if parents == "trie" else rows(parents)._replace(window=window)
    found = results(splash, view, dtype, softcap)
    expected = jax.jit(partial(results, einsum, view, dtype, softcap))()
    real = np.asarray(view.ids > 0)
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-2, "atol": 3e-2}
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float32(one)[real], np.float32(other)[real], **tolerance)


def test_sinks_are_keys_without_values():
    view = rows(parents=True)
    found = results(splash, view, "float32", None, jnp.linspace(-1, 3, N))
    expected = jax.jit(partial(results, einsum, view, "float32", None, jnp.linspace(-1, 3, N)))()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(*(x[np.asarray(view.ids > 0)] for x in (one, other)), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("window", [40, *slow([None])])
def test_parts_of_the_queries_have_their_part(window):
    """A row over two devices: each has half of the queries, and its share of the gradients of all keys."""
    view, half = rows(parents=window is None)._replace(window=window), T // 2
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    q, k, v, pull = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    settings = {"scale": 0.1, "softcap": None}

    def of_part(first: jax.Array):
        mine = view._replace(first=first)
        mq, mp = (jax.lax.dynamic_slice_in_dim(x, first, half, 1) for x in (q, pull))
        result = splash.forward(mq, k, v, mine, **settings)
        return *result, *splash.backward(mq, k, v, mine, result, mp, **settings)

    one, other = (jax.jit(of_part)(jnp.int32(first)) for first in (0, half))
    found = [jnp.concatenate(each, 1) for each in zip(one[:3], other[:3], strict=True)]
    found += [one[3] + other[3], one[4] + other[4]]
    expected = jax.jit(partial(results, einsum, view, "float32", None))()
    real = np.asarray(view.ids > 0)
    for part, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(part[real], whole[real], rtol=1e-5, atol=2e-5)


def test_what_the_kernel_lacks():
    q, k = jnp.zeros((B, T, N, H)), jnp.zeros((B, T, K, H))
    spec = spec_of(q, k, rows(parents=True), None)
    assert splash.lacks(spec) == "it needs a TPU"
    assert splash.lacks(replace(spec, platform="tpu")) is None
    assert "columns" in str(splash.lacks(replace(spec, platform="tpu", window=8)))
    part = replace(spec, platform="tpu", queries=100)
    assert "parts of rows of 100 tokens are no multiple of 128" in str(splash.lacks(part))


@pytest.mark.parametrize(
    ("length", "parts", "window"), [(2048, 1, None), (2048, 2, None), (2048, 1, 512), (1536, 1, 700), (640, 1, 1)]
)
def test_blocks_that_are_visited_are_those_of_the_kernels_own_masks(length: int, parts: int, window: int | None):
    shape, sizes = (length, length), splash._sizes(length // parts)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    settings = {"head_shards": 1, "q_seq_shards": parts}
    by_q, _ = info.process_mask(masks.MultiHeadMask([mask] * 2), (sizes.block_q, sizes.block_kv), **settings)
    blocks = (sizes.block_q_dkv, sizes.block_kv_dkv)
    by_kv, _ = info.process_mask_dkv(masks.MultiHeadMask([mask] * 2), blocks, **settings)
    found = splash._masks(length, parts, 2, window)
    jax.tree.map(np.testing.assert_array_equal, tuple(found.by_q), tuple(by_q))
    jax.tree.map(np.testing.assert_array_equal, tuple(found.by_kv), tuple(by_kv))
