"""Completions and episodes as JSON values, bit for bit: in a run's position, and between its processes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tunix.data.types import Prompt
from tunix.rollout.types import Scored
from tunix.types import Completion, Sampling
from tunix.util.coded import array_of, coded

ARRAYS = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
"""What is saved of a completion, by the name of its attribute."""


def encoded(completion: Completion) -> dict[str, Any]:
    """A completion as JSON values."""
    arrays = {name: coded(np.asarray(getattr(completion, name), dtype)) for name, dtype in ARRAYS.items()}
    saved = {**arrays, "finish": completion.finish, "turns": completion.turns}
    if (experts := completion.experts) is not None:
        saved |= {"experts": coded(experts.astype(np.int16)), "routed": experts.shape[1:]}
    return saved


def decoded(saved: Mapping[str, Any], sampling: Sampling) -> Completion:
    """The inverse of `encoded`.

    Args:
        saved: what it returned.
        sampling: the settings of the completion, which are not saved.
    """
    tokens, logprobs, versions = (array_of(saved[name]) for name in ARRAYS)
    turns = tuple((start, end) for start, end in saved["turns"])
    experts = array_of(saved["experts"]).reshape(-1, *saved["routed"]) if "experts" in saved else None
    return Completion(tokens, logprobs, saved["finish"], versions, sampling, turns, experts=experts)


def saved_episode(episode: Scored) -> dict[str, Any]:
    """An episode as JSON values; with what its environment made of the prompt."""
    own = {name: getattr(episode, name) for name in ("text", "rewards", "failures", "turn_rewards", "logged")}
    start = {"tokens": coded(episode.prompt.tokens), "text": episode.prompt.text}
    return {**own, "completion": encoded(episode.completion), "prompt": start}


def episode_of(saved: Mapping[str, Any], prompt: Prompt, sampling: Sampling) -> Scored:
    """The inverse of `saved_episode`.

    Args:
        saved: what it returned.
        prompt: has the row's columns, which are not saved.
        sampling: the settings of the completion, which are not saved.
    """
    start = replace(prompt, tokens=array_of(saved["prompt"]["tokens"]), text=saved["prompt"]["text"])
    rest = {"failures": saved["failures"], "turn_rewards": tuple(saved["turn_rewards"]), "logged": saved["logged"]}
    return Scored(start, decoded(saved["completion"], sampling), saved["text"], saved["rewards"], **rest)
