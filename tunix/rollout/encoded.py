"""Completions as JSON values, bit for bit: in a run's position, and between its processes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix.types import Completion, Sampling
from tunix.util.coded import array_of, coded

ARRAYS = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
"""What is saved of a completion, by the name of its attribute."""


def encoded(completion: Completion) -> dict[str, Any]:
    """A completion as JSON values."""
    arrays = {name: coded(np.asarray(getattr(completion, name), dtype)) for name, dtype in ARRAYS.items()}
    return {**arrays, "finish": completion.finish, "turns": completion.turns}


def decoded(saved: Mapping[str, Any], sampling: Sampling) -> Completion:
    """The inverse of `encoded`.

    Args:
        saved: what it returned.
        sampling: the settings of the completion, which are not saved.
    """
    tokens, logprobs, versions = (array_of(saved[name]) for name in ARRAYS)
    turns = tuple((start, end) for start, end in saved["turns"])
    return Completion(tokens, logprobs, saved["finish"], versions, sampling, turns)
