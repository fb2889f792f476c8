"""Gemma 4's folders: a multimodal one gives its text part, spare keys and values stay out, other fields are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma4Config, Gemma4ForConditionalGeneration

from tests.hf.test_model_folder import rewrite
from tests.tiny_models import CASES, load, loss_and_gradients, our_logits, randomise, rows_of
from tunix.cli import main
from tunix.errors import UserError
from tunix.hf.model_folder import save_folder
from tunix.hf.source import read_folder
from tunix.models.config import Gemma4, Rope
from tunix.models.families.table import FAMILIES, from_hf, preset, small, to_hf, with_sizes

pytestmark = pytest.mark.models


def test_a_multimodal_gemma4_gives_its_text_part(tmp_path):
    """As published: the text part under `model.language_model.`, towers, and keys that no layer reads any more."""
    text = {**CASES["gemma4-shared-keys-wide-ffn"].hf_config().to_dict(), "pad_token_id": 0}
    whole = Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=text, vision_config=None, audio_config=None, eos_token_id=[2, 9])
    ).eval()
    randomise(whole)
    whole.save_pretrained(tmp_path)
    towers = {"model.vision_tower.a.weight": torch.randn(3), "model.embed_audio.b.weight": torch.randn(3)}
    start = "model.language_model.layers.5.self_attn"
    spare = {f"{start}.k_proj.weight": torch.randn(16, 32), f"{start}.k_norm.weight": torch.randn(16)}
    rewrite(tmp_path, lambda tensors: {**tensors, **towers, **spare})

    model, params = load(tmp_path)
    assert read_folder(tmp_path) == model.config
    assert dict(model.config.stops)["eos_token_id"] == (2, 9)
    save_folder(tmp_path / "text", model.config, params, source=tmp_path, dtype="float32")
    assert json.loads((tmp_path / "text/config.json").read_text())["model_type"] == "gemma4_text"
    exported = load_file(tmp_path / "text" / "model.safetensors")
    assert not any("tower" in name or ("layers.5." in name and ".k_" in name) for name in exported)
    again, same = load(tmp_path / "text")
    assert again.config == model.config
    assert all(np.array_equal(params[name], same[name]) for name in params)
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        theirs = whole(input_ids=ids).logits
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "text")(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_ids_beyond_the_inputs_of_layers_have_none(tmp_path):
    """A table of 60 rows for 97 ids is one of 97 whose last rows are 0, which transformers computes; and so is its
    gradient. A folder of it is read back as it was."""
    case = CASES["gemma4-inputs-of-layers"]
    whole = replace(case, fields={**case.fields, "vocab_size_per_layer_input": 97}).hf_config()
    hf = AutoModelForCausalLM.from_config(whole, attn_implementation="eager").eval()
    randomise(hf)
    name = "model.embed_tokens_per_layer.weight"
    with torch.no_grad():
        hf.model.embed_tokens_per_layer.weight[60:] = 0
    hf.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, name: tensors[name][:60].clone()})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size_per_layer_input": 60}))

    model, params = load(tmp_path)
    assert (model.config.vocab_size, model.config.gemma4.layer_vocab) == (97, 60)
    ids = np.array([[3, 59, 60, 96, 12, 61, 59, 70]])
    labels = torch.from_numpy(ids)
    result = hf(labels, labels=labels)
    result.loss.backward()
    rows = rows_of(*([row] for row in ids))
    np.testing.assert_allclose(our_logits(model, params, rows)[:1, :8], result.logits.detach(), atol=1e-4)
    _, gradients = loss_and_gradients(model, params, rows)
    theirs = hf.model.embed_tokens_per_layer.weight.grad[:60].numpy()
    np.testing.assert_allclose(gradients["inputs/embed/w"] / 7, theirs, atol=1e-4)

    save_folder(tmp_path / "again", model.config, params, source=tmp_path, dtype="float32")
    again, same = load(tmp_path / "again")
    assert again.config == model.config
    np.testing.assert_array_equal(params["inputs/embed/w"], same["inputs/embed/w"])


def test_a_key_in_a_layer_beyond_the_last_is_not_spare(tmp_path):
    case = CASES["gemma4-shared-keys-wide-ffn"]
    AutoModelForCausalLM.from_config(case.hf_config()).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "model.layers.6.self_attn.k_proj.weight": torch.randn(16, 32)})
    with pytest.raises(UserError, match="more layers than num_hidden_layers = 6"):
        load(tmp_path)


def test_both_spellings_of_the_global_heads_mean_the_same(tmp_path):
    new = CASES["gemma4-keys-are-values"].hf_config().to_dict()
    old = {name: value for name, value in new.items() if name != "per_layer_config"}
    old |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert from_hf(old, tmp_path / "a") == from_hf(new_keys(new), tmp_path / "b")
    assert from_hf(old, tmp_path / "a").gemma4 == Gemma4(1, 16, keys_are_values=True)


def new_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: the keys of objects are strings."""
    return json.loads(json.dumps(raw))


def test_a_folder_that_states_no_ropes_has_the_published_ones(tmp_path):
    raw = new_keys(CASES["gemma4-last-layer-global-untied"].hf_config().to_dict())
    config = from_hf({**raw, "rope_parameters": None}, tmp_path / "config.json")
    assert (config.rope, config.rope_local) == (Rope(1_000_000.0, "proportional", share=0.25), Rope(10_000.0))


def test_null_means_what_a_missing_field_does(tmp_path):
    raw = new_keys(CASES["gemma4-last-layer-global-untied"].hf_config().to_dict())
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        missing = {key: value for key, value in raw.items() if key != name}
        assert from_hf({**raw, name: None}, tmp_path / "config.json") == from_hf(missing, tmp_path / "config.json")


@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma4-e4b", "gemma4-12b", "gemma4-31b"])
def test_presets_are_read_back_from_what_an_export_writes(name, tmp_path):
    assert from_hf(new_keys(to_hf(preset(name))), tmp_path / "config.json") == preset(name)


def test_heads_of_global_layers_shrink_with_the_others():
    tiny = with_sizes(small("gemma4"), {"num_kv_heads": 1, "head_dim": 16, "num_layers": 4})
    assert tiny.gemma4 == Gemma4(1, 32, keys_are_values=True)
    assert tiny.local_layers == (True, True, True, False)
    shared = with_sizes(preset("gemma4-e2b"), {"num_layers": 6})
    assert (shared.shared_layers, shared.local_layers) == (0, (True, True, True, True, True, False))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_moe_block": True}, "use_double_wide_mlp = True is not supported in layers with experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5 leaves no local or no global layer"),
        ({"vocab_size_per_layer_input": -1}, "vocab_size_per_layer_input = -1 must be a positive integer"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types = .*names no local layer"),
        ({"per_layer_config": {"1": {"head_dim": 16}}}, "per_layer_config = .*must be the same for the global layers"),
        ({"per_layer_config": {n: {"head_dim": 16, "num_key_value_heads": 2} for n in "135"}}, "other kv heads"),
        ({"attention_gate": True}, "attention_gate = True is a field that tunix does not know"),
    ],
)
def test_fields_of_gemma4_that_are_not_understood_are_refused(fields, message, tmp_path):
    raw = {**new_keys(CASES["gemma4-shared-keys-wide-ffn"].hf_config().to_dict()), **fields}
    with pytest.raises(UserError, match=message):
        from_hf(raw, tmp_path / "config.json")


@pytest.mark.parametrize("family", ["gemma4", "qwen3_5_moe"])
def test_a_reward_model_is_refused_where_transformers_has_none(family, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = str(Path(__file__).parents[2] / "recipes/reward_qwen.yaml")
    assert main(["run", recipe, "--tiny", f"model.family={family}"]) == 2
    assert f"no sequence classifier for {family}" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_has_the_classes_that_exports_name(family):
    found = FAMILIES[family]
    vision = [] if found.vision is None else [found.vision.architecture]
    classes = [found.architecture, *([] if found.classifier is None else [found.classifier]), *vision]
    assert all(hasattr(transformers, name) for name in classes), classes
    assert found.classifier or not hasattr(transformers, f"{found.architecture[:-11]}ForSequenceClassification")
