"""Renders prompts and observations as token ids, from any of the three forms that an environment may use.

Axes: T time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix.data.chat import Message, render_continuation, render_prompt
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError

Observation = str | Sequence[Message] | np.ndarray
"""A text that is encoded as it is (an answer to a turn as its continuation), messages that the tokenizer's template
renders, or token ids."""


def check_observation(observation: Any) -> str | None:
    """What is wrong with an observation that is none of the three forms, e.g. `a float`; None for nothing."""
    if isinstance(observation, str | np.ndarray):
        return None
    if not isinstance(observation, Sequence) or isinstance(observation, bytes):
        return "None" if observation is None else f"a {type(observation).__name__}"
    foreign = next((one for one in observation if not isinstance(one, Mapping)), None)
    return None if foreign is None else f"a {type(observation).__name__} that holds a {type(foreign).__name__}"


def render_start(start: Observation, tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any]) -> np.ndarray:
    """`[T]` int32 ids of a prompt; a text begins with BOS where the tokenizer's own encoding does.

    Raises:
        UserError: it cannot be rendered.
    """
    if isinstance(start, np.ndarray):
        return token_ids(start)
    known = _needed(tokenizer)
    if isinstance(start, str):
        return np.asarray(known.encode(start, bos=known.adds_bos), np.int32)
    return render_prompt(start, known, **template_kwargs).tokens


def render_observation(
    start: Observation,
    observation: Observation,
    action: np.ndarray,
    tokenizer: Tokenizer | None,
    template_kwargs: Mapping[str, Any],
) -> np.ndarray:
    """`[T]` int32 ids of the observation that follows a turn of the model.

    Args:
        start: the episode's prompt; an observation of messages continues its conversation.
        observation: what the environment answers.
        action: `[T]` ids of the turn.
        tokenizer: None where all observations are token ids.
        template_kwargs: variables of the chat template.

    Raises:
        UserError: it cannot be rendered.
    """
    if isinstance(observation, np.ndarray):
        return token_ids(observation)
    known = _needed(tokenizer)
    if isinstance(observation, str):
        return np.asarray(known.encode_after(action.tolist(), observation), np.int32)
    if isinstance(start, str | np.ndarray):
        raise UserError("an observation of messages wants a prompt of messages: a text or tokens are no conversation")
    stopped = len(action) > 0 and int(action[-1]) in known.stop_ids
    return render_continuation(start, observation, known, stopped, **template_kwargs)


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise UserError("the model's folder has no tokenizer: the environment has to speak in token ids")
    return tokenizer


def token_ids(ids: np.ndarray) -> np.ndarray:
    """`[T]` int32 ids that an environment gave as such.

    Raises:
        UserError: they are no vector of whole numbers.
    """
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"token ids are a vector of whole numbers, not {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int32)
