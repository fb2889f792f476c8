"""Where the assistant's turns begin and end in a traced text, in characters and then in tokens.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
                     ^^ owner 0                           ^^^^^^ owner 1
                       |---- the prompt's end -----------|      |- closing -|

A turn starts where the prompt that inference would send ends, and ends with its stop token. Both are the template's own
text, compared letter by letter with what it writes where the conversation ends there, between two letters whose messages
are proved. Nothing is searched in the text, and no turn reaches a letter of another message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tunix.data.accounting import UNPROVED, Refused
from tunix.data.tokenizer import Tokenizer
from tunix.data.traced import Message, Traced
from tunix.errors import UserError


@dataclass(frozen=True)
class Turn:
    """The tokens of an assistant's turn."""

    tokens: slice
    """From its first token to its last one, e.g. `slice(12, 20)`; empty where the template leaves an empty turn out."""
    stops: bool
    """Whether the last one ends the turn in inference too."""


class Turns:
    """The turns of a conversation."""

    def __init__(
        self,
        traced: Traced,
        tokenizer: Tokenizer,
        ids: list[int],
        offsets: np.ndarray,
        prompt: Callable[[Sequence[Message]], str],
        render: Callable[[Sequence[Message]], str],
    ) -> None:
        """Keeps what the turns are read from.

        Args:
            traced: the conversation.
            tokenizer: knows added tokens and stop tokens.
            ids: of the text's tokens.
            offsets: `[T 2]` the characters of each token.
            prompt: renders messages that the assistant is to continue.
            render: renders whole messages.
        """
        self._traced, self._tokenizer = traced, tokenizer
        self._ids, self._offsets = ids, offsets
        self._prompt, self._render = prompt, render

    def turn(self, k: int) -> Turn:
        """The turn of message `k`, an assistant's.

        Raises:
            Refused: its bounds cannot be proved.
        """
        traced = self._traced
        span, before, limit = traced.span(k), traced.last_before(k), traced.first_after(k)
        if span is not None and not before < span[0] <= span[1] < limit:
            raise Refused(UNPROVED, f"message {k + 1} (assistant): the chat template mixes its text with other messages'")
        start = self._start(k, span, before)
        if start is None or start > limit:
            return Turn(slice(0, 0), stops=False)
        end, stops = self._end(k, start, span, before, limit)
        return Turn(slice(self._first_token(start), end), stops)

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
            stops = tokens.stop > tokens.start and self._tokenizer.is_added(self._ids[tokens.stop - 1])
            turns.append(Turn(tokens, stops))
        return turns

    def _start(self, k: int, span: tuple[int, int] | None, before: int) -> int | None:
        """The character where message `k` starts; None where an empty one is not written.

        Where the text does not go on as the prompt of inference does (the template opens a thought in prompts only), it
        is the first character of what is said; for calls and empty turns, the end of what the text has of the prompt.
        """
        traced = self._traced
        rest = traced.text[before + 1 :]
        try:
            code, prompt = traced.tail(self._prompt(traced.coded[:k]))
        except UserError:  # some templates refuse a conversation without a user's message
            code, prompt = None, ""
        continues = code == traced.code_at(before)
        if continues and rest.startswith(prompt) and (span is None or before + len(prompt) < span[0]):
            return before + 1 + len(prompt)
        if span is not None and traced.field_at(span[0]).kind != "call":
            return span[0] - traced.untraced_before(span[0])
        if continues and k:
            code, closing = traced.tail(self._render(traced.coded[:k]))
            shared = common_prefix(rest, prompt)
            if code == traced.code_at(before) and rest.startswith(closing) and shared > len(closing):
                # `<think>` and `<tool_call>` share no `<t`: a marker is there as a whole or not at all.
                while shared > len(closing) and not (
                    rest[shared - 1].isspace() or rest[shared - 1] in ">]" or rest[shared] in "<["
                ):
                    shared -= 1
                return before + 1 + shared
        if span is None:
            return None
        raise Refused(UNPROVED, f"message {k + 1} (assistant): where its tool call starts cannot be proved")

    def _end(self, k: int, start: int, span: tuple[int, int] | None, before: int, limit: int) -> tuple[int, bool]:
        """The token after the last one of message `k`, and whether that one is a stop token."""
        traced, ids, offsets = self._traced, self._ids, self._offsets
        last = before if span is None else span[1]
        says = span is not None and traced.field_at(last).kind != "call"
        end = start if span is None else last + 1
        if says:
            end += traced.untraced_after(last)
        first = i = self._first_token(end)
        while i < len(ids) and self._is_blank(i):
            i += 1
        if i < len(ids) and ids[i] in self._tokenizer.stop_ids and offsets[i, 0] < limit:
            return i + 1, True
        # What the template writes after the message where the conversation ends with it, as far as the text has it too.
        code, closing = traced.tail(self._render(traced.coded[: k + 1]))
        shared = common_prefix(traced.text[last + 1 :], closing) if code == traced.code_at(last) else 0
        closed = max(end, last + 1 + shared)
        inside = [i for i in range(first, len(ids)) if offsets[i, 1] <= closed]
        added = [i for i in inside if self._tokenizer.is_added(ids[i])]
        if says:  # the added tokens that follow without a gap
            added = [i for n, i in enumerate(added) if i == first + n]
            if not added and first < len(ids) and offsets[first, 0] < limit and self._are_added(ids[first], closing):
                added = [first]  # history's turns end in another token than the last one, as gpt-oss's do
        elif stop := [i for i in added if ids[i] in self._tokenizer.stop_ids]:
            added = stop[:1]
        if added:
            return added[-1] + 1, True
        if not says and span is not None:
            end += len(traced.text[end:closed].rstrip())
        return self._first_token(end), False

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
