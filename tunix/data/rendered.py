"""Renders a row as tokens and a mask of trained tokens, before any limit: completions, whole texts, or prompts alone.

Pairs are rendered in `pairs.py`, with the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import numpy as np

from tunix.config import RowKind
from tunix.data.chat import render_chat, render_prompt
from tunix.data.columns import Row, as_integers, as_messages, as_string, as_tools, as_weights, column
from tunix.data.shapes import Rendering
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.types import LOSS_WEIGHTS

Rendered = tuple[np.ndarray, np.ndarray]
"""`[T]` int32 tokens and `[T]` bool mask of the trained ones."""


def render_row(row: Row, tokenizer: Tokenizer | None, settings: Rendering) -> Rendered:
    """Tokens and mask of a row that becomes one sequence.

    Raises:
        UserError: a missing or malformed column.
    """
    if settings.train_on == RowKind.PROMPT:
        tokens = _prompt(row, tokenizer, settings)
        return tokens, np.zeros(len(tokens), bool)
    if settings.format == "tokens":
        tokens, mask = (
            _given_completion(row, settings) if settings.train_on == RowKind.LABELS else _given_tokens(row, settings)
        )
    else:
        tokens, mask = _text_row(row, needed(tokenizer, settings), settings)
    return tokens, np.ones_like(mask) if settings.train_on == RowKind.ALL else mask


def prompt_text(row: Row) -> str:
    """The prompt that rewards read: the string, or the last message's content; empty for token ids."""
    prompt = row.get("prompt", row.get("messages", ""))
    if isinstance(prompt, str):
        return prompt
    return str(asked(as_messages(prompt))[-1]["content"])


def render_completion(prompt: Any, completion: Any, row: Row, tokenizer: Tokenizer, settings: Rendering) -> Rendered:
    """Renders two strings, of which the second continues the first and ends in EOS; or two lists of messages as one chat.

    The prompt's ids are those that a sampler is given, and the completion's follow them: no token crosses the border.

    Args:
        prompt: the row's prompt.
        completion: the text after it, which is trained; of messages the assistant's turns are.
        row: may contain `tools`.
        tokenizer: its chat template renders messages.
        settings: columns and template variables.

    Raises:
        UserError: one of the two is a string and the other a list, or the template refuses the messages.
    """
    if isinstance(prompt, str) and isinstance(completion, str) and settings.chat:
        prompt, completion = as_chat("user", prompt, settings), as_chat("assistant", completion, settings)
    if isinstance(prompt, str) and isinstance(completion, str):
        start = tokenizer.encode(tokenizer.expanded(prompt), bos=tokenizer.adds_bos)
        return joined(start, tokenizer.ended(tokenizer.encode_after(start, completion)))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError("prompt and completion are both strings or both lists of messages, not one of each")
    before, after = as_messages(prompt), as_messages(completion)
    return render_messages([*before, *after], row, tokenizer, settings, trained_from=len(before))


def render_messages(
    messages: List[dict[str, Any]], row: Row, tokenizer: Tokenizer, settings: Rendering, trained_from: int = 0
) -> Rendered:
    """Renders a chat with the row's tools; the assistant's turns from message `trained_from` on are trained."""
    tools = as_tools(column(row, "tools", settings.columns, None))
    return render_chat(messages, tokenizer, trained_from=trained_from, **tools, **settings.template_kwargs)


def needed(tokenizer: Tokenizer | None, settings: Rendering) -> Tokenizer:
    """The tokenizer, which rows that are not token ids need.

    Raises:
        UserError: the model has no tokenizer.
    """
    if tokenizer is None:
        shape = "chosen and rejected" if settings.format == "pairs" else settings.format.replace("_", " and ")
        raise UserError(
            f"it has {shape}, but the model's folder has no tokenizer: "
            f"add one, or give {_GIVEN.get(settings.train_on, 'input_ids (prompt_ids where only prompts are read)')}"
        )
    return tokenizer


def given_ids(row: Row, name: str, settings: Rendering) -> np.ndarray:
    """The token ids of a column, `[T]` int32, unchanged.

    Raises:
        UserError: the column contains something else.
    """
    theirs = settings.columns.get(name, name)
    ids = as_integers(column(row, name, settings.columns), theirs)
    if len(ids) and ids.min() < 0:
        raise UserError(f"{theirs} holds {ids.min()}, which is no token id")
    return ids


def joined(prompt: List[int] | np.ndarray, completion: List[int] | np.ndarray) -> Rendered:
    """Tokens of prompt and completion, trained from the completion's first token."""
    tokens = np.asarray([*prompt, *completion], np.int32)
    return tokens, np.arange(len(tokens)) >= len(prompt)


def as_chat(role: str, text: str, settings: Rendering) -> list[dict[str, Any]]:
    """A string as a list of messages; a user's message follows the system message, where there is one."""
    before = [{"role": "system", "content": settings.system}] if settings.system and role == "user" else []
    return [*before, {"role": role, "content": text}]


def _text_row(row: Row, tokenizer: Tokenizer, settings: Rendering) -> Rendered:
    """Renders messages, prompt and completion, or text."""
    if settings.format == "messages":
        return render_messages(as_messages(column(row, "messages", settings.columns)), row, tokenizer, settings)
    if settings.format == "prompt_completion":
        prompt, completion = (column(row, name, settings.columns) for name in ("prompt", "completion"))
        return render_completion(prompt, completion, row, tokenizer, settings)
    text = as_string(column(row, "text", settings.columns), "text")
    return joined([], tokenizer.ended(tokenizer.encode(text, bos=tokenizer.adds_bos)))


def _prompt(row: Row, tokenizer: Tokenizer | None, settings: Rendering) -> np.ndarray:
    """The prompt's tokens: ids, a string, or a chat up to the start of the assistant's turn."""
    if settings.format == "tokens":
        return given_ids(row, "prompt_ids", settings)
    tokenizer = needed(tokenizer, settings)
    prompt = column(row, "messages" if settings.format == "messages" else "prompt", settings.columns)
    if isinstance(prompt, str) and not settings.chat:
        return np.asarray(tokenizer.encode(prompt, bos=tokenizer.adds_bos), np.int32)
    messages = as_chat("user", prompt, settings) if isinstance(prompt, str) else asked(as_messages(prompt))
    tools = as_tools(column(row, "tools", settings.columns, None))
    return render_prompt(messages, tokenizer, **tools, **settings.template_kwargs)


def asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without the assistant's turns at its end.

    Raises:
        UserError: no message is left.
    """
    last = next((i for i, message in enumerate(reversed(messages)) if message["role"] != "assistant"), len(messages))
    if last == len(messages):
        raise UserError("messages holds nothing but the assistant's: there is no prompt")
    return messages[: len(messages) - last]


def _given_completion(row: Row, settings: Rendering) -> Rendered:
    """Tokens of `prompt_ids` and `completion_ids`; the completion is trained."""
    return joined(given_ids(row, "prompt_ids", settings), given_ids(row, "completion_ids", settings))


def given_weights(row: Row, number: int, settings: Rendering) -> np.ndarray | None:
    """The loss weights of a row's tokens, `[T]`; None where the rows have none.

    Raises:
        UserError: the row has weights and the first row has none, or the other way round.
    """
    if LOSS_WEIGHTS in settings.fixed:
        return as_weights(column(row, LOSS_WEIGHTS, settings.columns), LOSS_WEIGHTS, number)
    if settings.train_on == RowKind.COMPLETION and column(row, LOSS_WEIGHTS, settings.columns, None) is not None:
        raise UserError(
            "it has loss_weights, which the first row has not, or not as input_ids: give them to all or none"
        )
    return None


def _given_tokens(row: Row, settings: Rendering) -> Rendered:
    """The ids unchanged, with the mask from `labels` (not shifted, -100 is not trained), `loss_mask` or weights."""
    tokens = given_ids(row, "input_ids", settings)
    labels, loss_mask = (column(row, name, settings.columns, None) for name in ("labels", "loss_mask"))
    weights = given_weights(row, len(tokens), settings)
    if weights is not None:
        if labels is not None or loss_mask is not None:
            raise UserError("it has loss_weights and labels or loss_mask: a weight of 0 says what is not trained")
        return tokens, weights > 0
    if labels is not None and loss_mask is not None:
        raise UserError("it has labels and loss_mask: leave one of them out")
    if labels is None and loss_mask is None:
        return tokens, np.ones(len(tokens), bool)
    name = "loss_mask" if labels is None else "labels"
    given = as_integers(loss_mask if labels is None else labels, name)
    if len(given) != len(tokens):
        raise UserError(f"{name} has {len(given)} values for {len(tokens)} input_ids")
    if name == "loss_mask":
        if not np.isin(given, (0, 1)).all():
            raise UserError(f"loss_mask holds 0 and 1, not {given[~np.isin(given, (0, 1))][0]}")
        return tokens, given == 1
    wrong = np.flatnonzero((given != -100) & (given != tokens))
    if len(wrong):
        i = int(wrong[0])
        raise UserError(
            f"labels[{i}] is {given[i]}, but input_ids[{i}] is {tokens[i]}: "
            "labels repeat the ids, unshifted, or are -100"
        )
    return tokens, given != -100


_GIVEN = {
    RowKind.PAIRS: "prompt_ids, chosen_ids and rejected_ids",
    RowKind.LABELS: "prompt_ids, completion_ids and label",
}
