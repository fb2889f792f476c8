"""Runs of Qwen 3.5 with pictures: it learns what it sees, and what it exports is transformers' and PEFT's.

Pictures of 20 to 52 x 24 pixels have 3 to 8 tokens each. What all models with pictures share is in `test_pictures_run`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.data import rendered_as
from tests.hf.test_model_folder import rewrite
from tests.models.test_qwen_vision import given
from tests.mtp import head_of
from tests.run.test_pictures_run import CHANGES as GEMMA
from tests.run.test_pictures_run import (
    COLOURS,
    GRPO,
    assert_an_environment_shows_pictures,
    assert_killed_with_pictures_it_ends_alike,
    assert_pairs_start_at_their_reference,
    assert_sampler_and_trainer_agree,
    chat,
    row,
)
from tests.tiny_models import DELTA, randomise
from tests.tiny_runs import losses, metrics, train, write_recipe, write_rows
from tunix.cli import main
from tunix.data.examples import to_example
from tunix.data.tokenizer import bytes_tokenizer, load_tokenizer
from tunix.data.types import Kept
from tunix.hf.picture_settings import with_reader, write_settings
from tunix.hf.safetensors_io import tensors_of_folder
from tunix.hf.source import read_folder
from tunix.types import Sequence

CHANGES: dict[str, Any] = {**GEMMA, "data.picture_tokens": 8}
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Qwen3_5ForConditionalGeneration:
    """A random multimodal folder as transformers saves it, and rows beside it, every fourth without a picture."""
    torch.manual_seed(0)
    tokenizer = bytes_tokenizer("chatml", pictures=True)
    ids = {name: tokenizer.hf.convert_tokens_to_ids(token) for name, token in IDS.items()}
    config = Qwen3_5Config(
        text_config={
            **DELTA,
            "vocab_size": 272,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "depth": 3,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
        **ids,
    )
    model = Qwen3_5ForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    write_settings(tmp_path / "base", read_folder(tmp_path / "base", pictures=True).vision, [])
    (tmp_path / "seen").mkdir()
    write_rows(tmp_path / "train.jsonl", [row(tmp_path, number) for number in range(32)])
    write_rows(tmp_path / "held.jsonl", [row(tmp_path, number) for number in range(32, 36)])
    return model


IDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|im_end|>",
}


def asked(folder: Path, picture: Any) -> Sequence:
    """A question about a picture, as a run reads it: its tokens up to the answer, and the picture."""
    decoder = read_folder(folder, pictures=True)
    _, tokenizer = with_reader(decoder, load_tokenizer(folder), folder, 1, 8)
    question = chat([{"type": "image", "image": picture}, {"type": "text", "text": "Hue?"}], "?")
    found = to_example({"messages": question}, tokenizer, rendered_as("messages", max_length=200))
    assert isinstance(found, Kept)
    (one,) = found.sequences
    start = int(np.argmax(one.loss_mask))
    return Sequence(one.tokens[:start], one.loss_mask[:start], pictures=one.pictures.within(0, start))


def test_a_run_learns_from_pictures_and_exports_the_whole_model(tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml", {**CHANGES, "data.eval": "held.jsonl", "steps": 60})
    train(str(recipe))
    assert losses("run")[-1] < 0.5 * losses("run")[0]
    assert sum(one.get("compile/count", 0) for one in metrics("run")[1:]) == 0, "something was compiled after the start"
    before, after = (tensors_of_folder(tmp_path / name) for name in ("base", "run/export"))
    assert before.keys() == after.keys()
    tower = [key for key in before if key.startswith("model.visual.")]
    assert tower
    assert all(np.array_equal(before[key].read(), after[key].read()) for key in tower), "the tower is frozen"
    model = Qwen3_5ForConditionalGeneration.from_pretrained("run/export").eval()
    for name, colour in COLOURS.items():
        one = asked(tmp_path / "run/export", Image.new("RGB", (30, 30), colour))
        model.model.rope_deltas = None
        written = model.generate(**given(one, image_id(model)), max_new_tokens=len(name), do_sample=False)
        assert load_tokenizer("run/export").decode(written[0][len(one.tokens) :].tolist()) == name


def image_id(model: Qwen3_5ForConditionalGeneration) -> int:
    return int(model.config.image_token_id)


def test_an_environment_shows_the_pictures_of_its_row(tmp_path):
    assert_an_environment_shows_pictures(tmp_path, CHANGES)


@pytest.mark.parametrize("changes", [{}, GRPO], ids=["sft", "grpo"])
def test_killed_it_ends_like_the_uninterrupted_run(tmp_path, changes):
    assert_killed_with_pictures_it_ends_alike(tmp_path, {**CHANGES, **changes})


def test_the_models_own_head_drafts_and_trains_with_pictures(tmp_path, base):
    """The policy moves as without it, drafts are counted, and the head alone differs in the export."""
    _, head = head_of(base.config.text_config)
    rewrite(tmp_path / "base", lambda others: {**others, **head})
    fields = json.loads((tmp_path / "base/config.json").read_text())
    fields["text_config"]["mtp_num_hidden_layers"] = 1
    (tmp_path / "base/config.json").write_text(json.dumps(fields))

    def fit(name: str, mtp: str | None, speculate: int) -> list[dict[str, Any]]:
        changes = {"model": {**CHANGES["model"], "mtp": mtp}, "rollout.speculate": speculate, "output": name}
        train(str(write_recipe(tmp_path / f"{name}.yaml", {**CHANGES, **GRPO, **changes, "steps": 3})))
        return [row for row in metrics(name) if "train/loss" in row]

    for step, drafted in zip(fit("plain", None, 0), fit("drafted", "train", 2), strict=True):
        assert step["reward/mean"] == drafted["reward/mean"]
        np.testing.assert_allclose(step["train/loss"], drafted["train/loss"], atol=1e-5)
        assert drafted["mismatch/max"] < 1e-4
        assert 0 <= drafted["perf/rollout_accepted"] <= 1
        assert np.isfinite(drafted["loss/mtp"])
        assert drafted["compile/count"] == 0
    before, plain, after = (tensors_of_folder(tmp_path / x) for x in ("base", "plain/export", "drafted/export"))
    assert before.keys() == plain.keys() == after.keys()
    for name in head:
        assert np.array_equal(before[name].read(), plain[name].read())
        assert not np.array_equal(before[name].read(), after[name].read()), name


def test_an_adapter_goes_to_peft_and_to_a_whole_model(tmp_path, base):
    adapter = {"kind": "lora", "rank": 4, "alpha": 8}
    recipe = write_recipe(tmp_path / "recipe.yaml", {**CHANGES, "adapter": adapter, "optimizer.learning_rate": 1e-2})
    train(str(recipe))
    assert main(["export", "run", "whole"]) == 0
    inputs = given(asked(tmp_path / "whole", Image.new("RGB", (30, 30), (9, 9, 200))), image_id(base))
    merged = Qwen3_5ForConditionalGeneration.from_pretrained("whole").eval()
    with torch.no_grad():
        plain, whole = base(**inputs).logits, merged(**inputs).logits
        # PEFT changes the base, and warns where tensors of the adapter have no place.
        adapted = PeftModel.from_pretrained(base, tmp_path / "run/export").eval()
        torch.testing.assert_close(adapted(**inputs).logits, whole, atol=1e-4, rtol=0)
    assert (plain - whole).abs().max() > 1e-2
    assert not any("visual" in name for name, _ in adapted.named_modules() if "lora_A" in name)


def test_pairs_with_pictures_start_at_their_reference_and_come_apart(tmp_path):
    assert_pairs_start_at_their_reference(tmp_path, CHANGES)


def test_grpo_samples_with_pictures_what_its_trainer_computes(tmp_path, capsys):
    """All steps pass the gate, the reference is the start, and held-out prompts are answered with their pictures."""
    assert_sampler_and_trainer_agree(tmp_path, CHANGES)
    assert "Hue?" in capsys.readouterr().err
