"""Small runs for the tests, from recipe to run folder: rows, recipes, model folders as transformers writes them.

All runs share one shape of model and batch, so that their compiled programs are found in the cache.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.tiny_models import randomise
from tunix.cli import main
from tunix.data.tokenizer import bytes_tokenizer
from tunix.util.atomic_io import read_rows

VOCAB = 272
"""256 bytes and the specials of the llama3 and gemma templates have room in it."""
RECIPE: dict[str, Any] = {
    "model": {
        "init": "random",
        "family": "llama",
        "sizes": {
            "vocab_size": VOCAB,
            "d_model": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "ffn": 64,
        },
        "tokenizer": "bytes",
        "dtype": "float32",
    },
    "data": {"train": "train.jsonl", "max_length": 48},
    "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    "batch_size": 8,
    "steps": 4,
    "output": "run",
}
ADAPTER = {"README.md", "adapter_config.json", "adapter_model.safetensors", "tunix_base.json"}
"""Files of an exported adapter."""
EVAL = {"data.eval": "held.jsonl", "eval": {"every": 2, "samples": 2, "sample_tokens": 6}}


def row(prompt: int, completion: int, letter: str = "a") -> dict[str, str]:
    """A row of `1 + prompt` and `completion + 1` tokens: BOS before, EOS after, a byte is a token."""
    return {"prompt": letter * prompt, "completion": letter.upper() * completion}


def rows(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of many lengths, all shorter than 48 tokens; what follows is the prompt's letter in capitals."""
    return [row(4 + (7 * i + seed) % 13, 3 + (5 * i + seed) % 17, chr(97 + (i + seed) % 5)) for i in range(number)]


def write_rows(path: Path, written: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in written))
    return path


def write_recipe(path: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """RECIPE with changes by dotted key, and rows beside it: 32 to train on, 6 held out."""
    sections = copy.deepcopy(RECIPE)
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = sections
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = copy.deepcopy(value)
    if not (path.parent / "train.jsonl").exists():
        write_rows(path.parent / "train.jsonl", rows(32))
        write_rows(path.parent / "held.jsonl", rows(6, seed=3))
    path.write_text(yaml.safe_dump(sections))
    return path


def train(*words: str) -> None:
    """`tunix run WORDS`, which has to end well."""
    assert main(["run", *words]) == 0


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, all of whose lines are whole; of a packed one those of its whole members."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else read_rows(path)


def metrics(run: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return lines(Path(run) / "metrics.jsonl")


def losses(run: str | Path) -> list[float]:
    """`train/loss` of each step."""
    return [one["train/loss"] for one in metrics(run) if "train/loss" in one]


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def model_folder(folder: Path, *, tokenizer: bool = True, seed: int = 0, **fields: Any) -> Path:
    """A random Llama of RECIPE's sizes as transformers saves it, with a byte tokenizer beside it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    config = AutoConfig.for_model("llama", **{**sizes, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(folder)
    if tokenizer:
        bytes_tokenizer("llama3").save(folder)
    return folder
