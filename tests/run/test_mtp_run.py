"""Runs with the head that drafts: it trains beside a model that stays the same to the bit, and drafts for it in RL."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.mtp import DENSE, MIXTURE, folder_with_head
from tests.tiny_models import tokens
from tests.tiny_runs import metrics
from tunix.recipe.recipe import Recipe
from tunix.run.opening import train

pytestmark = pytest.mark.models


EVEN = """
def even(completion, completion_ids):
    return sum(x % 2 for x in completion_ids) / len(completion_ids)
"""


def write_rows(folder: Path) -> str:
    """Rows in which each token says the next one, so that a head can learn what comes."""
    rows = [{"input_ids": [(3 + start + 5 * place) % 97 for place in range(20)]} for start in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("case", [DENSE, MIXTURE])
def test_the_head_trains_and_all_else_is_as_without_it(case, tmp_path):
    folder_with_head(tmp_path / "base", case)

    def fit(name: str, **model: Any) -> Path:
        sections = {
            "model": {"path": str(tmp_path / "base"), "dtype": "float32", **model},
            "data": {"train": write_rows(tmp_path), "max_length": 32},
            "optimizer": {"learning_rate": 1e-2, "clip_norm": 0.1, "schedule": "constant", "warmup": 0},
            "batch_size": 8,
            "steps": 12,
            "output": str(tmp_path / name),
        }
        train(Recipe.build(sections))
        return tmp_path / name

    plain, trained = fit("plain"), fit("trained", mtp="train")
    base, without, after = load_file(tmp_path / "base/model.safetensors"), weights(plain), weights(trained)
    assert base.keys() == without.keys() == after.keys()
    for name, x in base.items():
        if name.startswith("mtp."):
            assert torch.equal(without[name], x)
            assert not torch.equal(after[name], x), name
        else:
            assert torch.equal(without[name], after[name]), name
    rows = [row for row in metrics(trained) if "train/loss" in row]
    for row, other in zip(rows, (row for row in metrics(plain) if "train/loss" in row), strict=True):
        assert (row["train/loss"], row["train/grad_norm"]) == (other["train/loss"], other["train/grad_norm"])
    assert rows[-1]["loss/mtp"] < 0.7 * rows[0]["loss/mtp"]
    assert json.loads((trained / "export/config.json").read_text())["mtp_num_hidden_layers"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("use", ["freeze", "train"])
def test_a_policy_is_drafted_for_by_its_own_head(use, tmp_path, monkeypatch):
    """The run's rewards and log-probs are those without drafts; a frozen head goes through unchanged."""
    monkeypatch.chdir(tmp_path)
    folder_with_head(tmp_path / "base")
    prompts = [{"prompt_ids": tokens(seed, 1, 9)[0].tolist()} for seed in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "rewards.py").write_text(EVEN)

    def fit(name: str, model: dict[str, Any], rollout: dict[str, Any]) -> list[dict[str, Any]]:
        sections = {
            "model": {"path": str(tmp_path / "base"), "dtype": "float32", **model},
            "data": {"train": "prompts.jsonl", "max_length": 32, "completion_length": 12},
            "algorithm": {"name": "grpo", "group_size": 4},
            "reward": {"functions": ["rewards.py:even"]},
            "rollout": rollout,
            "optimizer": {"learning_rate": 1e-3},
            "batch_size": 4,
            "steps": 3,
            "output": name,
        }
        train(Recipe.build(sections))
        return [row for row in metrics(Path(name)) if "train/loss" in row]

    plain, drafted = fit("plain", {}, {}), fit("drafted", {"mtp": use}, {"speculate": 2})
    assert all("perf/rollout_accepted" not in row for row in plain)
    for row, other in zip(plain, drafted, strict=True):
        assert 0 <= other["perf/rollout_accepted"] <= 1
        assert row["reward/mean"] == other["reward/mean"]
        assert other["mismatch/max"] < 1e-4
        np.testing.assert_allclose(row["train/loss"], other["train/loss"], atol=1e-5)
        assert other["compile/count"] == 0
    base, after = load_file(tmp_path / "base/model.safetensors"), weights(Path("drafted"))
    assert base.keys() == after.keys()
    for name, x in base.items():
        if name.startswith("mtp."):
            assert torch.equal(after[name], x) == (use == "freeze"), name
