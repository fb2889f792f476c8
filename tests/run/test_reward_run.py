"""Reward models through the command line: trained on pairs, exported, gone on from, and judging a policy."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.marks import slow
from tests.tiny_runs import lines, metrics, model_folder, train, write_recipe, write_rows
from tunix.cli import main

LETTERS = "abcdefgh"


def pairs(number: int, seed: int = 0) -> list[dict[str, str]]:
    """The chosen side answers with capitals, the rejected one with small letters."""
    rng = np.random.default_rng(seed)

    def word() -> str:
        return "".join(rng.choice(list(LETTERS), size=int(rng.integers(3, 8))))

    return [{"prompt": f"{word()}>", "chosen": word().upper(), "rejected": word()} for _ in range(number)]


def write_reward(folder: Path, name: str = "reward.yaml", **changes) -> Path:
    """A recipe of a reward model, and pairs beside it."""
    write_rows(folder / "train.jsonl", pairs(64))
    write_rows(folder / "held.jsonl", pairs(16, seed=1))
    usual = {"algorithm.name": "reward", "data.eval": "held.jsonl", "steps": 12, "output": "reward"}
    return write_recipe(folder / name, {**usual, **{key.replace("__", "."): x for key, x in changes.items()}})


def test_a_reward_model_learns_and_transformers_scores_alike(tmp_path):
    """Capitals against small letters: nothing is told apart at first, and all of it at the end."""
    train(str(write_reward(tmp_path)))
    first, last = (row for row in metrics("reward") if "eval/rewards/accuracy" in row)
    assert first["eval/rewards/accuracy"] == 0.5  # a head of zeros: all scores are equal, and ties count half
    assert first["eval/loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert last["eval/rewards/accuracy"] == 1.0
    assert last["eval/rewards/margin"] == pytest.approx(last["eval/rewards/chosen"] - last["eval/rewards/rejected"])
    row = lines(Path("reward/metrics.jsonl"))[-1]
    assert row["rewards/accuracy"] == 1.0

    model = AutoModelForSequenceClassification.from_pretrained("reward/export").eval()
    tokenizer = AutoTokenizer.from_pretrained("reward/export")
    texts = [one["prompt"] + one[side] + "<eos>" for one in pairs(16, seed=1) for side in ("chosen", "rejected")]
    read = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**read).logits[:, 0].numpy()
    assert scores[::2].mean() == pytest.approx(last["eval/rewards/chosen"], abs=1e-4)
    assert scores[1::2].mean() == pytest.approx(last["eval/rewards/rejected"], abs=1e-4)


@pytest.mark.slow
def test_a_reward_model_is_gone_on_from(tmp_path, capfd):
    """From a language model's folder with a new head, said so; from there with the head that there is."""
    model_folder(tmp_path / "causal")
    write_reward(tmp_path, model={"path": "causal", "dtype": "float32"}, steps=3)
    train("reward.yaml")
    assert "no score.weight to go on from" in capfd.readouterr().err
    last = [row for row in metrics("reward") if "eval/loss" in row][-1]
    again = {"model": {"path": "reward", "dtype": "float32"}, "steps": 1, "output": "again"}
    train(str(write_reward(tmp_path, "again.yaml", **again)))
    assert "no score.weight" not in capfd.readouterr().err
    assert metrics("again")[0]["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-4)


@pytest.mark.parametrize("stands_alone", slow([False, True]))
def test_under_lora_the_head_trains_and_is_exported(stands_alone, tmp_path):
    """On a published base a PEFT folder with the head in it; else merged. Both go on, and score, where they were."""
    adapter = {"rank": 4, "alpha": 8.0}
    changes = {"adapter": adapter, "steps": 4}
    if stands_alone:
        model_folder(tmp_path / "causal")
        changes["model"] = {"path": "causal", "dtype": "float32"}
    train(str(write_reward(tmp_path, **changes)))
    config = Path("reward/export/adapter_config.json")
    assert config.is_file() == stands_alone
    if stands_alone:
        assert json.loads(config.read_text())["task_type"] == "SEQ_CLS"
        assert main(["export", "reward", "merged"]) == 0
        assert "score.weight" in (tmp_path / "merged/model.safetensors").read_bytes()[:20_000].decode(errors="ignore")
    last = [row for row in metrics("reward") if "eval/loss" in row][-1]
    assert last["eval/loss"] < 0.68
    again = {"model": {"path": "reward", "dtype": "float32"}, "steps": 1, "output": "again"}
    train(str(write_reward(tmp_path, "again.yaml", **again)))
    assert metrics("again")[0]["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-4)
