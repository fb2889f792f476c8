"""The recipes that we ship, tiny: each runs to its end, learns something, compiles nothing twice, and leaves an export.

Three kinds, by what the last stage learns from: given completions, given preferences, completions that the model draws.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.tiny_runs import metrics, train
from tunix.recipe.recipe import Recipe

pytestmark = pytest.mark.models

SLOW = (
    *("qlora_grpo_llama", "dapo_qwen", "grpo_llama_gsm8k", "distill_gemma"),
    *("dpo_llama_lora", "dpo_pydoc", "orpo_gemma", "simpo_qwen", "lora_gemma", "sft_llama", "sft_qwen"),
    *("sft_gemma", "qlora_gemma", "online_dpo_gemma", "grpo_gemma", "ppo_gemma", "tool_use_qwen"),
    *("grpo_qwen_16k", "qat_gemma", "kto_llama", "quickstart", "reward_qwen", "dpo_gemma"),
    *("sft_qwen3_moe", "dpo_qwen3_moe", "grpo_qwen3_moe", "grpo_gemma3_pictures", "sft_gpt_oss"),
    *("sft_gemma3_pictures", "sft_gemma4", "dpo_gemma4", "grpo_gemma4", "dpo_qwen35", "grpo_qwen35"),
    *("sft_llama_70b", "grpo_llama_70b", "sft_qwen_64k", "grpo_qwen35_pictures", "sft_qwen35"),
)
"""The first four compile for minutes, the others have a sibling here (sft_pydoc, of today's families
sft_qwen35_pictures) or in the notebooks (01 runs the quickstart); what is of their own, smaller runs see: in tests/run,
and tests/commands/test_quantize.py and tests/rollout/environments/test_environments.py."""
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@functools.cache
def last(path: Path) -> Recipe:
    """The recipe, or its last stage."""
    recipe = Recipe.load(path)
    return (recipe.stages or (recipe,))[-1]


def by_reward(path: Path) -> bool:
    return last(path).algorithm.learns_from_rewards


def by_preference(path: Path) -> bool:
    return last(path).algorithm.reads in ("pairs", "labels")


def by_example(path: Path) -> bool:
    return not by_reward(path) and not by_preference(path)


def of_kind(kind: Callable[[Path], bool]) -> Iterable[object]:
    return [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in SLOW else ())
        for path in RECIPES
        if kind(path)
    ]


def finished(path: Path, *overrides: str, first: str = "steps=4") -> Path:
    """The run folder of the recipe's last stage, trained tiny with overrides of that stage.

    Args:
        first: what is overridden in the stage before it.
    """
    stages = len(Recipe.load(path).stages)
    assert stages in (0, 2)
    words = [f"stages.1.{one}" for one in overrides] + [f"stages.0.{first}"] if stages else list(overrides)
    train(str(path), "--tiny", "output=run", *words)
    return Path(f"run/1_{last(path).algorithm.name}" if stages else "run")


@pytest.mark.parametrize("path", of_kind(by_example))
def test_every_recipe_runs_tiny_and_learns(path: Path):
    folder = finished(path, "eval.samples=0")
    rows = metrics(folder)
    assert [one["step"] for one in rows] == list(range(21))
    evaluated = [one["eval/loss"] for one in rows if "eval/loss" in one]
    assert evaluated[-1] < evaluated[0]
    assert all(one["compile/count"] == 0 for one in rows[1:])
    assert all(math.isfinite(one["train/grad_norm"]) for one in rows[1:])
    assert AutoModelForCausalLM.from_pretrained(folder / "export")


@pytest.mark.parametrize("path", of_kind(by_preference))
def test_every_recipe_of_preferences_runs_tiny_and_tells_them_apart(path: Path):
    # The recipes' rates are those of published weights; two random layers would need many more than 20 steps.
    folder = finished(path, "optimizer.learning_rate=1e-2")
    rows = metrics(folder)
    assert [one["step"] for one in rows] == list(range(21))
    evaluated = [one for one in rows if "eval/loss" in one]
    assert evaluated[-1]["eval/loss"] < evaluated[0]["eval/loss"]
    first, end = evaluated[0], evaluated[-1]
    if last(path).algorithm.has_lm_head:
        gained = end["eval/rewards/accuracy"] - first["eval/rewards/accuracy"]
        assert gained > 0.1 or path.stem == "dpo_pydoc"  # real text wants more: tests/run/test_learning_preferences.py
    else:
        # A new scalar head: the accuracy over 64 pairs was 0.55 to 0.73 by seed and mesh, the margin 0.35 to 0.80.
        assert first["eval/rewards/margin"] == 0.0
        assert end["eval/rewards/margin"] > 0.2
    for one in rows[1:]:
        assert one["compile/count"] == 0
        assert math.isfinite(one["train/grad_norm"])
        if "rewards/margin" in one:  # a batch of KTO's may have one label alone
            assert one["rewards/margin"] == pytest.approx(one["rewards/chosen"] - one["rewards/rejected"], abs=1e-3)
    if last(path).algorithm.has_lm_head:
        assert AutoModelForCausalLM.from_pretrained(folder / "export")
    else:
        assert AutoModelForSequenceClassification.from_pretrained(folder / "export").num_labels == 1
    assert "eval/rewards/margin" in (folder / "curves.svg").read_text()


@pytest.mark.parametrize("path", of_kind(by_reward))
def test_every_recipe_with_rewards_runs_tiny(path: Path):
    # A random model is never right. Its answers differ in length, so that with this reward too there is a signal.
    reward = last(path).reward
    functions = [one.model_dump() for one in reward.functions] if reward else []
    functions.append({"name": "length", "options": {"target": 1, "width": 64}})
    # Fewer than --tiny's 20, which show no more.
    folder = finished(path, f"reward.functions={json.dumps(functions)}", "steps=4", "optimizer.warmup=1")
    rows = [one for one in metrics(folder) if one["step"]]
    assert [one["step"] for one in rows] == [1, 2, 3, 4]
    bfloat16 = last(path).model.dtype == "bfloat16"
    assert all(one["reward/failed"] == 0 for one in rows)
    assert rows[0]["compile/count"] == rows[-1]["compile/count"] or path.stem == "ppo_gemma"
    updates = [one for one in rows if "mismatch/max" in one]  # PPO's critic is alone at first
    assert len(updates) >= 2
    assert all(one["mismatch/max"] < (0.25 if bfloat16 else 1e-3) for one in updates)
    assert max(one["train/grad_norm"] for one in updates) > 0
    assert AutoModelForCausalLM.from_pretrained(folder / "export")
    assert (folder / "curves.svg").is_file()
