"""How the sampling copy of the weights lies in memory, and that it computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import one_device
from trainers import PLAIN

from tunix.lora.adapt import adapt
from tunix.lora.config import AdapterConfig
from tunix.models import model as models_model
from tunix.models.cached import empty, extend, gains, unstack
from tunix.models.layers import project
from tunix.models.model import Model


def with_pages(monkeypatch, size: int, adapter: AdapterConfig | None) -> tuple:
    """What a model with memory pages of this size samples from, its gains, and its states for two rows."""
    monkeypatch.setattr(models_model, "PAGE", size)
    model = Model(PLAIN, adapt=None if adapter is None else adapt(adapter, PLAIN))
    params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), one_device())
    weights = unstack(model, params)
    if adapter is not None:
        return model.turned, weights, gains(model, weights), None
    tokens, count = jnp.array([[3, 5, 7], [4, 6, 0]]), jnp.array([3, 2])
    states, _ = extend(model, weights, empty(PLAIN, 2, 8, 3, "float32"), tokens, 0 * count, count)
    return model.turned, weights, None, states


def test_wide_matrices_are_turned_and_compute_the_same(monkeypatch):
    # In PLAIN 32 inputs become 64 of the ffn: rows of 256 bytes. No row is as long as a usual page.
    turned, weights, _, states = with_pages(monkeypatch, 255, None)
    assert turned == {"gate", "up"}
    assert weights.layers[0]["gate/w"].shape == (64, 32)
    usual, plain, _, expected = with_pages(monkeypatch, 256, None)
    assert not usual
    assert plain.layers[0]["gate/w"].shape == (32, 64)
    np.testing.assert_array_equal(weights.layers[1]["up/w"].T, plain.layers[1]["up/w"])
    np.testing.assert_allclose(states[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(states[1, :2], expected[1, :2], rtol=1e-5, atol=1e-6)


def test_gains_of_turned_matrices_are_the_same(monkeypatch):
    dora = AdapterConfig(rank=2, dora=True)
    found, expected = (with_pages(monkeypatch, size, dora)[2] for size in (255, 256))
    for mine, theirs in zip(found, expected, strict=True):
        for name in theirs:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "x", "w", "turned"),
    [
        ("BTNH,NHD->BTD", (2, 1, 4, 32), (4, 32, 256), False),  # two axes are summed, not in the alphabet's order
        ("BTD,DF->BTF", (2, 1, 128), (256, 128), True),
    ],
)
def test_a_product_copies_no_matrix(spec, x, w, turned):
    def loop(x, w):
        def one(_, x):
            y = project(spec, x, jnp.moveaxis(w, -1, 0) if turned else w)
            return x + y.sum()

        return jax.lax.fori_loop(0, 8, one, x)

    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, w))
    account = jax.jit(loop).lower(*arrays).compile().memory_analysis()
    # The matrix has 128 KiB, inputs and outputs of two rows 2 KiB.
    assert account.temp_size_in_bytes < 16 << 10
