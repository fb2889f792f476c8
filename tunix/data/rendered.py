"""A row as tokens and a mask of what is trained, before any limit: completions, whole texts, or prompts alone.

Pairs are rendered in `pairs.py`, side by side and by the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import numpy as np

from tunix.data.chat import render_chat, render_prompt
from tunix.data.columns import Row, as_integers, as_messages, as_string, as_tools, as_weights, column
from tunix.data.shapes import Rendering
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.types import LOSS_WEIGHTS

Rendered = tuple[np.ndarray, np.ndarray]
"""`[T]` int32 tokens and `[T]` bool mask of what is trained."""


def render_row(row: Row, tokenizer: Tokenizer | None, how: Rendering) -> Rendered:
    """Tokens and mask of a row that becomes one sequence.

    Raises:
        UserError: a missing or malformed column.
    """
    if how.train_on == "prompt":
        tokens = _prompt(row, tokenizer, how)
        return tokens, np.zeros(len(tokens), bool)
    if how.format == "tokens":
        tokens, mask = _given_completion(row, how) if how.train_on == "labels" else _given_tokens(row, how)
    else:
        tokens, mask = _text_row(row, needed(tokenizer, how), how)
    return tokens, np.ones_like(mask) if how.train_on == "all" else mask


def prompt_text(row: Row) -> str:
    """What a reward reads as the prompt: the string, or the last message's content; empty for token ids."""
    prompt = row.get("prompt", row.get("messages", ""))
    if isinstance(prompt, str):
        return prompt
    return str(asked(as_messages(prompt))[-1]["content"])


def render_completion(prompt: Any, completion: Any, row: Row, tokenizer: Tokenizer, how: Rendering) -> Rendered:
    """Two strings, tokenized separately and closed by EOS; or two lists of messages, rendered as one chat.

    Args:
        prompt: of the row.
        completion: what follows it and is trained; of lists the assistant's turns.
        row: where `tools` are found.

    Raises:
        UserError: one of each, or what the template refuses.
    """
    if isinstance(prompt, str) and isinstance(completion, str) and how.chat:
        prompt, completion = spoken("user", prompt, how), spoken("assistant", completion, how)
    if isinstance(prompt, str) and isinstance(completion, str):
        start = tokenizer.encode(prompt, bos=tokenizer.adds_bos)
        return joined(start, [*tokenizer.encode(completion), tokenizer.eos_id])
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError("prompt and completion are both strings or both lists of messages, not one of each")
    before, after = as_messages(prompt), as_messages(completion)
    return render_messages([*before, *after], row, tokenizer, how, trained_from=len(before))


def render_messages(
    messages: List[dict[str, Any]], row: Row, tokenizer: Tokenizer, how: Rendering, trained_from: int = 0
) -> Rendered:
    """A chat with the row's tools; the assistant's turns from `trained_from` on are trained."""
    tools = as_tools(column(row, "tools", how.columns, None))
    return render_chat(messages, tokenizer, trained_from=trained_from, **tools, **how.template_kwargs)


def needed(tokenizer: Tokenizer | None, how: Rendering) -> Tokenizer:
    """The tokenizer, for rows that are no token ids.

    Raises:
        UserError: there is none.
    """
    if tokenizer is None:
        shape = "chosen and rejected" if how.format == "pairs" else how.format.replace("_", " and ")
        raise UserError(
            f"it has {shape}, but the model's folder has no tokenizer: "
            f"add one, or give {_GIVEN.get(how.train_on, 'input_ids (prompt_ids where only prompts are read)')}"
        )
    return tokenizer


def given_ids(row: Row, name: str, how: Rendering) -> np.ndarray:
    """`[T]` int32 ids of a column, as they stand.

    Raises:
        UserError: it holds something else.
    """
    name_there = how.columns.get(name, name)
    ids = as_integers(column(row, name, how.columns), name_there)
    if len(ids) and ids.min() < 0:
        raise UserError(f"{name_there} holds {ids.min()}, which is no token id")
    return ids


def joined(prompt: List[int] | np.ndarray, completion: List[int] | np.ndarray) -> Rendered:
    """Tokens of both, trained from the completion's first."""
    tokens = np.asarray([*prompt, *completion], np.int32)
    return tokens, np.arange(len(tokens)) >= len(prompt)


def spoken(role: str, text: str, how: Rendering) -> list[dict[str, Any]]:
    """A string as a message; the user's after the system's."""
    before = [{"role": "system", "content": how.system}] if how.system and role == "user" else []
    return [*before, {"role": role, "content": text}]


def _text_row(row: Row, tokenizer: Tokenizer, how: Rendering) -> Rendered:
    """Messages, prompt and completion, or text."""
    if how.format == "messages":
        return render_messages(as_messages(column(row, "messages", how.columns)), row, tokenizer, how)
    if how.format == "prompt_completion":
        prompt, completion = (column(row, name, how.columns) for name in ("prompt", "completion"))
        return render_completion(prompt, completion, row, tokenizer, how)
    text = as_string(column(row, "text", how.columns), "text")
    return joined([], [*tokenizer.encode(text, bos=tokenizer.adds_bos), tokenizer.eos_id])


def _prompt(row: Row, tokenizer: Tokenizer | None, how: Rendering) -> np.ndarray:
    """The tokens that a policy goes on from: ids, a string, or a chat up to where the assistant speaks."""
    if how.format == "tokens":
        return given_ids(row, "prompt_ids", how)
    tokenizer = needed(tokenizer, how)
    prompt = column(row, "messages" if how.format == "messages" else "prompt", how.columns)
    if isinstance(prompt, str) and not how.chat:
        return np.asarray(tokenizer.encode(prompt, bos=tokenizer.adds_bos), np.int32)
    messages = spoken("user", prompt, how) if isinstance(prompt, str) else asked(as_messages(prompt))
    tools = as_tools(column(row, "tools", how.columns, None))
    return render_prompt(messages, tokenizer, **tools, **how.template_kwargs)


def asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without the assistant's turns at its end.

    Raises:
        UserError: nothing is left.
    """
    last = next((i for i, message in enumerate(reversed(messages)) if message["role"] != "assistant"), len(messages))
    if last == len(messages):
        raise UserError("messages holds nothing but the assistant's: there is no prompt")
    return messages[: len(messages) - last]


def _given_completion(row: Row, how: Rendering) -> Rendered:
    """`prompt_ids` and then `completion_ids`, which are trained."""
    return joined(given_ids(row, "prompt_ids", how), given_ids(row, "completion_ids", how))


def given_weights(row: Row, number: int, how: Rendering) -> np.ndarray | None:
    """`[T]` what each token counts, where the rows say so; every one of them does, or none.

    Raises:
        UserError: a row without them where the first has them, or the other way round.
    """
    if LOSS_WEIGHTS in how.fixed:
        return as_weights(column(row, LOSS_WEIGHTS, how.columns), LOSS_WEIGHTS, number)
    if how.train_on == "completion" and column(row, LOSS_WEIGHTS, how.columns, None) is not None:
        raise UserError(
            "it has loss_weights, which the first row has not, or not as input_ids: give them to all or none"
        )
    return None


def _given_tokens(row: Row, how: Rendering) -> Rendered:
    """Ids as they stand, with the mask of `labels` (not shifted, -100 is not trained), `loss_mask` or weights."""
    tokens = given_ids(row, "input_ids", how)
    labels, loss_mask = (column(row, name, how.columns, None) for name in ("labels", "loss_mask"))
    weights = given_weights(row, len(tokens), how)
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


_GIVEN = {"pairs": "prompt_ids, chosen_ids and rejected_ids", "labels": "prompt_ids, completion_ids and label"}
