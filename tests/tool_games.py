"""A vault whose digits only a tool knows, for tiny models that learn to call it.

The prompt is a key of two letters, `look` says the key's digit, and the answer is that digit. The tool is a function, a
server's (tests/worlds) and a method of a class for TRL. `demonstrations` are for a first stage of SFT: they know the
markup, and more often than not ask for the first key whatever the prompt says.
"""

import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.run.test_kill import assert_killed_it_ends_alike
from tests.run.test_learning import SMALL, run
from tunix.data.tokenizer import bytes_tokenizer
from tunix.rollout.environments.base import Episode
from tunix.rollout.environments.config import EnvironmentConfig
from tunix.rollout.environments.remote import read_environment

KEYS = ["".join(pair) for pair in itertools.product("abcdefgh", repeat=2)]
SHORT = {"instructions": ""}
"""Options of the environment: a tiny model reads no instructions."""


def look(key: str) -> str:
    """Says the digit of a key.

    Args:
        key: two letters
    """
    return digit(key)


def digit(key: str) -> str:
    """A digit that does not follow from the key's letters in any simple way."""
    return str(zlib.crc32(key.encode()) % 10)


def right(completion: str, prompt: str) -> float:
    """Whether the last letter is the key's digit, and was asked for."""
    return float(completion.strip()[-1:] == digit(prompt) and "tool_output" in completion)


class Vault:
    """The same for TRL's trainer."""

    def reset(self, **row: Any) -> None:
        self.asked: list[str] = []

    def look(self, key: str) -> str:
        """Says the digit of a key.

        Args:
            key: two letters
        """
        self.asked.append(key)
        return digit(key)


def opened(prompts: list, completions: list, environments: list, **columns: Any) -> list[float]:
    """Whether the last answer is the digit of the key, which was asked for."""
    return [
        float(prompt[-1]["content"] in vault.asked and said[-1]["content"] == digit(prompt[-1]["content"]))
        for prompt, said, vault in zip(prompts, completions, environments, strict=True)
    ]


def rows() -> list[dict[str, str]]:
    """A row for each key."""
    return [{"prompt": key} for key in KEYS]


def demonstrations(count: int = 2048, seed: int = 0) -> list[dict[str, Any]]:
    """Episodes as `input_ids` and a `loss_mask` that trains the model's turns only."""
    tokenizer, rng = bytes_tokenizer(), np.random.default_rng(seed)
    config = EnvironmentConfig(name="tools", tools=("tests.tool_games:look",), options=SHORT)
    kind, _, options = read_environment(config, tokenizer)
    played = []
    for key in rng.choice(KEYS, count):
        episode = Episode(kind(**options), {"prompt": key}, rng, tokenizer)
        tokens, mask = list(episode.prompt), [0] * len(episode.prompt)
        asked = key if rng.random() < 0.45 else KEYS[0]
        for text in (f"```tool_code\nlook(key='{asked}')\n```", digit(asked)):
            action = tokenizer.encode(f"{text}<end_of_turn>")
            answer = episode.turn(np.asarray(action, np.int32))
            seen = [] if answer is None else answer.tolist()
            tokens, mask = [*tokens, *action, *seen], [*mask, *[1] * len(action), *[0] * len(seen)]
        played.append({"input_ids": [int(token) for token in tokens], "loss_mask": mask})
    return played


SFT: dict[str, Any] = {
    "model": SMALL,
    "data": {"train": "tests.tool_games:demonstrations", "max_length": 96},
    "optimizer": {"learning_rate": 2e-3, "b2": 0.98, "warmup": 20},
    "batch_size": 64,
    "steps": 200,
}
GRPO: dict[str, Any] = {
    "data": {"train": "tests.tool_games:rows", "eval": "tests.tool_games:rows", "max_length": 112},
    "algorithm": {"name": "grpo", "group_size": 8, "updates": 2},
    "optimizer": {"learning_rate": 1e-3, "b2": 0.95, "schedule": "constant", "warmup": 5},
    "batch_size": 32,
    "steps": 60,
    "eval": {"every": 5, "rows": 64, "until": {"eval/reward": 0.9}},
}


def first_stage(folder: Path) -> dict[str, Any]:
    """The `model` section of a model that knows how to call, and not yet with what."""
    run(folder, SFT)
    return {"model": {"path": str(folder), "dtype": "float32"}}


def assert_learns(folder: Path, start: dict[str, Any], environment: dict[str, Any], **sections: Any) -> None:
    """A run of GRPO in an environment opens nine vaults in ten."""
    rewards = run(folder, GRPO, start, {"rollout": {"environment": environment}, **sections})
    assert rewards[0] < 0.4, rewards
    assert rewards[-1] >= 0.9, rewards


def assert_resumes(folder: Path, start: dict[str, Any], environment: dict[str, Any], **sections: Any) -> None:
    """A run in an environment that is killed ends like one that nobody disturbs, to the bit."""
    recipe = {**GRPO, **start, "rollout": {"environment": environment}, **sections, "output": "run", "steps": 6}
    recipe |= {"checkpoint": {"every": 2, "keep": 2}, "eval": {"every": 3, "rows": 8}}

    def write(place: Path) -> None:
        (place / "r.yaml").write_text(yaml.safe_dump(recipe))

    folder.mkdir()
    assert_killed_it_ends_alike(folder, write, at=3)
