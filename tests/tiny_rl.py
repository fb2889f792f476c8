"""Small on-policy runs for the tests: tiny_runs' model writes short answers, and a made-up reward judges them.

All runs share one shape: 16 answers of up to 12 tokens, in rows of 32.
"""

from pathlib import Path
from typing import Any

from tests.tiny_runs import write_recipe, write_rows

REWARDS = '''
def letters(completion):
    """The share of capitals, small letters and digits: a random model varies in it from the start."""
    return sum(c.isascii() and c.isalnum() for c in completion) / max(len(completion), 1)
'''
POLICY: dict[str, Any] = {
    "data.max_length": 32,
    "data.completion_length": 12,
    "batch_size": 4,
    "steps": 3,
    "optimizer.learning_rate": 1e-3,
    "algorithm": {"name": "grpo", "group_size": 4},
    "reward.functions": ["rewards.py:letters"],
    "logging.samples.groups": 4,
}


def write_policy(folder: Path, name: str = "r.yaml", **changes: Any) -> Path:
    """The recipe of such a run, its rewards and its rows. A dot in a key is written as two underscores."""
    if not (folder / "rewards.py").exists():
        (folder / "rewards.py").write_text(REWARDS)
    return write_recipe(folder / name, {**POLICY, **{key.replace("__", "."): x for key, x in changes.items()}})


def write_prompts(folder: Path, *prompts: str) -> None:
    """Rows of prompts alone, to train on."""
    write_rows(folder / "train.jsonl", [{"prompt": prompt} for prompt in prompts])
    write_rows(folder / "held.jsonl", [{"prompt": prompt} for prompt in prompts])
