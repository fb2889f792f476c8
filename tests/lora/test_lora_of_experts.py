"""Adapters of a mixture's experts, on plain and on rounded matrices: their start, gradients, meshes and refusals.

`test_lora.py` has their parity with PEFT.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from peft import LoraConfig, get_peft_model

from tests.lora.test_lora import adapted
from tests.lora.test_qlora import assert_same_as_full_forward
from tests.marks import slow
from tests.tiny_models import (
    CASES,
    one_device,
    quick_jit,
    reference_folder,
    reference_model,
    row_logprobs,
    rows_of,
    tokens,
)
from tests.trainers import sequences, trainer
from tunix.algorithms.sft.algorithm import SFT
from tunix.algorithms.sft.config import SFTConfig
from tunix.config import MeshConfig
from tunix.data.packing import pack
from tunix.errors import UserError
from tunix.hf.peft_folder import _parts
from tunix.lora.adapt import adapt, merge_rounded, quantization
from tunix.lora.config import AdapterConfig
from tunix.lora.multi_lora import Mixture
from tunix.mesh import build_mesh
from tunix.models.config import DENSE_AND_EXPERTS, Clamp, DecoderConfig, Experts, is_adapter
from tunix.models.families.table import small
from tunix.models.model import Model
from tunix.models.moe import Bank
from tunix.models.quantization.formats import Quantization, is_scale, plain
from tunix.trainer.perf import adapter_weights
from tunix.types import Sampling

pytestmark = pytest.mark.models

LOSS = SFT(SFTConfig()).objective


def tiny(family: str, **changes: Any) -> DecoderConfig:
    return replace(small(family), **{"vocab_size": 96, "d_model": 16, "ffn": 16, "num_layers": 1, **changes})


CONFIG = tiny("qwen3_moe", experts=Experts(4, 2))
BESIDE = tiny(
    "gemma4",
    num_layers=2,
    local_layers=(True, False),
    experts=Experts(4, 2, shared=24),
    feed_forward=DENSE_AND_EXPERTS,
)
"""Experts beside a dense ffn, in layers of two kinds."""
BIASED = tiny("gpt_oss", local_layers=(False,), experts=Experts(4, 2, biases=True, clamp=Clamp(limit=1.0)))
"""Experts with biases, and factors of which some are clamped."""
LORA = AdapterConfig(rank=2, alpha=6.0, ranks={"experts.down_proj": 3}, targets=("q_proj", "experts.*"))
QLORA = LORA.model_copy(update={"kind": "qlora", "base": "int8", "tile": 8})
SHAPES = {
    "layers/gates/w_lora_a": (1, 4, 16, 2),
    "layers/gates/w_lora_b": (1, 4, 2, 2, 16),
    "layers/downs/w_lora_a": (1, 4, 16, 3),
    "layers/downs/w_lora_b": (1, 4, 3, 16),
}


def batch(seed=0, rows=4):
    return pack(sequences(rows, seed), rows, 24)


def spread(params, seed=3):
    """The same with random values in the adapters' matrices, and biases."""
    rng, moved = np.random.default_rng(seed), [n for n in params if is_adapter(n) or n.endswith("/b")]
    return {**params, **{n: params[n] + 0.2 * rng.standard_normal(params[n].shape, np.float32) for n in moved}}


def test_gate_and_up_share_an_a_and_the_start_is_the_base():
    model = Model(CONFIG, adapt=adapt(LORA, CONFIG))
    made = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), one_device())
    assert {name: x.shape for name, x in made.items() if "s/w_lora" in name} == SHAPES
    a = np.asarray(made["layers/gates/w_lora_a"])
    # Uniform within 1 / sqrt(16 inputs), whatever the number of experts: the largest of 128 is near it.
    assert 0.23 < np.abs(a).max() <= 0.25
    assert len(np.unique(a[0, :, 0, 0])) == 4  # experts start apart
    rows = (*rows_of(*([row % 96] for row in tokens()))[:3],)
    base = Model(CONFIG)
    plainly = quick_jit(base.forward)({name: x for name, x in made.items() if not is_adapter(name)}, *rows)[0]
    np.testing.assert_array_equal(quick_jit(model.forward)(made, *rows)[0], plainly)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe-seven-of-three", "gpt_oss-five-of-two"])
def test_gradients_are_those_of_peft(name, tmp_path):
    case = CASES[name]
    reference_folder(case, tmp_path / "base")
    settings = AdapterConfig(rank=2, alpha=4.0, targets=("experts.*",))
    model, params, fresh = adapted(tmp_path / "base", settings)
    theirs = get_peft_model(
        reference_model(case),
        LoraConfig(
            r=2,
            lora_alpha=4.0,
            target_modules=[],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            task_type="CAUSAL_LM",
        ),
    )
    weights = dict(theirs.named_parameters())
    places = {}
    for name, (tensor, _) in _parts(settings, model.config).items():
        for layer in range(model.config.num_layers):
            key = "base_model.model." + tensor.key(layer).replace(".weight", ".default.weight")
            places[name, layer] = weights[key], tensor
            with torch.no_grad():
                weights[key].copy_(torch.from_numpy(tensor.write(np.asarray(fresh[name][layer]))))
    ids = torch.from_numpy(tokens()).long()
    logits = theirs(ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    rows = rows_of(*([row] for row in tokens()))
    found = quick_jit(jax.grad(lambda mine: -row_logprobs(model, {**params, **mine}, *rows).sum()))(fresh)
    for (name, layer), (weight, tensor) in places.items():
        expected, ours = weight.grad.numpy(), tensor.write(np.asarray(found[name][layer]))
        assert np.abs(ours - expected).max() < 1e-3 * np.abs(expected).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("settings", [LORA, QLORA], ids=["lora", "qlora"])
@pytest.mark.parametrize(
    "sizes",
    [
        MeshConfig(data=1, fsdp=1, expert=2, tensor=4),  # downs have two tiles of 8 inputs, and four devices for them
        MeshConfig(data=1, fsdp=2, expert=4),
    ],
    ids=repr,
)
@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=lambda config: config.family)
def test_a_mesh_computes_the_same(config, settings, sizes):
    model, mesh = Model(config, adapt=adapt(settings, config), quantization=quantization(settings)), build_mesh(sizes)
    params = spread(model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), one_device()))
    ids = np.random.default_rng(0).integers(0, 96, (4, 16)).astype(np.int32)
    real = np.where(np.arange(16) < np.asarray([[16], [9], [3], [15]]), 1, 0).astype(np.int32)
    rows = tuple(map(jnp.asarray, (ids, np.broadcast_to(np.arange(16, dtype=np.int32), ids.shape), real, real > 0)))

    def loss(mine, base):
        return -row_logprobs(model, {**base, **mine}, *rows).sum()

    def parts(all):
        return ({n: x for n, x in all.items() if is_adapter(n) == mine} for mine in (True, False))

    expected = quick_jit(jax.value_and_grad(loss))(*parts(params))
    with jax.set_mesh(mesh):
        found = quick_jit(jax.value_and_grad(loss))(*parts(jax.device_put(params, model.shardings(mesh))))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, gradient in expected[1].items():
        assert np.abs(gradient).max() > 1e-3
        np.testing.assert_allclose(found[1][name], gradient, atol=1e-4 * float(np.abs(gradient).max()), err_msg=name)


@pytest.mark.parametrize("settings", [LORA, *slow([QLORA])], ids=["lora", "qlora"])
def test_adapters_learn_and_the_rest_stays(settings):
    ours = trainer(CONFIG, adapter=settings)
    assert all(map(is_adapter, ours.state.params))
    base, before = jax.tree.map(np.asarray, (ours.learner.frozen, ours.state.params))
    losses = [float(ours.step(batch(), LOSS)["train/loss"]) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05
    for name, value in base.items():
        np.testing.assert_array_equal(ours.learner.frozen[name], value)
    for name, value in before.items():
        assert np.any(ours.state.params[name] != value), name


@pytest.mark.slow  # tests/lora/test_qlora.py has the same of dense models
@pytest.mark.parametrize(
    ("kind", "config"),
    [("nf4", CONFIG), ("int8", CONFIG), *((kind, BIASED) for kind in ("nf4", "int8", "int4", "fp8"))],
    ids=lambda one: one if isinstance(one, str) else one.family,
)
def test_a_rounded_base_computes_as_its_dequantized_one(kind, config):
    settings = QLORA.model_copy(update={"base": kind})
    rounded = Model(config, adapt=adapt(settings, config), quantization=quantization(settings))
    params = spread(rounded.init(jax.random.key(0), dict.fromkeys(rounded.shapes, "float32"), one_device()))
    assert params["layers/downs/w_scale"].shape == (1, 4, 2, 16)  # of each expert, two tiles of 8 inputs
    assert params["layers/downs/w"].shape == (1, 4, 16, 16)
    wide = {name: plain(params, name) for name in params if not is_scale(name)}
    whole = Model(config, adapt=adapt(LORA, config))
    rows = rows_of(*([row % 96] for row in tokens()))

    def loss(model, base, mine):
        return row_logprobs(model, {**base, **mine}, *rows).sum()

    mine = {name: x for name, x in params.items() if is_adapter(name)}
    found = quick_jit(jax.value_and_grad(partial(loss, rounded, params)))(mine)
    expected = quick_jit(jax.value_and_grad(partial(loss, whole, wide)))(mine)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(np.abs(other).max()))
    merged, error = merge_rounded(params, settings, "float32")
    assert error == 0
    logprobs = quick_jit(partial(row_logprobs, Model(config)))(merged, *rows)
    assert float(logprobs.sum()) == pytest.approx(float(expected[0]), abs=2e-3)


def test_a_rounded_expert_is_as_near_as_its_type_allows():
    """int8 has 127.5 steps from 0 to a tile's largest value, and rounds to half a step."""
    w = np.random.default_rng(0).standard_normal((3, 16, 8)).astype(np.float32)
    bank = Bank((3, 16, 8), ("expert", "embed", "ffn"), nnx.Rngs(0))
    bank.w[...] = w
    bank.quantize("gates", Quantization("int8", 8))
    tiles, found = (
        w.reshape(3, 2, 8, 8),
        np.asarray(
            plain(
                {"layers/gates/w": bank.w[...][None], "layers/gates/w_scale": bank.w_scale[...][None]}, "layers/gates/w"
            )
        )[0],
    )
    steps = np.abs(tiles).max(axis=2, keepdims=True) / 127.5
    errors = np.abs(found.reshape(tiles.shape) - tiles)
    assert np.all(errors <= 0.5 * steps * (1 + 1e-5))
    assert errors.max() > 0.25 * steps.min()


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, BESIDE, BIASED], ids=lambda config: config.family)
@pytest.mark.parametrize("settings", [LORA, QLORA], ids=["lora", "qlora"])
def test_what_is_sampled_is_what_is_trained_and_a_checkpoint_resumes(settings, config, tmp_path):
    ours = trainer(config, adapter=settings, length=24)
    ours.step(batch(), LOSS)
    ours.publish()
    prompts = [row.tokens[:5] for row in sequences(3, seed=5)]
    drawn = [found[0] for found in ours.sample(prompts, 1, Sampling(max_tokens=12, temperature=1.0), seed=0)]
    assert_same_as_full_forward(ours, prompts, drawn)
    ours.save(tmp_path / "state").result()
    other = trainer(config, adapter=settings, length=24)
    other.load(tmp_path / "state")
    steps = [[float(one.step(batch(seed), LOSS)["train/loss"]) for seed in (1, 2)] for one in (ours, other)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"dropout": 0.1}, r"adapter.dropout: 0.1 is not possible with experts"),
        ({"dora": True}, r"adapter.dora: True is not possible with experts"),
        ({"start": "pissa"}, r"adapter.start: pissa is not possible with experts"),
        ({"ranks": {"experts.down_proj": 17}}, r"adapter.rank: 17 is above 16.*experts.down_proj's matrix"),
    ],
)
def test_what_experts_cannot_have_is_refused(section, message):
    settings = AdapterConfig(targets=("experts.*",), **section)
    with pytest.raises(UserError, match=message):
        _ = Model(CONFIG, adapt=adapt(settings, CONFIG)).shapes
    other = AdapterConfig(targets=("q_proj", "mlp.*"), **{**section, "ranks": {}})
    assert other.targeted_in(small("llama"))  # which has no experts


def test_patterns_name_experts_and_a_dense_name_does_not():
    config = small("qwen3_5_moe")
    both = ("experts.gate_up_proj", "experts.down_proj")
    assert AdapterConfig(targets=("down_proj",)).targeted_in(config) == ("down_proj",)
    assert AdapterConfig(targets=("experts.*",)).targeted_in(config) == both
    assert AdapterConfig(targets=("mlp.experts.down_proj",)).targeted_in(config) == both[1:]
    assert set(both) < set(AdapterConfig(targets=("mlp.*",)).targeted_in(config))
    assert AdapterConfig(targets=("experts.*",)).targeted_in(BESIDE) == both
    assert AdapterConfig(targets=("mlp.down_proj",)).targeted_in(BESIDE) == ("down_proj",)


def test_adapters_of_experts_are_not_mixed_in_a_batch():
    with pytest.raises(UserError, match=r"experts.*cannot be mixed"):
        Mixture(Model(CONFIG), (LORA,))
    assert Mixture(Model(CONFIG), (AdapterConfig(targets=("q_proj",)),))


def test_the_weights_that_a_token_uses_are_counted():
    """Of 2 experts: A and B of gate and up 2 (16 + 2 16), of down 3 (16 + 16); and q, of 4 heads of 16, 2 (16 + 64)."""
    assert adapter_weights(CONFIG, LORA) == 2 * (2 * 48 + 3 * 32) + 2 * 80
