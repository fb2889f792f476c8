"""Published sizes with random bfloat16 weights build and take one step forward and back on this class of machine."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import one_device

from tunix.models.families import preset
from tunix.models.model import Model

# Parameters as the model cards count them, with the embedding once where it is tied.
SIZES = {"llama3.2-1b": 1.236e9, "gemma3-1b": 1.000e9, "qwen3-0.6b": 0.596e9}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_published_size_steps(name):
    model = Model(preset(name), dtype="bfloat16")
    count = sum(np.prod(shape) for shape in model.shapes.values())
    assert count == pytest.approx(SIZES[name], rel=2e-3)
    params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "bfloat16"), one_device())
    ids = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (1, 64)), jnp.int32)
    positions = jnp.arange(64, dtype=jnp.int32)[None]

    def loss(params):
        return -model.logprobs(params, ids, positions, jnp.ones_like(ids), jnp.ones(ids.shape, bool))[0].sum() / 63

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    # Random weights of unit gain know nothing: somewhat above log(vocabulary), by the spread of their logits.
    uniform = np.log(model.config.vocab_size)
    assert uniform - 1 < float(value) < uniform + 3
    for key, gradient in gradients.items():
        assert gradient.dtype == jnp.bfloat16
        assert bool(jnp.isfinite(gradient).all()), key
        assert bool(jnp.any(gradient != 0)), key
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 20e9
