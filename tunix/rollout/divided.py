"""The prompts of a step among the processes of a run: each samples and scores its own, and all receive all."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from tunix.data.types import Prompt
from tunix.distributed import processes
from tunix.rollout.encoded import decoded, encoded
from tunix.rollout.types import Clock, Scored
from tunix.types import Sampling

Item = TypeVar("Item")


def dealt(items: List[Item]) -> list[Item]:
    """What is dealt to this process: every `processes.number()`th."""
    return list(items[processes.index() :: processes.number()])


def shared(groups: list[list[Scored]], prompts: List[Prompt], sampling: Sampling, clock: Clock) -> list[list[Scored]]:
    """Hands this process's groups to all, and returns those of all, in the order of the prompts.

    Args:
        groups: of the prompts that were `dealt` to it.
        prompts: of all processes.
        sampling: the settings of the completions.
        clock: its counts become those of all.
    """
    if processes.number() == 1:
        return groups
    given = {"groups": [[_saved(x) for x in group] for group in groups], "counted": clock.counted}
    found = [json.loads(one) for one in processes.exchanged("groups", json.dumps(given).encode())]
    names = dict.fromkeys(name for one in found for name in one["counted"])
    clock.counted = {name: sum(one["counted"].get(name, 0) for one in found) for name in names}
    parts = [one["groups"] for one in found]
    rows = [parts[i % len(parts)][i // len(parts)] for i in range(len(prompts))]
    return [[_read(x, prompt, sampling) for x in row] for prompt, row in zip(prompts, rows, strict=True)]


def _saved(episode: Scored) -> dict[str, Any]:
    """An episode as JSON values, bit for bit; with what its environment made of the prompt."""
    own = {name: getattr(episode, name) for name in ("text", "rewards", "failures", "turn_rewards")}
    start = {"tokens": episode.prompt.tokens.tolist(), "text": episode.prompt.text}
    return {**own, "completion": encoded(episode.completion), "prompt": start}


def _read(saved: Mapping[str, Any], prompt: Prompt, sampling: Sampling) -> Scored:
    """The inverse of `_saved`, for the row of a prompt."""
    start = replace(prompt, tokens=np.asarray(saved["prompt"]["tokens"], np.int32), text=saved["prompt"]["text"])
    rest = {"failures": saved["failures"], "turn_rewards": tuple(saved["turn_rewards"])}
    return Scored(start, decoded(saved["completion"], sampling), saved["text"], saved["rewards"], **rest)
