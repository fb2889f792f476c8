"""The intervals of keys that NVIDIA's kernel is given, computed by tokamax's reference of it: values and gradients."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.models.attention.test_chunked import B, H, K, N, T, inputs, rows, trie
from tunix.models.attention import einsum, mosaic
from tunix.models.attention.attend import described, implementation, spec_of
from tunix.models.attention.inputs import Segments, past_sinks

pytestmark = pytest.mark.models


def reference(parents: bool) -> Any:
    """The operation that the kernel is tested against by its authors, who take no part of a merged result back."""
    base = pytest.importorskip("tokamax._src.ops.attention.base")
    from absl.flags import FLAGS

    FLAGS.mark_as_parsed()
    op = base.DotProductAttention(vjp=base.DotProductAttentionVjp())
    return Merging(op) if parents else op


class Merging(NamedTuple):
    """The authors' forward pass with the backward pass of the kernel."""

    op: Any

    def __call__(self, *inputs, **settings):
        return self.op(*inputs, **settings)

    def bind(self, *inputs, **settings):
        return self.op.bind(*inputs, **settings)

    def vjp(self, *inputs, **settings) -> dict[str, jax.Array]:
        return as_the_kernel(*inputs, **settings)


def as_the_kernel(residuals, out, dout, q, k, v, *, mask, logits_scale, logits_soft_cap, **_) -> dict[str, jax.Array]:
    """The kernel's arithmetic (`pallas_mosaic_gpu_vjp_kernel_sm90.py`): weights from the residuals, delta from out."""
    top, total = residuals
    q, k, v, out, dout = (x.astype(jnp.float32) for x in (q, k, v, out, dout))
    more = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, more, axis=2) for x in (k, v))
    scores, slope = jnp.einsum("BQNH,BTNH->BNQT", q, keys) * logits_scale, 1.0
    if logits_soft_cap is not None:
        bent = jnp.tanh(scores / logits_soft_cap)
        scores, slope = logits_soft_cap * bent, 1 - bent**2
    scores = jnp.where(mask.as_array(q.shape[1], k.shape[1]), scores, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - top[..., None]) / total[..., None]
    delta = jnp.einsum("BQNH,BQNH->BNQ", out, dout)
    d_scores = weights * (jnp.einsum("BQNH,BTNH->BNQT", dout, values) - delta[..., None]) * slope * logits_scale

    def shared(x: jax.Array) -> jax.Array:
        return x.reshape(*k.shape[:3], more, -1).sum(3)

    return {
        "q": jnp.einsum("BNQT,BTNH->BQNH", d_scores, keys),
        "k": shared(jnp.einsum("BNQT,BQNH->BTNH", d_scores, q)),
        "v": shared(jnp.einsum("BNQT,BQNH->BTNH", weights, dout)),
    }


def results(
    module, view: Segments, dtype: str, softcap: float | None, sinks: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    q, k, v, pull = inputs(dtype)
    settings = {"scale": 0.4, "softcap": softcap}
    result = past_sinks(module.forward(q, k, v, view, **settings), sinks)
    backward = module.backward_of_tokamax if module is mosaic else module.backward
    return *result, *backward(q, k, v, view, result, pull, **settings)


CASES = [(False, None, None, "float32"), (True, 11, 2.0, "float32")]
MORE = [
    (False, 11, 2.0, "float32"),
    (True, None, None, "float32"),
    (True, 40, None, "float32"),
    (True, None, 2.0, "bfloat16"),
]


@pytest.mark.parametrize(("parents", "window", "softcap", "dtype"), [*CASES, *slow(MORE)])
def test_values_and_gradients_are_those_of_the_einsums(parents, window, softcap, dtype, monkeypatch):
    view, operation = rows(parents)._replace(window=window), reference(parents)
    monkeypatch.setattr(mosaic, "operation", lambda name: operation)
    found = jax.jit(partial(results, mosaic, view, dtype, softcap))()
    expected = jax.jit(partial(results, einsum, view, dtype, softcap))()
    real = np.asarray(view.ids > 0)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-2, "atol": 3e-2}
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.float32(one)[real], np.float32(other)[real], **tolerance)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), *slow([(11, 2.0)])])
def test_keys_of_interleaved_segments_stand_together(window, softcap, monkeypatch):
    view, operation = trie(B, T)._replace(window=window), reference(True)
    monkeypatch.setattr(mosaic, "operation", lambda name: operation)
    found = jax.jit(partial(results, mosaic, view, "float32", softcap))()
    expected = jax.jit(partial(results, einsum, view, "float32", softcap))()
    real = np.asarray(view.ids > 0)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[real], other[real], rtol=1e-5, atol=1e-5)


def test_sinks_are_keys_without_values(monkeypatch):
    view, operation = rows(parents=True)._replace(window=11), reference(True)
    monkeypatch.setattr(mosaic, "operation", lambda name: operation)
    sinks = jnp.linspace(-1, 3, N)
    found = jax.jit(partial(results, mosaic, view, "float32", 2.0, sinks))()
    expected = jax.jit(partial(results, einsum, view, "float32", 2.0, sinks))()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(*(x[np.asarray(view.ids > 0)] for x in (one, other)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parents", [False, True], ids=["documents", "shared prompts"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_query_sees_its_intervals(parents, window):
    view = rows(parents)._replace(window=window)
    column, seen = jnp.arange(T), jnp.zeros((B, T, T), bool)
    for one in mosaic.intervals(view, T):
        some = True if one.some is None else one.some[..., None]
        seen |= some & (one.start[..., None] <= column) & (column < one.stop[..., None])
    real = np.asarray(view.ids > 0)
    np.testing.assert_array_equal(seen[real], view.seen(0, T)[real])


def test_a_part_of_the_queries_has_its_part_of_the_intervals():
    view = rows(parents=True)
    whole, part = mosaic.intervals(view, T), mosaic.intervals(view._replace(first=jnp.int32(30)), 20)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_array_equal(one[:, 30:50], other)


def test_what_the_kernel_lacks():
    pytest.importorskip("tokamax")
    spec = spec_of(jnp.zeros((B, T, N, H), jnp.bfloat16), jnp.zeros((B, T, K, H), jnp.bfloat16), rows(True), None)
    assert "compute capability 9 or 10" in str(mosaic.lacks(spec))
    hopper = replace(spec, platform="gpu", capability=9.0)
    blackwell, ampere = (replace(hopper, capability=capability) for capability in (10.0, 8.0))
    for found, expected in ((hopper, "mosaic"), (blackwell, "tokamax"), (ampere, "einsum")):
        assert implementation(found).name == expected
    assert (
        described([blackwell])
        == "tokamax (splash: it needs a TPU; mosaic: its backward kernels are written for Hopper)"
    )
    assert described([ampere]).count("compute capability 9 or 10") == 1
    assert "bfloat16, not float32" in str(mosaic.lacks(replace(hopper, dtype="float32")))
    assert "heads of 512 numbers" in str(mosaic.lacks(replace(hopper, head_dim=512)))
