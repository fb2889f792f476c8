"""How a teacher reads a row: rendered by its own chat template, and aligned by the tokens of the completion.

    student   <bos> <|user|> Hi <|model|> Hello <|end|>
    teacher   <bos> <|system|> Be kind. <|user|> Hi <|model|> Hello <|end|>
    places    0     0        0  0         6     7

The teacher's log-prob of a trained token is that at its place in the teacher's tokens: the same id, after the teacher's
prompt. Prompts may differ in any way, and what a template writes before an answer (an empty `<think>` block) counts
with them. A completion that the two templates write with other tokens cannot be compared, and its row is dropped.
A teacher of another vocabulary reads the text of a sampled completion in its own tokens (`Spans`).

Axes: T time, Tt teacher's time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tunix.data.chat import Rendered
from tunix.data.shapes import Rendering, Row, as_messages, column
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import NOT_THE_TEACHERS, Refused
from tunix.errors import UserError, nearest
from tunix.types import TeacherView


@dataclass(frozen=True)
class Spans:
    """A completion in the tokens of two vocabularies, cut wherever both begin a token.

    student   un | believ | able | <end>        ours    0 1 1 2
    teacher   un | believable | </s>            theirs  0 1 2
    """

    tokens: np.ndarray
    """`[Tt]` the ids of the teacher's vocabulary that write the same text, with an end where the student's has one."""
    theirs: np.ndarray
    """`[Tt]` the span of each, counted from 0."""
    ours: np.ndarray
    """`[T]` the span of each of the student's tokens."""

    @classmethod
    def of(cls, ids: np.ndarray, student: Tokenizer, teacher: Tokenizer, end: int) -> Spans:
        """Aligns the `[T]` ids of a sampled completion; `end` is the teacher's id where a turn ends."""
        stops, text, begins = int(len(ids) > 0 and ids[-1] in student.stop_ids), "", list[int]()
        for i in range(len(ids) - stops):
            # The bytes of a character may be in several tokens, four at most, which begin together.
            waiting = len(begins)
            if i - waiting > 3:
                begins.append(len(text))
                text += student.decode(ids[waiting : waiting + 1], previous=ids[:waiting].tolist())
                waiting += 1
            piece = student.decode(ids[waiting : i + 1], previous=ids[:waiting].tolist())
            if not piece.endswith("\ufffd"):
                begins += [len(text)] * (i + 1 - waiting)
                text += piece
        begins += [len(text)] * (len(ids) - stops - len(begins))
        whole = student.decode(ids[: len(ids) - stops])
        if text != whole[: len(text)]:  # bytes of no character, in tokens that hold parts of two
            begins = [0] * len(begins)
        tokens, offsets = teacher.encode_with_offsets(whole)
        both = np.union1d([0], np.intersect1d(begins, offsets[:, 0]))
        ours, theirs = (np.searchsorted(both, x, side="right") - 1 for x in (begins, offsets[:, 0]))
        if stops:  # a span of its own
            last = int(max(ours, default=-1)) + 1
            tokens, theirs, ours = [*tokens, end], [*theirs, last], [*ours, last]
        return cls(np.array(tokens, np.int32), np.array(theirs, np.int64), np.array(ours, np.int64))


@dataclass(frozen=True)
class TeacherReader:
    """What renders rows for a teacher, in its chat format or with more in the prompt."""

    tokenizer: Tokenizer | None
    """The student's vocabulary with the teacher's chat template, or the teacher's own (`align: text`); None where rows
    are token ids."""
    length: int
    """Most tokens of a sequence as the teacher reads it, e.g. 2048."""
    name: str
    """The teacher's path or hub id, for messages."""
    prompt: str | None = None
    """What it is asked in place of a row's prompt, e.g. `"{prompt} A hint: {hint}"`; None for the prompt itself."""
    number: int = 0
    """Which of several teachers it is, e.g. 1."""

    def asked(self, row: Row, settings: Rendering) -> Row:
        """The row with what the teacher is asked in place of its prompt, or of its last user's message.

        Raises:
            UserError: the row has no such text, or not the columns that `prompt` names.
        """
        if self.prompt is None:
            return row
        ours = {"messages": "messages", "prompt_completion": "prompt"}.get(settings.format)
        if ours is None:
            raise UserError(f"teacher.prompt: rows of {settings.format} have no question to add to: leave it out")
        columns = settings.data.columns
        value = column(row, ours, columns)
        messages = [] if isinstance(value, str) else as_messages(value)
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        question = value if isinstance(value, str) else messages[last].get("content") if last >= 0 else None

        def words(match: re.Match[str]) -> str:
            name = match[1]
            if name == "prompt":
                text = question
            elif name == "completion" and messages[-1:] and messages[-1]["role"] == "assistant":
                text = messages[-1].get("content")
            else:
                text = column(row, name, columns)
                text = as_messages(text)[-1].get("content") if isinstance(text, list) else text
            if not isinstance(text, str | int | float):
                raise UserError(f"teacher.prompt: {{{name}}} is {text!r:.80}, not a text")
            return str(text)

        changed = _COLUMN.sub(words, self.prompt)
        if messages:
            value = [*messages[:last], {**messages[last], "content": changed}, *messages[last + 1 :]]
        return {**row, columns.get(ours, ours): value if messages else changed}

    def view(self, student: Rendered, teacher: Rendered) -> TeacherView:
        """The teacher's rendering of a row, aligned with the student's.

        Raises:
            Refused: the teacher's has other turns, or a turn that does not end in the student's tokens.
        """
        places = np.zeros(len(student.tokens), np.int32)
        # First and end token of each run of trained tokens, `[turns 2]`.
        ours, theirs = (
            np.flatnonzero(np.diff(np.pad(x.mask, 1).astype(np.int8))).reshape(-1, 2) for x in (student, teacher)
        )
        for number, (begin, end) in enumerate(ours):
            last = theirs[number][1] if len(ours) == len(theirs) else 0
            first, turn = max(last - (end - begin), theirs[number][0] if last else 0), student.tokens[begin:end]
            if not np.array_equal(turn, teacher.tokens[first:last]):
                assert self.tokenizer is not None, "token ids are rendered once"
                texts = (self.tokenizer.decode(x[-24:]) for x in (teacher.tokens[teacher.mask][: last or None], turn))
                raise Refused(NOT_THE_TEACHERS, _DIFFER.format(self.name, number + 1, *map(repr, texts)))
            places[begin:end] = np.arange(first, last)
        return TeacherView(teacher.tokens, places, self.number)


class TeacherChoice:
    """What renders a row for the teacher that it names in a column."""

    def __init__(self, column: str, readers: Mapping[str, TeacherReader]):
        """`readers` by the teachers' names, in the order of their numbers."""
        self.column = column
        self.readers = {name: replace(x, number=i) for i, (name, x) in enumerate(readers.items())}

    def of(self, row: Row, columns: Mapping[str, str], where: str = "") -> TeacherReader:
        """The reader of the teacher that a row follows; `where` names the row in messages, if the caller does not.

        Raises:
            UserError: the row names no teacher, or one that there is not.
        """
        name = column(row, self.column, columns, None)
        if not isinstance(name, str) or name not in self.readers:
            hint = nearest(name, self.readers) if isinstance(name, str) else ""
            begin = f"{where}: " if where else ""
            raise UserError(
                f"{begin}teacher.column: {self.column} is {name!r:.80}, and teacher.by_name has "
                f"{', '.join(self.readers)}.{hint}"
            )
        return self.readers[name]


def vocabulary(tokenizer: Tokenizer) -> str:
    """What tokenizers have in common whose ids stand for the same tokens, e.g. `3f0c1a9e77b2`."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.hf.get_vocab().items())).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class StoredTeacher:
    """Reads what a teacher has said of a row's trained tokens in advance, as `tunix score --top-k` writes it."""

    vocabulary: str | None
    """`vocabulary` of the student's tokenizer, e.g. `3f0c1a9e77b2`; None where it has none."""
    size: int
    """V, the number of the student's ids, e.g. 151936."""

    def read(self, row: Row, columns: Mapping[str, str], mask: np.ndarray) -> np.ndarray:
        """`[T 2 A]` as in `Sequence.stored`, of the tokens that the `[T]` mask trains.

        Raises:
            UserError: a column is missing or of a wrong shape, or the ids are of another tokenizer.
        """
        theirs = column(row, "tokenizer", columns, None)
        if self.vocabulary is not None and theirs != self.vocabulary:
            raise UserError(
                f"the teacher's tokenizer is {theirs!r:.40}, and the student's {self.vocabulary!r}: its ids are other "
                "tokens. Score the rows by a teacher with the student's tokenizer (tunix score --top-k)"
            )
        listed = [column(row, x, columns) for x in ("top_ids", "top_logprobs")]
        try:
            ids, logprobs = (np.asarray(x, np.float64) for x in listed)
        except (ValueError, TypeError):
            raise UserError("top_ids and top_logprobs are not lists of equally many numbers for each token") from None
        number = int(mask.sum())
        if ids.shape != logprobs.shape or ids.ndim != 2 or len(ids) != number or not ids.size:
            shapes = " and ".join(f"{list(x.shape)}" for x in (ids, logprobs))
            raise UserError(
                f"top_ids and top_logprobs are {shapes}, not both [{number}, k] for {number} trained tokens"
            )
        if (wrong := (ids < 0) | (ids >= self.size) | (ids % 1 != 0) | ~(logprobs <= 0)).any():
            i, j = np.argwhere(wrong)[0].tolist()
            raise UserError(
                f"top_ids[{i}][{j}] is {ids[i, j]:g} with the log-prob {logprobs[i, j]:g}: ids are below {self.size}, "
                "and log-probs at most 0"
            )
        stored = np.full((len(mask), 2, ids.shape[1]), -1, np.float32)
        stored[mask] = np.stack([ids, logprobs], axis=1)
        return stored


_COLUMN = re.compile(r"\{(\w+)\}")
_DIFFER = (
    "the chat template of {} ends turn {} of the completion in {}, the student's in {}: probabilities of other tokens "
    "cannot be compared. Give the student the teacher's format (data.chat_template), or have the teacher read the "
    "student's (teacher.chat_template: student)"
)
