"""One row becomes one sequence: tokens and a mask of what is trained, or a reason why not, and all of it is counted.

The shapes: `messages`; `prompt` and `completion` (strings, or lists of messages); `text`; and `input_ids` with `labels`
or `loss_mask`, to which nothing is added. Where a policy writes the completions (`train_on: prompt`) only the prompt of
a row is read. `detect_format` reads the shape off a row, `to_sequence` renders it, cuts or refuses what is too long,
and `Accounting` adds up: kept plus dropped is the number of rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from tunix.config import DataConfig
from tunix.data.chat import check_messages, render_chat, render_prompt
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError, nearest
from tunix.types import Sequence

Format = Literal["messages", "prompt_completion", "text", "tokens"]
TrainOn = Literal["completion", "all", "prompt", "row"]
Overflow = Literal["truncate", "drop", "error"]
Row = Mapping[str, Any]

REQUIRED: dict[Format, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The columns of each shape; where a row has several, the first one here is meant."""

PROMPTS: dict[Format, tuple[str, ...]] = {
    "prompt_completion": ("prompt",),
    "messages": ("messages",),
    "tokens": ("prompt_ids",),
}
"""Likewise, of rows whose completions a policy writes; further columns are the rewards'."""

OPTIONAL = ("labels", "loss_mask", "weight", "tools")

SPOKEN = ("messages", "prompt and completion", "prompt", "text", "input_ids", "prompt_ids")
"""The order in which shapes are named to a person: the most usual first."""

TOO_LONG, PROMPT_TOO_LONG = "longer than max_length", "longer than prompt_length"
NO_PROMPT = "no prompt"
NOTHING_TRAINED = "nothing to train on"
CUT_AWAY = "nothing to train on within max_length"


@dataclass(frozen=True)
class Rendering:
    """How rows become sequences."""

    format: Format
    """Shape of every row."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our column -> theirs."""
    max_length: int = 1024
    """Tokens of a sequence at most."""
    on_overflow: Overflow = "truncate"
    """What happens to a longer one."""
    train_on: TrainOn = "completion"
    """`all` trains every token after the first, prompts included; `prompt` reads prompts only, and trains nothing;
    `row` renders nothing: an environment makes its prompts of the columns."""
    prompt_length: int = 0
    """Tokens of a prompt at most, where only prompts are read; a longer one loses its beginning."""
    chat: bool = False
    """A prompt (and completion) that is a string becomes a chat of a user (and an assistant)."""
    system: str | None = None
    """Its system message."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    vocab_size: int | None = None
    """Rows of the model's embedding, where known: a larger id is refused instead of being read as another one."""


@dataclass(frozen=True)
class Kept:
    """A row that became a sequence."""

    sequence: Sequence
    """What is trained."""
    truncated: bool = False
    """Whether tokens beyond the limit were cut off."""
    row: Row = field(default_factory=dict)
    """Its columns under our names, where only its prompt was read: what rewards and environments are given."""


@dataclass(frozen=True)
class Dropped:
    """A row that is left out."""

    reason: str
    """One of a few fixed phrases, so that they can be counted."""


@dataclass(frozen=True)
class Accounting:
    """What became of the rows read so far: `kept + sum(dropped) == rows`, and the truncated are among the kept."""

    rows: int = 0
    """Rows read."""
    kept: int = 0
    """Rows that became sequences, whole or truncated."""
    truncated: int = 0
    """Kept rows that lost tokens at their end."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> rows left out for it."""

    def __post_init__(self) -> None:
        assert self.kept + sum(self.dropped.values()) == self.rows, self

    def __add__(self, other: Accounting) -> Accounting:
        reasons = {**self.dropped, **other.dropped}
        dropped = {reason: self.dropped.get(reason, 0) + other.dropped.get(reason, 0) for reason in reasons}
        return Accounting(self.rows + other.rows, self.kept + other.kept, self.truncated + other.truncated, dropped)

    @staticmethod
    def of(example: Kept | Dropped) -> Accounting:
        """The account of one row."""
        if isinstance(example, Dropped):
            return Accounting(rows=1, dropped={example.reason: 1})
        return Accounting(rows=1, kept=1, truncated=int(example.truncated))

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> Accounting:
        """Back from `to_dict`."""
        return Accounting(**saved)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def rendering(config: DataConfig, first: Row, where: str, train_on: TrainOn = "completion") -> Rendering:
    """The settings of a recipe's `data` section, with the shape read off the first row where it says `auto`.

    Raises:
        UserError: an unknown name in `data.columns`, or a row of no known shape.
    """
    shapes = REQUIRED if train_on in ("completion", "all") else PROMPTS
    names = sorted({name for group in REQUIRED.values() for name in group} | set(OPTIONAL))
    for name in config.columns:
        if name not in names and shapes is REQUIRED:  # a reward may name its columns as it likes
            known = f"{', '.join(names)}.{nearest(name, names)}"
            raise UserError(f"data.columns maps {name!r}, which is none of our columns: {known}")
    shape = "tokens" if train_on == "row" else config.format
    if shape == "auto":
        shape = detect_format(first, config.columns, where, shapes)
    elif shape not in shapes:
        raise UserError(f"data.format is {shape!r}, but prompts are read from {', '.join(shapes)}")
    return Rendering(
        format=shape,
        columns=config.columns,
        max_length=config.max_length,
        on_overflow=config.on_overflow,
        train_on=train_on,
        prompt_length=config.longest_prompt,
        chat=config.chat,
        system=config.system,
        template_kwargs=config.template_kwargs,
    )


def detect_format(
    row: Row,
    columns: Mapping[str, str],
    where: str = "row 1",
    shapes: Mapping[Format, tuple[str, ...]] = REQUIRED,
) -> Format:
    """The shape that a row's columns tell.

    Args:
        row: usually the first.
        columns: our column -> theirs.
        where: how the row is called in a message.
        shapes: those that could be meant, and their columns.

    Raises:
        UserError: no shape fits; names the wanted and the present columns.
    """
    for shape, wanted in shapes.items():
        if all(columns.get(name, name) in row for name in wanted):
            return shape
    wanted = [columns.get(name, name) for group in shapes.values() for name in group]
    hints = [f"{name!r} for {hint!r}" for name in wanted for hint in _near(name, row)]
    listed = sorted((" and ".join(group) for group in shapes.values()), key=SPOKEN.index)
    raise UserError(
        f"{where} has the columns {_listed(row)}; wanted are {', or '.join(listed)}. Name yours in data.columns, as in "
        "{prompt: question, completion: answer}." + (f" Is it {', '.join(hints)}?" if hints else "")
    )


def to_sequence(row: Row, tokenizer: Tokenizer | None, how: Rendering, where: str = "the row") -> Kept | Dropped:
    """Renders a row, cuts it to length, and checks that something of it is trained.

    Args:
        row: the columns of one example.
        tokenizer: None serves rows of token ids only.
        how: shape and limits.
        where: how the row is called in a message, for instance `row 3 of train.jsonl`.

    Raises:
        UserError: a missing or malformed column, or an over-long row where that is an error; begins with `where`.
    """
    if how.train_on == "row":
        nothing = np.zeros(0, np.int32)
        return Kept(Sequence(nothing, nothing.astype(bool)), row=_renamed(row, how))
    try:
        tokens, mask = _render(row, tokenizer, how)
        weight = _weight(_column(row, "weight", how, None))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if how.vocab_size is not None and len(tokens) and tokens.max() >= how.vocab_size:
        raise UserError(f"{where}: token id {tokens.max()} is beyond the model's vocabulary of {how.vocab_size}")
    only_prompt = how.train_on == "prompt"
    mask[:1] = False
    if not (len(tokens) if only_prompt else mask.any()):
        return Dropped(NO_PROMPT if only_prompt else NOTHING_TRAINED)
    limit, key = (how.prompt_length, "prompt_length") if only_prompt else (how.max_length, "max_length")
    too_long = len(tokens) > limit
    if too_long and how.on_overflow == "error":
        raise UserError(
            f"{where} has {len(tokens)} tokens, more than data.{key} {limit}: "
            "raise it, or set data.on_overflow to truncate or drop"
        )
    if too_long and how.on_overflow == "drop":
        return Dropped(PROMPT_TOO_LONG if only_prompt else TOO_LONG)
    if only_prompt:
        # The end of a prompt is what asks the question.
        return Kept(Sequence(tokens[-limit:], mask[-limit:], weight), too_long, _renamed(row, how))
    tokens, mask = tokens[:limit], mask[:limit]
    return Kept(Sequence(tokens, mask, weight), too_long) if mask.any() else Dropped(CUT_AWAY)


def prompt_text(row: Row) -> str:
    """What a reward reads as the prompt: the string, or the last message's content; empty for token ids."""
    prompt = row.get("prompt", row.get("messages", ""))
    if isinstance(prompt, str):
        return prompt
    asked = _asked(_messages(prompt))
    return str(asked[-1]["content"])


def _renamed(row: Row, how: Rendering) -> Row:
    """The row with our names for the columns that `data.columns` maps."""
    return {**row, **{ours: row[theirs] for ours, theirs in how.columns.items() if theirs in row}}


def _render(row: Row, tokenizer: Tokenizer | None, how: Rendering) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask of a whole row, before any limit."""
    if how.format == "tokens":
        if how.train_on == "prompt":
            tokens = _integers(_column(row, "prompt_ids", how), how.columns.get("prompt_ids", "prompt_ids"))
            return tokens, np.zeros(len(tokens), bool)
        tokens, mask = _given_tokens(row, how)
    elif tokenizer is None:
        raise UserError(
            f"it has {how.format.replace('_', ' and ')}, but the model's folder has no tokenizer: "
            "add one, or give input_ids (prompt_ids where only prompts are read)"
        )
    elif how.train_on == "prompt":
        tokens = _prompt(row, tokenizer, how)
        return tokens, np.zeros(len(tokens), bool)
    elif how.format == "messages":
        messages = _messages(_column(row, "messages", how))
        tools = _tools(_column(row, "tools", how, None))
        tokens, mask = render_chat(messages, tokenizer, **tools, **how.template_kwargs)
    elif how.format == "prompt_completion":
        tokens, mask = _prompt_completion(row, tokenizer, how)
    else:
        text = _string(_column(row, "text", how), "text")
        tokens, mask = _joined([], [*tokenizer.encode(text, bos=tokenizer.adds_bos), tokenizer.eos_id])
    return tokens, np.ones_like(mask) if how.train_on == "all" else mask


def _prompt(row: Row, tokenizer: Tokenizer, how: Rendering) -> np.ndarray:
    """The tokens that a policy goes on from: a string, or a chat up to where the assistant speaks."""
    prompt = _column(row, "messages" if how.format == "messages" else "prompt", how)
    if isinstance(prompt, str) and not how.chat:
        return np.asarray(tokenizer.encode(prompt, bos=tokenizer.adds_bos), np.int32)
    messages = _spoken("user", prompt, how) if isinstance(prompt, str) else _asked(_messages(prompt))
    tools = _tools(_column(row, "tools", how, None))
    return render_prompt(messages, tokenizer, **tools, **how.template_kwargs)


def _asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without the assistant's turns at its end."""
    last = next((i for i, message in enumerate(reversed(messages)) if message["role"] != "assistant"), len(messages))
    if last == len(messages):
        raise UserError("messages holds nothing but the assistant's: there is no prompt")
    return messages[: len(messages) - last]


def _spoken(role: str, text: str, how: Rendering) -> list[dict[str, Any]]:
    """A string as a message; the user's after the system's."""
    before = [{"role": "system", "content": how.system}] if how.system and role == "user" else []
    return [*before, {"role": role, "content": text}]


def _prompt_completion(row: Row, tokenizer: Tokenizer, how: Rendering) -> tuple[np.ndarray, np.ndarray]:
    """Two strings, tokenized separately and closed by EOS; or two lists of messages, rendered as one chat."""
    prompt, completion = _column(row, "prompt", how), _column(row, "completion", how)
    if isinstance(prompt, str) and isinstance(completion, str) and how.chat:
        prompt, completion = _spoken("user", prompt, how), _spoken("assistant", completion, how)
    if isinstance(prompt, str) and isinstance(completion, str):
        start = tokenizer.encode(prompt, bos=tokenizer.adds_bos)
        return _joined(start, [*tokenizer.encode(completion), tokenizer.eos_id])
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError("prompt and completion are both strings or both lists of messages, not one of each")
    before, after = _messages(prompt), _messages(completion)
    tools = _tools(_column(row, "tools", how, None))
    return render_chat([*before, *after], tokenizer, trained_from=len(before), **tools, **how.template_kwargs)


def _given_tokens(row: Row, how: Rendering) -> tuple[np.ndarray, np.ndarray]:
    """Ids as they stand, with the mask that `labels` (not shifted, -100 is not trained) or `loss_mask` tells."""
    tokens = _integers(_column(row, "input_ids", how), "input_ids")
    if len(tokens) and tokens.min() < 0:
        raise UserError(f"input_ids holds {tokens.min()}, which is no token id")
    labels, loss_mask = _column(row, "labels", how, None), _column(row, "loss_mask", how, None)
    if labels is not None and loss_mask is not None:
        raise UserError("it has labels and loss_mask: leave one of them out")
    if labels is None and loss_mask is None:
        return tokens, np.ones(len(tokens), bool)
    name = "loss_mask" if labels is None else "labels"
    given = _integers(loss_mask if labels is None else labels, name)
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


def _column(row: Row, name: str, how: Rendering, *default: Any) -> Any:
    """The value of our column `name`; where it is absent or null the default, if there is one."""
    theirs = how.columns.get(name, name)
    if (value := row.get(theirs)) is not None:
        return value
    if default:
        return default[0]
    if theirs in row:
        raise UserError(f"the column {theirs!r} is null")
    hint = "".join(f" Did you mean {other!r}?" for other in _near(theirs, row))
    raise UserError(f"there is no column {theirs!r}; it has {_listed(row)}.{hint}")


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a column. Keys that Arrow filled with null, since another row has them, are left out."""
    check_messages(value)
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]


def _tools(value: Any) -> dict[str, Any]:
    """Template arguments for a `tools` column: a list, or JSON of one; nothing where there is none."""
    if value is None:
        return {}
    try:
        return {"tools": json.loads(value) if isinstance(value, str) else list(value)}
    except (ValueError, TypeError) as error:
        raise UserError(f"tools is {value!r:.80}, not a list of tools: {error}") from error


def _weight(value: Any) -> float:
    """A finite, non-negative weight; 1 where the row has none."""
    if value is None:
        return 1.0
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.number)
        or not math.isfinite(value)
        or value < 0
    ):
        raise UserError(f"weight is {value!r}, not a finite number of at least 0")
    return float(value)


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r:.80}, not a string")
    return value


def _integers(value: Any, name: str) -> np.ndarray:
    """`[T]` int32 of a list of whole numbers (or booleans, for a mask)."""
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise UserError(f"{name} is {value!r:.80}, not a list of whole numbers")
    if array.size and max(abs(int(array.max())), abs(int(array.min()))) >= 2**31:
        raise UserError(f"{name} holds {array.max()}, beyond any vocabulary")
    return array.astype(np.int32)


def _joined(prompt: list[int], completion: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of both, trained from the completion's first."""
    tokens = np.asarray([*prompt, *completion], np.int32)
    return tokens, np.arange(len(tokens)) >= len(prompt)


def _near(name: str, row: Iterable[str]) -> list[str]:
    """The row's column that looks most like `name`, if any does."""
    import difflib

    return difflib.get_close_matches(name, [str(column) for column in row], n=1)


def _listed(row: Iterable[str]) -> str:
    return ", ".join(repr(column) for column in row) or "no columns"
