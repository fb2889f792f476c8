"""What the tests of games share: a tiny model that has seen random play, runs in processes of their own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.run.test_kill import Run
from tests.test_pages import WORLDS, blocks
from tests.tiny_runs import metrics, write_rows
from tunix.data.tokenizer import bytes_tokenizer
from tunix.recipe.recipe import Recipe
from tunix.rollout.environments.base import Environment, Episode
from tunix.rollout.environments.remote import Player
from tunix.util.yaml_io import parse_yaml

MODEL: dict[str, Any] = {
    "init": "random",
    "family": "gemma",
    "sizes": {
        "vocab_size": 320,
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn": 192,
    },
    "tokenizer": "bytes",
    "dtype": "float32",
}
RL: dict[str, Any] = {
    "algorithm": {"name": "grpo", "group_size": 16, "updates": 2},
    "optimizer": {"learning_rate": 2e-3, "b2": 0.95, "schedule": "constant", "warmup": 5},
    "batch_size": 16,
}


def write(folder: Path, **sections: Any) -> Path:
    """The recipe of a run, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "r.yaml").write_text(yaml.safe_dump({"model": MODEL, "output": "run", **sections}))
    return folder


def run(folder: Path, **sections: Any) -> list[dict[str, Any]]:
    """The metrics of a run to its end."""
    process = Run(write(folder, **sections))
    assert process.wait() == 0, process.log
    return metrics(folder / "run")


def mean(rows: list[dict[str, Any]], name: str) -> float:
    """The mean of a metric over the steps that have it."""
    return float(np.mean([row[name] for row in rows if name in row]))


def random_play(
    folder: Path, make: Callable[[], Environment], move: Callable[[np.random.Generator], str], length: int
) -> Mapping[str, Any]:
    """The `model` section of a model that has learned by example to make random moves, each ended by a new line."""
    rng, tokenizer, rows = np.random.default_rng(0), bytes_tokenizer(), []
    for number in range(512):
        episode = Episode(make(), {"seed": 7, "index": number}, rng, tokenizer, turns=99)
        tokens = episode.prompt.tolist()
        mask = [0] * len(tokens)
        while not episode.done and len(tokens) < length:
            action = tokenizer.encode(f"{move(rng)}\n")
            observed = episode.turn(np.asarray(action, np.int32))
            seen = [] if observed is None else observed.tolist()
            tokens += [*action, *seen]
            mask += [1] * len(action) + [0] * len(seen)
        rows.append({"input_ids": tokens[:length], "loss_mask": mask[:length]})
    write_rows(folder / "played.jsonl", rows)
    run(
        folder / "sft",
        data={"train": str(folder / "played.jsonl"), "max_length": length},
        optimizer={"learning_rate": 2e-3, "b2": 0.98, "warmup": 10},
        batch_size=16,
        steps=60,
    )
    return {"path": str(folder / "sft" / "run"), "dtype": "float32"}


def run_page(name: str) -> None:
    """Runs the Python of a guide page, and makes the environment of its recipe as a run does."""
    page, namespace = f"docs/guide/{name}.md", {}
    assert page in WORLDS
    for block in blocks(page, "python"):
        exec(compile(block.text, page, "exec"), namespace)
    (recipe,) = (parse_yaml(block.text, page) for block in blocks(page, "yaml"))
    config = Recipe.build({"output": "run", **recipe}, page).rollout.environment
    assert config is not None
    player = Player(config.model_copy(update={"workers": 1}), None)
    player.close()
    assert player.scores
