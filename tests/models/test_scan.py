"""What layers keep for the backward pass, whatever is recomputed, and the dtype of their weights' gradients."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow
from tests.trainers import PLAIN
from tunix.models.config import Gemma4
from tunix.models.families.table import small
from tunix.models.model import Model, Params
from tunix.models.scan import KEEPS

pytestmark = pytest.mark.models

B, T = 2, 12
C = replace(PLAIN, num_layers=3)
SHAPES = {
    "input": (B, T, C.d_model),
    "x": (B, T, C.d_model),
    "q": (B, T, C.num_heads, C.head_dim),
    "k": (B, T, C.num_kv_heads, C.head_dim),
    "v": (B, T, C.num_kv_heads, C.head_dim),
    "gate": (B, T, C.ffn),
    "up": (B, T, C.ffn),
    "mixed": (B, T, C.num_heads, C.head_dim),
    "lse": (B, T, C.num_heads),
}


@pytest.fixture(scope="module")
def params() -> Params:
    model = Model(C)
    keys = iter(jax.random.split(jax.random.key(0), len(model.shapes)))
    return {name: 0.2 * jax.random.normal(next(keys), shape) for name, shape in model.shapes.items()}


def loss(model: Model, params: Params) -> jax.Array:
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, C.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    hidden, _ = model.forward(params, tokens, positions, jnp.ones_like(positions))
    return jnp.sum(hidden.astype(jnp.float32) * jax.random.normal(jax.random.key(2), hidden.shape))


def gradients(model: Model, params: Params) -> Params:
    return jax.jit(jax.grad(lambda params: loss(model, params)))(params)


@pytest.mark.parametrize("remat", ["mlp", "offload", *slow(["attention", "block"])])
def test_gradients_do_not_depend_on_what_is_recomputed(params, remat):
    found, right = gradients(Model(C, remat=remat), params), gradients(Model(C), params)
    for name in params:
        np.testing.assert_allclose(found[name], right[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", *slow(["float32"])])
@pytest.mark.parametrize("remat", ["none", "mlp", "offload", *slow(["attention", "block"])])
def test_a_layer_keeps_what_is_said(params, remat, dtype):
    def backward(params: Params):
        return jax.vjp(lambda params: loss(Model(C, dtype=dtype, remat=remat), params), params)[1]

    kept = jax.tree.leaves(jax.eval_shape(backward, params))
    found = Counter(x.shape[1:] for x in kept if x.shape[:3] == (C.num_layers, B, T))
    names = KEEPS["block"] if remat == "offload" else KEEPS[remat]
    assert found == Counter(SHAPES[name] for name in names)
    program = str(jax.make_jaxpr(jax.grad(lambda params: loss(Model(C, dtype=dtype, remat=remat), params)))(params))
    assert ("<host>" in program) == (remat == "offload")


@pytest.mark.parametrize("remat", ["none", "offload", *slow(["attention", "mlp", "block"])])
def test_attention_runs_forward_once_and_backward_once(params, remat):
    model = Model(C, remat=remat, attention="chunked")
    program = str(jax.make_jaxpr(jax.grad(lambda params: loss(model, params)))(params))
    assert program.count("while[") == 2


def test_gradients_of_float32_weights_are_those_of_the_bfloat16_products(params):
    """Held in bfloat16 by the scan and cast afterwards: as if all weights had been cast before it."""
    model = Model(C, dtype="bfloat16")
    layers = {name: x for name, x in params.items() if name.startswith("layers/")}
    rest = {name: x for name, x in params.items() if name not in layers}
    cast = {name: x.astype(jnp.bfloat16) for name, x in layers.items()}
    run = jax.grad(lambda layers: loss(model, layers | rest))
    found, right = jax.jit(run)(layers), jax.jit(run)(cast)
    for name in layers:
        assert found[name].dtype == jnp.float32
        np.testing.assert_array_equal(found[name], right[name].astype(jnp.float32), err_msg=name)
    backward = [one for one in jax.make_jaxpr(run)(layers).jaxpr.eqns if one.params.get("reverse")]
    stacked = [x.aval.dtype for one in backward for x in one.outvars if x.aval.shape == (C.num_layers, 32, 64)]
    assert stacked == [jnp.bfloat16, jnp.bfloat16]  # gate and up


def test_no_layer_of_a_period_keeps_its_weights():
    """Three DeltaNets and an attention layer, five times. The weights are there: kept again they take as much."""
    linear = (True, True, True, False) * 5
    model = Model(replace(small("qwen3_5"), num_layers=20, linear_layers=linear, d_model=48, ffn=80))
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in model.shapes.items()}

    def kept(params: Params) -> list[jax.Array]:
        return jax.tree.leaves(jax.vjp(lambda params: loss(model, params), params)[1])

    found = {x.shape for x in jax.eval_shape(kept, params)}
    assert (5, B, T, 48) in found, "the stream before a layer of each period"
    # The weights themselves are found by periods: [5 3 ...] and [5 1 ...].
    assert not found & {(5, *shape[1:]) for name, shape in model.shapes.items() if name.startswith("layers/")}


def test_inputs_of_layers_have_gradients_beside_those_of_weights_that_the_scan_casts():
    """They are no weights of layers, but pass into the scan like these; both dtypes of the gradients' sums agree."""
    config = replace(C, gemma4=Gemma4(C.num_kv_heads, C.head_dim, layer_inputs=8))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    params = {name: 0.2 * jax.random.normal(next(keys), shape) for name, shape in Model(config).shapes.items()}
    params["layers/output/factor"] = jnp.ones(config.num_layers)
    found = gradients(Model(config, dtype="bfloat16"), params)
    right = gradients(Model(config), params)
    for name in ("inputs/embed/w", "inputs/context/w", "inputs/norm/w", "layers/input_gate/w", "layers/input_out/w"):
        apart = np.linalg.norm(found[name] - right[name]) / np.linalg.norm(right[name])
        assert apart < 0.05, name  # bfloat16 keeps 8 bits
