"""Accelerators' grouped products by emulations of their kernels: rows that belong to no expert hold NaN there.

Triton's kernels and `tgmm` are interpreted as they are. Mosaic's cannot be, and are emulated by what they compute: each
block of rows whole, those of other experts multiplied by 0 (`pallas_mosaic_gpu_kernel_sm90.py` of tokamax).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

from tests.marks import slow
from tests.models.test_moe import assert_near
from tunix.models import expert_products, grouped_products
from tunix.models.expert_products import from_experts, routes, to_experts
from tunix.models.grouped_products import (
    OF_GROUPS,
    TRANSPOSED,
    GroupedSpec,
    described,
    implementation,
    triton_gradients,
    triton_products,
)

pytestmark = pytest.mark.models

E, D, F, TOKENS = 5, 128, 128, 24
SIZES = (0, 3, 17, 0, 9)
"""Rows of each expert: two have none, one of them after others; 19 pairs more are of other devices."""


def of_mosaic(rows: jax.Array, other: jax.Array, *, group_sizes: jax.Array, **how: Any) -> jax.Array:
    """What tokamax's Mosaic kernels compute, with NaN where they write nothing."""
    numbers, ends = how.get("ragged_dot_dimension_numbers"), jnp.cumsum(group_sizes)
    at = jnp.arange(len(rows))
    if numbers == OF_GROUPS:
        own = (at >= (ends - group_sizes)[:, None]) & (at < ends[:, None])
        return jnp.einsum("Er,rD,rF->EDF", own.astype(rows.dtype), rows, other).astype(how["preferred_element_type"])
    product = jax.lax.ragged_dot(rows, other.mT if numbers == TRANSPOSED else other, group_sizes)
    return jnp.where((at < ends[-1])[:, None], product, jnp.nan)


def emulate_mosaic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_products, "implementation", lambda spec: "mosaic")
    monkeypatch.setattr(grouped_products, "operation", lambda name: of_mosaic)


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


@pytest.mark.parametrize("kernel", [emulate_mosaic, interpret_triton, interpret_tpu])
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


CHOICES = [
    (None, "bfloat16", (128, 256), 64, "ragged_dot"),
    (7.5, "bfloat16", (128, 256), 64, "ragged_dot"),
    (8.0, "bfloat16", (128, 256), 64, "triton"),
    (9.0, "bfloat16", (128, 256), 64, "mosaic"),
    (9.0, "float32", (128, 256), 64, "triton"),
    (9.0, "bfloat16", (128, 192), 64, "triton"),
    (9.0, "bfloat16", (192, 128), 64, "triton"),
    (9.0, "bfloat16", (128, 256), 60, "triton"),
    (10.0, "bfloat16", (128, 256), 64, "triton"),
]


@pytest.mark.parametrize(("capability", "dtype", "widths", "rows", "name"), CHOICES)
def test_a_kernel_is_taken_where_it_can_compute(capability, dtype, widths, rows, name, monkeypatch):
    """A remainder of inputs by 128 would be left out by Mosaic's; it takes 16 bits and Hopper, and rows by 8."""
    monkeypatch.setattr(grouped_products, "missing", lambda name: None)
    assert implementation(GroupedSpec(rows, widths, (dtype, dtype), capability)) == name


def test_without_mosaic_triton_is_taken_and_says_why(monkeypatch):
    monkeypatch.setattr(grouped_products, "missing", lambda name: f"no {name} here")
    hopper = GroupedSpec(64, (128, 256), ("bfloat16", "bfloat16"), 9.0)
    assert described([hopper, hopper]) == "triton (mosaic: no ragged_dot here)"
    turing = replace(hopper, capability=7.5)
    assert described([turing]) == (
        "ragged_dot (mosaic: it needs an NVIDIA GPU of compute capability 9 (Hopper); "
        "triton: it needs an NVIDIA GPU of compute capability 8 or more)"
    )
