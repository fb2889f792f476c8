"""Renders a row as tokens and a mask of trained tokens, before any limit: completions, whole texts, or prompts alone.

Pairs are rendered in `pairs.py`, with the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any

import numpy as np

from tunix.config import RowKind
from tunix.data.chat import Rendered, render_chat, render_prompt
from tunix.data.columns import Row, as_messages, as_string, as_template_kwargs, as_tools, column
from tunix.data.shapes import TEMPLATE_KWARGS, Rendering
from tunix.data.token_rows import given_ids, given_tokens
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError


def render_row(row: Row, tokenizer: Tokenizer | None, settings: Rendering) -> Rendered:
    """Tokens and mask of a row that becomes one sequence.

    Raises:
        UserError: a missing or malformed column.
    """
    if settings.train_on == RowKind.PROMPT:
        return _prompt(row, tokenizer, settings)
    if settings.format == "tokens":
        rendered = (
            joined(*given_ids(row, ("prompt_ids", "completion_ids"), tokenizer, settings))
            if settings.train_on == RowKind.LABELS
            else Rendered(*given_tokens(row, tokenizer, settings))
        )
    else:
        rendered = _text_row(row, needed(tokenizer, settings), settings)
    return replace(rendered, mask=np.ones_like(rendered.mask)) if settings.train_on == RowKind.ALL else rendered


def prompt_messages(row: Row) -> list[dict[str, Any]] | None:
    """The messages of a prompt, without the assistant's turns at its end; None where it is a string or token ids.

    Raises:
        UserError: they are no messages, or all the assistant's.
    """
    prompt = next((row[name] for name in ("prompt", "messages") if row.get(name) is not None), "")
    return None if isinstance(prompt, str) else asked(as_messages(prompt))


def prompt_text(row: Row) -> str:
    """The prompt that rewards read: the string, or the text of the last message's content; empty for token ids."""
    messages = prompt_messages(row)
    if messages is None:
        return row.get("prompt") or ""
    content = messages[-1].get("content")
    if not isinstance(content, list | tuple | np.ndarray):
        return "" if content is None else str(content)
    # As templates join them; a picture has no text.
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def render_completion(prompt: Any, completion: Any, row: Row, tokenizer: Tokenizer, settings: Rendering) -> Rendered:
    """Renders two strings, the second as the continuation of the first, up to EOS; or two lists of messages as a chat.

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
    return render_chat(messages, tokenizer, trained_from=trained_from, **_template_kwargs(row, settings))


def _template_kwargs(row: Row, settings: Rendering) -> dict[str, Any]:
    """The variables of the chat template: the recipe's, the row's own, which take precedence, and its tools."""
    more = as_template_kwargs(column(row, TEMPLATE_KWARGS, settings.columns, None))
    return {**settings.template_kwargs, **more, **as_tools(column(row, "tools", settings.columns, None))}


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


def joined(prompt: List[int] | np.ndarray, completion: List[int] | np.ndarray) -> Rendered:
    """Tokens of prompt and completion, trained from the completion's first token."""
    tokens = np.asarray([*prompt, *completion], np.int32)
    return Rendered(tokens, np.arange(len(tokens)) >= len(prompt))


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


def _prompt(row: Row, tokenizer: Tokenizer | None, settings: Rendering) -> Rendered:
    """The prompt's tokens: ids, a string, or a chat up to the start of the assistant's turn."""
    if settings.format == "tokens":
        return joined(given_ids(row, ("prompt_ids",), tokenizer, settings)[0], [])
    tokenizer = needed(tokenizer, settings)
    prompt = column(row, "messages" if settings.format == "messages" else "prompt", settings.columns)
    if isinstance(prompt, str) and not settings.chat:
        return joined(tokenizer.encode(prompt, bos=tokenizer.adds_bos), [])
    messages = as_chat("user", prompt, settings) if isinstance(prompt, str) else asked(as_messages(prompt))
    return render_prompt(messages, tokenizer, **_template_kwargs(row, settings))


def asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without the assistant's turns at its end.

    Raises:
        UserError: no message is left.
    """
    last = next((i for i, message in enumerate(reversed(messages)) if message["role"] != "assistant"), len(messages))
    if last == len(messages):
        raise UserError("messages holds nothing but the assistant's: there is no prompt")
    return messages[: len(messages) - last]


_GIVEN = {
    RowKind.PAIRS: "prompt_ids, chosen_ids and rejected_ids",
    RowKind.LABELS: "prompt_ids, completion_ids and label",
}
