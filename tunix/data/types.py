"""The records of the data pipeline: a row that is kept as one sequence or a pair, or dropped for a reason; the counts
over many rows; and what leaves it, packed batches of given sequences, and prompts to sample completions for.

Kept plus dropped always equals the number of rows. Loads without jax.

Axes: T time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tunix.errors import UserError

if TYPE_CHECKING:  # it loads jax, which checking a recipe does not wait for
    from tunix.types import Batch, Pictures, Sequence, TeacherView

TOO_LONG, PROMPT_TOO_LONG = "longer than max_length", "longer than prompt_length"
COMPLETION_TOO_LONG = "longer than completion_length"
TOO_LONG_FOR_TEACHER = "longer than teacher.max_length"
NO_PROMPT = "no prompt"
NOTHING_TRAINED = "nothing to train on"
PICTURE_CUT = "its pictures end after max_length"
CUT_AWAY = "nothing to train on within max_length"
EMPTY = "an empty completion"
EQUAL, CUT_EQUAL = "chosen and rejected are equal", "chosen and rejected are equal within max_length"
NO_COMMON_PROMPT = "chosen and rejected have no prompt in common"
NOT_THE_TEACHERS = "completions that the teacher's chat template writes otherwise"
NOT_WRITTEN = "messages that the template does not write"
UNPROVED = "turns whose bounds cannot be proved"

THOUGHTS = "thoughts that the template leaves out"
BEFORE_CALL = "text before a call that the template leaves out"
REWRITTEN = "text that the template writes otherwise"
EMPTY_TURN = "empty turns, not trained: their place is unknown"
LATER_TURNS = "turns that max_length leaves no room for"
NO_STOP = "turns that end without a stop token"


@dataclass(frozen=True)
class Note:
    """What became of a part of a row that is kept."""

    rule: str
    """One of a few fixed phrases, e.g. `thoughts that the template leaves out`, so that rules can be counted."""
    text: str
    """The part, e.g. `<think>easy`."""


class Refused(UserError):
    """A row that cannot be trained as it stands; where rows are counted it is dropped."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Kept:
    """A row that became a sequence, or two that are compared with each other."""

    sequences: tuple[Sequence, ...]
    """The sequences that are trained on; for a pair the chosen one, then the rejected one."""
    truncated: bool = False
    """Whether tokens beyond the limit were cut off."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row's columns under our names, where only its prompt was rendered; rewards and environments receive them."""
    notes: tuple[Note, ...] = ()
    """What the chat template left out of it, or wrote otherwise."""
    source: str = ""
    """The name of its data set, e.g. `chats`; empty where there is a single one."""
    number: int = 0
    """The row's number in the data, from 0."""


@dataclass(frozen=True)
class Dropped:
    """A row that is left out."""

    reason: str
    """One of a few fixed phrases, e.g. `longer than max_length`, so that reasons can be counted."""
    detail: str = ""
    """Which part of the row it is about, and the remedy, where the reason does not say it."""
    source: str = ""
    """The name of its data set; empty where there is a single one."""


@dataclass(frozen=True)
class Accounting:
    """Counts of the rows read so far: `kept + sum(dropped) == rows`, and truncated rows are among the kept ones."""

    rows: int = 0
    """Rows read."""
    kept: int = 0
    """Rows that became sequences, whole or truncated; a pair counts once."""
    truncated: int = 0
    """Kept rows that lost tokens at their end."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of rows dropped for it."""
    pieces: int = 0
    """Sequences that kept rows were cut into, with `packing: split` or `wrapped`; a row is kept with its first one."""
    untrained: int = 0
    """Pieces that were left out because nothing in them is trained."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """Rule -> number of kept rows that have such a note."""
    kept_of: Mapping[str, int] = field(default_factory=dict)
    """Data set of a mixture -> number of its rows that were kept."""
    dropped_of: Mapping[str, int] = field(default_factory=dict)
    """Data set of a mixture -> number of its rows that were dropped."""

    def __post_init__(self) -> None:
        assert self.kept + sum(self.dropped.values()) == self.rows, self

    def __add__(self, other: Accounting) -> Accounting:
        def added(x: Any, y: Any) -> Any:
            return x + y if isinstance(x, int) else dict(Counter(x) + Counter(y))

        return Accounting(*map(added, vars(self).values(), vars(other).values()))

    @staticmethod
    def of(example: Kept | Dropped) -> Accounting:
        """The counts of one row."""
        source = {example.source: 1} if example.source else {}
        if isinstance(example, Dropped):
            return Accounting(rows=1, dropped={example.reason: 1}, dropped_of=source)
        notes = dict.fromkeys((note.rule for note in example.notes), 1)
        return Accounting(rows=1, kept=1, truncated=int(example.truncated), notes=notes, kept_of=source)


@dataclass(frozen=True)
class Packed:
    """A batch, its sequences, and the accounting of the rows so far."""

    batch: Batch
    """The packed rows as numpy arrays."""
    accounting: Accounting
    """Counts of all rows read up to and including this batch, over all epochs; or of all held-out rows."""
    sequences: tuple[Sequence, ...]
    """The sequences that were packed, for algorithms that also use them unpacked."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that the policy samples completions for."""

    tokens: np.ndarray
    """`[T]` int32 token ids, e.g. `[2, 651, 603]`."""
    text: str
    """The prompt as the row has it, without the template, which rewards read; empty for token ids."""
    row: Mapping[str, Any]
    """The row's columns under our names, which rewards and environments read."""
    pictures: Pictures | None = None
    """Its pictures, e.g. one of 256 soft tokens; None where the model sees none."""
    source: str = ""
    """The name of its data set, e.g. `sums`; empty where there is a single one."""
    number: int = 0
    """The row's number in the data, from 0."""
    teacher: TeacherView | None = None
    """The prompt as a teacher reads it, e.g. of the tokens `[2, 105, 651]`; None where that is `tokens`."""
