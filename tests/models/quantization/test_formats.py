"""Quantized bases: rounding by hand and beside qwix's own, models beside their dequantized selves, loading, meshes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from tests.marks import slow
from tests.paged import next_token, pages_of
from tests.tiny_models import CASES, EACH, load, one_device, our_logits, reference_folder, rows_of, tokens
from tests.trainers import PLAIN
from tunix.errors import UserError
from tunix.hf import tensor_transfer
from tunix.hf.model_folder import load_params
from tunix.lora.adapt import merge_rounded
from tunix.lora.config import AdapterConfig
from tunix.mesh import bytes_of
from tunix.models import model as models_model
from tunix.models.kv_cache import unstack
from tunix.models.model import Model
from tunix.models.quantization import formats
from tunix.models.quantization.formats import (
    ROUNDED,
    Quantization,
    check_supported,
    check_tile,
    dequantize,
    is_scale,
    plain,
    quantize,
    tile_of,
)
from tunix.models.quantization.modules import projections_of
from tunix.rollout.engine.programs import IN_TURN

pytestmark = pytest.mark.models

BASES = ("nf4", "int8", "int4", "fp8")

# Two inputs, four outputs, one tile: the scale of an output follows from its larger input, 1, 2, 1 and 3.
MATRIX = [[0.5, 2.0, -0.3, 3.0], [1.0, -1.0, 1.0, 0.0]]
BY_HAND = {
    # Integers: the largest is half a step beyond the last number, 127.5 steps, and is rounded into the range.
    # 0.5 -> 63.75 -> 64; 1, 2 and 3 -> 127.5 -> 127; -1 of 2 -> -63.75 -> -64; -0.3 -> -38.25 -> -38
    "int8": [
        [64 / 127.5, 127 * 2 / 127.5, -38 / 127.5, 127 * 3 / 127.5],
        [127 / 127.5, -64 * 2 / 127.5, 127 / 127.5, 0],
    ],
    # 7.5 steps: 0.5 -> 3.75 -> 4; the largest -> 7; -1 of 2 -> -4; -0.3 -> -2.25 -> -2
    "int4": [[4 / 7.5, 7 * 2 / 7.5, -2 / 7.5, 7 * 3 / 7.5], [7 / 7.5, -4 * 2 / 7.5, 7 / 7.5, 0]],
    # e4m3 ends at 448, with three bits behind the first: 0.3 -> 134.4 -> 128, since 16 lie between 128 and 144
    "fp8": [[0.5, 2.0, -128 / 448, 3.0], [1.0, -1.0, 1.0, 0.0]],
    # The table's nearest: 0.5 between 0.441 and 0.563, -0.5 between -0.525 and -0.395, -0.3 beside -0.284
    "nf4": [[0.44070983, 2.0, -0.28444138, 3.0], [1.0, 2 * -0.52507305, 1.0, 0.0]],
}


@pytest.mark.parametrize("base", BASES)
def test_rounding_by_hand(base):
    values, scales = quantize(jnp.asarray(MATRIX), Quantization(base, 2), 1)
    assert values.shape == (2, 4)
    assert scales.shape == (1, 4)
    np.testing.assert_allclose(dequantize(values, scales), np.array(BY_HAND[base], np.float32), rtol=1e-6)


def test_each_tile_has_a_scale_of_its_own():
    # Tiles of two inputs: of 1 and of 10. The smaller tile keeps its precision.
    values, scales = quantize(jnp.asarray([[1.0], [0.5], [10.0], [5.0]]), Quantization("int8", 2), 1)
    np.testing.assert_array_equal(values[:, 0], [127, 64, 127, 64])
    np.testing.assert_allclose(scales[:, 0], [1 / 127.5, 10 / 127.5], rtol=1e-6)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("shape", "contracted"), [((48, 6), 1), ((48, 3, 5), 1), ((4, 12, 5), 2)])
def test_rounding_is_qwix_own(base, shape, contracted):
    w = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
    values, scales = quantize(w, Quantization(base, 16), contracted)
    assert scales.shape == (3, *shape[contracted:])  # 48 inputs in tiles of 16
    flat = w.reshape(48, *shape[contracted:])
    theirs = qwix.quantize(flat, ROUNDED[base], channelwise_axes=range(1, flat.ndim), tiled_axes={0: 16})
    np.testing.assert_array_equal(dequantize(values, scales).reshape(flat.shape), qwix.dequantize(theirs))


def test_a_tile_is_the_largest_that_divides_the_inputs():
    assert [tile_of(inputs, 128) for inputs in (2048, 64, 192, 2880, 131)] == [128, 64, 96, 120, 1]
    check_tile("o", 2880, Quantization("nf4", 128))
    with pytest.raises(UserError, match=r"adapter.tile: 128 leaves tiles of 1 for the 131 inputs of down"):
        check_tile("down", 131, Quantization("nf4", 128))


def test_bytes_by_hand():
    # 256 inputs and 64 outputs: 2 tiles of 128. Half a byte a value, four bytes a scale: 8192 + 512.
    values, scales = quantize(jnp.ones((256, 64)), Quantization("nf4", 128), 1)
    assert bytes_of([values, scales]) == 8192 + 512
    assert (8192 + 512) / (256 * 64) == 0.53125  # bytes a weight


@pytest.mark.parametrize(
    ("name", "base"), [*((EACH[0], base) for base in BASES), *slow((name, "nf4") for name in EACH[1:])]
)
def test_a_folder_is_rounded_while_it_is_loaded(name, base, tmp_path):
    reference_folder(CASES[name], tmp_path)
    whole, exact = load(tmp_path)
    model = replace(whole, quantization=Quantization(base, 16))
    params = load_params(model, tmp_path, dict.fromkeys(model.shapes, "float32"), one_device())
    assert set(params) == set(model.shapes)
    assert set(model.quantized) == {
        f"layers/{name}/w" for ours in projections_of(model.config).values() for name in ours
    }
    for key, value in params.items():
        assert value.shape == model.shapes[key]
        if key in model.quantized:
            assert value.dtype == model.kinds[key]
            # A tile's largest value is 1, 127.5, 7.5 or 448 steps; half of the widest step is the largest error.
            step = {"nf4": 0.1519, "int8": 0.5 / 127, "int4": 1 / 7.5, "fp8": 1 / 28}[base]
            largest = np.abs(exact[key]).max()
            assert np.abs(plain(params, key) - exact[key]).max() <= step * largest
        elif not is_scale(key):
            np.testing.assert_array_equal(value, exact[key])  # norms, biases and tables are as they were

    rows = rows_of(*([row] for row in tokens()))
    rounded = {key: plain(params, key) for key in whole.shapes}
    ours = our_logits(model, params, rows)
    assert np.abs(ours - our_logits(whole, rounded, rows)).max() < 1e-5
    assert np.abs(ours - our_logits(whole, exact, rows)).max() > 1e-3  # the rounding is there


def test_loading_never_holds_the_whole_model(tmp_path, monkeypatch):
    reference_folder(CASES["qwen2-biases-grouped"], tmp_path)
    whole, exact = load(tmp_path)
    model = replace(whole, quantization=Quantization("nf4", 16))
    before, read, seen = {id(x) for x in jax.live_arrays()}, tensor_transfer._whole, []

    def reading(*arguments):
        """Reads a tensor, and looks at what is alive beside those of this test."""
        found = read(*arguments)
        seen.append(bytes_of([x for x in jax.live_arrays() if id(x) not in before]))
        return found

    monkeypatch.setattr(tensor_transfer, "_whole", reading)
    params = load_params(model, tmp_path, dict.fromkeys(model.shapes, "float32"), one_device())
    held = bytes_of(params)
    one_tensor = max(x[0].nbytes if key.startswith("layers/") else x.nbytes for key, x in exact.items())
    assert max(seen) <= held + one_tensor
    # Half a byte and 4 / 16 bytes a weight instead of 4.
    matrices = sum(x.size for key, x in exact.items() if key in model.quantized)
    assert sum(x.nbytes for x in exact.values()) - held == matrices * (4 - 0.75)


@pytest.mark.parametrize(("dtype", "value", "cost"), [("float32", 100.75, 0.0), ("bfloat16", 101.0, 0.25 / 100.75)])
def test_a_merge_dequantizes_first_and_says_what_writing_costs(dtype, value, cost):
    # 50 steps of 2, and A B = 0.75. Above 64 bfloat16 counts in halves, and of two that are as near takes the even.
    down = {
        "w": jnp.full((1, 8, 8), 50, jnp.int8),
        "w_scale": jnp.full((1, 1, 8), 2.0),
        "w_lora_a": jnp.full((1, 8, 1), 0.75),
        "w_lora_b": jnp.ones((1, 1, 8)),
    }
    params = {"norm/w": jnp.ones(8), **{f"layers/down/{name}": x for name, x in down.items()}}
    merged, moved = merge_rounded(params, AdapterConfig(rank=1, alpha=1.0, targets=("down_proj",)), dtype)
    assert set(merged) == {"norm/w", "layers/down/w"}
    assert merged["layers/down/w"].dtype == dtype
    np.testing.assert_array_equal(merged["layers/down/w"].astype("float32"), np.full((1, 8, 8), value))
    assert moved == pytest.approx(cost, rel=1e-5)


def test_a_type_that_the_device_does_not_know_is_told(monkeypatch):
    check_supported(Quantization("fp8", 32))

    def refused(*_):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: F8E4M3FN\nat pass 7")

    monkeypatch.setattr(formats, "quantize", refused)
    with pytest.raises(
        UserError, match=r"^adapter.base: fp8 cannot be .* \(UNIMPLEMENTED: F8E4M3FN\).* nf4, int8, int4$"
    ):
        check_supported(Quantization("fp8", 32))


def test_decoding_holds_one_matrix_at_a_time():
    config = replace(PLAIN, d_model=128, ffn=512, num_layers=4)
    model = Model(config, quantization=Quantization("nf4", 64))
    params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), one_device())
    weights = unstack(model, params)

    def drawn(weights, steps):
        """Greedy tokens, one after the other."""

        def one(index, carry):
            caches, token = carry
            at = jnp.full((2,), index, jnp.int32)
            hidden, caches = next_token(model, weights, caches, token, at)
            return caches, jnp.argmax(model.logits(weights.top, hidden)[:, 0], -1).astype(jnp.int32)

        start = (pages_of(config, 2, 16), jnp.zeros((2,), jnp.int32))
        return jax.lax.fori_loop(0, steps, one, start)[1]

    account = jax.jit(drawn, compiler_options=IN_TURN).lower(weights, 8).compile().memory_analysis()
    whole = sum(4 * params[name].size for name in model.quantized)
    largest = 4 * 128 * 512
    # Of four layers with seven matrices each: one matrix, and the caches.
    assert largest <= account.temp_size_in_bytes < 2 * largest < whole / 6


@pytest.mark.slow
def test_matrices_made_together_or_alone_are_the_same(monkeypatch):
    model = Model(PLAIN, quantization=Quantization("nf4", 16))
    dtypes = dict.fromkeys(model.shapes, "float32")
    together = model.init(jax.random.key(0), dtypes, one_device())
    assert list(map(len, model._together(model.quantized))) == [7]
    # 32 x 64 inputs and outputs of 2 layers, 4 bytes each: gate, up and down take 16 KiB, the others half and less.
    monkeypatch.setattr(models_model, "TOGETHER", 16 << 10)
    groups = list(model._together(model.quantized))
    assert len(groups) > 3
    assert [name for group in groups for name in group] == list(model.quantized)
    for name, value in model.init(jax.random.key(0), dtypes, one_device()).items():
        np.testing.assert_array_equal(value, together[name])
