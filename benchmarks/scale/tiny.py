"""Two recipes that take seconds, with rows and a reward of their own: what `runs.py` starts again and again."""

from typing import Any

ROWS = 64
MODEL: dict[str, Any] = {
    "init": "random",
    "family": "llama",
    "sizes": {
        "vocab_size": 272,
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn": 128,
    },
    "tokenizer": "bytes",
    "dtype": "float32",
}
"""91,500 weights, split evenly over up to 8 devices; a byte is a token."""
COMMON: dict[str, Any] = {
    "model": MODEL,
    "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
    "steps": 6,
    "output": "run",
}
RECIPES: dict[str, dict[str, Any]] = {
    "SFT": {
        **COMMON,
        "data": {"train": "benchmarks.scale.tiny:rows", "max_length": 48},
        "algorithm": {"name": "sft"},
        "batch_size": 32,
    },
    "GRPO": {
        **COMMON,
        "data": {"train": "benchmarks.scale.tiny:rows", "max_length": 32, "completion_length": 12},
        "algorithm": {"name": "grpo", "group_size": 4},
        "reward": {"functions": ["benchmarks.scale.tiny:letters"]},
        "logging": {"samples": {"groups": 0}},
        "batch_size": 8,
    },
}
"""32 rows or answers to a step, of 48 and 32 tokens at most."""


def rows() -> list[dict[str, str]]:
    """Rows of many lengths; what follows is the prompt's letter in capitals."""
    letters = [chr(97 + i % 5) for i in range(ROWS)]
    return [
        {"prompt": letter * (4 + 7 * i % 13), "completion": letter.upper() * (3 + 5 * i % 17)}
        for i, letter in enumerate(letters)
    ]


def letters(completion: str) -> float:
    """A reward in which a random model varies from the start: the share of ASCII letters and digits."""
    return sum(c.isascii() and c.isalnum() for c in completion) / max(len(completion), 1)
