"""Qwen 3.5's folders: a multimodal one gives its text part, its drafting head stays, and other fields are refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.hf.test_model_folder import rewrite
from tests.tiny_models import CASES, load, reference_folder, tokens
from tunix.errors import UserError
from tunix.hf.model_folder import save_folder
from tunix.models.families.table import from_hf
from tunix.recipe.recipe import Recipe
from tunix.run.opening import train

pytestmark = pytest.mark.models


def test_a_multimodal_qwen35_gives_its_text_part_and_keeps_its_drafting_head(tmp_path):
    """As published: text under `model.language_model.`, a vision tower, and `mtp.`, which transformers drops."""
    text = CASES["qwen3_5-three-to-one"].hf_config().to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    whole = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config={**vision, "num_position_embeddings": 16}, eos_token_id=[2, 9])
    ).eval()
    whole.save_pretrained(tmp_path)
    drafting = {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.norm.weight": torch.randn(32)}
    rewrite(tmp_path, lambda tensors: {**tensors, **drafting})
    saved = load_file(tmp_path / "model.safetensors")
    assert any(key.startswith("model.visual.") for key in saved)
    assert any(key.startswith("model.language_model.layers.0.linear_attn.") for key in saved)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["text_config"] |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(fields))

    model, params = load(tmp_path)
    assert dict(model.config.stops)["eos_token_id"] == (2, 9)
    save_folder(tmp_path / "text", model.config, params, source=tmp_path, dtype="float32", base=tmp_path)
    written = json.loads((tmp_path / "text/config.json").read_text())
    assert (written["model_type"], written["mtp_num_hidden_layers"]) == ("qwen3_5_text", 1)
    exported = load_file(tmp_path / "text" / "model.safetensors")
    for name, tensor in drafting.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor)
    again, same = load(tmp_path / "text")
    assert again.config == model.config
    assert all(np.array_equal(params[name], same[name]) for name in params)
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        theirs = whole(input_ids=ids).logits
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "text")(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is no multiple of linear_num_key_heads = 2"),
        ({"layer_types": ["full_attention"] * 4}, "names one kind of layer only"),
        (
            {"layer_types": ["linear_attention", "mamba", "full_attention", "full_attention"]},
            "layer_types = .*must name",
        ),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1 must be 2 or more"),
        ({"linear_value_head_dim": 6, "linear_key_head_dim": 8}, "no multiple of its keys' width"),
        ({"linear_gate_rank": 4}, "linear_gate_rank = 4 is a field that tunix does not know"),
    ],
)
def test_fields_of_qwen35_that_are_not_understood_are_refused(fields, message, tmp_path):
    raw = {**CASES["qwen3_5-three-to-one"].hf_config().to_dict(), **fields}
    with pytest.raises(UserError, match=message):
        from_hf(raw, tmp_path / "config.json")


@pytest.mark.slow  # others here export folders with one
def test_a_run_takes_the_drafting_head_along(tmp_path):
    reference_folder(CASES["qwen3_5-three-to-one"], tmp_path / "base")
    head = torch.randn(32, 64)
    rewrite(tmp_path / "base", lambda tensors: {**tensors, "mtp.fc.weight": head})
    rows = [{"input_ids": tokens(seed, 1, 20)[0].tolist()} for seed in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "model": {"path": str(tmp_path / "base"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 32},
        "batch_size": 2,
        "steps": 1,
        "output": str(tmp_path / "run"),
    }
    train(Recipe.build(sections))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "run/export"))
    assert torch.equal(after["mtp.fc.weight"], head)
    assert not torch.equal(after["model.layers.0.linear_attn.A_log"], before["model.layers.0.linear_attn.A_log"])
