"""Adapters against PEFT, both ways, and what they promise: a start at the base, gradients only where targeted."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.marks import slow
from tests.tiny_models import (
    CASES,
    load,
    one_device,
    quick_jit,
    reference_folder,
    reference_model,
    row_logprobs,
    rows_of,
    tokens,
)
from tests.trainers import PLAIN
from tunix.errors import UserError
from tunix.hf.peft_folder import foreign_base, load_adapter, save_adapter
from tunix.lora.adapt import adapt, merge, started
from tunix.lora.config import AdapterConfig
from tunix.models.config import is_adapter
from tunix.models.families.table import read_config
from tunix.models.model import Model
from tunix.models.quantization.modules import EXPERTS

pytestmark = pytest.mark.models

ADAPTERS = {
    "llama-multiquery-linear-wide-heads": AdapterConfig(
        rank=4, alpha=10.0, ranks={"q_proj": 2, r"mlp\..*": 3}, alphas={"down_proj": 7.0}
    ),
    "gemma-multiquery": AdapterConfig(rank=3, alpha=5.0, rslora=True, targets=("q_proj", "v_proj", "o_proj")),
    "gemma2-windows-caps": AdapterConfig(rank=3, alpha=6.0, dora=True),
    "gemma3-dual-rope": AdapterConfig(rank=4, alpha=10.0, targets=(r"self_attn\..*",), also=("lm_head",)),
    "qwen2-biases-grouped": AdapterConfig(
        rank=3, alpha=5.0, rslora=True, ranks={"o_proj": 5}, alphas={"k_proj": 2.0}, also=("embed_tokens", "lm_head")
    ),
    "qwen3-wide-heads-tied": AdapterConfig(rank=2, alpha=4.0, dora=True, rslora=True, ranks={"v_proj": 4}),
    "qwen3_5-wide-values-tied": AdapterConfig(rank=2, alpha=4.0, dora=True, ranks={"in_proj_qkv": 3, "in_proj_b": 1}),
    "gemma4-keys-are-values": AdapterConfig(rank=2, alpha=4.0, dora=True, ranks={"q_proj": 3, "v_proj": 1}),
    "gemma4-shared-keys-wide-ffn": AdapterConfig(rank=2, alpha=4.0, ranks={"mlp.*": 3, "per_layer_input_gate": 1}),
    "qwen3_moe-seven-of-three": AdapterConfig(
        rank=2, alpha=4.0, ranks={"experts.down_proj": 3}, targets=("q_proj", "experts.*")
    ),
    "qwen3_moe-one-of-four-tied": AdapterConfig(rank=2, alpha=4.0, targets=("experts.gate_up_proj",)),
    "qwen3_5_moe-five-of-two": AdapterConfig(
        rank=2,
        alpha=4.0,
        rslora=True,
        ranks={"mlp.shared_expert.down_proj": 3, "experts.down_proj": 1},
        alphas={"experts.gate_up_proj": 6.0},
        targets=("down_proj", "in_proj_z", "experts.*"),
    ),
    "gemma4_moe-five-of-three": AdapterConfig(
        rank=2, alpha=4.0, ranks={"experts.down_proj": 3, "mlp.down_proj": 1}, targets=("down_proj", "experts.*")
    ),
    "gpt_oss-five-of-two": AdapterConfig(
        rank=2, alpha=4.0, rslora=True, ranks={"experts.down_proj": 3}, targets=("o_proj", "experts.*")
    ),
    "mixtral-five": AdapterConfig(rank=2, alpha=4.0, targets=("v_proj", "experts.down_proj")),
}
"""One of every family: plain, rank-stabilised and with magnitudes, patterns of ranks and alphas, tables that train,
experts: both of their parameters, or one."""
FOR_ALL = ("llama-multiquery-linear-wide-heads", "qwen2-biases-grouped", "qwen3_moe-seven-of-three")
parity = pytest.mark.parametrize("name", [*FOR_ALL, *slow(name for name in ADAPTERS if name not in FOR_ALL)])
"""Patterns, tables that train, and experts; tests/run/test_given_adapter.py has magnitudes."""
patterns_of_experts = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
"""PEFT looks for the patterns among the names of modules alone when it warns; it applies them to parameters too."""
SPREAD = 0.1
"""Of random adapters. At 0.2 both sides round to 1e-4 of what torch computes in float64, by the draw and the machine
(Llama: ours 1.1e-4, PEFT's 0.9e-4; Qwen 3.5 1.2e-4 and 0.8e-4), so that their difference says nothing; at 0.1 it is
below 6e-5 for all of them."""


def adapted(folder, adapter, *, random=True):
    """Our model of the folder with adapters, as (model, base params, what trains)."""
    config = read_config(folder)
    model = Model(config, adapt=adapt(adapter, config))
    _, base = load(folder)
    ours = {name: "float32" for name in model.shapes if is_adapter(name)}
    fresh = model.init(jax.random.key(0), ours, one_device())
    fresh = started(adapter, model, fresh, base, "float32", one_device())
    if random:
        generator = np.random.default_rng(1)
        moved = {name: x for name, x in fresh.items() if not name.endswith("0")}
        fresh |= {n: x + SPREAD * generator.standard_normal(x.shape, np.float32) for n, x in moved.items()}
    return model, base, fresh


def our_logits(model, params):
    rows = rows_of(*([row] for row in tokens()))
    run = quick_jit(lambda p: model.logits(p, model.forward(p, rows.tokens, rows.positions, rows.segment_ids)[0]))
    return run(params)


def their_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(tokens()).long()).logits.numpy()


@parity
@patterns_of_experts
def test_our_adapter_loads_in_peft(name, tmp_path):
    base = reference_folder(CASES[name], tmp_path / "base")
    settings = ADAPTERS[name]
    model, params, fresh = adapted(tmp_path / "base", settings)
    save_adapter(tmp_path / "adapter", fresh, settings, model.config, str(tmp_path / "base"))

    theirs = in_peft(tmp_path)
    ours = our_logits(model, {**params, **fresh})
    assert np.abs(ours - their_logits(theirs)).max() < 1e-4
    assert np.abs(ours - their_logits(base)).max() > 0.1  # the adapter does something
    again, arrays = load_adapter(tmp_path / "adapter", model.config)
    assert again.modules_of(model.config) == settings.modules_of(model.config)
    assert (again.rslora, again.dora) == (settings.rslora, settings.dora)
    assert set(arrays) == set(fresh)
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, fresh[key])


@pytest.mark.parametrize("name", [*FOR_ALL[:2], *slow(name for name in ADAPTERS if name not in FOR_ALL[:2])])
@patterns_of_experts
def test_an_adapter_of_peft_loads_here_and_merges(name, tmp_path):
    reference_folder(CASES[name], tmp_path / "base")
    settings = ADAPTERS[name]
    config = read_config(tmp_path / "base")
    torch.manual_seed(0)  # PEFT draws A
    theirs = get_peft_model(
        reference_model(CASES[name]),
        LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            rank_pattern=settings.ranks,
            alpha_pattern=settings.alphas,
            use_rslora=settings.rslora,
            use_dora=settings.dora,
            target_modules=[name for name in settings.targeted_in(config) if not name.startswith(EXPERTS)],
            target_parameters=[name for name in settings.targeted_in(config) if name.startswith(EXPERTS)],
            modules_to_save=["embed_tokens", "lm_head"] if settings.also else None,
            ensure_weight_tying=config.tied and bool(settings.also),
            task_type="CAUSAL_LM",
        ),
    ).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in (weight for weight in theirs.parameters() if weight.requires_grad):
            weight.add_(SPREAD * torch.randn(weight.shape))
    theirs.save_pretrained(tmp_path / "adapter")

    _, params = load(tmp_path / "base")
    config = read_config(tmp_path / "base")
    found, arrays = load_adapter(tmp_path / "adapter", config)
    whole = {**params, **{key: jnp.asarray(array) for key, array in arrays.items()}}
    ours = our_logits(Model(config, adapt=adapt(found, config)), whole)
    assert np.abs(ours - their_logits(theirs)).max() < 1e-4
    merged = our_logits(Model(config), merge(whole, found))
    assert np.abs(merged - ours).max() < 1e-4


def in_peft(folder):
    """transformers' model of `folder / "base"` under PEFT's reading of `folder / "adapter"`."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    return PeftModel.from_pretrained(base, folder / "adapter").eval()


def test_ranks_and_scales_by_hand():
    plain = AdapterConfig(rank=16, alpha=32, ranks={r".*\.(q|k)_proj": 4, "k_proj": 1}, alphas={"mlp.up_proj": 8})
    stable = AdapterConfig(rank=16, alpha=32, rslora=True, targets=("v_proj",))
    assert plain.modules["q"] == (4, 8.0)  # 32 / 4
    assert plain.modules["k"] == (4, 8.0)  # the first pattern counts
    assert plain.modules["v"] == (16, 2.0)  # 32 / 16
    assert plain.modules["up"] == (16, 0.5)  # 8 / 16
    assert stable.modules_of(PLAIN) == {"v": (16, 8.0)}  # 32 / sqrt(16)


@pytest.mark.parametrize(
    ("targets", "means"),
    [
        ("all-linear", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        (["v_proj", "q_proj"], ("q_proj", "v_proj")),
        (r"self_attn\.(q|k)_proj", ("q_proj", "k_proj")),
        (r"model\.layers\.\d+\.mlp\..*", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_targets_by_name_and_pattern(targets, means):
    assert AdapterConfig(targets=targets).targeted_in(PLAIN) == means


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"targets": ["qproj"]}, r"'qproj' matches no module.*q_proj, k_proj.*Did you mean 'q_proj'\?"),
        ({"targets": ["lm_head"]}, r"`also: \[lm_head\]` trains it whole"),
        ({"targets": r"layers\.0\..*"}, "some layers only"),
        ({"targets": "(q"}, "nor a regular expression"),
        ({"targets": []}, "targets is empty"),
        ({"targets": ["q_proj"], "ranks": {"up_proj": 4}}, "ranks has 'up_proj', but targets adapts only q_proj"),
        ({"ranks": {"up": 4}}, "'up' matches no module"),
        ({"rank": 0}, "greater than 0"),
        ({"dropout": 1.0}, "less than 1"),
        ({"also": ["score"]}, "embed_tokens"),
    ],
)
def test_sections_that_mean_nothing_are_refused(section, told):
    with pytest.raises(ValueError, match=told):
        AdapterConfig.model_validate(section)


def test_a_rank_above_the_matrix_is_refused(tmp_path):
    reference_folder(CASES["qwen2-biases-grouped"], tmp_path)
    config = read_config(tmp_path)
    # k has 2 heads of 8, so 16 columns.
    model = Model(config, adapt=adapt(AdapterConfig(rank=17), config))
    with pytest.raises(UserError, match=r"adapter\.rank: 17 is above 16, the most that k_proj's matrix can have"):
        _ = model.shapes


def test_a_fresh_adapter_is_the_base_exactly(tmp_path):
    reference_folder(CASES["gemma3-dual-rope"], tmp_path / "base")
    model, params, fresh = adapted(tmp_path / "base", AdapterConfig(rank=4), random=False)
    plain = our_logits(Model(model.config), params)
    np.testing.assert_array_equal(our_logits(model, {**params, **fresh}), plain)
    assert all(np.any(value) for name, value in fresh.items() if name.endswith("_a"))


def test_gradients_flow_only_where_targeted(tmp_path):
    reference_folder(CASES["qwen2-biases-grouped"], tmp_path / "base")
    settings = AdapterConfig(rank=2, targets=("k_proj", "down_proj"))
    model, params, fresh = adapted(tmp_path / "base", settings)
    assert set(fresh) == {f"layers/{name}/w_lora_{letter}" for name in ("k", "down") for letter in "ab"}
    rows = rows_of(*([row] for row in tokens()))
    gradients = quick_jit(jax.grad(lambda mine: row_logprobs(model, {**params, **mine}, *rows).sum()))(fresh)
    # Every layer's adapters of these two move.
    for name, gradient in gradients.items():
        assert np.all(np.abs(gradient).reshape(gradient.shape[0], -1).max(axis=1) > 0), name


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """(base's config, adapter folder) of a small adapter, which nobody changes."""
    folder = tmp_path_factory.mktemp("saved")
    reference_folder(CASES["qwen2-biases-grouped"], folder / "base")
    settings = AdapterConfig(rank=3, alpha=5.0, rslora=True, targets=("q_proj", "v_proj", "o_proj"))
    model, _, fresh = adapted(folder / "base", settings)
    save_adapter(folder / "adapter", fresh, settings, model.config, "base")
    return model.config, folder / "adapter"


@pytest.fixture
def saved(saved_once, tmp_path):
    """The same, with a copy of the folder."""
    config, folder = saved_once
    return config, Path(shutil.copytree(folder, tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", "LOHA"),
        ("peft_type", "PROMPT_TUNING"),
        ("task_type", "TOKEN_CLS"),
        ("bias", "all"),
        ("modules_to_save", ["norm"]),
        ("rank_pattern", {r"layers\.0\..*": 8}),
        ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": "8"}),
        ("layers_to_transform", [0]),
        ("init_lora_weights", "pissa"),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", r".*\.0\..*_proj"),
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
    with pytest.raises(UserError, match=r"lora_B\.weight expected \(32, 3\), found \(5, 3\).*It names base\."):
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


def test_pissa_leaves_as_a_plain_adapter_of_twice_the_rank(tmp_path):
    """On the base as it is: `A B - A0 B0` is `[A A0] [B; -B0]`, and the scale stays."""
    reference_folder(CASES["qwen2-biases-grouped"], tmp_path / "base")
    settings = AdapterConfig(rank=3, alpha=6.0, rslora=True, start="pissa", ranks={"v_proj": 2}, dora=True)
    model, params, fresh = adapted(tmp_path / "base", settings)
    save_adapter(tmp_path / "adapter", fresh, settings, model.config, str(tmp_path / "base"))
    ours = our_logits(model, {**params, **fresh})
    assert np.abs(ours - their_logits(in_peft(tmp_path))).max() < 1e-4
    again, _ = load_adapter(tmp_path / "adapter", model.config)
    assert again.modules["q"] == (6, pytest.approx(6 / 3**0.5))
    assert again.modules["v"] == (4, pytest.approx(6 / 2**0.5))


def test_an_adapter_that_names_another_base_says_so(saved):
    config, folder = saved
    base = folder.parent / "base"
    assert foreign_base(folder, "/elsewhere/base", base, config) == ""
    told = foreign_base(folder, "org/other-model", base, config)
    assert told.startswith(f"note: {folder} was trained on base and is put on org/other-model")
