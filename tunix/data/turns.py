r"""Where the assistant's turns begin and end in a traced text, in characters and then in tokens.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
                      ^^ message 0                           ^^^^^^ message 1

A turn starts where the prompt that inference would send ends, and ends with its stop token. Both are the template's own
text, compared letter by letter with what it writes where the conversation ends there, between two letters whose messages
are proved. Nothing is searched in the text, and no turn reaches a letter of another message.
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
class Turn:
    """The tokens of an assistant's turn."""

    tokens: slice
    """From its first token to its last one, e.g. `slice(12, 20)`."""
    stops: bool
    """Whether the last one ends the turn in inference too."""


class Turns:
    """The turns of a conversation."""

    def __init__(
        self,
        messages: Sequence[Message],
        traced: Traced,
        tokenizer: Tokenizer,
        ids: list[int],
        offsets: np.ndarray,
        prompt: Render,
        render: Render,
    ) -> None:
        """Keeps what the turns are read from.

        Args:
            messages: of the conversation.
            traced: their text.
            tokenizer: knows added tokens and stop tokens.
            ids: of the text's tokens.
            offsets: `[T 2]` the characters of each token.
            prompt: renders messages that the assistant is to continue.
            render: renders whole messages.
        """
        self._messages, self._traced, self._tokenizer = messages, traced, tokenizer
        self._ids, self._offsets = ids, offsets
        self._prompt, self._render = prompt, render

    def turn(self, k: int) -> Turn:
        """The turn of message `k`, an assistant's with text.

        Raises:
            Refused: its bounds cannot be proved.
        """
        traced = self._traced
        first, last = traced.span(k)
        before, limit = traced.last_before(k), traced.first_after(k)
        if not before < first <= last < limit:
            raise Refused(UNPROVED, f"message {k + 1} (assistant): the chat template mixes its text with other messages'")
        start = self._start(k, first, before)
        end, stops = self._end(k, last, limit)
        return Turn(slice(self._first_token(start), end), stops)

    def empty_turn(self, k: int) -> Turn | None:
        """The turn of message `k`, an assistant's without text: that of a turn that says `x`, without the `x`.

        Returns:
            None where the template writes another text around nothing than around something.
        """
        plain = self._messages[k]
        filled = [*self._messages[:k], {**plain, "content": "x"}, *self._messages[k + 1 :]]
        if (traced := trace(filled, self._render)) is None:
            return None
        place, _ = traced.span(k)
        if traced.text[:place] + traced.text[place + 1 :] != self._traced.text:
            return None
        ids, offsets = self._tokenizer.encode_with_offsets(traced.text)
        turn = Turns(filled, traced, self._tokenizer, ids, offsets, self._prompt, self._render).turn(k)
        begin, end = int(offsets[turn.tokens.start, 0]), int(offsets[turn.tokens.stop - 1, 1])
        return Turn(slice(self._first_token(begin), self._first_token(end - 1)), turn.stops)

    def marked(self, spans: Sequence[tuple[int, int]], trained: Sequence[int]) -> list[Turn]:
        """The turns between a template's generation marks, which are in characters, of the messages that are trained.

        Raises:
            Refused: a mark holds text of a message that is not the assistant's, or of one that is trained and one that is not.
        """
        turns = []
        for begin, end in spans:
            owners = set(self._traced.owners[begin:end].tolist()) - {-1}
            # A turn without a letter is that of the message after the last one before it.
            owners = owners or {1 + int(self._traced.owners[:begin].max(initial=-1))}
            if owners.isdisjoint(trained):
                continue
            if not owners.issubset(trained):
                raise Refused(UNPROVED, "the chat template's generation marks hold text of a message that is not trained")
            tokens = slice(self._first_token(begin), self._first_token(end))
            said = [i for i in range(tokens.start, tokens.stop) if not self._is_blank(i)]
            turns.append(Turn(tokens, bool(said) and self._tokenizer.is_added(self._ids[said[-1]])))
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
        try:
            code, prompt = traced.tail(self._prompt(traced.coded[:k]))
        except UserError:  # some templates refuse a conversation without a user's message
            code, prompt = None, ""
        continues = code == traced.code_at(before)
        if continues and rest.startswith(prompt) and before + len(prompt) < first:
            return before + 1 + len(prompt)
        shared = common_prefix(rest, prompt) if continues else 0
        # `<think>` and `<tool_call>` share no `<t`: a marker is there as a whole or not at all.
        while shared and not (rest[shared - 1].isspace() or rest[shared - 1] in ">]" or rest[shared] in "<["):
            shared -= 1
        if traced.field_at(first).kind != "call":
            return max(first - traced.untraced_before(first), before + 1 + shared)
        if shared and k:
            code, closing = traced.tail(self._render(traced.coded[:k]))
            if code == traced.code_at(before) and rest.startswith(closing) and shared > len(closing):
                return before + 1 + shared
        raise Refused(UNPROVED, f"message {k + 1} (assistant): where its tool call starts cannot be proved")

    def _end(self, k: int, last: int, limit: int) -> tuple[int, bool]:
        """The token after the last one of message `k`, and whether that one is a stop token.

        Args:
            k: the message.
            last: where its last letter stands.
            limit: where the first letter of a later message stands.
        """
        traced, ids, offsets = self._traced, self._ids, self._offsets
        calls = traced.field_at(last).kind == "call"
        end = last + 1 + (0 if calls else traced.untraced_after(last))
        first = i = self._first_token(end)
        while i < len(ids) and self._is_blank(i):
            i += 1
        if i < len(ids) and ids[i] in self._tokenizer.stop_ids and offsets[i, 0] < limit:
            return i + 1, True
        # What the template writes after the message where the conversation ends with it, as far as the text has it too.
        code, closing = traced.tail(self._render(traced.coded[: k + 1]))
        shared = common_prefix(traced.text[last + 1 :], closing) if code == traced.code_at(last) else 0
        closed = max(end, last + 1 + shared)
        inside = range(first, self._first_token(closed))
        added = [i for i in inside if self._tokenizer.is_added(ids[i]) and offsets[i, 1] <= closed]
        if not calls:  # the added tokens that follow without a gap
            added = [i for n, i in enumerate(added) if i == first + n]
            if not added and first < len(ids) and offsets[first, 0] < limit and self._are_added(ids[first], closing):
                added = [first]  # history's turns end in another token than the last one, as gpt-oss's do
        elif stop := [i for i in added if ids[i] in self._tokenizer.stop_ids]:
            added = stop[:1]
        if added:
            return added[-1] + 1, True
        return self._first_token(end + (len(traced.text[end:closed].rstrip()) if calls else 0)), False

    def _first_token(self, place: int) -> int:
        """The first token that begins at a character or after it."""
        return int(np.searchsorted(self._offsets[:, 0], place))

    def _are_added(self, token: int, text: str) -> bool:
        """Whether a token and the first one of a text are both added tokens."""
        return self._tokenizer.is_added(token) and any(map(self._tokenizer.is_added, self._tokenizer.encode(text)[:1]))

    def _is_blank(self, token: int) -> bool:
        added = self._tokenizer.is_added(self._ids[token])
        return not added and self._traced.text[slice(*self._offsets[token])].isspace()


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
