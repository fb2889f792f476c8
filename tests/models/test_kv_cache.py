"""How the sampling copy of the weights lies in memory, and that it computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.paged import next_token, pages_of
from tests.tiny_models import one_device
from tests.trainers import PLAIN
from tunix.models import model as models_model
from tunix.models.kv_cache import unstack
from tunix.models.layers import Adapter, Projection, project
from tunix.models.model import Model

pytestmark = pytest.mark.models


def test_wide_matrices_are_turned_and_compute_the_same(monkeypatch):
    tokens = jnp.array([[3, 4], [5, 6], [7, 0]])
    params = Model(PLAIN).init(jax.random.key(0), dict.fromkeys(Model(PLAIN).shapes, "float32"), one_device())

    def sampled(page: int) -> tuple:
        """With memory pages of this size: what is turned, a matrix as it lies, and the states of two rows."""
        monkeypatch.setattr(models_model, "PAGE", page)
        model = Model(PLAIN)

        def states(params):
            weights = unstack(model, params)
            caches, found = pages_of(PLAIN, 2, 8), []
            for position, new in enumerate(tokens):
                hidden, caches = next_token(model, weights, caches, new, jnp.full(2, position))
                found.append(hidden[:, 0])
            return weights.layers[1]["up/w"], jnp.stack(found)

        return model.turned, *jax.jit(states)(params)

    # In PLAIN 32 inputs become 64 of the ffn: rows of 256 bytes. No row is longer than a usual page.
    turned, matrix, found = sampled(255)
    assert turned == {"gate", "up"}
    assert matrix.shape == (64, 32)
    usual, plain, expected = sampled(256)
    assert not usual
    np.testing.assert_array_equal(matrix.T, plain)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_turned_matrix_multiplies_and_is_measured_as_it_was():
    one = Projection("BTD,DF->BTF", (2, 3), ("embed", "ffn"), nnx.Rngs(0), contracted=1)
    one.w = nnx.Param(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 12.0]]))
    one.w_lora_a, one.w_lora_b = nnx.Param(jnp.zeros((2, 1))), nnx.Param(jnp.zeros((1, 3)))
    one.w_lora_m = nnx.Param(jnp.array([5.0**0.5, 10.0, 26.0]))
    one.adapter, one.turned = Adapter(1.0, 0, magnitude=True), True
    # Rows are the outputs' weights, of lengths sqrt(5), 5 and 13: gains 1, 2 and 2. x = (1, 10): 21, 43 and 125.
    np.testing.assert_allclose(one.gain(jnp.ones(())), [1, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(one(jnp.array([[[1.0, 10.0]]])), [[[21, 86, 250]]], rtol=1e-6)


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
