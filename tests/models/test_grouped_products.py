"""Accelerators' grouped products by emulations of their kernels: rows that belong to no expert hold NaN there.

Triton's kernels and `tgmm` are interpreted as they are. Mosaic's cannot be, and are emulated by what they compute: each
block of rows whole, those of other experts multiplied by 0 (`pallas_mosaic_gpu_kernel_sm90.py` of tokamax).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

from tests.marks import slow
from tests.models.test_moe import assert_near
from tunix.models import expert_products, grouped_products
from tunix.models.expert_products import from_experts, routes, to_experts
from tunix.models.grouped_products import OF_GROUPS, TRANSPOSED

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
    monkeypatch.setattr(grouped_products, "_kernel", lambda *_: of_mosaic)


def interpret_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("tokamax._src.ops.ragged_dot.pallas_triton")
    call = pallas.pallas_call

    def interpreted(*arguments: Any, compiler_params: Any, **how: Any) -> Callable[..., Any]:
        return call(*arguments, interpret=True, **how)

    monkeypatch.setattr(pallas, "pallas_call", interpreted)
    monkeypatch.setattr(module.PallasTritonRaggedDot, "supported_on", lambda *_: True)
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


CHOICES = [
    (None, "bfloat16", (128, 256), 64, None),
    (7.5, "bfloat16", (128, 256), 64, None),
    (8.0, "bfloat16", (128, 256), 64, "PallasTritonRaggedDot"),
    (9.0, "bfloat16", (128, 256), 64, "PallasMosaicGpuRaggedDot"),
    (9.0, "float32", (128, 256), 64, "PallasTritonRaggedDot"),
    (9.0, "bfloat16", (128, 192), 64, "PallasTritonRaggedDot"),
    (9.0, "bfloat16", (192, 128), 64, "PallasTritonRaggedDot"),
    (9.0, "bfloat16", (128, 256), 60, "PallasTritonRaggedDot"),
    (10.0, "bfloat16", (128, 256), 64, "PallasTritonRaggedDot"),
]


@pytest.mark.parametrize(("capability", "dtype", "sizes", "rows", "name"), CHOICES)
def test_a_kernel_is_taken_where_it_can_compute(capability, dtype, sizes, rows, name, monkeypatch):
    """A remainder of inputs by 128 would be left out by Mosaic's; it takes 16 bits and Hopper, and rows by 8."""
    monkeypatch.setattr(grouped_products, "capability", lambda: capability)
    monkeypatch.setattr(grouped_products, "operation", lambda module, name: name)
    x, w = (jnp.zeros(shape, dtype) for shape in ((rows, sizes[0]), (4, *sizes)))
    assert grouped_products._kernel(x, w) == name
    monkeypatch.setattr(grouped_products, "installed", lambda: False)
    assert grouped_products._kernel(x, w) is None
