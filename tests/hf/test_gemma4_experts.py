"""Gemma 4's folders with experts: all of a layer are in two tensors, and what is wrong in a folder is named."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from tests.hf.test_model_folder import rewrite
from tests.marks import slow
from tests.tiny_models import CASES, load, randomise, reference_folder
from tunix.cli import main
from tunix.errors import UserError
from tunix.hf.model_folder import save_folder
from tunix.models.families.table import from_hf, preset, read_config, to_hf
from tunix.models.model import rounded
from tunix.models.quantization.formats import simulated
from tunix.models.quantization.rules import Rules

pytestmark = pytest.mark.models

NAME = "gemma4_moe-five-of-three"
LAYER = "model.layers.1.experts"


@pytest.fixture
def folder(tmp_path):
    reference_folder(CASES[NAME], tmp_path / "base")
    return tmp_path / "base"


def test_a_multimodal_folder_gives_its_text_part_with_experts(tmp_path):
    text = {**CASES[NAME].hf_config().to_dict(), "pad_token_id": 0}
    whole = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=None, audio_config=None))
    randomise(whole)
    whole.save_pretrained(tmp_path)
    model, params = load(tmp_path)
    save_folder(tmp_path / "text", model.config, params, source=tmp_path, dtype="float32")
    theirs, ours = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "text" / "model.safetensors")
    named = {key.replace("model.language_model.", "model."): x for key, x in theirs.items()}
    assert ours[f"{LAYER}.gate_up_proj"].shape == (5, 48, 32)
    assert set(ours) == set(named) - {"lm_head.weight"}
    assert all(torch.equal(ours[key], named[key]) for key in ours)
    assert read_config(tmp_path / "text") == model.config


def test_the_preset_is_read_back_from_what_an_export_writes(tmp_path):
    config = preset("gemma4-26b-a4b")
    written = to_hf(config)
    assert (written["intermediate_size"], written["moe_intermediate_size"]) == (2112, 704)
    assert from_hf(json.loads(json.dumps(written)), tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{LAYER}.down_proj"), rf"{LAYER}\.0\.down_proj\.weight.*ends in \.down_proj \["),
        (lambda t: t.pop("model.layers.0.router.scale"), r"missing: model\.layers\.0\.router\.scale"),
        (lambda t: t.update({"model.layers.0.router.bias": torch.ones(5)}), r"no place for: model\.layers\.0\.router"),
        (lambda t: cut(t, f"{LAYER}.gate_up_proj", 4), rf"{LAYER}\.4\.gate_proj\.weight"),
        (lambda t: cut(t, "model.layers.1.router.per_expert_scale", 4), r"per_expert_scale expected \(5,\), found"),
        (lambda t: cut(t, "model.layers.0.post_feedforward_layernorm_2.weight", 9), r"layernorm_2\.weight expected"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, folder):
    def changed(tensors):
        change(tensors)
        return tensors

    rewrite(folder, changed)
    with pytest.raises(UserError, match=message):
        load(folder)


def cut(tensors: dict[str, torch.Tensor], key: str, rows: int) -> None:
    """Leaves the first rows of a tensor."""
    tensors[key] = tensors[key][:rows].contiguous()


@pytest.mark.parametrize(("weights", "packed"), [("fp8", True), *slow([("fp8", False), ("int8", True)])])
def test_a_rounded_folder_is_read_back(weights, packed, folder, tmp_path, capsys):
    """Of every expert by its own scales: what a folder holds in few bits is what one holds in many."""
    words = ["quantize", str(folder), str(tmp_path / "out"), "--rules", f"experts.*={weights}"]
    assert main(words + ["--packed"] * packed) == 0
    assert f"experts.down_proj {weights}, a scale for each output" in capsys.readouterr().out
    model, params = load(folder)
    _, found = load(tmp_path / "out")
    rules = Rules.model_validate({"rules": [{"module": "experts.*", "weights": weights}]})
    expected, moved = rounded(replace(model, simulated=simulated(rules)), params)
    assert set(moved) == {f"layers/{one}/w" for one in ("gates", "ups", "downs")}
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k_experts": 6}, "top_k_experts = 6 is more than the 5 experts"),
        ({"num_experts": None}, "num_experts = None is missing"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0 must be a positive integer"),
        ({"enable_moe_block": "yes"}, "enable_moe_block = 'yes' must be true or false"),
        (
            {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
            "use_double_wide_mlp = True is not supported in layers with experts",
        ),
    ],
)
def test_fields_of_experts_that_are_not_understood_are_refused(fields, message, tmp_path):
    fields = {**CASES[NAME].fields, **fields}
    if fields["num_hidden_layers"] == 4:
        fields["layer_types"] = ["sliding_attention", "full_attention"] * 2
    raw = json.loads(json.dumps(CASES[NAME].hf_config().to_dict()))
    raw |= fields
    raw.pop("per_layer_config")
    with pytest.raises(UserError, match=re.escape(message)):
        from_hf(raw, tmp_path / "config.json")
