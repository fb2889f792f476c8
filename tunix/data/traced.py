"""A conversation's text by the chat template, in which every letter knows the message that it came from.

The conversation is rendered twice: as it is, and with each letter of its messages replaced by a private code point of
its own. A template writes, trims, cuts and escapes code points as it does letters. Where putting the letters back gives
the first text, the second one proves where each letter stands, which letters the template left out, and that everything
else is the template's own text. Where it does not (the template decides by what a message says), fewer letters are
replaced; where that does not help either, the row is refused.

White space, quotes, brackets and tags such as `<think>` stay as they are, since templates trim, escape and split by
them. They stand between letters whose places are known.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""Renders messages with the template."""

_FIRST, _LAST = 0xF0000, 0x10FFFF
"""Unicode's private planes."""
_TAG = re.compile(r"<[^<>\n]{1,60}>|\[/?[A-Z_]+\]")
_KEPT = "\"'\\<>[]{}|/&"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's thoughts, as transformers knows them."""
_OUTLINED = {"role", "content", "name", *REASONING}
"""Keys of a message in an outline."""
_THOUGHT_END = "</think>"
Kind = Literal["content", "reasoning", "call"]
"""What a text is in its message."""
Part = Literal["all", "answer", "none"]
"""What is written of a text: all of it, what follows its last `</think>`, or nothing."""

_LETTER = re.compile(r"[^\s\0-\x1f" + re.escape(_KEPT) + "]")
_CODED = np.array([not (chr(i).isspace() or chr(i) in _KEPT or i < 32) for i in range(0x3002)])
"""Whether the letter of each code point is replaced; the last one stands for all behind it, where no white space is."""


@dataclass(frozen=True)
class Field:
    """A text of a message."""

    message: int
    """Index of the message."""
    kind: Kind
    """What it is in the message."""
    text: str
    """Its letters, e.g. `It rains.`."""
    begin: int
    """Its first code."""
    end: int
    """One more than its last code; `begin` where no letter is replaced, as in an empty text."""


@dataclass(frozen=True)
class Traced:
    """The text of a conversation, and the code of each of its letters."""

    text: str
    """The template's text."""
    fields: tuple[Field, ...]
    """The texts of all messages, in their order."""
    codes: np.ndarray
    """`[text]` int32: the code of each letter, also where the template repeats it (a called function's name before the
    result); -1 for the template's own text, and for what is not replaced."""
    places: np.ndarray
    """`[codes]` int32: where in the text each code stands first; -1 where the template left it out."""
    offsets: np.ndarray
    """`[codes]`: the letter's index in its field."""
    messages: np.ndarray
    """`[codes]`: the letter's message; it never falls."""
    coded: tuple[Message, ...]
    """The messages with the code points in them, to render parts of the conversation."""
    base: int
    """The code point of code 0."""

    def places_of(self, first: int, end: int) -> np.ndarray:
        """Where the letters of the messages `first` to `end` stand, those that are written, in the messages' order."""
        begin, stop = np.searchsorted(self.messages, (first, end))
        places = self.places[begin:stop]
        return places[places >= 0]

    def code_at(self, place: int) -> int:
        """The code at a place of the text; -1 for none, and for the place -1 before it."""
        return int(self.codes[place]) if place >= 0 else -1

    def field_at(self, place: int) -> Field:
        """The field of a letter in the text."""
        code = self.codes[place]
        return next(field for field in self.fields if field.begin <= code < field.end)

    def untraced_before(self, place: int) -> int:
        """How many characters right before a letter are its field's too: quotes, brackets or tags that begin it."""
        field, code = self.field_at(place), self.codes[place]
        begin = self.offsets[code - 1] + 1 if code > field.begin else 0
        before, number = field.text[begin : self.offsets[code]], 0
        if code > field.begin:  # what stood before was left out, up to a tag
            before = re.split(r"[>\]]", before)[-1]
        while number < len(before) and self.text[place - number - 1] == before[-number - 1]:
            number += 1
        return len(before[len(before) - number :].lstrip())

    def untraced_after(self, place: int) -> int:
        """How many characters right after a field's last letter are its own too: quotes, brackets, white space."""
        field, code = self.field_at(place), self.codes[place]
        after = field.text[self.offsets[code] + 1 :]
        for end in (after, after.rstrip()):
            if self.text.startswith(end, place + 1):
                return len(end)
        return 0

    def is_whole(self, field: Field) -> bool:
        """Whether a field stands in the text as it is, but for white space."""
        if field.begin == field.end:
            return True
        if min(self.places[field.begin], self.places[field.end - 1]) < 0:
            return False
        first, last = int(self.places[field.begin]), int(self.places[field.end - 1])
        written = self.text[first : last + 1 + self.untraced_after(last)]
        return "".join(written.split()) == "".join(field.text[self.offsets[field.begin] :].split())


@dataclass(frozen=True)
class Outline:
    """What a template writes around conversations of one shape: the same roles, one text in each message, thoughts.

    A text that equals the literals with the messages' texts between them has each letter where the outline says, and
    needs no second rendering.
    """

    literals: tuple[str, ...]
    """The template's own text before each text, and at the end."""
    written: tuple[Part, ...]
    """What the template writes of each text."""
    starts: Mapping[int, int]
    """Message -> how many characters of the literal before it belong to the assistant's turn."""

    @staticmethod
    def key(messages: Sequence[Message], template_kwargs: Mapping[str, Any], trained: Sequence[int]) -> Hashable:
        """The shape of a conversation; None where its texts are not one in each message, or there are tools."""
        shape = []
        for message in messages:
            texts = _texts(message)
            if not message.keys() <= _OUTLINED or not all(isinstance(x, str) and _has_letters(x) for x in texts):
                return None
            marks = [("<" in text or "[" in text, _THOUGHT_END in text, text[0].isspace()) for text in texts]
            shape.append((message["role"], *message, *marks))
        variables = tuple(template_kwargs.items())
        if any(not isinstance(value, str | int | float | None) for _, value in variables):
            return None
        return tuple(shape), variables, tuple(trained)

    @classmethod
    def of(cls, traced: Traced, begins: Mapping[int, int]) -> Outline | None:
        """The outline of a traced conversation; None where the template changes a text otherwise.

        Args:
            traced: the conversation.
            begins: the character where each of the assistant's turns starts.
        """
        literals, written, starts, at = [], list[Part](), dict[int, int](), 0
        for field in traced.fields:
            places = traced.places[field.begin : field.end]
            begin, text, part = at, "", "none"
            if (places >= 0).any():
                first = int(np.argmax(places >= 0))
                part = "all" if first == 0 else "answer"
                if (text := _part(field.text, part)) is None:
                    return None
                begin = int(places[first] - traced.offsets[field.begin + first]) + len(field.text) - len(text)
                if begin < at or not traced.text.startswith(text, begin):
                    return None
                if field.message in begins:
                    starts.setdefault(field.message, begin - begins[field.message])
            literals.append(traced.text[at:begin])
            written.append(part)
            at = begin + len(text)
        if min(starts.values(), default=0) < 0:
            return None
        return cls((*literals, traced.text[at:]), tuple(written), starts)

    def bounds(self, messages: Sequence[Message], text: str) -> tuple[list[tuple[int, int]], list[str]] | None:
        """Where the text of each message begins and ends, and the thoughts that are left out; None where the text is
        not the outline's."""
        bounds, thoughts, at, parts = [], [], 0, zip(self.literals, self.written, strict=False)
        for message in messages:
            begins = []
            for whole, (literal, part) in zip(_texts(message), parts, strict=False):
                if (written := _part(whole, part)) is None or not text.startswith(literal + written, at):
                    return None
                if part != "all":
                    thoughts.append(whole.removesuffix(written).rstrip().removesuffix(_THOUGHT_END).strip())
                if part != "none":
                    begins.append(at + len(literal))
                at += len(literal) + len(written)
            bounds.append((begins[0], at))
        return (bounds, thoughts) if text[at:] == self.literals[-1] else None


def _texts(message: Message) -> list[Any]:
    """The texts of a message in the order of its fields: thoughts, content."""
    thoughts = [message[name] for name in REASONING if name in message]
    return [*thoughts[:1], message.get("content")]


def _part(text: str, part: Part) -> str | None:
    """A part of a text; None where it should be an answer after thoughts and there is none."""
    if part == "answer":
        thought, _, answer = text.rpartition(_THOUGHT_END)
        return answer.lstrip() if _has_letters(thought) and _has_letters(answer) else None
    return text if part == "all" else ""


def _has_letters(text: str) -> bool:
    """Whether a text has letters that are replaced, beside tags and brackets."""
    return _LETTER.search(_TAG.sub("", text) if "<" in text or "[" in text else text) is not None


def trace(messages: Sequence[Message], text: str, render: Render) -> Traced | None:
    """Finds each letter of a conversation in its text.

    Args:
        messages: with content, reasoning and tool calls as the template reads them.
        text: the template's.
        render: renders messages, the same text for the same messages.

    Returns:
        None where the template decides by what the messages say, so that no place is proved.
    """
    points = _code_points(text)
    base = max(_FIRST, int(points.max(initial=0)) + 1)
    for names, ends in ((True, False), (False, False), (False, True)):
        coder = _Coder(base, names, ends)
        coded = tuple(map(coder.message, itertools.count(), messages))
        if coder.used > _LAST - base:
            continue
        letters, offsets, owners = coder.arrays()
        written = _code_points(render(coded))
        if len(written) != len(points):
            continue
        at = np.flatnonzero((written >= base) & (written < base + coder.used))
        number = written[at] - base
        back = written.copy()
        back[at] = letters[number]
        if (back == points).all():
            places, codes = np.full(coder.used, -1, np.int32), np.full(len(points), -1, np.int32)
            places[number[::-1]] = at[::-1]  # the first place of each, which is assigned last
            codes[at] = number
            traced = Traced(text, tuple(coder.fields), codes, places, offsets, owners, coded, base)
            # Between its ends a text is proved by standing there as it is.
            if not ends or all(field.kind == "call" or traced.is_whole(field) for field in traced.fields):
                return traced
    return None


class _Coder:
    """Replaces letters of messages by code points, counting on."""

    def __init__(self, base: int, names: bool, ends: bool) -> None:
        self.fields: list[Field] = []
        self.used = 0
        self._base, self._names, self._ends = base, names, ends
        self._parts: list[tuple[np.ndarray, np.ndarray, int]] = []

    def message(self, number: int, message: Message) -> Message:
        """The message with code points in its texts."""
        coded = dict(message)
        if names := [name for name in REASONING if name in message]:
            coded |= dict.fromkeys(names, self._text(number, "reasoning", message[names[0]]))
        if isinstance(content := message.get("content"), str):
            coded["content"] = self._text(number, "content", content)
        elif content is not None:
            kinds: dict[str, Kind] = {"text": "content", "thinking": "reasoning"}
            parts = ((part, part["type"]) for part in content)
            coded["content"] = [
                {**part, name: self._text(number, kinds[name], part[name])} if name in kinds else part
                for part, name in parts
            ]
        if calls := message.get("tool_calls"):
            coded["tool_calls"] = []
            for call in calls:
                function = dict(call["function"])
                if self._names:
                    function["name"] = self._text(number, "call", function["name"])
                function["arguments"] = self._value(number, function["arguments"])
                coded["tool_calls"].append({**call, "function": function})
        return coded

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The code point of each code's letter, its index in its field, and its message."""
        if not self._parts:
            return np.zeros(0, int), np.zeros(0, int), np.zeros(0, int)
        letters, offsets, messages = zip(*self._parts, strict=True)
        return np.concatenate(letters), np.concatenate(offsets), np.repeat(messages, list(map(len, letters)))

    def _value(self, number: int, value: Any) -> Any:
        """An argument with code points in all of its strings."""
        if isinstance(value, str):
            return self._text(number, "call", value)
        if isinstance(value, Mapping):
            return {key: self._value(number, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(number, item) for item in value]
        return value

    def _text(self, number: int, kind: Kind, text: str) -> str:
        points = _code_points(text)
        coded = _CODED[np.minimum(points, len(_CODED) - 1)]
        if "<" in text or "[" in text:
            for tag in _TAG.finditer(text):
                coded[tag.start() : tag.end()] = False
        if not coded.any():  # nothing but tags and brackets
            coded = np.array([not letter.isspace() for letter in text], bool)
        at = np.flatnonzero(coded)
        if self._ends:
            at = at[[0, -1]] if len(at) > 1 else at
        self.fields.append(Field(number, kind, text, self.used, self.used + len(at)))
        self._parts.append((points[at], at, number))
        points = points.copy()
        points[at] = np.arange(self._base + self.used, self._base + self.used + len(at))
        self.used += len(at)
        return points.tobytes().decode("utf-32-le", "surrogatepass")


def _code_points(text: str) -> np.ndarray:
    """`[text]` int32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<i4")
