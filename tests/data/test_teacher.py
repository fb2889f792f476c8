"""Rows as a teacher reads them: by its own chat template, aligned by the tokens of the completion."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunix.config import RowKind
from tunix.data.config import DataConfig
from tunix.data.examples import Examples
from tunix.data.packing import pack
from tunix.data.pipeline import decoded, encoded, prompt_of
from tunix.data.sources import Rows
from tunix.data.teacher import TeacherReader
from tunix.data.tokenizer import bytes_tokenizer
from tunix.data.types import NOT_THE_TEACHERS, TOO_LONG_FOR_TEACHER, Dropped, Kept
from tunix.errors import UserError

STUDENT = bytes_tokenizer("llama3")
SHORT = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '[U]' + m.content if m.role == 'user' else '[A]' + LEAD + m.content + END }}"
    "{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
LONGER = [*CHAT, {"role": "user", "content": "So"}, {"role": "assistant", "content": "No."}]


def reader(lead: str = "", end: str = "<|eot_id|>", length: int = 64) -> TeacherReader:
    """A teacher that writes `[U]` and `[A]` for the headers, and something before each answer."""
    template = SHORT.replace("LEAD", repr(lead)).replace("END", repr(end))
    return TeacherReader(STUDENT.replace_template(template), length, "big")


def read(
    messages: list[dict[str, Any]], teacher: TeacherReader, kind: RowKind = RowKind.COMPLETION, **data: Any
) -> Kept | Dropped:
    config = DataConfig(train="rows", **{"max_length": 64, **data})
    return Examples(Rows("rows", [{"messages": messages}]), STUDENT, config, kind, None, teacher)[0]


def test_each_trained_token_has_its_place_in_the_teachers_rendering():
    """The student's text begins with BOS, a header of 8 tokens (2 markers, `user`, 2 line ends), `Hi`, the end and the
    assistant's header of 13: `Yo` and its end are tokens 25 to 27. The teacher's begins with BOS, `[U]Hi[A]`, so that
    they are tokens 9 to 11 there."""
    kept = read(CHAT, reader())
    assert isinstance(kept, Kept)
    (sequence,) = kept.sequences
    assert sequence.teacher is not None
    assert STUDENT.decode(sequence.teacher.tokens) == "<bos>[U]Hi[A]Yo<|eot_id|>"
    assert len(sequence.tokens) == 28
    assert np.flatnonzero(sequence.loss_mask).tolist() == [25, 26, 27]
    assert sequence.teacher.places.tolist() == [0] * 25 + [9, 10, 11]


def test_what_a_template_writes_before_an_answer_belongs_to_its_prompt():
    """Two turns: `<bos>[U]Hi[A]<t></t>Yo|` has `Yo|` at 16 to 18, `[U]So[A]<t></t>No.|` follows with `No.|` at 34."""
    kept = read(LONGER, reader("<t></t>"))
    assert isinstance(kept, Kept)
    (sequence,) = kept.sequences
    assert sequence.teacher is not None
    places = sequence.teacher.places[sequence.loss_mask]
    assert places.tolist() == [16, 17, 18, 34, 35, 36, 37]
    np.testing.assert_array_equal(sequence.teacher.tokens[places], sequence.tokens[sequence.loss_mask])


@pytest.mark.parametrize("end", ["<eos>", "", "!<|eot_id|>"])
def test_a_completion_of_other_tokens_drops_its_row(end: str):
    dropped = read(CHAT, reader(end=end))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == NOT_THE_TEACHERS
    assert "the chat template of big" in dropped.detail


@pytest.mark.parametrize("turns", ["each", "last", "all"])
def test_turns_have_views_of_their_own(turns: str):
    kept = read(LONGER, reader("<t></t>"), turns=turns)
    assert isinstance(kept, Kept)
    assert len(kept.sequences) == (2 if turns == "each" else 1)
    for sequence in kept.sequences:
        view = sequence.teacher
        assert view is not None
        assert view.places.max() == len(view.tokens) - 1  # nothing after the last trained token
        np.testing.assert_array_equal(view.tokens[view.places[sequence.loss_mask]], sequence.tokens[sequence.loss_mask])


def test_a_prompt_is_followed_by_the_same_completion():
    kept = read(CHAT, reader(), RowKind.PROMPT)
    assert isinstance(kept, Kept)
    prompt = prompt_of(kept)
    assert prompt.teacher is not None
    assert STUDENT.decode(prompt.teacher.tokens) == "<bos>[U]Hi[A]"


def test_what_has_no_room_for_the_teacher_is_counted():
    """Tokens 9 and 10 of the teacher's fit into 11, its end does not; of a prompt its last tokens are kept."""
    cut = read(CHAT, reader(length=11))
    assert isinstance(cut, Kept)
    assert cut.truncated
    assert np.flatnonzero(cut.sequences[0].loss_mask).tolist() == [25, 26]
    dropped = read(CHAT, reader(length=11), on_overflow="drop")
    assert isinstance(dropped, Dropped)
    assert dropped.reason == TOO_LONG_FOR_TEACHER
    with pytest.raises(UserError, match=r"row 1 of rows has 12 tokens, more than teacher\.max_length 11"):
        read(CHAT, reader(length=11), on_overflow="error")
    prompt = read(CHAT, reader(length=16), RowKind.PROMPT, completion_length=12)
    assert isinstance(prompt, Kept)
    assert prompt.truncated
    view = prompt_of(prompt).teacher
    assert view is not None
    assert STUDENT.decode(view.tokens) == "i[A]"


def test_the_students_limit_cuts_both():
    """The student's row ends with `Y`, token 25; the teacher then reads up to it, token 9."""
    kept = read(CHAT, reader(), max_length=26)
    assert isinstance(kept, Kept)
    view = kept.sequences[0].teacher
    assert view is not None
    assert len(view.tokens) == 10
    assert view.places[25] == 9


def test_views_travel_between_processes_and_are_packed_all_or_none():
    kept = read(CHAT, reader())
    assert isinstance(kept, Kept)
    (back,) = decoded(encoded([kept]))
    assert isinstance(back, Kept)
    view, sent = kept.sequences[0].teacher, back.sequences[0].teacher
    assert view is not None
    assert sent is not None
    np.testing.assert_array_equal(view.tokens, sent.tokens)
    np.testing.assert_array_equal(view.places, sent.places)
    (other,) = decoded(
        encoded([replace(kept, sequences=(replace(kept.sequences[0], teacher=replace(view, number=2)),))])
    )
    assert isinstance(other, Kept)
    assert other.sequences[0].teacher is not None
    assert other.sequences[0].teacher.number == 2
    assert len(pack([*kept.sequences, *back.sequences], 4, 64).teacher or ()) == 2
    with pytest.raises(ValueError, match="1 of 2 sequences in another way"):
        pack([*kept.sequences, replace(back.sequences[0], teacher=None)], 4, 64)


HINTED = "{prompt} \\boxed{} (Hint: {hint}, as in {completion})"
TRAINED = {"messages": CHAT, "hint": 7}


def asked(row: dict[str, Any], prompt: str = HINTED, kind: RowKind = RowKind.PROMPT, **data: Any) -> str:
    """What the teacher reads of a row, as text."""
    config = DataConfig(train="rows", max_length=64, **data)
    teacher = replace(reader(length=200), prompt=prompt)
    kept = Examples(Rows("rows", [row]), STUDENT, config, kind, None, teacher)[0]
    assert isinstance(kept, Kept)
    view = kept.sequences[0].teacher
    assert view is not None
    return STUDENT.decode(view.tokens)


def test_a_teacher_may_see_more_than_the_student():
    """The last user's message is replaced; braces without a word in them are text."""
    more = "Hi \\boxed{} (Hint: 7, as in Yo)"
    assert asked(TRAINED) == f"<bos>[U]{more}[A]"
    assert asked(TRAINED, kind=RowKind.COMPLETION) == f"<bos>[U]{more}[A]Yo<|eot_id|>"
    lists = {"prompt": CHAT[:1], "completion": CHAT[1:], "hint": 7}
    assert asked(lists) == asked(lists, kind=RowKind.COMPLETION).removesuffix("Yo<|eot_id|>") == f"<bos>[U]{more}[A]"
    texts = {"question": "Hi", "completion": "Yo", "clue": 7}
    named = {"columns": {"prompt": "question", "hint": "clue"}}
    assert asked(texts, **named) == f"<bos>{more}"  # no chat: the text is continued
    assert asked(texts, chat=True, **named) == f"<bos>[U]{more}[A]"
    before = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    earlier = {"messages": [*before, *CHAT], "hint": 7}
    assert asked(earlier) == f"<bos>[U]A[A]B<|eot_id|>[U]{more}[A]"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": CHAT}, "there is no column 'hint'"),
        ({"messages": CHAT, "hint": [1, 2]}, "message 1 is 1, not an object"),
        ({"messages": CHAT, "hint": {"a": 1}}, "teacher.prompt: {hint} is {'a': 1}, not a text"),
        ({"messages": [{"role": "system", "content": "Hi"}], "hint": 7}, "teacher.prompt: {prompt} is None"),
        ({"prompt_ids": [1, 2]}, "teacher.prompt: rows of tokens have no question to add to"),
    ],
)
def test_what_the_teacher_would_see_has_to_be_there(row: dict[str, Any], said: str):
    with pytest.raises(UserError, match=re.escape(said)):
        asked(row)
