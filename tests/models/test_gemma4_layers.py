"""Layers of two shapes, some of which read the keys and values of others: what is counted, told, kept and decayed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_models import one_device
from tunix.models.blocks import FEED_FORWARDS
from tunix.models.config import SHARED
from tunix.models.families.table import preset, with_sizes
from tunix.models.layers import GatedFFN
from tunix.models.model import Model
from tunix.plan.programs import state_of
from tunix.rollout.engine.engine import Engine
from tunix.trainer.optimizer import decays
from tunix.trainer.perf import matmul_weights

pytestmark = pytest.mark.models

SIZES = {"vocab_size": 96, "d_model": 16, "num_layers": 12, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "ffn": 24}
SIZED = with_sizes(preset("gemma4-e4b"), SIZES)
CONFIG = replace(SIZED, gemma4=replace(SIZED.gemma4, layer_inputs=4))
"""Twelve layers, of which the last five have no keys and values."""


class Told(GatedFFN):
    """Tells the sum of a layer's own matrix."""

    def __call__(self, *given, **how):
        return super().__call__(*given, **how)[0], {"sum": jnp.sum(self.down.w[...])}


@pytest.mark.slow
def test_terms_of_several_scans_are_in_the_order_of_the_layers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FEED_FORWARDS, "told", Told)
    model = Model(replace(CONFIG, feed_forward="told"))
    assert len(model.config.stages) > 1
    params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), one_device())
    ids = jnp.ones((1, 8), jnp.int32)
    _, terms = jax.jit(model.forward)(params, ids, jnp.arange(8)[None], ids)
    np.testing.assert_allclose(terms["sum"], params["layers/down/w"].sum((1, 2)), rtol=1e-4, atol=1e-5)


def test_a_plan_places_what_each_layer_keeps():
    model, mesh = Model(CONFIG), one_device()
    state = state_of(model, mesh, Engine(model, mesh, slots=2, max_length=64).sizes)
    kept = [cache is not None for cache in state.caches]
    assert kept == [kind.mixer not in SHARED for kind in CONFIG.kinds]
    assert kept.count(False) == 5


@pytest.mark.parametrize(("name", "weights"), [("gemma4-e2b", 2.3e9), ("gemma4-12b", 11.95e9), ("gemma4-31b", 30.7e9)])
def test_weights_are_as_many_as_published(name: str, weights: float):
    """Those of E2B without tables of layers, which its name leaves out too; a wider ffn counts as it is."""
    config = preset(name)
    assert matmul_weights(config) == pytest.approx(weights, rel=0.01)


def test_what_does_not_train_does_not_decay():
    model = Model(CONFIG)
    named = [name for name in model.shapes if name.endswith("/factor")]
    assert named == ["layers/output/factor"]
    assert not any(map(decays, named))
