r"""Renders a conversation as tokens and a mask of trained tokens, using the tokenizer's own chat template only.

The template renders the whole conversation once, and that text is tokenized once, so the tokens are those of
`apply_chat_template` by construction. `trace` proves which letters of the text are whose; `Turns` finds where the
assistant's turns begin and end beside them, in characters and then in tokens. Where a template has `{% generation %}`
marks, they decide.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
                      ^^ message 0                           ^^^^^^ message 1

For the proof the conversation is rendered twice: as it is, and with each letter of its messages replaced by a private
code point of its own. A template writes, trims, cuts and escapes code points as it does letters. Where putting the
letters back gives the first text, the second one proves where each letter stands, which letters the template left out,
and that everything else is the template's own text. Where it does not (the template decides by what a message says),
fewer letters are replaced; where that does not help either, the row is refused. White space, quotes, brackets and tags
such as `<think>` stay as they are, since templates trim, escape and split by them. They stand between letters whose
places are known.

A turn starts where the prompt that inference would send ends, and ends with its stop token. Both are the template's own
text, compared with what it writes where the conversation ends there, between two letters whose messages are proved.
Nothing is searched in the text, and no turn reaches a letter of another message.

What the template leaves out of a row is named by a rule (`Note`), or the row is refused (`Refused`).

Axes: T time.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tunix.data.templates import MARKERS, template_text
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import (
    BEFORE_CALL,
    EMPTY_TURN,
    NO_STOP,
    NOT_WRITTEN,
    REWRITTEN,
    THOUGHTS,
    UNPROVED,
    Note,
    Refused,
)
from tunix.errors import UserError, nearest

if TYPE_CHECKING:  # it loads jax
    from tunix.types import TeacherView

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


class Tokens:
    """A text as tokens: T `ids`, and `[T 2]` the first and end character of each, `offsets`."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.text, self.tokenizer = text, tokenizer
        self.ids, self.offsets = tokenizer.encode_with_offsets(text)

    def first_from(self, place: int) -> int:
        """The first token that begins at a character or after it."""
        return int(np.searchsorted(self.offsets[:, 0], place))

    def is_blank(self, token: int) -> bool:
        """Whether a token is white space and no added token."""
        return not self.tokenizer.is_added(self.ids[token]) and self.text[slice(*self.offsets[token])].isspace()

    def after_stop(self, place: int, limit: int) -> int | None:
        """The token after the stop token that comes next from a character on, but for white space; None where another
        one does, or only after `limit`."""
        i = self.first_from(place)
        while i < len(self.ids) and self.is_blank(i):
            i += 1
        stops = i < len(self.ids) and self.ids[i] in self.tokenizer.stop_ids and self.offsets[i, 0] < limit
        return i + 1 if stops else None


@dataclass(frozen=True)
class Turn:
    """The tokens of an assistant's turn."""

    tokens: slice
    """From its first token to its last one, e.g. `slice(12, 20)`."""
    stops: bool
    """Whether the last one ends the turn in inference too."""
    begin: int
    """The character where it starts."""


@dataclass(frozen=True)
class Turns:
    """The turns of a conversation."""

    messages: Sequence[Message]
    traced: Traced
    """Their text."""
    tokens: Tokens
    """The tokens of that text."""
    prompt: Render
    """Renders messages that the assistant is to continue."""
    render: Render
    """Renders whole messages."""

    def turn(self, k: int) -> Turn:
        """The turn of message `k`, an assistant's with text.

        Raises:
            Refused: its bounds cannot be proved.
        """
        traced = self.traced
        places, earlier = traced.places_of(k, k + 1), traced.places_of(0, k)
        later = traced.places_of(k + 1, len(self.messages))
        first, last = int(places.min()), int(places.max())
        before, limit = int(earlier.max(initial=-1)), int(later.min(initial=len(traced.text)))
        if not before < first <= last < limit:
            raise Refused(
                UNPROVED, f"message {k + 1} (assistant): the chat template mixes its text with that of others"
            )
        start = self._start(k, first, before)
        end, stops = self.end(k, last, limit)
        return Turn(slice(self.tokens.first_from(start), end), stops, start)

    def empty_turn(self, k: int) -> Turn | None:
        """The turn of message `k`, an assistant's without text: that of a turn that says `x`, without the `x`.

        Returns:
            None where the template writes another text around nothing than around something.
        """
        filled = [*self.messages[:k], {**self.messages[k], "content": "x"}, *self.messages[k + 1 :]]
        text = self.render(filled)
        if (traced := trace(filled, text, self.render)) is None:
            return None
        place = int(traced.places_of(k, k + 1).max(initial=-1))
        if place < 0 or text[:place] + text[place + 1 :] != self.traced.text:
            return None
        tokens = Tokens(text, self.tokens.tokenizer)
        turn = Turns(filled, traced, tokens, self.prompt, self.render).turn(k)
        end = int(tokens.offsets[turn.tokens.stop - 1, 1]) - 1
        return Turn(slice(self.tokens.first_from(turn.begin), self.tokens.first_from(end)), turn.stops, turn.begin)

    def marked(self, spans: Sequence[tuple[int, int]], trained: Sequence[int]) -> list[Turn]:
        """The turns between a template's generation marks, which are in characters, of the messages that are trained.

        Raises:
            Refused: a mark holds text of messages that are trained and of others.
        """
        traced, turns = self.traced, []
        for begin, end in spans:
            inside = np.unique(traced.messages[traced.codes[begin:end][traced.codes[begin:end] >= 0]])
            # A turn without a letter is that of the message after the last one before it.
            before = traced.codes[:begin].max(initial=-1)
            owners = set(inside.tolist()) or {0 if before < 0 else 1 + int(traced.messages[before])}
            if owners.isdisjoint(trained):
                continue
            if not owners.issubset(trained):
                raise Refused(UNPROVED, "a generation mark of the chat template holds text that is not trained")
            tokens = slice(self.tokens.first_from(begin), self.tokens.first_from(end))
            said = [i for i in range(tokens.start, tokens.stop) if not self.tokens.is_blank(i)]
            stops = bool(said) and self.tokens.tokenizer.is_added(self.tokens.ids[said[-1]])
            turns.append(Turn(tokens, stops, begin))
        return turns

    def _start(self, k: int, first: int, before: int) -> int:
        """The character where message `k` starts, whose `first` letter stands after the last one `before` it (or -1).

        Where the text does not go on as the prompt of inference does (the template opens a thought in prompts only), it
        is the first character of what is said; for calls, the end of what the text has of the prompt.
        """
        traced = self.traced
        rest = traced.text[before + 1 :]
        code, prompt = self._tail(self.prompt, k)
        continues = code == traced.code_at(before)
        if continues and rest.startswith(prompt) and before + len(prompt) < first:
            return before + 1 + len(prompt)
        shared = common_prefix(rest, prompt) if continues else 0
        # `<think>` and `<tool_call>` share no `<t`: a marker is there as a whole or not at all.
        while shared and not (
            rest[shared - 1].isspace() or rest[shared - 1] in ">]" or rest.startswith(("<", "["), shared)
        ):
            shared -= 1
        if traced.field_at(first).kind != "call":
            return max(first - traced.untraced_before(first), before + 1 + shared)
        if shared and k:
            code, closing = self._tail(self.render, k)
            if code == traced.code_at(before) and rest.startswith(closing) and shared > len(closing):
                return before + 1 + shared
        raise Refused(UNPROVED, f"message {k + 1} (assistant): where its tool call starts cannot be proved")

    def _tail(self, render: Render, number: int) -> tuple[int | None, str]:
        """The last code in the rendering of the first messages, -1 where there is none, and what the template wrote
        after it; None where it refuses them, as some refuse a conversation without a user's message."""
        traced = self.traced
        try:
            text = render(traced.coded[:number])
        except UserError:
            return None, ""
        for place in range(len(text) - 1, -1, -1):
            code = ord(text[place]) - traced.base
            if 0 <= code < len(traced.offsets) and text.find(text[place]) == place:
                return code, text[place + 1 :]
        return -1, text

    def end(self, k: int, last: int, limit: int) -> tuple[int, bool]:
        """The token after the last one of message `k`, whose `last` letter stands before the first one of a later
        message, at `limit`; and whether that token is a stop token."""
        traced, tokens = self.traced, self.tokens
        ids, is_added = tokens.ids, tokens.tokenizer.is_added
        calls = traced.field_at(last).kind == "call"
        end = last + 1 + (0 if calls else traced.untraced_after(last))
        if (stopped := tokens.after_stop(end, limit)) is not None:
            return stopped, True
        # What the template writes after the message where the conversation ends with it, as far as the text has it too.
        code, closing = self._tail(self.render, k + 1)
        shared = common_prefix(traced.text[last + 1 :], closing) if code == traced.code_at(last) else 0
        closed, first = max(end, last + 1 + shared), tokens.first_from(end)
        inside = range(first, tokens.first_from(closed))
        added = [i for i in inside if is_added(ids[i]) and tokens.offsets[i, 1] <= closed]
        stop = [i for i in added if ids[i] in tokens.tokenizer.stop_ids]
        if not calls:  # the added tokens that follow each other, after white space at most
            after = next((i for i in inside if not tokens.is_blank(i)), first)
            added = [i for n, i in enumerate(added) if i == after + n]
            others = first < len(ids) and is_added(ids[first]) and tokens.offsets[first, 0] < limit
            if not added and others and any(map(is_added, tokens.tokenizer.encode(closing)[:1])):
                added = [first]  # history's turns end in another token than the last one, as gpt-oss's do
            added = added or stop[:1]
        elif stop:
            added = stop[:1]
        if added:
            return added[-1] + 1, True
        return tokens.first_from(end + (len(traced.text[end:closed].rstrip()) if calls else 0)), False


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix of two texts or lists."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ("text", "image", "thinking")
"""Types of a content's parts."""
PROMPT = -1
"""In the place of the trained messages: that the conversation is a prompt."""
OUTLINES = 1000
"""Shapes of conversations that are remembered."""


@dataclass(frozen=True, eq=False)
class Rendered:
    """A row as tokens; it unpacks as tokens and mask."""

    tokens: np.ndarray
    """`[T]` int32 token ids."""
    mask: np.ndarray
    """`[T]` bool: which of them are trained."""
    notes: tuple[Note, ...] = ()
    """What the chat template left out of the row."""
    weights: np.ndarray | None = None
    """`[T]` float32: by what each token counts in the loss; None where they all count alike."""
    teacher: TeacherView | None = None
    """How a teacher reads the row; None where that is as it is, or nobody teaches."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.tokens, self.mask))


def render_chat(
    messages: Sequence[Message], tokenizer: Tokenizer, trained_from: int = 0, **template_kwargs: Any
) -> Rendered:
    """Tokens of a conversation and the mask of those in the assistant's turns.

    A token that begins before the assistant's turn (its text merged with the prompt's end) is not trained: inference
    never produces it. The stop token that ends the turn is.

    Args:
        messages: `role` and `content` (a string, or parts), `reasoning_content`, `tool_calls`, and others as the
            template reads them. An assistant's message with `weight: 0` or `train: false` is context.
        tokenizer: its chat template is the only authority on the format.
        trained_from: index of the first message that may be trained; the ones before are context.
        template_kwargs: variables of the template (`tools`, `enable_thinking`, ...).

    Raises:
        UserError: there is no template, a message is malformed, or the template refuses the conversation.
        Refused: the template does not write a message, or a turn's bounds cannot be proved.
    """
    prepared = _prepared(messages, tokenizer)
    trained = [
        k
        for k, message in enumerate(messages)
        if k >= trained_from and message["role"] == "assistant"
        # OpenAI's `weight` and Axolotl's `train` make context of an assistant's message.
        if message.get("weight") != 0 and message.get("train") is not False
    ]
    render = partial(_render, tokenizer=tokenizer, template_kwargs=template_kwargs)
    text = render(prepared)
    tokens = Tokens(text, tokenizer)
    key = None if tokenizer.marks_generation else Outline.key(prepared, template_kwargs, trained)
    outline = tokenizer.outlines.get(key)
    if outline is not None and (proved := outline.bounds(prepared, text)) is not None:
        bounds, thoughts = proved
        mask = np.zeros(len(tokens.ids), bool)
        for k, start in outline.starts.items():
            (begin, end), (limit, _) = bounds[k], (*bounds, (len(text), 0))[k + 1]
            if (stopped := tokens.after_stop(end, limit)) is None:
                break  # the outline does not prove where the turn ends
            mask[tokens.first_from(begin - start) : stopped] = True
        else:
            return Rendered(np.asarray(tokens.ids, np.int32), mask, tuple(Note(THOUGHTS, x) for x in thoughts))
    traced, notes = _traced(prepared, text, render)
    prompt = partial(_render, tokenizer=tokenizer, template_kwargs=template_kwargs, add_generation_prompt=True)
    turns = Turns(prepared, traced, tokens, prompt, render)
    if tokenizer.marks_generation:
        spans = turns.marked(tokenizer.marked_text(prepared, template_kwargs, False, True)[1], trained)
    else:
        spans = [turns.turn(k) if len(traced.places_of(k, k + 1)) else turns.empty_turn(k) for k in trained]
    mask = np.zeros(len(tokens.ids), bool)
    for turn in spans:
        if turn is None:
            notes.append(Note(EMPTY_TURN, ""))
            continue
        mask[turn.tokens] = True
        if mask[turn.tokens].any() and not turn.stops:
            notes.append(Note(NO_STOP, tokenizer.decode(tokens.ids[turn.tokens])))
    # The characters within the tokens that are trained.
    starts, stops = (np.bincount(x, minlength=len(text) + 1) for x in tokens.offsets[mask].T)
    codes = traced.codes[np.cumsum(starts - stops)[: len(text)] > 0]
    for message in np.flatnonzero(np.bincount(traced.messages[codes[codes >= 0]])).tolist():
        if message not in trained:
            raise Refused(UNPROVED, f"message {message + 1} would be trained: an assistant's turn holds its text too")
    begins = {k: turn.begin for k, turn in zip(trained, spans, strict=False) if turn is not None}
    _remember(tokenizer, key, notes, traced, begins)
    return Rendered(np.asarray(tokens.ids, np.int32), mask, tuple(notes))


def render_prompt(messages: Sequence[Message], tokenizer: Tokenizer, **template_kwargs: Any) -> Rendered:
    """Tokens of a conversation that the assistant is to continue, none of them trained.

    Raises:
        UserError, Refused: as `render_chat`.
    """
    prepared = _prepared(messages, tokenizer)
    render = partial(_render, tokenizer=tokenizer, template_kwargs=template_kwargs, add_generation_prompt=True)
    text, notes = render(prepared), list[Note]()
    key = Outline.key(prepared, template_kwargs, (PROMPT,))
    outline = tokenizer.outlines.get(key)
    if outline is not None and (proved := outline.bounds(prepared, text)) is not None:
        notes.extend(Note(THOUGHTS, thought) for thought in proved[1])
    else:
        traced, notes = _traced(prepared, text, render)
        _remember(tokenizer, key, notes, traced, {})
    ids = tokenizer.encode(text)
    return Rendered(np.asarray(ids, np.int32), np.zeros(len(ids), bool), tuple(notes))


def render_continuation(
    messages: Sequence[Message],
    answers: Sequence[Message],
    tokenizer: Tokenizer,
    stopped: bool,
    **template_kwargs: Any,
) -> np.ndarray:
    """Tokens that follow an assistant's turn, `[T]` int32: its end, the answers to it, the start of its next turn.

    They are what the template writes after a turn that says `x`, or that is the assistant's message with which the
    answers begin: the sampled turn itself keeps the tokens that were sampled. Some templates write the result of a tool
    only after the message that calls it; one that refuses several calls in a message is shown the first of them.

    Args:
        messages: the conversation that the assistant's turn answered.
        answers: messages that answer the turn, usually of role `user` or `tool`; before them an assistant's message
            with `tool_calls` where the turn called tools.
        tokenizer: its chat template is the only authority on the format.
        stopped: whether the turn's tokens end with a stop token, which is then not repeated.
        template_kwargs: variables of the template.

    Raises:
        UserError, Refused: as `render_chat`.
    """
    turn, answers = {"role": "assistant", "content": "x"}, list(answers)
    if answers and answers[0].get("role") == "assistant":
        turn = dict(answers.pop(0))
    conversation, k = [*messages, turn, *answers], len(messages)
    prepared = _prepared(conversation, tokenizer)
    whole = partial(_render, tokenizer=tokenizer, template_kwargs=template_kwargs)
    render = partial(whole, add_generation_prompt=True)
    try:
        text = render(prepared)
        traced, _ = _traced(prepared, text, render)
    except UserError:
        if len(calls := turn.get("tool_calls") or ()) < 2:
            raise
        answers = [{**turn, "tool_calls": calls[:1]}, *answers]
        return render_continuation(messages, answers, tokenizer, stopped, **template_kwargs)
    places, later = traced.places_of(k, k + 1), traced.places_of(k + 1, len(conversation))
    if "tool_calls" in turn:
        tokens, last = Tokens(text, tokenizer), int(places.max())
        end, stops = Turns(prepared, traced, tokens, render, whole).end(k, last, int(later.min(initial=len(text))))
        ids = tokens.ids[end - stops :]
    else:
        ids = tokenizer.encode(text[places[-1] + 1 :])
    first = next((i for i, token in enumerate(ids) if tokenizer.is_added(token)), None)
    if stopped and first is not None and ids[first] in tokenizer.stop_ids:
        ids = ids[first + 1 :]
    return np.asarray(ids, np.int32)


def with_template(tokenizer: Tokenizer, spec: str, key: str = "data.chat_template") -> Tokenizer:
    """The tokenizer with the chat template that a key of the recipe names.

    Args:
        tokenizer: its own template is replaced.
        spec: `gemma`, `gemma4`, `llama3`, `chatml`, or a .jinja file.
        key: the recipe's key, for messages.

    Raises:
        UserError: there is no such name or file, or the tokenizer lacks the format's marker tokens.
    """
    if spec in MARKERS:
        missing = [marker for marker in MARKERS[spec] if not tokenizer.has_token(marker)]
        if missing:
            raise UserError(
                f"{key} is {spec!r}, but {tokenizer.name} has no token {', '.join(missing)}: "
                "choose the format of the model's family, or a .jinja file that uses the tokens it has"
            )
    return tokenizer.replace_template(template_text(spec, key))


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Id of the token that a trained turn of the assistant ends with; None where the chat template writes none, and
    without a template."""
    if tokenizer.chat_template is None:
        return None
    try:
        turn = render_chat([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], tokenizer)
    except UserError:  # it refuses a conversation of two turns
        return None
    stops = not any(note.rule == NO_STOP for note in turn.notes)
    return next(filter(tokenizer.is_added, reversed(turn.tokens[turn.mask].tolist())), None) if stops else None


def check_messages(messages: Any) -> None:
    """Refuses a value that is not a list of valid messages, which templates would render as nonsense.

    Raises:
        UserError: the message says which message is wrong and why.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError(f"messages is {messages!r:.80}, not a list of at least one message")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise UserError(f"message {i} is {message!r:.80}, not an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            hint = " Did you mean 'assistant'?" if role in ("model", "gpt", "bot") else nearest(str(role), ROLES)
            raise UserError(f"message {i} has the role {role!r:.80}, not one of {', '.join(ROLES)}.{hint}")
        if fault := _fault(message, role):
            raise UserError(f"message {i} ({role}) {fault}")


def _fault(message: Mapping[str, Any], role: str) -> str | None:
    """What in a message does not fit its role."""
    content, calls = message.get("content"), message.get("tool_calls")
    if message.get("function_call") is not None:
        return 'has a function_call: write tool_calls: [{"function": {"name": ..., "arguments": ...}}]'
    if calls and role != "assistant":
        return "has tool_calls, which only an assistant's message has"
    if content is None and not calls:
        empty = " and tool_calls is empty" if calls is not None else f"; its keys are {', '.join(map(str, message))}"
        return f"has no content{empty}"
    if content is not None and not isinstance(content, str):
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            return f"has the content {content!r:.80}, not a string or a list of parts"
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in PARTS:
                return f"has the part {part!r:.80}, not an object whose type is one of {', '.join(PARTS)}"
            if kind != "image" and not isinstance(part.get(kind), str):
                return f"has a part of type {kind!r} whose {kind!r} is {part.get(kind)!r:.80}, not a string"
    thoughts = [message[name] for name in REASONING if message.get(name) is not None]
    if any(not isinstance(thought, str) or thought != thoughts[0] for thought in thoughts):
        return f"has thoughts that are no string, or differ: give one of {', '.join(REASONING)}"
    weight, train = message.get("weight"), message.get("train")
    if role != "assistant" and (weight or train):
        return "has a weight of its own, but only the assistant's messages are trained"
    if weight is not None and weight not in (0, 1):
        return f"has the weight {weight!r:.80}, not 0 or 1; a row's own weight is a column of the row"
    if train is not None and not isinstance(train, bool):
        return f"has train {train!r:.80}, not true or false"
    return None


def _prepared(messages: Sequence[Message], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The messages as templates read them: no nulls, text parts as a string, calls as objects with a function; raises
    UserError where a message is malformed."""
    check_messages(messages)
    prepared = []
    for i, message in enumerate(messages, 1):
        plain = {key: x for key, x in message.items() if x is not None and key not in ("weight", "train")}
        content, calls = plain.get("content"), plain.pop("tool_calls", None)
        if content is not None and not isinstance(content, str):
            texts = [part["text"] for part in content if part["type"] == "text"]
            plain["content"] = "".join(texts) if len(texts) == len(content) else list(content)
        if calls:
            try:
                calls = json.loads(calls) if isinstance(calls, str) else calls
                plain["tool_calls"] = [_prepared_call(call, tokenizer) for call in calls]
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"message {i} has the tool_calls {calls!r:.80}: {error}") from error
        prepared.append(plain)
    return prepared


def _prepared_call(call: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """A tool call as `{"function": {"name", "arguments"}, ...}`, its arguments as the template reads them."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
        raise ValueError(f"{call!r:.80} is not an object with a function")
    function = call.get("function", call)
    if not isinstance(name := function.get("name"), str):
        raise ValueError(f"the function's name is {name!r:.80}, not a string")
    text = arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"the arguments of {name} are {text!r:.80}, which is not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {name} are {arguments!r:.80}, not an object")
    if tokenizer.reads_arguments_as_text:
        arguments = text if isinstance(text, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "type": "function",
        **(call if "function" in call else {}),
        "function": {**function, "arguments": arguments},
    }


def _render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    """The template's text; an error inside of the template is raised as a UserError."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise UserError(
            f"{tokenizer.name} has no chat template: set data.chat_template to gemma, gemma4, llama3, chatml or a "
            ".jinja file, or give rows of prompt and completion strings, or text"
        )
    try:
        return tokenizer.marked_text(messages, template_kwargs, add_generation_prompt)[0]
    except (TemplateError, TypeError, ValueError) as error:  # a template may add a string to a list of parts
        raise UserError(f"the chat template of {tokenizer.name} refuses the conversation: {error}") from error


def _remember(
    tokenizer: Tokenizer, key: Hashable | None, notes: Sequence[Note], traced: Traced, begins: Mapping[int, int]
) -> None:
    """Keeps the outline of a conversation whose shape has one, for others of that shape."""
    outlined = key is not None and all(note.rule == THOUGHTS for note in notes)
    outline = Outline.of(traced, begins) if outlined and len(tokenizer.outlines) < OUTLINES else None
    if outline is not None:
        tokenizer.outlines[key] = outline


def _traced(messages: Sequence[Message], text: str, render: Render) -> tuple[Traced, list[Note]]:
    """The traced text, and what the template does not write of the assistant's messages; raises Refused where it
    decides by what the messages say, or leaves out something else, which no rule allows."""
    if (traced := trace(messages, text, render)) is None:
        raise Refused(
            UNPROVED,
            "the chat template writes other text around other words, so that the bounds of turns cannot be proved: use "
            "a template with {% generation %} marks, or leave the row out",
        )
    notes = []
    for field in traced.fields:
        written = traced.places[field.begin : field.end] >= 0
        role, number = messages[field.message]["role"], field.message + 1
        if written.all():
            if role == "assistant" and field.kind != "call" and not traced.is_whole(field):
                notes.append(Note(REWRITTEN, field.text))
            continue
        missing = np.flatnonzero(~written)
        lost = field.text[: traced.offsets[field.begin + missing[-1]] + 1].strip()
        if role == "assistant" and (field.kind == "reasoning" or (field.kind == "content" and written[-1])):
            notes.append(Note(THOUGHTS, lost))
        elif role == "assistant" and field.kind == "content" and "tool_calls" in messages[field.message]:
            notes.append(Note(BEFORE_CALL, lost))
        else:
            remedy = (
                "write it as the system's, or use another template"
                if role == "developer"
                else "use a template that writes it (data.chat_template), or leave the row out"
            )
            what = "a tool call" if field.kind == "call" else "its content"
            raise Refused(
                NOT_WRITTEN,
                f"message {number} ({role}): the chat template does not write {what}, {lost!r:.80}: {remedy}",
            )
    return traced, notes
