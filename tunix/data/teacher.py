"""How a teacher reads a row: rendered by its own chat template, and aligned by the tokens of the completion.

    student   <bos> <|user|> Hi <|model|> Hello <|end|>
    teacher   <bos> <|system|> Be kind. <|user|> Hi <|model|> Hello <|end|>
    places    0     0        0  0         6     7

The teacher's log-prob of a trained token is that at its place in the teacher's tokens: the same id, after the teacher's
prompt. Prompts may differ in any way, and what a template writes before an answer (an empty `<think>` block) counts
with them. A completion that the two templates write with other tokens cannot be compared, and its row is dropped.

Axes: T time, Tt teacher's time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tunix.data.chat import Rendered
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import NOT_THE_TEACHERS, Refused
from tunix.types import TeacherView


@dataclass(frozen=True)
class TeacherReader:
    """What renders rows for a teacher."""

    tokenizer: Tokenizer
    """The student's vocabulary with the teacher's chat template."""
    length: int
    """Most tokens of a sequence as the teacher reads it, e.g. 2048."""
    name: str
    """The teacher's path or hub id, for messages."""

    def view(self, student: Rendered, teacher: Rendered) -> TeacherView:
        """The teacher's rendering of a row, aligned with the student's.

        Raises:
            Refused: the teacher's has other turns, or a turn that does not end in the student's tokens.
        """
        places, (ours, theirs) = np.zeros(len(student.tokens), np.int32), (_turns(x.mask) for x in (student, teacher))
        for number, (begin, end) in enumerate(ours):
            last = theirs[number][1] if len(ours) == len(theirs) else 0
            first, turn = max(last - (end - begin), theirs[number][0] if last else 0), student.tokens[begin:end]
            if not np.array_equal(turn, teacher.tokens[first:last]):
                texts = (self.tokenizer.decode(x[-24:]) for x in (teacher.tokens[teacher.mask][: last or None], turn))
                raise Refused(NOT_THE_TEACHERS, _DIFFER.format(self.name, number + 1, *map(repr, texts)))
            places[begin:end] = np.arange(first, last)
        return TeacherView(teacher.tokens, places)


_DIFFER = (
    "the chat template of {} ends turn {} of the completion in {}, the student's in {}: probabilities of other tokens "
    "cannot be compared. Give the student the teacher's format (data.chat_template), or have the teacher read the "
    "student's (teacher.chat_template: student)"
)


def _turns(mask: np.ndarray) -> np.ndarray:
    """First and end token of each run of trained tokens, `[turns 2]`."""
    return np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))).reshape(-1, 2)
