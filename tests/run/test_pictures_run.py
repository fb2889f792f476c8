"""Runs with pictures, from rows to folders that transformers and PEFT load, and what they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor, Gemma3Config, Gemma3ForConditionalGeneration

from tests.marks import slow
from tests.run.test_kill import assert_killed_it_ends_alike
from tests.tiny_models import randomise
from tests.tiny_runs import files, losses, metrics, model_folder, train, write_recipe, write_rows
from tunix.cli import main
from tunix.data.tokenizer import bytes_tokenizer
from tunix.hf.picture_settings import write_settings
from tunix.hf.safetensors_io import tensors_of_folder
from tunix.hf.source import read_folder

pytestmark = pytest.mark.models

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 40), "blue": (30, 40, 220)}
CHANGES: dict[str, Any] = {
    "model": {"path": "base", "dtype": "float32"},
    "data.max_length": 96,
    "data.pictures": 2,
    "optimizer.learning_rate": 3e-3,
    "micro_batch_size": 4,
}
"""Rows of 50 to 70 tokens: packed, two micro-batches hold a batch of eight at the least."""
GRPO: dict[str, Any] = {
    "algorithm": {"name": "grpo", "group_size": 4, "kl": 0.1},
    "data.completion_length": 12,
    "reward": {"functions": [{"name": "length", "options": {"target": 6, "width": 12}}]},
    "batch_size": 4,
    "micro_batch_size": None,
}


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Gemma3ForConditionalGeneration:
    """A random multimodal folder as transformers saves it, and rows beside it, every fourth without a picture."""
    torch.manual_seed(0)
    ids = {name: bytes_tokenizer("gemma", pictures=True).hf.convert_tokens_to_ids(f"<{name}>") for name in IDS}
    config = Gemma3Config(
        text_config={
            "vocab_size": 272,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        **{name: ids[token] for token, name in IDS.items()},
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path / "base")
    bytes_tokenizer("gemma", pictures=True).save(tmp_path / "base")
    write_settings(tmp_path / "base", read_folder(tmp_path / "base", pictures=True).vision, [])
    (tmp_path / "seen").mkdir()
    write_rows(tmp_path / "train.jsonl", [row(tmp_path, number) for number in range(32)])
    write_rows(tmp_path / "held.jsonl", [row(tmp_path, number) for number in range(32, 36)])
    return model


IDS = {
    "start_of_image": "boi_token_index",
    "end_of_image": "eoi_token_index",
    "image_soft_token": "image_token_index",
}


def row(folder: Path, number: int) -> dict[str, Any]:
    name = sorted(COLOURS)[number % 3]
    said: list[Any] = [{"type": "text", "text": "Hue?"}]
    if number % 4 == 3:
        return {"messages": chat(said, "none"), "images": [], "answer": "none"}
    Image.new("RGB", (20 + number, 24), COLOURS[name]).save(folder / f"seen/{number}.png")
    return {"messages": chat([{"type": "image"}, *said], name), "images": [f"seen/{number}.png"], "answer": name}


def chat(content: list[Any], answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def tower(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {key: x for key, x in tensors.items() if key.startswith(("vision_tower.", "multi_modal_projector."))}


def test_a_run_learns_from_pictures_and_exports_the_whole_model(tmp_path, capsys):
    recipe = write_recipe(tmp_path / "recipe.yaml", {**CHANGES, "data.eval": "held.jsonl", "steps": 40})
    train(str(recipe))
    assert losses("run")[-1] < 0.5 * losses("run")[0]
    assert sum(one.get("compile/count", 0) for one in metrics("run")[1:]) == 0, "something was compiled after the start"
    assert metrics("run")[-1]["data/kept"] > 0
    before, after = tower(tmp_path / "base"), tower(tmp_path / "run/export")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before), "the tower is frozen"
    frozen = sum(x.numel() for x in before.values())
    assert f"{frozen / 1000:.3g}k are frozen" in Path("run/log.txt").read_text(), "nor does it have moments"
    assert tensors_of_folder(tmp_path / "run/export").keys() == tensors_of_folder(tmp_path / "base").keys()
    processor = AutoProcessor.from_pretrained("run/export")
    model = Gemma3ForConditionalGeneration.from_pretrained("run/export").eval()
    for name, colour in COLOURS.items():
        said = [{"type": "image", "image": Image.new("RGB", (30, 30), colour)}, {"type": "text", "text": "Hue?"}]
        asked = [{"role": "user", "content": said}]
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = processor.apply_chat_template(asked, **how)
        written = model.generate(**inputs, max_new_tokens=len(name), do_sample=False)
        assert processor.tokenizer.decode(written[0][inputs["input_ids"].shape[1] :]) == name


@pytest.mark.slow
def test_packing_and_stopping_change_nothing(tmp_path):
    recipe = str(write_recipe(tmp_path / "recipe.yaml", CHANGES))
    train(recipe)
    train(recipe, "output=apart", "data.packing=false")
    np.testing.assert_allclose(losses("apart"), losses("run"), rtol=1e-4)
    train(recipe, "output=stopped", "steps=2")
    train(recipe, "output=stopped")
    assert losses("stopped") == losses("run")
    assert files(tmp_path / "stopped/export") == files(tmp_path / "run/export")


def assert_killed_with_pictures_it_ends_alike(tmp_path: Path, changes: dict[str, Any]) -> None:
    def write(folder: Path) -> None:
        for name in ("base", "seen"):
            shutil.copytree(tmp_path / name, folder / name)
        for name in ("train.jsonl", "held.jsonl"):
            shutil.copy(tmp_path / name, folder)
        (folder / "games.py").write_text(GAME.replace("SAID", '"And now?"'))
        held = {"data.eval": "held.jsonl", "eval": {"every": 10, "samples": 1}}
        write_recipe(folder / "r.yaml", {**changes, **held, "steps": 20, "checkpoint": {"every": 5}})

    assert_killed_it_ends_alike(tmp_path, write, at=7)


GAME = """
from tunix.rollout.environments.base import Environment, Step

class Hues(Environment):
    stop_strings = tuple("abcdefghijklmnopqrstuvwxyz")

    def reset(self, row, rng):
        self.asked = 0
        return row["messages"][:1]

    def step(self, text, action):
        self.asked += 1
        if self.asked == 3:
            return Step(reward=float("e" in text), done=True)
        return Step([{"role": "user", "content": SAID}], reward=len(text) / 9)
"""
PLAYED: dict[str, Any] = {
    **{key: x for key, x in GRPO.items() if key != "reward"},
    "rollout": {"environment": {"name": "games.py:Hues"}},
    "data.completion_length": 40,
    "data.max_length": 128,
    "steps": 3,
}


def assert_an_environment_shows_pictures(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Sampler and trainer see them alike in all turns, and other pictures make another step."""
    (tmp_path / "games.py").write_text(GAME.replace("SAID", '"And now?"'))
    words = str(write_recipe(tmp_path / "recipe.yaml", {**changes, **PLAYED}))
    train(words)
    rows = metrics("run")
    assert len(rows) == 3
    assert all(row["mismatch/max"] < 1e-3 for row in rows)
    assert rows[0]["rollout/turns"] > 1.5
    assert all(row["compile/count"] == 0 for row in rows[1:])
    for file in (tmp_path / "seen").iterdir():
        with Image.open(file) as image:
            Image.eval(image, lambda x: 255 - x).save(file)
    train(words, "output=others", "steps=1")
    assert metrics("others")[0]["train/grad_norm"] != rows[0]["train/grad_norm"]


def test_an_environment_shows_the_pictures_of_its_row(tmp_path):
    assert_an_environment_shows_pictures(tmp_path, CHANGES)


@pytest.mark.slow
def test_pictures_in_the_middle_of_an_episode_are_no_score(tmp_path, capsys):
    (tmp_path / "games.py").write_text(GAME.replace("SAID", '[{"type": "image", "image": "seen/0.png"}]'))
    assert main(["run", str(write_recipe(tmp_path / "recipe.yaml", {**CHANGES, **PLAYED}))]) == 2
    assert "showed pictures, or changed the conversation, after the prompt" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, GRPO, PLAYED], ids=["sft", "grpo", "environment"])
def test_killed_it_ends_like_the_uninterrupted_run(tmp_path, changes):
    assert_killed_with_pictures_it_ends_alike(tmp_path, {**CHANGES, **changes})


@pytest.mark.slow
def test_an_adapter_goes_to_peft_and_to_a_whole_model(tmp_path, base):
    adapter = {"kind": "lora", "rank": 4, "alpha": 8}
    recipe = write_recipe(tmp_path / "recipe.yaml", {**CHANGES, "adapter": adapter, "optimizer.learning_rate": 1e-2})
    train(str(recipe))
    assert main(["export", "run", "whole"]) == 0
    processor = AutoProcessor.from_pretrained("whole")
    asked = chat([{"type": "image", "image": Image.new("RGB", (30, 30), (9, 9, 200))}], "x")[:1]
    inputs = processor.apply_chat_template(asked, tokenize=True, return_dict=True, return_tensors="pt")
    merged = Gemma3ForConditionalGeneration.from_pretrained("whole").eval()
    with torch.no_grad():
        plain, whole = base(**inputs).logits, merged(**inputs).logits
        # PEFT changes the base, and warns where tensors of the adapter have no place.
        adapted = PeftModel.from_pretrained(base, tmp_path / "run/export").eval()
        torch.testing.assert_close(adapted(**inputs).logits, whole, atol=1e-4, rtol=0)
    assert (plain - whole).abs().max() > 1e-2
    assert not any("vision" in name for name, _ in adapted.named_modules() if "lora_A" in name)


def assert_pairs_start_at_their_reference(tmp_path: Path, changes: dict[str, Any]) -> None:
    rows = []
    for number in range(32):
        one = row(tmp_path, number)
        asked, right = one["messages"]
        wrong = {**right, "content": sorted(COLOURS)[(number + 1) % 3]}
        rows.append({"prompt": [asked], "chosen": [right], "rejected": [wrong], "images": one["images"]})
    write_rows(tmp_path / "pairs.jsonl", rows)
    own = {"algorithm": {"name": "dpo", "beta": 0.5}, "data.train": "pairs.jsonl", "steps": 8}
    recipe = str(write_recipe(tmp_path / "recipe.yaml", {**changes, **own}))
    train(recipe)
    assert losses("run")[0] == pytest.approx(np.log(2), abs=1e-5)
    assert losses("run")[-1] < 0.69
    train(recipe, "output=apart", "data.packing=false")
    np.testing.assert_allclose(losses("apart"), losses("run"), rtol=1e-3)


@pytest.mark.slow  # a run above learns from pictures
@pytest.mark.parametrize("adapter", [*slow([None]), {"kind": "lora", "rank": 4, "alpha": 8}], ids=["all", "lora"])
def test_pairs_with_pictures_start_at_their_reference_and_come_apart(tmp_path, adapter):
    """A reference that saw other pictures than the policy, or none, would give another loss than ln 2 at the start."""
    assert_pairs_start_at_their_reference(tmp_path, {**CHANGES, "adapter": adapter})


@pytest.mark.slow
def test_grpo_samples_with_pictures_what_its_trainer_computes(tmp_path, capsys):
    """All steps pass the gate, the reference is the start, and held-out prompts are answered with their pictures."""
    assert_sampler_and_trainer_agree(tmp_path, CHANGES)
    assert "Hue?" in capsys.readouterr().err


def assert_sampler_and_trainer_agree(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", {**changes, **GRPO, "data.eval": "held.jsonl"})
    train(str(recipe), "steps=2", "eval={every: 1, rows: 4, samples: 1}")
    rows = metrics("run")
    largest = [row["mismatch/max"] for row in rows if "mismatch/max" in row]
    assert len(largest) == 2
    assert max(largest) < 1e-4
    assert next(row["kl/reference"] for row in rows if "kl/reference" in row) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.pictures": None},
            "row 1 of train.jsonl: it has pictures (images), and nothing here would look at them",
        ),
        ({"algorithm": {"name": "kto"}}, "data.pictures: kto looks at none as it is set here; sft and grpo do"),
        ({"algorithm": {"name": "dpo", "loss": "aot"}}, "data.pictures: dpo looks at none as it is set here"),
        ({"algorithm": {"name": "dpo", "reference": "precompute"}}, "data.pictures: dpo looks at none as it is set"),
        ({**GRPO, "rollout": {"max_staleness": 1}}, "data.pictures: not seen by rollout.max_staleness"),
        (
            {**PLAYED, "rollout": {**PLAYED["rollout"], "history": "template"}},
            "data.pictures: not seen by rollout.history: template",
        ),
        ({**GRPO, "rollout": {"engine": "vllm", "servers": ["http://h:1"]}}, "not seen by rollout.engine"),
        ({**GRPO, "reward": {"model": "judge"}}, "data.pictures: not seen by reward.model, which judges"),
        ({"data.packing": "split"}, "packing 'split' would cut pictures"),
        ({"model": {"path": "llama"}}, "model_type = 'llama' is read as a text model, which sees no pictures"),
    ],
)
def test_pictures_that_nobody_sees_are_refused(changes, message, tmp_path, capsys):
    if "model" in changes:
        model_folder(tmp_path / "llama")
    recipe = write_recipe(tmp_path / "recipe.yaml", {**CHANGES, **changes})
    assert main(["run", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_picture_that_is_missing_is_named_with_its_row_and_file(tmp_path, capsys):
    recipe = write_recipe(tmp_path / "recipe.yaml", {**CHANGES, "data.shuffle": False})
    (tmp_path / "seen/1.png").unlink()
    assert main(["run", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "row 2 of train.jsonl: picture 1, seen/1.png, does not exist" in said.replace(str(tmp_path) + "/", "")
    assert "Traceback" not in said
    assert json.loads((tmp_path / "train.jsonl").read_text().splitlines()[1])["images"] == ["seen/1.png"]
