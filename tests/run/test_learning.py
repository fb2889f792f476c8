"""Tiny models learn tiny tasks by reward to a stated number: sorting six letters, and a guessing game of several turns.

Thresholds on held-out problems, answered greedily. A run ends as soon as it is there, and fails where its steps do not
suffice. Processes of their own, on one device, with all of the compiler's optimizations.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny_runs import metrics

pytestmark = pytest.mark.slow

SORTING = "tunix.data.sorting"
SORT: dict[str, Any] = {
    "model": {
        "init": "random",
        "family": "gemma",
        "sizes": {
            "vocab_size": 320,
            "d_model": 128,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "ffn": 384,
        },
        "tokenizer": "bytes",
        "dtype": "float32",
    },
    "data": {"format": "prompt_completion", "max_length": 16, "completion_length": 8, "packing": False},
    "reward": {"functions": [{"name": "exact_match", "columns": {"answer": "completion"}}]},
}
BY_EXAMPLE: dict[str, Any] = {
    "data": {"train": f"{SORTING}:demonstrations", "eval": f"{SORTING}:validation"},
    "optimizer": {"learning_rate": 5e-4, "b2": 0.98, "weight_decay": 0.01},
    "batch_size": 256,
    "steps": 400,
    "eval": {"every": 2, "until": {"eval/reward": 0.3}},
}
BY_REWARD: dict[str, Any] = {
    "data": {"train": f"{SORTING}:problems", "eval": f"{SORTING}:held_out"},
    "optimizer": {"learning_rate": 3e-4, "b2": 0.95, "schedule": "constant", "warmup": 5},
    "batch_size": 64,
    "steps": 120,
    "eval": {"every": 10, "rows": 512, "until": {"eval/reward": 0.9}},
}


def run(folder: Path, *parts: dict[str, Any]) -> list[float]:
    """`eval/reward` along a run whose sections are those of the parts, a later one's keys before an earlier one's."""
    sections: dict[str, Any] = {"output": str(folder)}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(sections.get(key), dict)
            sections[key] = {**sections[key], **value} if both else value
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(sections))
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-m", "tunix.cli", "run", recipe], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [row["eval/reward"] for row in metrics(folder) if "eval/reward" in row]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The `model` section of a model that sorts a third of the letters."""
    folder = tmp_path_factory.mktemp("start") / "sft"
    rewards = run(folder, SORT, BY_EXAMPLE)
    assert 0.3 <= rewards[-1] < 0.9
    return {"model": {"path": str(folder), "dtype": "float32"}}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo", "group_size": 8, "updates": 4},
        {"name": "grpo", "preset": "rloo", "group_size": 8, "updates": 4},
        {"name": "ppo", "group_size": 8, "updates": 4, "critic": "shared"},
    ],
    ids=["grpo", "rloo", "ppo"],
)
def test_sorting(algorithm: dict[str, Any], start: dict[str, Any], tmp_path: Path):
    own = {key: value for key, value in SORT.items() if key != "model"}
    rewards = run(tmp_path / "run", own, BY_REWARD, start, {"algorithm": algorithm})
    assert rewards[0] < 0.6
    assert rewards[-1] >= 0.9, rewards


@pytest.mark.parametrize(("staleness", "in_flight"), [(1, "finish"), (4, "continue")])
def test_sorting_with_completions_of_older_weights(
    staleness: int, in_flight: str, start: dict[str, Any], tmp_path: Path
):
    own = {key: value for key, value in SORT.items() if key != "model"}
    algorithm = {"name": "grpo", "group_size": 8, "updates": 4}
    rollout = {"max_staleness": staleness, "in_flight": in_flight}
    rewards = run(tmp_path / "run", own, BY_REWARD, start, {"algorithm": algorithm, "rollout": rollout})
    assert rewards[-1] >= 0.9, rewards
    ages = [row["rollout/staleness/max"] for row in metrics(tmp_path / "run") if "rollout/staleness/max" in row]
    assert 0 < max(ages) <= staleness


GAME = "tunix.rollout.environments.guessing"
SMALL: dict[str, Any] = {
    **SORT["model"],
    "sizes": {**SORT["model"]["sizes"], "d_model": 64, "num_layers": 3, "head_dim": 16, "ffn": 192},
}


def test_guessing_a_number(tmp_path: Path):
    """1 to 31 in five guesses, which is enough for all of them: won is 0.84, by a model that began with 0.3."""
    demonstrations = {
        "model": SMALL,
        "data": {"train": "tests.guessing_games:demonstrations", "max_length": 64},
        "optimizer": {"learning_rate": 2e-3, "b2": 0.98, "warmup": 20},
        "batch_size": 128,
        "steps": 400,
    }
    run(tmp_path / "sft", demonstrations)
    games = {
        "model": {"path": str(tmp_path / "sft"), "dtype": "float32"},
        "data": {
            "train": f"{GAME}:secrets",
            "eval": f"{GAME}:secrets",
            "max_length": 64,
            "completion_length": 56,
        },
        # More of a bonus than this, and the 300 bytes that are no digits win.
        "algorithm": {"name": "grpo", "group_size": 8, "updates": 4, "entropy_bonus": 0.015},
        "rollout": {"environment": {"name": "guessing"}},
        "optimizer": {"learning_rate": 1e-3, "b2": 0.95, "schedule": "constant", "warmup": 5},
        "batch_size": 64,
        "steps": 140,
        "eval": {"every": 10, "rows": 31, "until": {"eval/reward": 0.83}},
    }
    rewards = run(tmp_path / "grpo", games)
    assert rewards[0] < 0.5
    assert rewards[-1] >= 0.8, rewards
