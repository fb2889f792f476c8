"""A vault whose digits only a tool knows, for tiny models that learn to call it.

The prompt is a key of two letters, `look` says the key's digit, and the answer is that digit. The tool is a function, a
server's (tests/worlds) and a method of a class for TRL. `demonstrations` are for a first stage of SFT: they know the
markup, and more often than not ask for the first key whatever the prompt says.
"""

import itertools
import zlib
from typing import Any

import numpy as np

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
