"""Products of 8-bit floats: both directions by hand, each token for itself, the same matrix in trainer and sampler."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from tests.lora.test_qlora import SHAPES, assert_same_as_full_forward
from tests.marks import slow
from tests.models.quantization.test_qat import drawn
from tests.trainers import PLAIN, RICH, sequences, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.lora.config import AdapterConfig
from tunix.models import expert_products, grouped_products
from tunix.models.expert_products import Fp8Bank, from_experts, routes, to_experts
from tunix.models.families.table import small
from tunix.models.kv_cache import unstack, view_axes
from tunix.models.layers import Adapter, Projection, project, project_in_fp8
from tunix.models.model import IN_DTYPE, Model
from tunix.models.quantization.formats import check_multiplies_fp8, dequantize, rounded_matrix
from tunix.models.quantization.modules import BANKS
from tunix.types import Sequence

pytestmark = pytest.mark.models

LOSS = SFT(SFTConfig()).objective
MIXTURE = replace(small("qwen3_moe"), vocab_size=96)
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
SPEC = "BTD,DNH->BTNH"


def test_a_product_and_its_gradients_by_hand():
    """Two tokens, three inputs, two outputs. e4m3 has 3 digits after the first and ends at 448 = 1.75 x 2^8, e5m2 has
    2 and ends at 57344 = 1.75 x 2^15."""
    w = np.array([[448, 1.75], [17, -0.07], [-200, 0.0]], np.float32)
    # Scales of the outputs 1 and 1.75 / 448 = 2^-8. 17 lies between 16 and 18 and goes to the even 16; -200 between
    # -192 and -208 goes to the even -192 (mantissa 1.100, not 1.101). -0.07 x 256 = -17.92 goes to -18.
    w_in_8 = np.array([[448, 448], [16, -18], [-192, 0]], np.float32)
    outputs = np.array([1, 2.0**-8], np.float32)
    x = np.array([[[448, 33, -1], [-7, 1, 0.11]]], np.float32)
    # The first token's scale is 1: 33 lies between 32 and 36. The second's is 7 / 448 = 2^-6: -448, 64, and
    # 0.11 x 64 = 7.04 goes to 7.
    x_in_8 = np.array([[[448, 32, -1], [-448, 64, 7]]], np.float32)
    tokens = np.array([1, 2.0**-6], np.float32)
    y = np.array([[[448 * 448 + 32 * 16 + 192, (448 * 448 - 32 * 18) / 256], [0, 0]]], np.float32)
    y[0, 1] = [(-448 * 448 + 64 * 16 - 7 * 192) / 64, (-448 * 448 - 64 * 18) / 256 / 64]
    np.testing.assert_array_equal(y[0], x_in_8[0] @ w_in_8 * outputs * tokens[:, None])

    product = partial(project_in_fp8, "BTD,DF->BTF", w_scale=None)
    found, backward = jax.vjp(product, jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_array_equal(found, y)
    dy = np.array([[[1.75, 128 * 1.5], [0, 0]]], np.float32)
    # Times the outputs' scales: 1.75 and 0.75, whose largest becomes 57344: the scale is 2^-15. 0.75 x 2^15 = 24576 =
    # 1.5 x 2^14 is a number of e5m2. The second token has no gradient.
    dx = np.array([[1.75 * 448 + 0.75 * 448, 1.75 * 16 - 0.75 * 18, -1.75 * 192], [0, 0, 0]], np.float32)
    dx_found, dw_found = backward(jnp.asarray(dy))
    np.testing.assert_array_equal(dx_found[0], dx)
    # The weights' gradient knows no rounding.
    np.testing.assert_array_equal(dw_found, x[0].T @ dy[0])


def rounded(x: np.ndarray, kind: type, axes: tuple[int, ...]) -> np.ndarray:
    """The numbers that 8-bit floats with a scale along these axes stand for, by numpy alone."""
    scale = powers(x, kind, axes)
    return (x / scale).astype(kind).astype(np.float64) * scale


def powers(x: np.ndarray, kind: type, axes: tuple[int, ...]) -> np.ndarray:
    """The least powers of two by which the numbers along these axes fit."""
    most = np.abs(x).max(axes, keepdims=True).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(most / float(ml_dtypes.finfo(kind).max)))
    assert np.all(most / scale <= float(ml_dtypes.finfo(kind).max))
    assert np.all(2 * most / scale > float(ml_dtypes.finfo(kind).max))
    return scale.astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_those_of_numpy(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = jax.random.normal(keys[0], (2, 5, 64), dtype), jax.random.normal(keys[1], (2, 5, 4, 8), dtype)
    w = jax.random.normal(keys[2], (64, 4, 8))
    cast, out = np.asarray(w.astype(dtype), np.float32), float(jnp.finfo(dtype).eps)
    w_in_8 = rounded(cast, E4M3, (0,))
    y, backward = jax.vjp(partial(project_in_fp8, SPEC, w_scale=None), x, w)
    dx, dw = backward(dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    theirs = np.einsum(SPEC.lower(), rounded(np.asarray(x, np.float32), E4M3, (2,)), w_in_8)
    np.testing.assert_allclose(np.asarray(y, np.float64), theirs, rtol=out, atol=4e-5)
    # S dy, rounded, times the values that S was taken out of.
    scales = powers(cast, E4M3, (0,))[0]
    pulled = rounded(np.asarray(dy, np.float32) * scales, E5M2, (2, 3))
    np.testing.assert_allclose(
        np.asarray(dx, np.float64), np.einsum("btnh,dnh->btd", pulled, w_in_8 / scales), rtol=out, atol=4e-5
    )
    plain = jax.vjp(partial(project, SPEC), x, w)[1](dy)[1]
    np.testing.assert_array_equal(dw, plain)
    # e4m3 has 4 binary digits: x and w are each off by 2^-4 of themselves at most.
    exact = np.einsum(SPEC.lower(), np.asarray(x, np.float64), np.asarray(w, np.float64))
    off = np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)
    assert 0.02 < off < 0.06


def test_few_bits_that_do_not_train_have_no_gradient():
    x, w = jax.random.normal(jax.random.key(0), (1, 3, 16)), jax.random.normal(jax.random.key(1), (16, 8))
    plain, backward = jax.vjp(partial(project_in_fp8, "BTD,DF->BTF", w_scale=None), x, w)
    scale = jnp.asarray(powers(np.asarray(w), E4M3, (0,)))
    values = (w / scale).astype(jnp.float8_e4m3fn)
    stored, of_x = jax.vjp(lambda x: project_in_fp8("BTD,DF->BTF", x, values, scale), x)
    np.testing.assert_array_equal(stored, plain)
    np.testing.assert_array_equal(of_x(stored)[0], backward(plain)[0])
    # Neither small numbers nor none at all have a scale of 0, which would divide 0 by 0.
    np.testing.assert_allclose(project_in_fp8("BTD,DF->BTF", 2.0**-90 * x, w, None), 2.0**-90 * plain, rtol=1e-6)
    np.testing.assert_array_equal(project_in_fp8("BTD,DF->BTF", 0 * x, 0 * w, None), jnp.zeros((1, 3, 8)))


@pytest.mark.parametrize("config", [PLAIN, *slow([RICH])])
def test_a_token_does_not_depend_on_its_neighbours(config):
    """Packed with others, one of them a hundred times as loud, as alone: a scale for all tokens of a batch fails."""
    ours = trainer(config, compute="fp8", length=24)
    few = sequences(3, seed=7, longest=8)
    loud = Sequence(np.full(8, 95, np.int32), np.arange(8) > 0)
    table = ours.state.params["embed/w"].at[95].multiply(100.0)
    ours.state = replace(ours.state, params={**ours.state.params, "embed/w": table})
    alone = [ours.logprobs([s])[0] for s in few]
    together = ours.logprobs([few[0], loud, *few[1:]])
    for mine, theirs in zip(alone, [together[0], *together[2:]], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("config", [RICH, MIXTURE], ids=["rich", "mixture"])
def test_the_sampler_stores_eight_bits_of_what_the_trainer_rounds(config):
    model = Model(config, dtype="bfloat16", compute="fp8")
    params = trainer(config, compute="fp8").learner.params
    weights = jax.jit(unstack, static_argnums=0)(model, params)
    wide = [name for name, x in weights.layers[0].items() if name.endswith("/w") and x.dtype != jnp.float8_e4m3fn]
    assert all("norm" in name or "router" in name for name in wide), wide
    assert len(wide) < len(weights.layers[0])
    for name in model.in_fp8:
        w, inputs = (
            np.asarray(params[f"layers/{name}/w"].astype(jnp.bfloat16), np.float32),
            (0, 1) if name == "o" else (0,),
        )
        whole, inputs = (jax.vmap(dequantize), (1,)) if name in BANKS else (dequantize, inputs)
        if name in BANKS:  # a device has the scales of its experts and outputs
            expert, _, outputs = view_axes(model, f"layers/{name}/w")
            assert view_axes(model, f"layers/{name}/w_scale") == (expert, None, outputs)
            assert expert is not None
        for layer, matrix in zip(weights.layers, w, strict=True):
            stored = whole(layer[f"{name}/w"], layer[f"{name}/w_scale"])
            np.testing.assert_allclose(stored, rounded(matrix, E4M3, inputs), rtol=1e-6)


def test_rates_of_states_and_routers_keep_their_dtype():
    assert IN_DTYPE == ("beta", "decay")
    assert Model(PLAIN, compute="fp8").in_fp8 == {"q", "k", "v", "o", "gate", "up", "down"}
    assert Model(MIXTURE, compute="fp8").in_fp8 == {"q", "k", "v", "o", "gates", "ups", "downs"}
    assert Model(PLAIN).in_fp8 == frozenset()


@pytest.mark.parametrize("where", ["turns", *slow(["triton", "ragged_dot"])])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_experts_are_those_of_numpy(dtype, where, monkeypatch):
    """Seven tokens with two of four experts each; the third expert has none, and one pair is not computed."""
    if where != "turns":
        monkeypatch.setattr(expert_products, "platform", lambda: "gpu")
        monkeypatch.setattr(grouped_products, "implementation", lambda spec: where)
    experts = np.array([[0, 1], [1, 3], [3, 0], [0, 1], [1, 0], [3, 1], [0, 3]])
    computed = np.ones((7, 2), bool)
    computed[4, 1] = False
    sent = routes(jnp.asarray(experts), 4, jnp.asarray(computed))
    keys, out = jax.random.split(jax.random.key(0), 4), float(jnp.finfo(dtype).eps)
    x, d = (jax.random.normal(key, (7, width), dtype) for key, width in zip(keys, (40, 24), strict=False))
    w = jax.random.normal(keys[2], (4, 40, 24), dtype)
    cast = np.asarray(w, np.float32)
    w_in_8, scales = rounded(cast, E4M3, (1,)), powers(cast, E4M3, (1,))[:, 0]

    def there(token: int) -> list[int]:
        return [int(e) for e, real in zip(experts[token], computed[token], strict=True) if real]

    def few(x: np.ndarray, kind: type) -> np.ndarray:
        return rounded(x[None], kind, (1,))[0]

    # Each token's products with its experts, in the order of the rows; and the sum of its own.
    wide, narrow = (np.asarray(x, np.float32) for x in (x, d))
    rows, backward = jax.vjp(lambda x, w: to_experts(x, Fp8Bank(w, None), sent), x, w)
    pairs = [(int(p) // 2, int(experts.reshape(-1)[p])) for p in sent.pairs[:13]]
    theirs = np.stack([few(wide[t], E4M3) @ w_in_8[e] for t, e in pairs])
    np.testing.assert_allclose(np.asarray(rows, np.float64)[:13], theirs, rtol=out, atol=4e-5)
    pull = jnp.zeros_like(rows).at[:13].set(d[jnp.asarray([t for t, _ in pairs])])
    dx, dw = backward(pull)
    assert (rows.dtype, dx.dtype, dw.dtype) == (dtype, dtype, dtype)
    pulled = np.zeros((7, 40))
    for t, e in pairs:
        back = few(narrow[t] * scales[e], E5M2) @ (w_in_8[e] / scales[e]).T
        pulled[t] += np.asarray(jnp.asarray(back, dtype), np.float64)
    np.testing.assert_allclose(np.asarray(dx, np.float64), pulled, rtol=2 * out, atol=20 * out)
    # The matrices' gradients are those of products that round nothing.
    plain = jax.vjp(lambda w: to_experts(x, w, sent), w)[1](pull)[0]
    np.testing.assert_array_equal(dw, plain)

    mixed, backward = jax.vjp(lambda rows, w: from_experts(rows, Fp8Bank(w, None), sent), pull, w.swapaxes(1, 2))
    turned = rounded(cast.swapaxes(1, 2), E4M3, (1,))
    theirs = np.zeros((7, 40))
    for t, e in pairs:
        theirs[t] += np.asarray(jnp.asarray(few(narrow[t], E4M3) @ turned[e], dtype), np.float64)
    np.testing.assert_allclose(np.asarray(mixed, np.float64), theirs, rtol=2 * out, atol=20 * out)
    # What a sampler stores gives the same, and has no gradient.
    stored = Fp8Bank(*jax.vmap(partial(rounded_matrix, contracted=1))(w))
    assert stored.matrices.dtype == E4M3
    again, of_x = jax.vjp(lambda x: to_experts(x, stored, sent), x)
    np.testing.assert_array_equal(again[:13], rows[:13])
    np.testing.assert_array_equal(of_x(pull)[0], dx)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "bfloat16"),
        ("mixture", "bfloat16"),
        *slow([("llama", "float32"), ("mixture", "float32"), ("rich", "bfloat16"), ("qwen2", "float32")]),
    ],
)
def test_what_is_sampled_is_what_is_trained(name, dtype):
    ours = trainer({**SHAPES, "mixture": MIXTURE}[name], compute="fp8", dtype=dtype, length=24)
    for _ in range(2):
        ours.step(pack(sequences(6), 6, 24), LOSS)
    # bfloat16's gate. What was measured: 0.02.
    assert_same_as_full_forward(ours, *drawn(ours), atol=0.25)


def test_an_adapters_gradients_are_not_rounded():
    """Of `y = q(x) q(W) + s x A B`: `dB = s (x A)^T dy` and `dA = s x^T dy B^T`."""
    w = np.asarray(jax.random.normal(jax.random.key(0), (8, 4)))
    draw = np.random.default_rng(0).standard_normal
    x, dy, a, b = (draw(shape).astype(np.float32) for shape in [(1, 3, 8), (1, 3, 4), (8, 2), (2, 4)])

    def pulled(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        projection = Projection("BTD,DF->BTF", (8, 4), ("embed", "ffn"), nnx.Rngs(0), contracted=1)
        projection.fp8, projection.adapter, projection.w = True, Adapter(0.5, 0), nnx.Param(jnp.asarray(w))
        projection.w_lora_a, projection.w_lora_b = nnx.Param(a), nnx.Param(b)
        return jnp.sum(projection(x) * dy)

    of_a, of_b, of_x = jax.grad(pulled, argnums=(0, 1, 2))(*map(jnp.asarray, (a, b, x)))
    np.testing.assert_allclose(of_a, 0.5 * x[0].T @ dy[0] @ b.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_b, 0.5 * (x[0] @ a).T @ dy[0], rtol=1e-5, atol=1e-6)
    # e5m2 and e4m3 times the base, and the adapter's as it is.
    scales = powers(w, E4M3, (0,))
    base = rounded(dy * scales, E5M2, (2,)) @ (rounded(w, E4M3, (0,)) / scales).T
    np.testing.assert_allclose(of_x, base + 0.5 * dy @ b.T @ a.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dora", slow([False, True]))
def test_an_adapter_learns_on_a_base_in_fp8(dora):
    ours = trainer(adapter=AdapterConfig(rank=4, dora=dora), compute="fp8", length=24)
    batch = pack(sequences(6), 6, 24)
    first = float(ours.evaluate([batch], LOSS)["eval/loss"])
    for _ in range(8):
        ours.step(batch, LOSS)
    assert float(ours.evaluate([batch], LOSS)["eval/loss"]) < first - 0.1
    # DoRA's gains too are those of the rounded base.
    assert_same_as_full_forward(ours, *drawn(ours), atol=0.25)


@pytest.mark.parametrize(
    ("config", "mesh"),
    slow([(PLAIN, {"fsdp": 2, "tensor": 2, "data": 2}), (MIXTURE, {"fsdp": 2, "tensor": 2, "expert": 2})]),
    ids=["dense", "mixture"],
)
def test_a_mesh_and_micro_batches_change_no_gradient(config, mesh):
    batch = pack(sequences(12), 12, 24)
    ours = trainer(config, compute="fp8", rows=8)
    for other in (
        trainer(config, compute="fp8", rows=8, devices=8, mesh=MeshConfig(**mesh)),
        trainer(config, compute="fp8", rows=2),
    ):
        a, b = (float(x.forward_backward(batch, LOSS)["train/loss"]) for x in (ours, other))
        assert a == pytest.approx(b, abs=1e-3)
        assert other.learner.gradients
        assert ours.learner.gradients
        for name, gradient in ours.learner.gradients.items():
            theirs = np.asarray(other.learner.gradients[name])
            assert np.linalg.norm(gradient - theirs) < 0.02 * np.linalg.norm(theirs), name
        ours.learner.gradients = None


def device(kind: str, platform: str = "gpu", **more: str) -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, platform=platform, **more)


@pytest.mark.parametrize(
    "chip",
    [
        device("NVIDIA H100 80GB HBM3", compute_capability="9.0"),
        device("NVIDIA L4", compute_capability="8.9"),
        device("NVIDIA B200", compute_capability="10.0"),
        device("TPU7x", "tpu"),
        device("cpu", "cpu"),
    ],
)
def test_chips_that_multiply_it(chip):
    check_multiplies_fp8(chip, "bfloat16")


@pytest.mark.parametrize(
    ("chip", "reason"),
    [
        (device("NVIDIA A100-SXM4-40GB", compute_capability="8.0"), "its compute capability is 8.0, and they begin"),
        (device("TPU v6 lite", "tpu"), r"they begin with v7x"),
        (device("TPU v5p", "tpu"), r"they begin with v7x"),
        (device("AMD Instinct MI300X", compute_capability="gfx942"), "are known to have them"),
    ],
)
def test_chips_that_do_not_say_what_would_run(chip, reason):
    with pytest.raises(UserError, match=f"^model.quantization: compute fp8: {chip.device_kind} .*{reason}") as raised:
        check_multiplies_fp8(chip, "bfloat16")
    assert str(raised.value).endswith("leave the key out, and it multiplies in bfloat16")
    assert "\n" not in str(raised.value)
