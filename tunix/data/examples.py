r"""Turns each row into one example: a sequence, a pair of sequences, or a reason why it is dropped.

The shapes: `messages`; `prompt` and `completion` (strings, or lists of messages); `text`; and `input_ids` with
`labels`, `loss_mask` or `loss_weights`, to which nothing is added. Pairs have `chosen` and `rejected`, labelled
completions a `label`, and both may be given as ids too. Where the policy samples the completions (`RowKind.PROMPT`)
only the prompt of a row is read. `shapes.rendering` derives the shape from a row; `render_rows` and `render_pair` make
tokens and a mask of trained tokens of it; `to_example` cuts or refuses what is too long; and `Accounting` counts: kept
plus dropped is the number of rows. `Examples` are the rows of a recipe by number: what batches, prompts, evaluations
and `tunix inspect` are made of.

Ids stay as they are, and nothing that speaks of single tokens is passed over: a column with a number for every token is
read, or known to change nothing, or refused by its name. What `attention_mask` leaves out at the ends is padding, which
is cut off with everything that belongs to it. Other padding is known by its ids: it is refused where it would be
trained, or seen by later tokens.

Of preference pairs with a `prompt`, strings and messages are rendered as prompt and completion are. Without one, the
prompt is the beginning that both sides have in common:

  messages      the messages that both share (UltraFeedback). A `prompt` that is a string is not read then.
  transcripts   "\n\nHuman: ...\n\nAssistant: ..." (Anthropic HH): up to the last "Assistant:" that both share. From
                there on the assistant's turns are trained, and no others.
  other texts   the tokens that both share.

Each side of the last two is tokenized as a whole, so that no merge is split: a token that begins before the completion
is not trained, and where it merges differently with the two completions, the prompts differ by it. The masks are
correct in any case.

Axes: T time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tunix.config import LOSS_WEIGHTS, RowKind
from tunix.data.chat import Rendered, common_prefix, render_chat, render_prompt
from tunix.data.config import DataConfig
from tunix.data.mixing import kind_of
from tunix.data.packing import shared_tokens
from tunix.data.pictures import IMAGES, images_of, with_marks
from tunix.data.shapes import (
    MASKS,
    SHAPES,
    Rendering,
    Row,
    as_ids,
    as_integers,
    as_messages,
    as_string,
    as_weights,
    column,
    is_finite,
    refuse_half_texts,
    rendering,
    template_variables,
    without_padding,
)
from tunix.data.sources import Chain, Rows
from tunix.data.teacher import StoredTeacher, TeacherChoice, TeacherReader
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import (
    COMPLETION_TOO_LONG,
    CUT_AWAY,
    CUT_EQUAL,
    EMPTY,
    EQUAL,
    LATER_TURNS,
    NO_COMMON_PROMPT,
    NO_PROMPT,
    NOT_THE_TEACHERS,
    NOTHING_TRAINED,
    PICTURE_CUT,
    PROMPT_TOO_LONG,
    TOO_LONG,
    TOO_LONG_FOR_TEACHER,
    Dropped,
    Kept,
    Note,
    Prompt,
    Refused,
)
from tunix.errors import UserError
from tunix.types import Sequence, TeacherView

TEACHER_LENGTH = "teacher.max_length"
_SPEAKS = re.compile("mask|label|weight|loss|target|position|segment|seq|document", re.IGNORECASE)
"""In the name of a column with a number for every token: it would change what is trained or seen."""


class Examples:
    """The rows of a dataset by number, each rendered, cut to length and checked when it is asked for."""

    def __init__(
        self,
        rows: Rows,
        tokenizer: Tokenizer | None,
        config: DataConfig,
        train_on: RowKind = RowKind.COMPLETION,
        vocab_size: int | None = None,
        teacher: TeacherReader | TeacherChoice | StoredTeacher | None = None,
    ) -> None:
        """Reads the first row, which determines the shape of all.

        Args:
            rows: from `open_rows`.
            tokenizer: None where rows are token ids.
            config: the recipe's `data` section.
            train_on: see `Rendering`.
            vocab_size: see `Rendering`.
            teacher: renders rows for a teacher that reads them in another way; None without one.

        Raises:
            UserError: the first row is of no known shape.
        """
        self.rows, self.tokenizer, self.config, self.train_on = rows, tokenizer, config, train_on
        self.teacher = teacher
        self.source = rows.section.name if rows.section else ""
        """The name of the data set, where it is one of several."""
        self.parts: list[Examples] = []
        """Those of each data set, one after the other, where rows are of several."""
        for part in rows.parts:
            assert part.section is not None, "joined with its section"
            kind = kind_of(part.section, config, train_on)
            self.parts.append(Examples(part, tokenizer, config.of(part.section), kind, vocab_size, teacher))
        if self.parts:
            self.settings = self.parts[0].settings
            return
        self.settings = rendering(config, rows[0], f"row 1 of {rows.name}", train_on, vocab_size)
        """How they are rendered; of several data sets, the first one's."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Kept | Dropped:
        """The example of row `i`; raises UserError as `to_example` does."""
        return self.example(i)

    def taught(self, prompt: Prompt, texts: Mapping[str, str]) -> TeacherView | None:
        """The prompt as its teacher reads it where the row has these columns too; None where it has no room for it."""
        kept = self.example(prompt.number, texts)
        return None if isinstance(kept, Dropped) or kept.truncated else kept.sequences[0].teacher

    def example(self, i: int, more: Mapping[str, str] = {}) -> Kept | Dropped:
        """The example of row `i`, where it has `more` columns; raises UserError as `to_example` does."""
        if self.parts:
            part, place = Chain(self.parts).at(i)
            example = part.example(place, more)
        else:
            where, row = f"row {i + 1} of {self.rows.name}", self.rows[i]
            row = {**row, **more} if more else row
            example = to_example(row, self.tokenizer, self.settings, where, self.rows.folder, self.teacher)
            example = replace(example, source=self.source) if self.source else example
        return replace(example, number=i) if isinstance(example, Kept) else example

    def first(self, limit: int | None = None) -> Iterator[Kept | Dropped]:
        """The first `limit` of them in file order, of each data set, or all."""
        if self.parts:
            return itertools.chain.from_iterable(part.first(limit) for part in self.parts)
        return (self[i] for i in range(len(self) if limit is None else min(limit, len(self))))

    def sequences(self, limit: int | None = None) -> Iterator[Sequence]:
        """The sequences of those of the first `limit` rows that are kept, in file order."""
        return (sequence for x in self.first(limit) if isinstance(x, Kept) for sequence in x.sequences)


def to_example(
    row: Row,
    tokenizer: Tokenizer | None,
    settings: Rendering,
    where: str = "the row",
    folder: Path | None = None,
    teacher: TeacherReader | TeacherChoice | StoredTeacher | None = None,
) -> Kept | Dropped:
    """Renders a row, cuts it to length, and checks that something in it is trained.

    Args:
        row: the columns of one example.
        tokenizer: None where rows are token ids.
        settings: shape and limits.
        where: the row's name in messages, for instance `row 3 of train.jsonl`.
        folder: where relative paths of pictures begin.
        teacher: renders the row for a teacher too, for `Sequence.teacher`, or for the one that the row names; None
            without one.

    Returns:
        The example, or the reason why the row is dropped.

    Raises:
        UserError: a missing or malformed column, or a row that is too long where that is an error; the message begins
            with `where`.
    """
    data, columns = settings.data, settings.data.columns
    reader, pixels = None if tokenizer is None else tokenizer.pictures, np.zeros(0, np.uint8)
    try:
        for name in (*SHAPES[settings.train_on][settings.format], "prompt", "tools"):
            if settings.format != "tokens":
                theirs = columns.get(name, name)
                refuse_half_texts(row.get(theirs), theirs)
        if row.get(columns.get("tools", "tools")) is not None and settings.format != "tokens":
            row = without_padding(row, data)
        # The row's pictures are marked in its text, and the tokenizer is told their grids.
        sees = settings.train_on.is_text or settings.train_on in (RowKind.PAIRS, RowKind.PROMPT)
        if tokenizer is not None and reader is not None and sees:
            row, pixels, reader = with_marks(row, columns, reader, folder)
            tokenizer = tokenizer.seeing(reader)
        elif (images := images_of(row, columns)) and reader is not None and settings.train_on == RowKind.ROW:
            # An environment shows them, and knows no folder.
            begin = Path() if folder is None else folder
            located = [str(begin / x) if isinstance(x, str) and "://" not in x else x for x in images]
            row = {**row, columns.get(IMAGES, IMAGES): located}
        elif images:
            name = columns.get(IMAGES, IMAGES)
            if reader is not None:
                raise UserError(f"it has pictures ({name}), which only sft, dpo and grpo look at: leave the column out")
            raise UserError(
                f"it has pictures ({name}), and nothing here would look at them: set data.pictures, the most of a row, "
                "to train with them (a Gemma 3 or Qwen 3.5 folder with a vision_config, and sft, dpo or grpo), or "
                "leave the column out"
            )
        if settings.train_on == RowKind.ROW:
            nothing = np.zeros(0, np.int32)
            return Kept((Sequence(nothing, nothing.astype(bool)),), row=_renamed(row, columns))
        if tokenizer is None and settings.format != "tokens":
            shape = "chosen and rejected" if settings.format == "pairs" else settings.format.replace("_", " and ")
            ids = {
                RowKind.PAIRS: "prompt_ids, chosen_ids and rejected_ids",
                RowKind.LABELS: "prompt_ids, completion_ids and label",
            }.get(settings.train_on, "input_ids (prompt_ids where only prompts are read)")
            raise UserError(f"it has {shape}, but the model's folder has no tokenizer: add one, or give {ids}")
        sides = (
            render_pair(row, tokenizer, settings)
            if settings.train_on == RowKind.PAIRS
            else render_rows(row, tokenizer, settings)
        )
        stored = None
        if isinstance(teacher, StoredTeacher):
            stored, teacher = teacher.read(row, columns, sides[0].mask), None
        elif isinstance(teacher, TeacherChoice):
            teacher = teacher.of(row, columns)
        if teacher is not None:
            theirs = render_rows(teacher.asked(row, settings), teacher.tokenizer, settings)
            if len(theirs) != len(sides):
                raise Refused(NOT_THE_TEACHERS, f"of {len(sides)} turns {teacher.name} sees {len(theirs)}")
            both = zip(sides, theirs, strict=True)
            sides = tuple(replace(side, teacher=teacher.view(side, other)) for side, other in both)
        if not is_finite(weight := column(row, "weight", columns, 1.0)) or weight < 0:
            raise UserError(f"weight is {weight!r}, not a finite number of at least 0")
        weight, values = float(weight), dict[str, float]()
        if settings.train_on == RowKind.LABELS:
            label, name = column(row, "label", columns), columns.get("label", "label")
            is_whole = isinstance(label, int | np.integer) and label in (0, 1)
            if not isinstance(label, bool | np.bool_) and not is_whole:
                raise UserError(f"{name} is {label!r:.80}, not true or false (the numbers 1 and 0 will do)")
            values = {"label": float(label)}
        elif "margin" in settings.fixed:
            margin, name = column(row, "margin", columns), columns.get("margin", "margin")
            if not is_finite(margin):
                raise UserError(f"{name} is {margin!r:.80}, not a finite number")
            values = {"margin": float(margin)}
    except Refused as refused:
        return Dropped(refused.reason, str(refused))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    for tokens, _ in sides:
        if settings.vocab_size is not None and len(tokens) and tokens.max() >= settings.vocab_size:
            raise UserError(
                f"{where}: token id {tokens.max()} is beyond the model's vocabulary of {settings.vocab_size}"
            )
    turns = len(sides)
    if settings.train_on == RowKind.PROMPT:
        # One that is too long keeps its end, which contains the question.
        (prompt, _), limit = sides[0], data.longest_prompt
        if not len(prompt):
            return Dropped(NO_PROMPT)
        if too_long := _too_long([prompt], limit, "prompt_length", settings, where):
            if data.on_overflow == "drop":
                return Dropped(PROMPT_TOO_LONG)
            prompt = prompt[-limit:]
        sequences, kept_row = (Sequence(prompt, np.zeros(len(prompt), bool), weight),), _renamed(row, columns)
        if teacher is not None and (view := sides[0].teacher) is not None:
            limit = teacher.length - data.longest_completion
            if longer := _too_long([view.tokens], limit, TEACHER_LENGTH, settings, where):
                if data.on_overflow == "drop":
                    return Dropped(TOO_LONG_FOR_TEACHER)
                view = replace(view, tokens=view.tokens[-limit:])
            too_long = too_long or longer
            sequences = (replace(sequences[0], teacher=view),)
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
        compared = settings.train_on == RowKind.PAIRS
        if compared and np.array_equal(sides[0].tokens, sides[1].tokens):
            return Dropped(EQUAL)
        limit, key = data.max_length, "max_length"
        if settings.train_on == RowKind.PAIRS and data.completion_length is not None:
            shared = shared_tokens([Sequence(side.tokens, side.mask) for side in sides])
            limit, key = min((limit, key), (shared + data.completion_length, "completion_length"))
        too_long = _too_long([side.tokens for side in sides], limit, key, settings, where)
        cut_away = Dropped(CUT_AWAY)
        if too_long and data.on_overflow == "drop":
            cut_away = Dropped(TOO_LONG if key == "max_length" else COMPLETION_TOO_LONG)
            sides = tuple(side for side in sides if len(side.tokens) <= limit) if settings.turns == "each" else ()
        if teacher is not None and sides:
            views = [side.teacher for side in sides if side.teacher is not None]
            needed = [view.tokens[: view.places.max() + 1] for view in views]
            if _too_long(needed, teacher.length, TEACHER_LENGTH, settings, where):
                if data.on_overflow == "drop":
                    return Dropped(TOO_LONG_FOR_TEACHER)
                too_long = True
                both = zip(sides, views, strict=True)
                sides = tuple(replace(x, mask=x.mask & (view.places < teacher.length)) for x, view in both)
        end = None if settings.uncut else limit
        if settings.turns == "each":  # the turns that have room
            sides = tuple(side for side in sides if side.mask[:end].any())
        if not sides:
            return cut_away
        weights, sequences = sides[0].weights, tuple[Sequence, ...]()
        stored = None if stored is None else stored[:end]
        per_token = {} if weights is None else {LOSS_WEIGHTS: weights[:end]}
        for side in sides:
            view = side.teacher
            if view is not None:  # as far as the last token that is trained
                places = np.where(side.mask, view.places, 0)[:end]
                view = replace(view, tokens=view.tokens[: places.max() + 1], places=places)
            tokens, mask = side.tokens[:end], side.mask[:end]
            sequences += (Sequence(tokens, mask, weight, per_token, values, teacher=view, stored=stored),)
        if not all(sequence.loss_mask.any() for sequence in sequences):
            return Dropped(CUT_AWAY)
        if compared and np.array_equal(sequences[0].tokens, sequences[1].tokens):
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
    if len(sides) < turns:
        notes += (Note(LATER_TURNS, f"{turns - len(sides)} of {turns}"),)
    return Kept(sequences, too_long, kept_row, notes)


def _too_long(sides: List[np.ndarray], limit: int, key: str, settings: Rendering, where: str) -> bool:
    """Whether any side of a row is above the limit; raises UserError with `on_overflow: error`."""
    if settings.uncut:
        return False
    most = max(map(len, sides))
    if most > limit and settings.data.on_overflow == "error":
        raise UserError(
            f"{where} has {most} tokens{' on a side' if len(sides) > 1 else ''}, more than "
            f"{key if '.' in key else f'data.{key}'} {limit}: "
            "raise it, or set data.on_overflow to truncate or drop"
        )
    return most > limit


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with our names for the columns that `data.columns` maps."""
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}


def given_tokens(row: Row, tokenizer: Tokenizer | None, settings: Rendering) -> Rendered:
    """The tokens of `input_ids` without padding, the mask of the trained ones, and their weights where all rows have
    `loss_weights`.

    The mask is that of `labels` (not shifted, -100 is not trained), `loss_mask`, `loss_weights`, or `completion_mask`
    and `assistant_masks`, which both have to be 1; without any of them every token is trained.

    Raises:
        UserError: a column is malformed, says another thing than a second one, or is not read.
    """
    columns = settings.data.columns
    ids = as_ids(row, "input_ids", columns)
    refuse_unread(row, settings, [len(ids)], ("attention_mask", "position_ids", "token_type_ids", "labels", *MASKS))
    # The tokens between the padding at both ends.
    attended, attention = slice(0, len(ids)), _whole_numbers(row, "attention_mask", len(ids), settings)
    if attention is not None:
        kept = np.flatnonzero(attention)
        attended = slice(int(kept[0]), int(kept[-1]) + 1) if len(kept) else slice(0, 0)
        if len(kept) != attended.stop - attended.start:
            inside = attended.start + int(np.argmin(attention[attended]))
            raise UserError(
                f"{columns.get('attention_mask', 'attention_mask')} is 0 at token {inside + 1}, and 1 before and after "
                "it: only padding at the ends is left out; for tokens that are seen and not trained use loss_mask"
            )
    positions = _whole_numbers(row, "position_ids", len(ids), settings)
    if positions is not None and (steps := np.diff(positions[attended])).size and (steps != 1).any():
        place = attended.start + int(np.argmax(steps != 1)) + 2
        raise UserError(
            f"position_ids does not count on at token {place}, and nothing reads it: leave the column out. Where "
            "several texts share the row, give each its own: tunix packs them itself (data.packing)"
        )
    types = _whole_numbers(row, "token_type_ids", len(ids), settings)
    if types is not None and types[attended].any():
        raise UserError("token_type_ids is not all 0, and nothing reads types of tokens: leave the column out")
    tokens, masks, weights = ids[attended], dict[str, np.ndarray](), None
    for name in ("labels", *MASKS):
        if (values := _whole_numbers(row, name, len(ids), settings)) is not None:
            values = values[attended]
            masks[name] = values != (-100 if name == "labels" else 0)
            if name == "labels" and len(wrong := np.flatnonzero(masks[name] & (values != tokens))):
                i, theirs = int(wrong[0]), columns.get("labels", "labels")
                raise UserError(
                    f"{theirs}[{i}] is {values[i]}, but input_ids[{i}] is {tokens[i]}: labels repeat the ids, "
                    "unshifted, or are -100"
                )
    if LOSS_WEIGHTS in settings.fixed:
        weights = as_weights(column(row, LOSS_WEIGHTS, columns), LOSS_WEIGHTS, len(ids))[attended]
        if masks:
            raise UserError(f"it has loss_weights and {' and '.join(masks)}: a weight of 0 says what is not trained")
        masks[LOSS_WEIGHTS] = weights > 0
    if "completion_mask" in masks and "assistant_masks" in masks:
        masks["completion_mask"] &= masks.pop("assistant_masks")
    (first, mask), *others = masks.items() or [("", np.ones(len(tokens), bool))]
    for name, other in others:
        if (differ := mask != other).any():
            place = attended.start + int(np.argmax(differ)) + 1
            raise UserError(f"it has {first} and {name}, which differ at token {place}: leave one of them out")
    if attention is None:
        _refuse_padding(tokens, columns.get("input_ids", "input_ids"), tokenizer, mask)
    return Rendered(tokens, mask, weights=weights)


def given_ids(row: Row, names: tuple[str, ...], tokenizer: Tokenizer | None, settings: Rendering) -> list[np.ndarray]:
    """The ids of columns that are taken whole, `[T]` int32 each: a prompt's, a completion's, or those of a pair.

    Raises:
        UserError: a column is malformed, begins or ends with padding, or has a mask.
    """
    columns = [as_ids(row, name, settings.data.columns) for name in names]
    for name, ids in zip(names, columns, strict=True):
        _refuse_padding(ids, settings.data.columns.get(name, name), tokenizer)
    lengths = [len(ids) for ids in columns]
    prompt, *after = lengths
    # A row may have input_ids too; the columns of their length belong to them.
    other = {len(row["input_ids"])} if isinstance(row.get("input_ids"), list | np.ndarray) else set()
    numbers = {*lengths, *(prompt + length for length in after)} - other
    refuse_unread(row, settings, sorted(numbers), ())
    return columns


def refuse_unread(row: Row, settings: Rendering, numbers: list[int], known: tuple[str, ...]) -> None:
    """Refuses a column that has a number for every token, which differ, and is not read.

    Args:
        row: the columns of one example.
        settings: its columns' names.
        numbers: the numbers of tokens that a column may speak of.
        known: our names of the columns of single tokens that are read.

    Raises:
        UserError: there is one; the message names it.
    """
    ids = {name for shapes in SHAPES.values() for name in shapes.get("tokens", ())}
    # The mask of special tokens says nothing of what is trained or seen.
    read = {settings.data.columns.get(name, name) for name in (*known, *ids, "special_tokens_mask", LOSS_WEIGHTS)}
    read |= set(settings.data.columns.values())
    packed = row.get("seq_lengths")
    if isinstance(packed, list | np.ndarray) and len(packed) > 1:
        raise UserError(
            f"seq_lengths says that {len(packed)} sequences share the row, which nothing would keep apart: give each "
            "its own row, tunix packs them itself (data.packing)"
        )
    for name, value in row.items():
        if not isinstance(value, list | tuple | np.ndarray) or len(value) not in numbers:
            continue
        try:
            array = np.asarray(value)
        except ValueError:  # a ragged list
            continue
        if name in read or array.ndim != 1 or array.dtype.kind not in "iubf" or (array == array[:1]).all():
            continue
        if _SPEAKS.search(name) or np.isin(array, (0, 1)).all():
            remedy = (
                f"map it in data.columns, as in {{loss_mask: {name}}}, if it says what is trained, or leave it out"
                if "labels" in known
                else "give only the ids that it keeps, and leave it out"
            )
            raise UserError(f"the column {name!r} has a number for every token and is not read: {remedy}")


def _read(row: Row, name: str, settings: Rendering) -> Any:
    """An optional column; None where it is absent, or where `data.columns` makes it another one of ours."""
    taken = name not in settings.data.columns and name in settings.data.columns.values()
    return None if taken else column(row, name, settings.data.columns, None)


def _whole_numbers(row: Row, name: str, number: int, settings: Rendering) -> np.ndarray | None:
    """The whole numbers of a column, one for each of `number` tokens, `[T]`; None where the row has none."""
    if (value := _read(row, name, settings)) is None:
        return None
    theirs = settings.data.columns.get(name, name)
    values = as_integers(value, theirs)
    if len(values) != number:
        raise UserError(f"{theirs} has {len(values)} values for {number} input_ids")
    if (name in MASKS or name == "attention_mask") and not np.isin(values, (0, 1)).all():
        raise UserError(f"{theirs} holds 0 and 1, not {values[~np.isin(values, (0, 1))][0]}")
    return values


def _refuse_padding(tokens: np.ndarray, name: str, tokenizer: Tokenizer | None, mask: np.ndarray | None = None) -> None:
    """Refuses padding that later tokens would see, or that would be trained (`mask`; None where ids are taken whole),
    where its id tells it. A PAD that is also a BOS or EOS begins or ends a text once."""
    pad = None if tokenizer is None else tokenizer.hf.pad_token_id
    if tokenizer is None or pad is None:
        return
    once = int(pad in (tokenizer.bos_id, *tokenizer.stop_ids))
    other = np.flatnonzero(tokens != pad)
    begin = int(other[0]) if len(other) else len(tokens)
    kept = tokens != pad if mask is None else (tokens != pad) | ~mask
    end = int(np.argmax(kept[::-1])) if len(other) else 0
    for number, where in ((begin, "begins"), (end, "ends")):
        if number > once:
            marked = "" if mask is None else ", or mark it in attention_mask"
            raise UserError(
                f"{name} {where} with {number} x {tokenizer.hf.pad_token} (id {pad}), padding that would be trained or "
                f"seen by later tokens: leave it out, tunix packs rows itself{marked}"
            )


def render_rows(row: Row, tokenizer: Tokenizer | None, settings: Rendering) -> tuple[Rendered, ...]:
    """Tokens and mask of a row that becomes one sequence, or one for each of the assistant's turns (`data.turns`).

    Raises:
        UserError: a missing or malformed column; or turns are to be trained together that the template does not show
            together as it showed each when it was the last.
    """
    data, shape, part = settings.data, settings.format, settings.turns
    messages, before = list[dict[str, Any]](), 0
    if part and shape == "messages":
        messages = as_messages(column(row, "messages", data.columns))
    elif part and shape == "prompt_completion":
        prompt, completion = (column(row, name, data.columns) for name in ("prompt", "completion"))
        if not (isinstance(prompt, str) or isinstance(completion, str)):
            messages, before = [*as_messages(prompt), *as_messages(completion)], len(prompt)
    turns = [k for k, message in enumerate(messages) if k >= before and message["role"] == "assistant"]
    if turns:
        assert tokenizer is not None
        # Each turn as the end of a conversation; only those that are trained are.
        shown = {
            k: render_chat(messages[: k + 1], tokenizer, trained_from=k, **template_variables(row, data)) for k in turns
        }
        if part == "last":
            return (shown[turns[-1]],)
        if part == "each":
            return tuple(turn for turn in shown.values() if turn.mask.any()) or (shown[turns[-1]],)
        whole = render_chat(messages, tokenizer, trained_from=before, **template_variables(row, data))
        for k, turn in shown.items():
            end = int(np.flatnonzero(turn.mask)[-1]) + 1 if turn.mask.any() else 0
            if not np.array_equal(turn.tokens[:end], whole.tokens[:end]):
                raise UserError(
                    f"message {k + 1} (assistant): the chat template shows this turn, or what comes before it, in "
                    "another way when the conversation goes on, so that not all turns can be trained together: set "
                    "data.turns to each or last"
                )
        return (whole,)
    if settings.train_on == RowKind.PROMPT:  # ids, a string, or a chat up to the start of the assistant's turn
        if shape == "tokens":
            return (joined(given_ids(row, ("prompt_ids",), tokenizer, settings)[0], []),)
        assert tokenizer is not None
        prompt = column(row, "messages" if shape == "messages" else "prompt", data.columns)
        if isinstance(prompt, str) and not data.chat:
            return (joined(tokenizer.encode(prompt, bos=tokenizer.adds_bos), []),)
        messages = as_chat("user", prompt, data) if isinstance(prompt, str) else asked(as_messages(prompt))
        return (render_prompt(messages, tokenizer, **template_variables(row, data)),)
    unread = settings.train_on == RowKind.COMPLETION and LOSS_WEIGHTS not in settings.fixed
    if unread and _read(row, LOSS_WEIGHTS, settings) is not None:
        raise UserError(
            "it has loss_weights, which the first row has not, or not as input_ids: give them to all or none"
        )
    if shape == "tokens" and settings.train_on == RowKind.LABELS:
        rendered = joined(*given_ids(row, ("prompt_ids", "completion_ids"), tokenizer, settings))
    elif shape == "tokens":
        rendered = given_tokens(row, tokenizer, settings)
    else:
        assert tokenizer is not None
        if shape == "messages":
            messages = as_messages(column(row, "messages", data.columns))
            rendered = render_chat(messages, tokenizer, **template_variables(row, data))
        elif shape == "prompt_completion":
            prompt, completion = (column(row, name, data.columns) for name in ("prompt", "completion"))
            rendered = render_completion(prompt, completion, row, tokenizer, data)
        else:
            text = as_string(column(row, "text", data.columns), "text")
            rendered = joined([], tokenizer.ended(tokenizer.encode(text, bos=tokenizer.adds_bos)))
    return (replace(rendered, mask=np.ones_like(rendered.mask)) if settings.train_on == RowKind.ALL else rendered,)


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


def render_completion(prompt: Any, completion: Any, row: Row, tokenizer: Tokenizer, data: DataConfig) -> Rendered:
    """Renders two strings, the second as the continuation of the first, up to EOS; or two lists of messages as a chat.

    The prompt's ids are those that a sampler is given, and the completion's follow them: no token crosses the border.

    Args:
        prompt: the row's prompt.
        completion: the text after it, which is trained; of messages the assistant's turns are.
        row: may contain `tools`.
        tokenizer: its chat template renders messages.
        data: names columns and template variables, and says whether strings become chats.

    Raises:
        UserError: one of the two is a string and the other a list, or the template refuses the messages.
    """
    if isinstance(prompt, str) and isinstance(completion, str) and data.chat:
        prompt, completion = as_chat("user", prompt, data), as_chat("assistant", completion, data)
    if isinstance(prompt, str) and isinstance(completion, str):
        start = tokenizer.encode(tokenizer.expanded(prompt), bos=tokenizer.adds_bos)
        return joined(start, tokenizer.ended(tokenizer.encode_after(start, completion)))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError("prompt and completion are both strings or both lists of messages, not one of each")
    before, after = as_messages(prompt), as_messages(completion)
    return render_chat([*before, *after], tokenizer, trained_from=len(before), **template_variables(row, data))


def joined(prompt: List[int] | np.ndarray, completion: List[int] | np.ndarray) -> Rendered:
    """Tokens of prompt and completion, trained from the completion's first token."""
    tokens = np.asarray([*prompt, *completion], np.int32)
    return Rendered(tokens, np.arange(len(tokens)) >= len(prompt))


def as_chat(role: str, text: str, data: DataConfig) -> list[dict[str, Any]]:
    """A string as a list of messages; a user's message follows the system message, where there is one."""
    before = [{"role": "system", "content": data.system}] if data.system and role == "user" else []
    return [*before, {"role": role, "content": text}]


def asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without the assistant's turns at its end.

    Raises:
        UserError: no message is left.
    """
    last = next((i for i, message in enumerate(reversed(messages)) if message["role"] != "assistant"), len(messages))
    if last == len(messages):
        raise UserError("messages holds nothing but the assistant's: there is no prompt")
    return messages[: len(messages) - last]


_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
"""The beginning of a turn in a transcript."""
_ROLES = {"Human": "user", "Assistant": "assistant"}


def render_pair(row: Row, tokenizer: Tokenizer | None, settings: Rendering) -> tuple[Rendered, Rendered]:
    """Tokens and mask of both sides before any limit, the chosen one first.

    Raises:
        Refused: they have no common prompt.
        UserError: a missing or malformed column.
    """
    data = settings.data
    if settings.format == "tokens":
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        prompt, chosen, rejected = given_ids(row, names, tokenizer, settings)
        return joined(prompt, chosen), joined(prompt, rejected)
    assert tokenizer is not None
    chosen, rejected = column(row, "chosen", data.columns), column(row, "rejected", data.columns)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError("chosen and rejected are both strings or both lists of messages, not one of each")
    prompt = column(row, "prompt", data.columns) if "prompt" in settings.fixed else None
    are_transcripts = prompt is None and isinstance(chosen, str) and _TURN.match(chosen) and _TURN.match(rejected)
    if are_transcripts and data.chat:
        system = [{"role": "system", "content": data.system}] if data.system else []
        conversations: list[list[dict[str, Any]]] = []
        for text in (chosen, rejected):
            _, *parts = _TURN.split(text)
            said = zip(parts[::2], parts[1::2], strict=True)
            turns = ({"role": _ROLES[who], "content": words.strip()} for who, words in said)
            conversations.append([*system, *turns])
        chosen, rejected = conversations
    if not isinstance(chosen, str):
        # They follow a prompt, or are whole conversations with a common beginning.
        chosen, rejected = as_messages(chosen), as_messages(rejected)
        before = [] if prompt is None or isinstance(prompt, str) else as_messages(prompt)
        if before and not (chosen[: len(before)] == before == rejected[: len(before)]):
            chosen, rejected = [*before, *chosen], [*before, *rejected]
        elif not before:
            # The messages that both sides begin with, except the last one of each side, which is compared.
            before = chosen[: common_prefix(chosen[:-1], rejected[:-1])]
        if not before:
            raise Refused(NO_COMMON_PROMPT)
        first, second = (
            render_chat(side, tokenizer, trained_from=len(before), **template_variables(row, data))
            for side in (chosen, rejected)
        )
        return first, second
    rejected = as_string(rejected, "rejected")
    if prompt is not None:
        sides = (render_completion(prompt, side, row, tokenizer, data) for side in (chosen, rejected))
        return next(sides), next(sides)
    if are_transcripts:
        # Trained on the assistant's turns from the last one whose beginning both share.
        common = common_prefix(chosen, rejected)
        starts = [turn.end() for turn in _TURN.finditer(chosen, 0, common) if turn[1] == "Assistant"]
        if not starts:
            raise Refused(NO_COMMON_PROMPT)
        return _transcript(chosen, starts[-1], tokenizer), _transcript(rejected, starts[-1], tokenizer)
    if data.chat:
        raise UserError(
            "data.chat is true, but chosen and rejected are strings without a prompt, and no transcripts of Human: and "
            "Assistant: either; add the column 'prompt'"
        )
    # Two texts between BOS and EOS, trained from the first token that differs.
    bos = tokenizer.adds_bos
    first, second = (tokenizer.ended(tokenizer.encode(text, bos=bos)) for text in (chosen, rejected))
    start = common_prefix(first[:-1], second[:-1])
    if start <= int(bos):
        raise Refused(NO_COMMON_PROMPT)
    return joined(first[:start], first[start:]), joined(second[:start], second[start:])


def _transcript(text: str, start: int, tokenizer: Tokenizer) -> Rendered:
    """A transcript between BOS and EOS; EOS is trained where the last turn is the assistant's."""
    offsets = tokenizer.encode_with_offsets(text)[1]
    turns = list(_TURN.finditer(text))
    mask = np.zeros(len(offsets), bool)
    for turn, after in zip(turns, [*(turn.start() for turn in turns[1:]), len(text)], strict=True):
        if turn[1] == "Assistant" and turn.end() >= start:
            mask |= (offsets[:, 0] >= turn.end()) & (offsets[:, 0] < after)
    ids = tokenizer.encode(text, bos=tokenizer.adds_bos)
    before, tokens = len(ids) - len(mask), tokenizer.ended(ids)
    ending = [turns[-1][1] == "Assistant"] * (len(tokens) - len(ids))
    return Rendered(np.asarray(tokens, np.int32), np.asarray([*[False] * before, *mask, *ending]))
