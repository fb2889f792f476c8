"""The columns of a row, and the shapes of rows: typed values, the columns of each shape, and how a recipe renders rows.

A value of another type is refused with the column's name and the value. The algorithm determines what is read of a row
(`RowKind`); among the shapes that fit, `detect_format` finds the one whose columns a row has.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tunix.config import LOSS_WEIGHTS, RowKind
from tunix.data.chat import check_messages
from tunix.data.config import DataConfig
from tunix.data.pictures import IMAGES
from tunix.data.tokenizer import refuse_half_characters
from tunix.errors import UserError, nearest
from tunix.util.nested import dotted

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
    names = list(dotted(row)) if "." in theirs else [str(name) for name in row]
    raise UserError(f"there is no column {theirs!r}; it has {listed(row)}.{nearest(theirs, names)}")


def as_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a column, without the keys that Arrow filled with null because another row has them."""
    check_messages(value)
    messages = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]
    for message in messages:
        if isinstance(parts := message.get("content"), list | tuple):
            message["content"] = [{k: v for k, v in part.items() if v is not None} for part in parts]
    return messages


def without_padding(row: Row, data: DataConfig) -> Row:
    """The row without null arguments that the called tool does not declare: those of other rows' tools, as `datasets`
    writes them into JSON lines."""
    tools = [tool.get("function", tool) for tool in template_variables(row, data).get("tools", ())]
    declared = {tool.get("name"): (tool.get("parameters") or {}).get("properties") or {} for tool in tools}

    def called(call: Any) -> Any:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if function.get("name") not in declared or not isinstance(arguments := function.get("arguments"), Mapping):
            return call
        known = declared[function["name"]]
        function = {**function, "arguments": {k: v for k, v in arguments.items() if v is not None or k in known}}
        return {**call, "function": function} if "function" in call else function

    changed = dict(row)
    for name in {data.columns.get(name, name) for name in ("messages", "prompt", "completion", "chosen", "rejected")}:
        if isinstance(row.get(name), list):
            changed[name] = [
                {**message, "tool_calls": list(map(called, message["tool_calls"]))}
                if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list)
                else message
                for message in row[name]
            ]
    return changed


def template_variables(row: Row, data: DataConfig) -> dict[str, Any]:
    """The variables of the chat template: the recipe's, the row's own, which take precedence, and its tools: a list of
    tools, or JSON of it, of each or of its parameters."""
    variables = {**data.template_kwargs, **as_template_kwargs(column(row, TEMPLATE_KWARGS, data.columns, None))}
    value = column(row, "tools", data.columns, [])
    try:
        tools = [_tool(_decoded(tool)) for tool in _decoded(value)]
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"tools is {value!r:.80}, not a list of tools: {error}") from error
    return {**variables, "tools": tools} if tools else variables


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


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool whose parameters are an object, also where they are JSON."""
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": _tool(tool["function"])}
    if "parameters" not in tool:
        return dict(tool)
    parameters = _decoded(tool["parameters"])
    if isinstance(parameters, Mapping) and isinstance(properties := parameters.get("properties"), Mapping):
        # One that is null is a property of another row's tool, as `datasets` writes it into JSON lines.
        parameters = {**parameters, "properties": {k: v for k, v in properties.items() if v is not None}}
    return {**tool, "parameters": parameters}


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


def as_ids(row: Row, name: str, columns: Mapping[str, str]) -> np.ndarray:
    """The token ids of a column, `[T]` int32."""
    theirs = columns.get(name, name)
    ids = as_integers(column(row, name, columns), theirs)
    if len(ids) and ids.min() < 0:
        raise UserError(f"{theirs} holds {ids.min()}, which is no token id")
    return ids


def _list_of(value: Any, name: str, kinds: str, what: str) -> np.ndarray:
    """A flat list whose numpy kind is one of `kinds`, as an array `[T]`; an empty list has any kind."""
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise UserError(f"{name} is {value!r:.80}, not a list of {what}")
    return array


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number, and no boolean."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def listed(row: Iterable[str]) -> str:
    """The columns' names, formatted for a message."""
    return ", ".join(repr(column) for column in row) or "no columns"


Format = Literal["messages", "prompt_completion", "text", "tokens", "pairs"]
Shapes = Mapping[Format, tuple[str, ...]]
"""The columns of each shape; a row that fits several has the first one."""

COMPLETIONS: Shapes = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
PROMPTS: Shapes = {
    "prompt_completion": ("prompt",),
    "messages": ("messages",),
    "tokens": ("prompt_ids",),
}
"""Columns of rows whose completions the policy samples; other columns are for rewards."""
PAIRS: Shapes = {
    "tokens": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "pairs": ("chosen", "rejected"),
}
"""Columns of preference pairs; `pairs` may have a `prompt`, without one it is the common beginning of both sides."""
LABELS: Shapes = {
    "tokens": ("prompt_ids", "completion_ids", "label"),
    "prompt_completion": ("prompt", "completion", "label"),
}
SHAPES: Mapping[RowKind, Shapes] = {
    RowKind.COMPLETION: COMPLETIONS,
    RowKind.ALL: COMPLETIONS,
    RowKind.PROMPT: PROMPTS,
    RowKind.ROW: PROMPTS,
    RowKind.PAIRS: PAIRS,
    RowKind.LABELS: LABELS,
}
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns of 0 and 1 for every token of `input_ids`: 1 is trained."""
TEMPLATE_KWARGS = "chat_template_kwargs"
"""The column of a row's own variables of the chat template, e.g. `{"enable_thinking": false}`."""
OPTIONAL = ("labels", *MASKS, "attention_mask", "loss_weights", "weight", "tools", TEMPLATE_KWARGS, "margin", IMAGES)
NAMES = sorted({name for shapes in SHAPES.values() for group in shapes.values() for name in group} | set(OPTIONAL))
"""The names of all of our columns."""
FIXED = ("prompt", "margin")
"""Optional columns of pairs that every row has or none; for token ids `loss_weights` is such a column."""

QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input")
ANSWERS = ("completion", "output", "answer", "response", "solution")
"""Usual names of the columns that we call prompt and completion."""
FUNCTION = "data.train: file.py:function"
"""How a recipe names a function that gives rows."""

USUAL = ("messages", "prompt and completion", "prompt", "text", "chosen and rejected", "prompt, completion and label")
"""The most usual shapes, which messages name first."""


@dataclass(frozen=True)
class Rendering:
    """How rows become sequences."""

    format: Format
    """Shape of every row."""
    data: DataConfig
    """The section of a recipe with columns, limits and the chat template's variables."""
    train_on: RowKind = RowKind.COMPLETION
    """Which columns of a row are read, and which of its tokens are targets."""
    vocab_size: int | None = None
    """V, the rows of the model's embedding, where known: larger ids are refused."""
    fixed: tuple[str, ...] = ()
    """Names in `FIXED` of columns that the first row has, and therefore every row."""
    uncut: bool = False
    """Whether sequences above the limit stay whole, e.g. for `pipeline.Cutter`."""
    chat: bool = False
    """Whether the chat template renders the rows: those of messages, and strings with `data.chat`."""

    @property
    def turns(self) -> Literal["last", "all", "each"] | None:
        """Which of the assistant's turns are trained, where conversations are; None for all, as they are shown."""
        return self.data.turns if self.train_on == RowKind.COMPLETION else None


def rendering(
    config: DataConfig,
    first: Row,
    where: str,
    train_on: RowKind = RowKind.COMPLETION,
    vocab_size: int | None = None,
) -> Rendering:
    """The rendering of a recipe's `data` section, with the shape of the first row where it says `auto`.

    Args:
        config: the section.
        first: the first row.
        where: that row's name in messages.
        train_on: what the algorithm reads of a row.
        vocab_size: see `Rendering`.

    Raises:
        UserError: an unknown name in `data.columns`, or a row of no known shape.
    """
    shapes = SHAPES[train_on]
    for name in config.columns:
        if name not in NAMES and shapes is not PROMPTS:  # a reward may name its columns as it likes
            known = f"{', '.join(NAMES)}.{nearest(name, NAMES)}"
            raise UserError(f"data.columns maps {name!r}, which is none of our columns: {known}")
    for name, theirs in config.columns.items():
        if "." in theirs and theirs not in first:
            hint = nearest(theirs, dotted(first))
            raise UserError(
                f"{where}: data.columns maps {name} to {theirs!r}, which is not there; it has {listed(first)}.{hint}"
            )
    shape = "tokens" if train_on == RowKind.ROW else config.format
    if shape == "auto":
        shape = detect_format(first, config.columns, where, shapes)
    elif shape not in shapes:
        raise UserError(f"data.format is {shape!r}, but {train_on.words} are read from {', '.join(shapes)}")
    if config.turns and train_on == RowKind.COMPLETION and shape not in ("messages", "prompt_completion"):
        raise UserError(f"data.turns: {config.turns} is about messages, and {where} has {shape}; leave it out")
    for name in (*shapes[shape], "prompt"):
        if _is_sharegpt(first.get(theirs := config.columns.get(name, name))):
            raise UserError(f"{where}: {_sharegpt(theirs, shapes)}")
    optional = FIXED if train_on == RowKind.PAIRS else ()
    if train_on == RowKind.COMPLETION and shape == "tokens":
        optional = (LOSS_WEIGHTS,)
    fixed = tuple(name for name in optional if first.get(config.columns.get(name, name)) is not None)
    asks = shape == "prompt_completion" and not isinstance(first.get(config.columns.get("prompt", "prompt")), str)
    chat = shape == "messages" or asks or (shape == "prompt_completion" and config.chat)
    return Rendering(shape, config, train_on, vocab_size, fixed, config.cuts and train_on.is_text, chat)


def detect_format(
    row: Row,
    columns: Mapping[str, str],
    where: str = "row 1",
    shapes: Shapes = COMPLETIONS,
) -> Format:
    """The shape whose columns a row has.

    Args:
        row: usually the first.
        columns: our column name -> the data's.
        where: the row's name in messages.
        shapes: the possible shapes and their columns.

    Raises:
        UserError: no shape fits; the message names the required and the present columns.
    """
    for shape, wanted in shapes.items():
        if all(columns.get(name, name) in row for name in wanted):
            return shape
    groups = [" and ".join([", ".join(group[:-1]), group[-1]] if group[1:] else group) for group in shapes.values()]
    groups.sort(key=lambda group: USUAL.index(group) if group in USUAL else len(USUAL))
    raise UserError(
        f"{where} has the columns {listed(row)}; wanted are {', or '.join(groups)}. {_remedy(row, columns, shapes)}"
    )


def _remedy(row: Row, columns: Mapping[str, str], shapes: Shapes) -> str:
    """What to do with a row of no known shape: for the usual layouts of other tools, else for names like ours."""
    for name, value in row.items():
        if _is_sharegpt(value):
            return _sharegpt(name, shapes)
        if "messages" in shapes and _turn(value).keys() >= {"role", "content"}:
            return f"Set data.columns: {{messages: {name}}}."
    question = next((name for name in QUESTIONS if isinstance(row.get(name), str)), None)
    answer = next((name for name in ANSWERS if isinstance(row.get(name), str)), None)
    if question == "instruction" and "input" in row and "prompt_completion" in shapes:
        return (
            "These are Alpaca's columns: join instruction and input into a column prompt"
            + (f", and set data.columns: {{completion: {answer}}}" if answer and shapes is COMPLETIONS else "")
            + f", for instance in a function ({FUNCTION})."
        )
    if question is not None and shapes is PROMPTS:
        return f"Set data.columns: {{prompt: {question}}}."
    if question is not None and answer is not None and (shapes is COMPLETIONS or (shapes is LABELS and "label" in row)):
        named = {"prompt": question, "completion": answer}
        return f"Set data.columns: {{{', '.join(f'{ours}: {x}' for ours, x in named.items() if ours != x)}}}."
    wanted = [columns.get(name, name) for group in shapes.values() for name in group]
    strange = [name for name in row if name not in (*wanted, *NAMES)]
    hints = [
        f"{ours!r} for {theirs!r}" for theirs in strange for ours in difflib.get_close_matches(theirs, wanted, n=1)
    ]
    example = "{chosen: better, rejected: worse}" if shapes is PAIRS else "{prompt: question, completion: answer}"
    return f"Name yours in data.columns, as in {example}." + (f" Is it {', '.join(hints)}?" if hints else "")


def _turn(value: Any) -> Mapping[str, Any]:
    """The first object of a list of objects; empty for other values."""
    first = value[0] if isinstance(value, list | tuple) and value else None
    return first if isinstance(first, Mapping) else {}


def _is_sharegpt(value: Any) -> bool:
    """Whether a column holds turns of ShareGPT's layout, or a single one of them."""
    turn = value if isinstance(value, Mapping) else _turn(value)
    return turn.keys() >= {"from", "value"}


def _sharegpt(name: str, shapes: Shapes) -> str:
    """What to do with a column of ShareGPT's turns."""
    place = " in a column messages" if "messages" in shapes else ""
    return (
        f"{name!r} holds ShareGPT's turns of from and value: make them a list of {{role, content}}{place} (human is "
        f"user, gpt is assistant), for instance in a function ({FUNCTION})."
    )
