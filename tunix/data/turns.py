r"""Where the assistant's turns begin and end in a traced text, in characters and then in tokens.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
                      ^^ message 0                           ^^^^^^ message 1

A turn starts where the prompt that inference would send ends, and ends with its stop token. Both are the template's own
text, compared with what it writes where the conversation ends there, between two letters whose messages are proved.
Nothing is searched in the text, and no turn reaches a letter of another message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunix.data.accounting import UNPROVED, Refused
from tunix.data.tokenizer import Tokenizer
from tunix.data.traced import Message, Render, Traced, trace
from tunix.errors import UserError


@dataclass(frozen=True)
class Tokens:
    """A text as tokens."""

    text: str
    """What was tokenized."""
    ids: list[int]
    """T ids."""
    offsets: np.ndarray
    """`[T 2]` the first and end character of each."""
    tokenizer: Tokenizer
    """What made them."""

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> Tokens:
        """The tokens of a text."""
        return cls(text, *tokenizer.encode_with_offsets(text), tokenizer)

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


class Turns:
    """The turns of a conversation."""

    def __init__(
        self,
        messages: Sequence[Message],
        traced: Traced,
        tokens: Tokens,
        prompt: Render,
        render: Render,
    ) -> None:
        """Keeps what the turns are read from.

        Args:
            messages: of the conversation.
            traced: their text.
            tokens: of that text.
            prompt: renders messages that the assistant is to continue.
            render: renders whole messages.
        """
        self._messages, self._traced, self._tokens = messages, traced, tokens
        self._prompt, self._render = prompt, render

    def turn(self, k: int) -> Turn:
        """The turn of message `k`, an assistant's with text.

        Raises:
            Refused: its bounds cannot be proved.
        """
        traced = self._traced
        places, earlier = traced.places_of(k, k + 1), traced.places_of(0, k)
        later = traced.places_of(k + 1, len(self._messages))
        first, last = int(places.min()), int(places.max())
        before, limit = int(earlier.max(initial=-1)), int(later.min(initial=len(traced.text)))
        if not before < first <= last < limit:
            raise Refused(
                UNPROVED, f"message {k + 1} (assistant): the chat template mixes its text with that of others"
            )
        start = self._start(k, first, before)
        end, stops = self._end(k, last, limit)
        return Turn(slice(self._tokens.first_from(start), end), stops, start)

    def empty_turn(self, k: int) -> Turn | None:
        """The turn of message `k`, an assistant's without text: that of a turn that says `x`, without the `x`.

        Returns:
            None where the template writes another text around nothing than around something.
        """
        filled = [*self._messages[:k], {**self._messages[k], "content": "x"}, *self._messages[k + 1 :]]
        text = self._render(filled)
        if (traced := trace(filled, text, self._render)) is None:
            return None
        place = int(traced.places_of(k, k + 1).max(initial=-1))
        if place < 0 or text[:place] + text[place + 1 :] != self._traced.text:
            return None
        tokens = Tokens.of(text, self._tokens.tokenizer)
        turn = Turns(filled, traced, tokens, self._prompt, self._render).turn(k)
        end = int(tokens.offsets[turn.tokens.stop - 1, 1]) - 1
        return Turn(slice(self._tokens.first_from(turn.begin), self._tokens.first_from(end)), turn.stops, turn.begin)

    def marked(self, spans: Sequence[tuple[int, int]], trained: Sequence[int]) -> list[Turn]:
        """The turns between a template's generation marks, which are in characters, of the messages that are trained.

        Raises:
            Refused: a mark holds text of messages that are trained and of others.
        """
        traced, turns = self._traced, []
        for begin, end in spans:
            inside = np.unique(traced.messages[traced.codes[begin:end][traced.codes[begin:end] >= 0]])
            # A turn without a letter is that of the message after the last one before it.
            before = traced.codes[:begin].max(initial=-1)
            owners = set(inside.tolist()) or {0 if before < 0 else 1 + int(traced.messages[before])}
            if owners.isdisjoint(trained):
                continue
            if not owners.issubset(trained):
                raise Refused(UNPROVED, "a generation mark of the chat template holds text that is not trained")
            tokens = slice(self._tokens.first_from(begin), self._tokens.first_from(end))
            said = [i for i in range(tokens.start, tokens.stop) if not self._tokens.is_blank(i)]
            stops = bool(said) and self._tokens.tokenizer.is_added(self._tokens.ids[said[-1]])
            turns.append(Turn(tokens, stops, begin))
        return turns

    def _start(self, k: int, first: int, before: int) -> int:
        """The character where message `k` starts.

        Where the text does not go on as the prompt of inference does (the template opens a thought in prompts only), it
        is the first character of what is said; for calls, the end of what the text has of the prompt.

        Args:
            k: the message.
            first: where its first letter stands.
            before: where the last letter of an earlier message stands, -1 where there is none.
        """
        traced = self._traced
        rest = traced.text[before + 1 :]
        code, prompt = self._tail(self._prompt, k)
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
            code, closing = self._tail(self._render, k)
            if code == traced.code_at(before) and rest.startswith(closing) and shared > len(closing):
                return before + 1 + shared
        raise Refused(UNPROVED, f"message {k + 1} (assistant): where its tool call starts cannot be proved")

    def _tail(self, render: Render, number: int) -> tuple[int | None, str]:
        """The last code in the rendering of the first messages, and what follows it; none where the template refuses
        them, as some refuse a conversation without a user's message."""
        try:
            return self._traced.tail(render(self._traced.coded[:number]))
        except UserError:
            return None, ""

    def _end(self, k: int, last: int, limit: int) -> tuple[int, bool]:
        """The token after the last one of message `k`, and whether that one is a stop token.

        Args:
            k: the message.
            last: where its last letter stands.
            limit: where the first letter of a later message stands.
        """
        traced, tokens = self._traced, self._tokens
        ids, is_added = tokens.ids, tokens.tokenizer.is_added
        calls = traced.field_at(last).kind == "call"
        end = last + 1 + (0 if calls else traced.untraced_after(last))
        if (stopped := tokens.after_stop(end, limit)) is not None:
            return stopped, True
        # What the template writes after the message where the conversation ends with it, as far as the text has it too.
        code, closing = self._tail(self._render, k + 1)
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


def common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix of two texts, by bisection: comparing slices runs in C."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
