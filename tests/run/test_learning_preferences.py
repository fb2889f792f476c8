"""Preferences over real text are learned to a stated number: which docstring line belongs to which function.

The recipe dpo_pydoc as it stands; a reward model on the same pairs, from its first stage; GRPO against that reward
model. Thresholds on functions that no stage has seen. Processes of their own, on one device.
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

ROOT = Path(__file__).parents[2]
PYDOC = "tunix.data.pydoc"


def run(recipe: Path, output: Path) -> None:
    """`tunix run`, which has to end well."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "tunix.cli", "run", str(recipe), f"output={output}"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def further(folder: Path, start: Path, sections: dict[str, Any]) -> None:
    """A run from the weights of another one."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump({"model": {"path": str(start), "dtype": "float32"}, **sections}))
    run(recipe, folder)


def held_out(folder: Path, name: str) -> list[float]:
    """A metric of the evaluations along a run."""
    return [row[name] for row in metrics(folder) if name in row]


@pytest.fixture(scope="module")
def pydoc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's run: SFT in `0_sft`, DPO in `1_dpo`."""
    folder = tmp_path_factory.mktemp("learning") / "pydoc"
    run(ROOT / "recipes/dpo_pydoc.yaml", folder)
    return folder


@pytest.fixture(scope="module")
def judge(pydoc: Path) -> Path:
    """A reward model of the same pairs."""
    sections = {
        "data": {"train": f"{PYDOC}:pairs", "eval": f"{PYDOC}:held_out_pairs", "max_length": 64},
        "algorithm": {"name": "reward", "centring": 0.01},
        "optimizer": {"learning_rate": 1e-3, "warmup": 0.1},
        "batch_size": 64,
        "steps": 150,
        "eval": {"every": 50, "rows": 512},
    }
    folder = pydoc.with_name("reward")
    further(folder, pydoc / "0_sft", sections)
    return folder


def test_dpo_tells_held_out_pairs_apart(pydoc: Path):
    accuracy = held_out(pydoc / "1_dpo", "eval/rewards/accuracy")
    assert accuracy[0] == pytest.approx(0.5, abs=1e-6)
    # 497 pairs: one standard error is 0.02.
    assert accuracy[-1] >= 0.72, accuracy
    # And it writes as before: nats per token of the held-out lines.
    likely = held_out(pydoc / "1_dpo", "eval/loss/sft")
    assert likely[-1] < likely[0] + 0.5, likely


def test_a_reward_model_tells_them_apart(judge: Path):
    accuracy = held_out(judge, "eval/rewards/accuracy")
    assert accuracy[0] == pytest.approx(0.5, abs=1e-6)
    assert accuracy[-1] >= 0.68, accuracy


def test_grpo_raises_the_reward_models_score(pydoc: Path, judge: Path):
    """By 0.4; scores of a line and of another function's are 0.8 apart."""
    sections = {
        "data": {
            "train": f"{PYDOC}:train",
            "eval": f"{PYDOC}:held_out",
            "max_length": 96,
            "completion_length": 32,
        },
        "reward": {"model": str(judge)},
        "algorithm": {"name": "grpo", "group_size": 4, "updates": 2},
        "optimizer": {"learning_rate": 3e-4, "schedule": "constant", "warmup": 3},
        "batch_size": 32,
        "steps": 40,
        "eval": {"every": 10, "rows": 128},
    }
    folder = pydoc.with_name("grpo")
    further(folder, pydoc / "0_sft", sections)
    scores = held_out(folder, "eval/reward")
    assert scores[-1] >= scores[0] + 0.4, scores
    assert max(row.get("mismatch/max", 0.0) for row in metrics(folder)) < 1e-3
