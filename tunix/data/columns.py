"""Reads the columns of a row as typed values; other values are refused with the column's name and the value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tunix.data.chat import check_messages
from tunix.data.tokenizer import refuse_half_characters
from tunix.errors import UserError

Row = Mapping[str, Any]
_ARGUMENTS = {"messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template"}
"""Arguments of a template, or of `apply_chat_template`, that no variable of a row replaces."""


def column(row: Row, name: str, columns: Mapping[str, str], *default: Any) -> Any:
    """The value of a column; the default where it is absent or null.

    Args:
        row: the columns of one example.
        name: our name of the column, e.g. `prompt`.
        columns: our column name -> the data's.
        default: at most one value, usually None.

    Raises:
        UserError: the column is absent or null, and there is no default.
    """
    theirs = columns.get(name, name)
    if (value := row.get(theirs)) is not None:
        return value
    if default:
        return default[0]
    if theirs in row:
        raise UserError(f"the column {theirs!r} is null")
    hint = "".join(f" Did you mean {other!r}?" for other in near(theirs, row))
    raise UserError(f"there is no column {theirs!r}; it has {listed(row)}.{hint}")


def as_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a column, without the keys that Arrow filled with null because another row has them."""
    check_messages(value)
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]


def as_tools(value: Any) -> dict[str, Any]:
    """The template arguments of a `tools` column (a list of tools, or JSON of it, of each or of its parameters); empty
    where a row has no tools."""
    if value is None:
        return {}
    try:
        tools = [_tool(_decoded(tool)) for tool in _decoded(value)]
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"tools is {value!r:.80}, not a list of tools: {error}") from error
    return {"tools": tools} if tools else {}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool whose parameters are an object, also where they are JSON."""
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": _tool(tool["function"])}
    return {**tool, "parameters": _decoded(tool["parameters"])} if "parameters" in tool else dict(tool)


def as_template_kwargs(value: Any) -> dict[str, Any]:
    """A row's own variables of the chat template, e.g. `{"enable_thinking": False}`, from an object or JSON of it."""
    try:
        variables = _decoded({} if value is None else value)
    except ValueError as error:
        raise UserError(f"chat_template_kwargs is {value!r:.80}, which is not JSON: {error}") from error
    if not isinstance(variables, Mapping):
        raise UserError(f"chat_template_kwargs is {value!r:.80}, not an object of the template's variables")
    if taken := sorted(variables.keys() & _ARGUMENTS):
        raise UserError(f"chat_template_kwargs sets {', '.join(taken)}, which tunix sets itself: leave it out")
    return dict(variables)


def _decoded(value: Any) -> Any:
    """A value, or the value that a string of JSON holds."""
    return json.loads(value) if isinstance(value, str) else value


def refuse_half_texts(value: Any, name: str) -> None:
    """Refuses a column with a lone surrogate in one of its texts, however deep in lists and objects.

    Raises:
        UserError: the message names the column and the character.
    """
    if isinstance(value, str):
        try:
            refuse_half_characters(value)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            refuse_half_texts(key, name)
            refuse_half_texts(item, name)
    elif isinstance(value, list | tuple):
        for item in value:
            refuse_half_texts(item, name)


def as_weight(value: Any) -> float:
    """A row's weight, finite and at least 0; 1 where the row has none."""
    if value is None:
        return 1.0
    if not _finite(value) or value < 0:
        raise UserError(f"weight is {value!r}, not a finite number of at least 0")
    return float(value)


def as_margin(value: Any, name: str) -> float:
    """A pair's margin, by which its chosen side is better: any finite number."""
    if not _finite(value):
        raise UserError(f"{name} is {value!r:.80}, not a finite number")
    return float(value)


def as_label(value: Any, name: str) -> float:
    """A completion's label, 1 for desirable and 0 for undesirable, from a boolean or the whole numbers 0 and 1."""
    if not isinstance(value, bool | np.bool_) and not (isinstance(value, int | np.integer) and value in (0, 1)):
        raise UserError(f"{name} is {value!r:.80}, not true or false (the numbers 1 and 0 will do)")
    return float(value)


def as_string(value: Any, name: str) -> str:
    """A column's text; other types are refused, not converted."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r:.80}, not a string")
    return value


def as_weights(value: Any, name: str, number: int) -> np.ndarray:
    """A list of finite numbers of at least 0, one for each of `number` tokens, as `[T]` float32."""
    array = _list_of(value, name, "iuf", "numbers")
    if len(array) != number:
        raise UserError(f"{name} has {len(array)} values for {number} input_ids")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        place = int(np.argmax(wrong))
        raise UserError(f"{name}[{place}] is {array[place]:g}, not a finite number of at least 0")
    return array.astype(np.float32)


def as_integers(value: Any, name: str) -> np.ndarray:
    """A list of whole numbers (or booleans, for a mask) as `[T]` int32."""
    array = _list_of(value, name, "iub", "whole numbers")
    if array.size and max(abs(int(array.max())), abs(int(array.min()))) >= 2**31:
        raise UserError(f"{name} holds {array.max()}, beyond any vocabulary")
    return array.astype(np.int32)


def _list_of(value: Any, name: str, kinds: str, what: str) -> np.ndarray:
    """A flat list whose numpy kind is one of `kinds`, as an array `[T]`; an empty list has any kind."""
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise UserError(f"{name} is {value!r:.80}, not a list of {what}")
    return array


def _finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def near(name: str, row: Iterable[str]) -> list[str]:
    """The row's column with the most similar name, as a list of at most one."""
    import difflib

    return difflib.get_close_matches(name, [str(column) for column in row], n=1)


def listed(row: Iterable[str]) -> str:
    """The columns' names, formatted for a message."""
    return ", ".join(repr(column) for column in row) or "no columns"
