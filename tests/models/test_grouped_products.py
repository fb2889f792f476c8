"""Accelerators' grouped products, interpreted: rows that belong to no expert hold NaN there."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

from tests.marks import slow
from tests.models.test_moe import assert_near
from tunix.models import expert_products, grouped_products
from tunix.models.expert_products import from_experts, routes, to_experts
from tunix.models.grouped_products import triton_gradients, triton_products

pytestmark = pytest.mark.models

E, D, F, TOKENS = 5, 128, 128, 24
SIZES = (0, 3, 17, 0, 9)
"""Rows of each expert: two have none, one of them after others; 19 pairs more are of other devices."""


def interpret_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_products, "capability", lambda: 8.0)


def interpret_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_products, "platform", lambda: "tpu")
    monkeypatch.setattr(grouped_products, "tgmm", partial(tgmm, interpret=True))


def results(dtype: str) -> tuple[jax.Array, ...]:
    """An ffn's two products one after the other, and the gradients of all that is multiplied."""
    other = 2 * TOKENS - sum(SIZES)
    numbers = np.repeat(np.arange(E + 1), (*SIZES, other))
    experts = jnp.asarray(np.random.default_rng(0).permutation(numbers).reshape(TOKENS, 2), jnp.int32)

    def mixed(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
        where = routes(experts, E, experts < E)
        return from_experts(to_experts(x, ups, where) ** 2, downs, where)

    def loss(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = mixed(*inputs)
        return jnp.sum(jax.random.normal(jax.random.key(3), y.shape) * y.astype(jnp.float32)), y

    shapes = ((TOKENS, D), (E, D, F), (E, F, D))
    inputs = [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]
    jax.clear_caches()  # else the program of another platform, of the same functions, would run again
    gradients, y = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*inputs)
    return y, *gradients


@pytest.mark.parametrize("kernel", [interpret_triton, interpret_tpu])
@pytest.mark.parametrize("dtype", ["float32", *slow(["bfloat16"])])
def test_kernels_compute_what_turns_on_a_cpu_do(kernel: Callable, dtype: str, monkeypatch: pytest.MonkeyPatch):
    expected = results(dtype)
    kernel(monkeypatch)
    monkeypatch.setattr(expert_products, "platform", lambda: "gpu")
    found = results(dtype)
    as_float = partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    assert_near(as_float(found), as_float(expected), 1e-5 if dtype == "float32" else 0.02)
    for gradients in found[2:]:
        assert gradients.dtype == dtype
        assert not np.any(np.asarray(gradients, np.float32)[[0, 3]])  # of experts without rows


@pytest.mark.parametrize(("inputs", "outputs"), [(40, 24), (192, 130)])
def test_triton_leaves_no_remainder_out(inputs: int, outputs: int):
    """Widths and rows that no block divides; an expert with more rows than a tile, and others without any."""
    sizes = (0, 3, 130, 0, 9, 0)
    keys, number = jax.random.split(jax.random.key(0), 3), sum(sizes)
    shapes = (number, inputs), (number, outputs), (len(sizes), inputs, outputs)
    rows, d, matrices = map(jax.random.normal, keys, shapes)
    foreign = [jnp.pad(x, ((0, 5), (0, 0)), constant_values=jnp.nan) for x in (rows, d)]
    counts = jnp.asarray(sizes, jnp.int32)
    products = triton_products(foreign[0], matrices, counts, transposed=False)[:number]
    back = triton_products(foreign[1], matrices, counts, transposed=True)[:number]
    gradients = triton_gradients(*foreign, counts, "float32")
    ends = np.cumsum(sizes)
    groups = [np.s_[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    rows, d, matrices = (np.asarray(x, np.float64) for x in (rows, d, matrices))
    expected = (
        np.concatenate([rows[group] @ w for group, w in zip(groups, matrices, strict=True)]),
        np.concatenate([d[group] @ w.T for group, w in zip(groups, matrices, strict=True)]),
        np.stack([rows[group].T @ d[group] for group in groups]),
    )
    for result, exact in zip((products, back, gradients), expected, strict=True):
        np.testing.assert_allclose(result, exact, rtol=1e-5, atol=2e-5)
