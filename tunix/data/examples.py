"""Turns each row into one example: a sequence, a pair of sequences, or a reason why it is dropped.

The shapes: `messages`; `prompt` and `completion` (strings, or lists of messages); `text`; and `input_ids` with
`labels`, `loss_mask` or `loss_weights`, to which nothing is added. Pairs have `chosen` and `rejected`, labelled
completions a `label`, and both may be given as ids too. Where the policy samples the completions (`RowKind.PROMPT`)
only the prompt of a row is read. `shapes.rendering` derives the shape from a row, `to_example` renders it (`rendered`)
and cuts or refuses what is too long, and `Accounting` counts: kept plus dropped is the number of rows. `Examples` are
the rows of a recipe by number: what batches, prompts, evaluations and `tunix inspect` are made of.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from tunix.data.config import DataConfig
from tunix.data.packing import shared_tokens
from tunix.data.pictures import IMAGES, images_of, with_marks
from tunix.data.rendered import render_pair, render_row
from tunix.data.shapes import SHAPES, Rendering, Row, column, is_finite, refuse_half_texts, rendering
from tunix.data.sources import Rows
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.types import Sequence


class Examples:
    """The rows of a dataset by number, each rendered, cut to length and checked when it is asked for."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer | None,
        config: DataConfig,
        train_on: RowKind = RowKind.COMPLETION,
        vocab_size: int | None = None,
    ) -> None:
        """Reads the first row, which determines the shape of all.

        Args:
            rows: from `open_rows`.
            tokenizer: None where rows are token ids.
            config: the recipe's `data` section.
            train_on: see `Rendering`.
            vocab_size: see `Rendering`.

        Raises:
            UserError: the first row is of no known shape.
        """
        self.rows, self.tokenizer, self.config, self.train_on = rows, tokenizer, config, train_on
        self.settings = rendering(config, rows[0], f"row 1 of {rows.name}", train_on, vocab_size)
        """How they are rendered."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Kept | Dropped:
        """The example of row `i`; raises UserError as `to_example` does."""
        where = f"row {i + 1} of {self.rows.name}"
        return to_example(self.rows[i], self.tokenizer, self.settings, where, self.rows.folder)

    def first(self, limit: int | None = None) -> Iterator[Kept | Dropped]:
        """The first `limit` of them in file order, or all."""
        return (self[i] for i in range(len(self) if limit is None else min(limit, len(self))))

    def sequences(self, limit: int | None = None) -> Iterator[Sequence]:
        """The sequences of those of the first `limit` rows that are kept, in file order."""
        return (sequence for x in self.first(limit) if isinstance(x, Kept) for sequence in x.sequences)


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
    reader, pixels = None if tokenizer is None else tokenizer.pictures, np.zeros(0, np.uint8)
    try:
        for name in (*SHAPES[settings.train_on][settings.format], "prompt", "tools"):
            if settings.format != "tokens":
                theirs = settings.columns.get(name, name)
                refuse_half_texts(row.get(theirs), theirs)
        # The row's pictures are marked in its text, and the tokenizer is told their grids.
        sees = settings.train_on.is_text or settings.train_on in (RowKind.PAIRS, RowKind.PROMPT)
        if tokenizer is not None and reader is not None and sees:
            row, pictures = with_marks(row, settings.columns, reader.mark, reader.sign)
            pixels, grids = reader.read(pictures, folder)
            reader = replace(reader, grids=tuple((rows, columns) for rows, columns in grids.tolist()))
            tokenizer = tokenizer.seeing(reader)
        elif images_of(row, settings.columns):
            name = settings.columns.get(IMAGES, IMAGES)
            if reader is not None:
                raise UserError(f"it has pictures ({name}), which only sft, dpo and grpo look at: leave the column out")
            raise UserError(
                f"it has pictures ({name}), and nothing here would look at them: set data.pictures, the most of a row, "
                "to train with them (a Gemma 3 or Qwen 3.5 folder with a vision_config, and sft, dpo or grpo), or "
                "leave the column out"
            )
        if settings.train_on == RowKind.ROW:
            nothing = np.zeros(0, np.int32)
            return Kept((Sequence(nothing, nothing.astype(bool)),), row=_renamed(row, settings))
        sides = (
            render_pair(row, tokenizer, settings)
            if settings.train_on == RowKind.PAIRS
            else (render_row(row, tokenizer, settings),)
        )
        if not is_finite(weight := column(row, "weight", settings.columns, 1.0)) or weight < 0:
            raise UserError(f"weight is {weight!r}, not a finite number of at least 0")
        weight, values = float(weight), dict[str, float]()
        if settings.train_on == RowKind.LABELS:
            label, name = column(row, "label", settings.columns), settings.columns.get("label", "label")
            is_whole = isinstance(label, int | np.integer) and label in (0, 1)
            if not isinstance(label, bool | np.bool_) and not is_whole:
                raise UserError(f"{name} is {label!r:.80}, not true or false (the numbers 1 and 0 will do)")
            values = {"label": float(label)}
        elif "margin" in settings.fixed:
            margin, name = column(row, "margin", settings.columns), settings.columns.get("margin", "margin")
            if not is_finite(margin):
                raise UserError(f"{name} is {margin!r:.80}, not a finite number")
            values = {"margin": float(margin)}
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
    if settings.train_on == RowKind.PROMPT:
        # One that is too long keeps its end, which contains the question.
        (prompt, _), limit = sides[0], settings.prompt_length
        if not len(prompt):
            return Dropped(NO_PROMPT)
        if too_long := _too_long([prompt], limit, "prompt_length", settings, where):
            if settings.on_overflow == "drop":
                return Dropped(PROMPT_TOO_LONG)
            prompt = prompt[-limit:]
        sequences, kept_row = (Sequence(prompt, np.zeros(len(prompt), bool), weight),), _renamed(row, settings)
    else:
        stops, completed = () if tokenizer is None else tokenizer.stop_ids, (RowKind.PAIRS, RowKind.LABELS)
        for side in sides:
            if reader is not None:
                side.mask[side.tokens == reader.soft_id] = False
            if settings.train_on in completed and all(token in stops for token in side.tokens[side.mask].tolist()):
                return Dropped(EMPTY)  # nothing but what ends it
            side.mask[:1] = False  # nothing predicts the first token
        if not all(side.mask.any() for side in sides):
            return Dropped(NOTHING_TRAINED)
        if _equal([side.tokens for side in sides]):
            return Dropped(EQUAL)
        limit, key = settings.max_length, "max_length"
        if settings.completion_length is not None:
            shared = shared_tokens([Sequence(side.tokens, side.mask) for side in sides])
            limit, key = min((limit, key), (shared + settings.completion_length, "completion_length"))
        too_long = _too_long([side.tokens for side in sides], limit, key, settings, where)
        if too_long and settings.on_overflow == "drop":
            return Dropped(TOO_LONG if key == "max_length" else COMPLETION_TOO_LONG)
        end = None if settings.on_overflow == "keep" else limit
        weights = sides[0].weights
        per_token = {} if weights is None else {LOSS_WEIGHTS: weights[:end]}
        sequences = tuple(Sequence(side.tokens[:end], side.mask[:end], weight, per_token, values) for side in sides)
        if not all(sequence.loss_mask.any() for sequence in sequences):
            return Dropped(CUT_AWAY)
        if _equal([sequence.tokens for sequence in sequences]):
            return Dropped(CUT_EQUAL)
        kept_row = {}
    if reader is not None:
        # Each sequence sees the row's pictures, of which none may be cut: a text loses its end, a prompt its beginning.
        both = zip(sequences, sides, strict=True)
        if any(np.sum(x.tokens == reader.soft_id) != np.sum(side.tokens == reader.soft_id) for x, side in both):
            return Dropped(PICTURE_CUT)
        try:
            sequences = tuple(replace(x, pictures=reader.pictures(x.tokens, pixels)) for x in sequences)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    notes = tuple(note for side in sides for note in side.notes)
    return Kept(sequences, too_long, kept_row, notes)


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


def _equal(tokens: List[np.ndarray]) -> bool:
    """Whether the two sides of a pair are equal."""
    return len(tokens) == 2 and np.array_equal(tokens[0], tokens[1])


def _renamed(row: Row, settings: Rendering) -> Row:
    """The row with our names for the columns that `data.columns` maps."""
    return {**row, **{ours: row[theirs] for ours, theirs in settings.columns.items() if theirs in row}}
