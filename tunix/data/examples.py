"""Turns each row into one example: a sequence, a pair of sequences, or a reason why it is dropped.

The shapes: `messages`; `prompt` and `completion` (strings, or lists of messages); `text`; and `input_ids` with
`labels`, `loss_mask` or `loss_weights`, to which nothing is added. Pairs have `chosen` and `rejected`, labelled
completions a `label`, and both may be given as ids too. Where the policy samples the completions (`RowKind.PROMPT`)
only the prompt of a row is read. `shapes.rendering` derives the shape from a row, `to_example` renders it (`rendered`)
and cuts or refuses what is too long, and `Accounting` counts: kept plus dropped is the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from pathlib import Path

import numpy as np

from tunix.config import LOSS_WEIGHTS, RowKind
from tunix.data.accounting import (
    COMPLETION_TOO_LONG,
    CUT_AWAY,
    CUT_EQUAL,
    EMPTY,
    EQUAL,
    NO_PROMPT,
    NOTHING_TRAINED,
    PICTURE_CUT,
    PROMPT_TOO_LONG,
    TOO_LONG,
    Dropped,
    Kept,
    Refused,
)
from tunix.data.chat import Rendered
from tunix.data.packing import shared_tokens
from tunix.data.picture_reader import PictureReader
from tunix.data.pictures import IMAGES, images_of, with_marks
from tunix.data.rendered import given_weights, render_pair, render_row
from tunix.data.shapes import SHAPES, Rendering, Row, as_label, as_margin, as_weight, column, refuse_half_texts
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.types import Sequence


def to_example(
    row: Row, tokenizer: Tokenizer | None, settings: Rendering, where: str = "the row", folder: Path | None = None
) -> Kept | Dropped:
    """Renders a row, cuts it to length, and checks that something in it is trained.

    Args:
        row: the columns of one example.
        tokenizer: None where rows are token ids.
        settings: shape and limits.
        where: the row's name in messages, for instance `row 3 of train.jsonl`.
        folder: where relative paths of pictures begin.

    Returns:
        The example, or the reason why the row is dropped.

    Raises:
        UserError: a missing or malformed column, or a row that is too long where that is an error; the message begins
            with `where`.
    """
    try:
        for name in (*SHAPES[settings.train_on][settings.format], "prompt", "tools"):
            if settings.format != "tokens":
                theirs = settings.columns.get(name, name)
                refuse_half_texts(row.get(theirs), theirs)
        row, tokenizer, pixels = _pictured(row, tokenizer, settings, folder)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if settings.train_on == RowKind.ROW:
        nothing = np.zeros(0, np.int32)
        return Kept((Sequence(nothing, nothing.astype(bool)),), row=_renamed(row, settings))
    try:
        sides = (
            render_pair(row, tokenizer, settings)
            if settings.train_on == RowKind.PAIRS
            else (render_row(row, tokenizer, settings),)
        )
        notes = () if isinstance(sides, Dropped) else tuple(note for side in sides for note in side.notes)
        weight, values = as_weight(column(row, "weight", settings.columns, None)), _values(row, settings)
        per_token = {} if isinstance(sides, Dropped) else _token_values(row, settings)
    except Refused as refused:
        return Dropped(refused.reason, str(refused))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if isinstance(sides, Dropped):
        return sides
    for tokens, _ in sides:
        if settings.vocab_size is not None and len(tokens) and tokens.max() >= settings.vocab_size:
            raise UserError(
                f"{where}: token id {tokens.max()} is beyond the model's vocabulary of {settings.vocab_size}"
            )
    reader = None if tokenizer is None else tokenizer.pictures
    if settings.train_on == RowKind.PROMPT:
        example = _prompt(sides[0].tokens, weight, row, settings, where)
        example = replace(example, notes=notes) if isinstance(example, Kept) else example
        return example if reader is None else _seen(example, reader, pixels, sides, where)
    if reader is not None:
        for side in sides:
            side.mask[side.tokens == reader.soft_id] = False
    example = _fault(sides, tokenizer, settings) or _fitted(sides, weight, per_token, values, settings, where)
    example = replace(example, notes=notes) if isinstance(example, Kept) else example
    return example if reader is None else _seen(example, reader, pixels, sides, where)


def _pictured(
    row: Row, tokenizer: Tokenizer | None, settings: Rendering, folder: Path | None
) -> tuple[Row, Tokenizer | None, np.ndarray]:
    """The row with its pictures marked in its text, a tokenizer that knows their grids, and their patches.

    Raises:
        UserError: one cannot be read; or there are some, and the model or the algorithm sees none.
    """
    reader, pictures = None if tokenizer is None else tokenizer.pictures, images_of(row, settings.columns)
    if reader is not None and (settings.train_on.is_text or settings.train_on in (RowKind.PAIRS, RowKind.PROMPT)):
        row, pictures = with_marks(row, settings.columns, reader.mark, reader.sign)
        pixels, grids = reader.read(pictures, folder)
        return row, tokenizer and tokenizer.seeing(reader.knowing(grids)), pixels
    if not pictures:
        return row, tokenizer, np.zeros(0, np.uint8)
    name = settings.columns.get(IMAGES, IMAGES)
    if reader is not None:
        raise UserError(f"it has pictures ({name}), which only sft, dpo and grpo look at: leave the column out")
    raise UserError(
        f"it has pictures ({name}), and nothing here would look at them: set data.pictures, the most of a row, to "
        "train with them (a Gemma 3 or Qwen 3.5 folder with a vision_config, and sft, dpo or grpo), or leave the "
        "column out"
    )


def _seen(
    example: Kept | Dropped,
    reader: PictureReader,
    pixels: np.ndarray,
    sides: List[Rendered],
    where: str,
) -> Kept | Dropped:
    """The example with its pictures, which each of its sequences sees; dropped where one of them is cut.

    Args:
        reader: knows the grids of the row's pictures.
        pixels: their patches.
        sides: the row's sequences before they were cut.
    """
    if isinstance(example, Dropped):
        return example
    both = zip(example.sequences, sides, strict=True)
    # A text loses its end, a prompt its beginning.
    if any(np.sum(x.tokens == reader.soft_id) != np.sum(side.tokens == reader.soft_id) for x, side in both):
        return Dropped(PICTURE_CUT)
    try:
        seen = [replace(one, pictures=reader.pictures(one.tokens, pixels)) for one in example.sequences]
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return replace(example, sequences=tuple(seen))


def _prompt(tokens: np.ndarray, weight: float, row: Row, settings: Rendering, where: str) -> Kept | Dropped:
    """The example of a prompt alone. One that is too long keeps its end, which contains the question."""
    if not len(tokens):
        return Dropped(NO_PROMPT)
    limit = settings.prompt_length
    if too_long := _too_long([tokens], limit, "prompt_length", settings, where):
        if settings.on_overflow == "drop":
            return Dropped(PROMPT_TOO_LONG)
        tokens = tokens[-limit:]
    return Kept((Sequence(tokens, np.zeros(len(tokens), bool), weight),), too_long, _renamed(row, settings))


def _fault(sides: List[Rendered], tokenizer: Tokenizer | None, settings: Rendering) -> Dropped | None:
    """The reason why a whole row cannot be used, or None. Clears the mask of first tokens, which nothing predicts."""
    if settings.train_on in (RowKind.PAIRS, RowKind.LABELS) and any(_is_empty(side, tokenizer) for side in sides):
        return Dropped(EMPTY)
    for side in sides:
        side.mask[:1] = False
    if not all(side.mask.any() for side in sides):
        return Dropped(NOTHING_TRAINED)
    return Dropped(EQUAL) if _equal([side.tokens for side in sides]) else None


def _fitted(
    sides: List[Rendered],
    weight: float,
    per_token: Mapping[str, np.ndarray],
    values: Mapping[str, float],
    settings: Rendering,
    where: str,
) -> Kept | Dropped:
    """The row's example, cut to its limit or dropped."""
    limit, key = _limit(sides, settings)
    too_long = _too_long([side.tokens for side in sides], limit, key, settings, where)
    if too_long and settings.on_overflow == "drop":
        return Dropped(TOO_LONG if key == "max_length" else COMPLETION_TOO_LONG)
    end = None if settings.on_overflow == "keep" else limit
    per_token = {name: x[:end] for name, x in per_token.items()}
    cut = tuple(Sequence(side.tokens[:end], side.mask[:end], weight, per_token, values) for side in sides)
    if not all(sequence.loss_mask.any() for sequence in cut):
        return Dropped(CUT_AWAY)
    return Dropped(CUT_EQUAL) if _equal([sequence.tokens for sequence in cut]) else Kept(cut, too_long)


def _limit(sides: List[Rendered], settings: Rendering) -> tuple[int, str]:
    """The most tokens of a side, and the recipe's key that sets this limit."""
    if settings.completion_length is None:
        return settings.max_length, "max_length"
    after_shared = shared_tokens([Sequence(side.tokens, side.mask) for side in sides]) + settings.completion_length
    return min((settings.max_length, "max_length"), (after_shared, "completion_length"))


def _too_long(sides: List[np.ndarray], limit: int, key: str, settings: Rendering, where: str) -> bool:
    """Whether any side of a row is above the limit; raises UserError with `on_overflow: error`."""
    if settings.on_overflow == "keep":
        return False
    most = max(map(len, sides))
    if most > limit and settings.on_overflow == "error":
        raise UserError(
            f"{where} has {most} tokens{' on a side' if len(sides) > 1 else ''}, more than data.{key} {limit}: "
            "raise it, or set data.on_overflow to truncate or drop"
        )
    return most > limit


def _is_empty(side: Rendered, tokenizer: Tokenizer | None) -> bool:
    """Whether a completion has no tokens except those that end it."""
    stops = () if tokenizer is None else tokenizer.stop_ids
    return all(token in stops for token in side.tokens[side.mask].tolist())


def _equal(tokens: List[np.ndarray]) -> bool:
    """Whether the two sides of a pair are equal."""
    return len(tokens) == 2 and np.array_equal(tokens[0], tokens[1])


def _values(row: Row, settings: Rendering) -> dict[str, float]:
    """The per-sequence values that a loss reads: a label or a margin."""
    if settings.train_on == RowKind.LABELS:
        return {"label": as_label(column(row, "label", settings.columns), settings.columns.get("label", "label"))}
    if "margin" in settings.fixed:
        return {"margin": as_margin(column(row, "margin", settings.columns), settings.columns.get("margin", "margin"))}
    return {}


def _token_values(row: Row, settings: Rendering) -> dict[str, np.ndarray]:
    """The per-token values: loss weights, where the rows have them."""
    weights = given_weights(row, settings)
    return {} if weights is None else {LOSS_WEIGHTS: weights}


def _renamed(row: Row, settings: Rendering) -> Row:
    """The row with our names for the columns that `data.columns` maps."""
    return {**row, **{ours: row[theirs] for ours, theirs in settings.columns.items() if theirs in row}}
