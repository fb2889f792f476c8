"""Mixtures of experts in folders: tensors one by one or stacked, and what is said where some are missing."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import CASES, load, reference_folder
from tunix.errors import UserError
from tunix.models.families.table import read_config

pytestmark = pytest.mark.models

NAME = "qwen3_5_moe-five-of-two"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp(NAME)
    reference_folder(CASES[NAME], path)
    return path


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as published folders have them: `gate_up_proj` `[E, 2F, D]` and `down_proj` `[E, D, F]`."""
    found = {key: x for key, x in tensors.items() if ".experts." not in key}
    for stem in sorted({key.split(".experts.")[0] for key in tensors if ".experts." in key}):
        gates, ups, downs = (
            torch.stack([tensors[f"{stem}.experts.{e}.{name}_proj.weight"] for e in range(5)])
            for name in ("gate", "up", "down")
        )
        found[f"{stem}.experts.gate_up_proj"] = torch.cat([gates, ups], dim=1)
        found[f"{stem}.experts.down_proj"] = downs
    return found


def written(folder, out, tensors) -> None:
    """A folder with these tensors, under the names of a multimodal one."""
    raw = json.loads((folder / "config.json").read_text())
    text = {"model_type": "qwen3_5_moe", "text_config": raw, "vision_config": {}, "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(text))
    named = {re.sub("^model.", "model.language_model.", key): x.contiguous() for key, x in tensors.items()}
    save_file(named | {"model.visual.w": torch.ones(3)}, out / "model.safetensors")


def test_stacked_experts_of_a_multimodal_folder_are_those_of_the_text_folder(folder, tmp_path):
    written(folder, tmp_path, stacked(load_file(folder / "model.safetensors")))
    assert read_config(tmp_path) == read_config(folder)
    expected, found = load(folder)[1], load(tmp_path)[1]
    assert set(found) == set(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_missing_experts_are_named(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    written(folder, tmp_path, tensors)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        load(tmp_path)


def test_a_stack_with_too_few_experts_names_what_it_lacks(folder, tmp_path):
    tensors = stacked(load_file(folder / "model.safetensors"))
    tensors["model.layers.0.mlp.experts.down_proj"] = tensors["model.layers.0.mlp.experts.down_proj"][:4]
    written(folder, tmp_path, tensors)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.experts\.4\.down_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("moe_router_bias", True), ("num_experts_per_tok", 9), ("mlp_only_layers", [1]), ("num_local_experts", 7)],
)
def test_fields_that_are_not_understood_are_refused_by_name(folder, tmp_path, field, value):
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, field: value}))
    with pytest.raises(UserError, match=field):
        read_config(tmp_path)
