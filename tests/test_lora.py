"""Adapters against PEFT, both ways, and what they promise: a start at the base, gradients only where targeted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import CASES, load, one_device, quick_jit, reference_folder, reference_model, rows_of, tokens
from transformers import AutoModelForCausalLM

from tunix.config import AdapterConfig
from tunix.errors import UserError
from tunix.lora.adapt import adapt, merge, scale
from tunix.lora.peft import load_adapter, save_adapter
from tunix.models.families import read_config
from tunix.models.model import Model, is_adapter

FAMILIES = ("llama-multiquery-linear-wide-heads", "gemma3-dual-rope", "qwen2-biases-grouped")
ADAPTERS = {
    "all": AdapterConfig(rank=4, alpha=10.0),
    "attention-rslora": AdapterConfig(rank=3, alpha=5.0, rslora=True, targets=("q_proj", "v_proj", "o_proj")),
}
parity = pytest.mark.parametrize(
    ("name", "adapter"), [(FAMILIES[0], "all"), (FAMILIES[1], "all"), (FAMILIES[2], "attention-rslora")]
)


def adapted(folder, adapter, *, random=True):
    """Our model of the folder with adapters, as (model, base params, adapter params)."""
    config = read_config(folder)
    model = Model(config, adapt=adapt(adapter, config))
    _, base = load(folder)
    ours = {name: "float32" for name in model.shapes if is_adapter(name)}
    fresh = model.init(jax.random.key(0), ours, one_device())
    if random:
        generator = np.random.default_rng(1)
        fresh = {n: jnp.asarray(0.3 * generator.standard_normal(v.shape, np.float32)) for n, v in fresh.items()}
    return model, base, fresh


def our_logits(model, params):
    rows = rows_of(*([row] for row in tokens()))
    run = quick_jit(lambda p: model.logits(p, model.hidden(p, rows.tokens, rows.positions, rows.segment_ids)))
    return run(params)


def their_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(tokens()).long()).logits.numpy()


@parity
def test_our_adapter_loads_in_peft(name, adapter, tmp_path):
    base = reference_folder(CASES[name], tmp_path / "base")
    model, params, fresh = adapted(tmp_path / "base", ADAPTERS[adapter])
    save_adapter(tmp_path / "adapter", fresh, ADAPTERS[adapter], model.config, str(tmp_path / "base"))

    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager"), tmp_path / "adapter"
    ).eval()
    ours = our_logits(model, {**params, **fresh})
    assert np.abs(ours - their_logits(theirs)).max() < 1e-4
    assert np.abs(ours - their_logits(base)).max() > 0.1  # the adapter does something
    again, arrays = load_adapter(tmp_path / "adapter", model.config)
    assert (again.rank, again.alpha, again.rslora) == (
        ADAPTERS[adapter].rank,
        ADAPTERS[adapter].alpha,
        ADAPTERS[adapter].rslora,
    )
    assert set(arrays) == set(fresh)
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, fresh[key])


@parity
def test_an_adapter_of_peft_loads_here_and_merges(name, adapter, tmp_path):
    reference_folder(CASES[name], tmp_path / "base")
    settings = ADAPTERS[adapter]
    modules = "all-linear" if settings.targets == "all-linear" else list(settings.targets)
    theirs = get_peft_model(
        reference_model(CASES[name]),
        LoraConfig(
            r=settings.rank,
            lora_alpha=int(settings.alpha),
            use_rslora=settings.rslora,
            target_modules=modules,
            task_type="CAUSAL_LM",
        ),
    ).eval()
    torch.manual_seed(1)
    for key, weight in theirs.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(weight, std=0.3)
    theirs.save_pretrained(tmp_path / "adapter")

    model, params, _ = adapted(tmp_path / "base", settings)
    found, arrays = load_adapter(tmp_path / "adapter", model.config)
    whole = {**params, **{key: jnp.asarray(array) for key, array in arrays.items()}}
    ours = our_logits(Model(model.config, adapt=adapt(found, model.config)), whole)
    assert np.abs(ours - their_logits(theirs)).max() < 1e-4
    merged = our_logits(Model(model.config), merge(whole, found))
    assert np.abs(merged - ours).max() < 1e-4


def test_scale_by_hand():
    assert scale(AdapterConfig(rank=16, alpha=32)) == 2.0  # 32 / 16
    assert scale(AdapterConfig(rank=16, alpha=32, rslora=True)) == 8.0  # 32 / sqrt(16)


def test_a_fresh_adapter_is_the_base_exactly(tmp_path):
    reference_folder(CASES["gemma3-dual-rope"], tmp_path / "base")
    model, params, fresh = adapted(tmp_path / "base", ADAPTERS["all"], random=False)
    plain = our_logits(Model(model.config), params)
    np.testing.assert_array_equal(our_logits(model, {**params, **fresh}), plain)
    assert all(np.any(value) for name, value in fresh.items() if name.endswith("_a"))


def test_gradients_flow_only_where_targeted(tmp_path):
    reference_folder(CASES["qwen2-biases-grouped"], tmp_path / "base")
    settings = AdapterConfig(rank=2, targets=("k_proj", "down_proj"))
    model, params, fresh = adapted(tmp_path / "base", settings)
    assert set(fresh) == {f"layers/{name}/w_lora_{letter}" for name in ("k", "down") for letter in "ab"}
    rows = rows_of(*([row] for row in tokens()))
    gradients = quick_jit(jax.grad(lambda mine: model.logprobs({**params, **mine}, *rows)[0].sum()))(fresh)
    # Every layer's adapters of these two move.
    for name, gradient in gradients.items():
        assert np.all(np.abs(gradient).reshape(gradient.shape[0], -1).max(axis=1) > 0), name


@pytest.fixture
def saved(tmp_path):
    """(base's config, adapter folder) of a small adapter."""
    reference_folder(CASES["qwen2-biases-grouped"], tmp_path / "base")
    model, _, fresh = adapted(tmp_path / "base", ADAPTERS["attention-rslora"])
    save_adapter(tmp_path / "adapter", fresh, ADAPTERS["attention-rslora"], model.config, "base")
    return model.config, tmp_path / "adapter"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("task_type", "TOKEN_CLS"),
        ("bias", "all"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("layers_to_transform", [0]),
        ("init_lora_weights", "pissa"),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", ".*_proj"),
        ("r", 0),
        ("fan_in_fan_out", True),
        ("tomorrows_idea", {"on": True}),
    ],
)
def test_other_kinds_are_refused_by_name(saved, field, value):
    config, folder = saved
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(UserError, match=f"adapter_config.json: {field} = "):
        load_adapter(folder, config)


def test_tensors_that_do_not_fit_are_named(saved):
    config, folder = saved
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"

    save_file({name: value for name, value in tensors.items() if name != key}, file)
    with pytest.raises(UserError, match=r"1 tensor\(s\).*missing.*layers\.1\.self_attn\.q_proj\.lora_B"):
        load_adapter(folder, config)
    save_file({**tensors, key: torch.zeros(5, 3)}, file)
    with pytest.raises(UserError, match=r"q_proj\.lora_B\.weight expected \(32, 3\), found \(5, 3\)"):
        load_adapter(folder, config)
    save_file({**tensors, "base_model.model.lm_head.lora_A.weight": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r"no place in this model: .*lm_head"):
        load_adapter(folder, config)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_adapter(folder, config)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="no pickles"):
        load_adapter(folder, config)
