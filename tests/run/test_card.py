"""README.md of an export, as huggingface_hub reads it."""

import json
from pathlib import Path

from huggingface_hub import ModelCard

from tests.tiny_runs import EVAL, train, write_recipe
from tunix.cli import main
from tunix.recipe.recipe import Recipe
from tunix.run.card import model_card

SECRET = "not-for-you"


def test_an_export_says_what_was_trained_and_measured(tmp_path: Path):
    train(str(write_recipe(tmp_path / "recipe.yaml", {**EVAL, "checkpoint": {"every": 2}})))
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(losses) > 2
    last = ModelCard.load(Path("run/export/README.md"))
    assert last.data.to_dict() == {"library_name": "transformers", "tags": ["tunix", "sft"]}
    assert f"| eval/loss | {losses[0]:.4g} | {losses[-1]:.4g} |" in last.text
    assert f"| kept | {rows[-1]['data/kept']:.0f} |" in last.text
    assert "4 steps" in last.text
    assert "learning_rate: 0.01" in last.text
    assert "warmup" not in last.text

    assert main(["export", "run", "earlier", "--step", "2"]) == 0
    earlier = ModelCard.load(Path("earlier/README.md"))
    assert f"| eval/loss | {losses[0]:.4g} | {losses[1]:.4g} |" in earlier.text
    assert "2 steps" in earlier.text


def test_an_adapter_names_its_base_and_nothing_secret():
    recipe = Recipe.build(
        {
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "adapter": {"rank": 4},
            "data": {"train": "rows.jsonl", "max_length": 96, "completion_length": 16},
            "algorithm": {"name": "grpo"},
            "reward": {
                "judge": {
                    "model": "http://judge:8000/v1",
                    "rubric": "rubric.md",
                    "options": {"api_key": SECRET, "seed": 3},
                }
            },
            "rollout": {"environment": {"mcp": {"command": ["python", "server.py"], "env": {"TOKEN": SECRET}}}},
            "output": f"/home/{SECRET}/runs",
            "steps": 1,
        }
    )
    card = ModelCard(model_card(recipe, "Qwen/Qwen3-0.6B", adapter=True))
    assert (card.data.library_name, card.data.base_model) == ("peft", "Qwen/Qwen3-0.6B")
    assert SECRET not in card.content
    assert "http://judge:8000/v1" in card.text
    assert "seed: 3" in card.text
    assert "name: grpo" in card.text  # though it is a default of its section

    local = ModelCard(model_card(recipe, f"/home/{SECRET}/llama", adapter=False))
    assert local.data.base_model is None
    assert "A model trained from llama" in local.text
    assert SECRET not in local.content
