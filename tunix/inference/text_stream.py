"""Decodes tokens as they arrive, and ends the text at a stop string."""

from collections.abc import Iterable

import numpy as np

from tunix.data.tokenizer import Tokenizer


class TextStream:
    """Decodes tokens as they arrive: whole characters only, and nothing from a stop string on."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = ()):
        self.tokens: list[int] = []
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._emitted = 0

    @property
    def text(self) -> str:
        """The text so far, without special tokens and up to a stop string."""
        return until_stop(self._tokenizer.decode(self.tokens, skip_special=True), self._stops)

    def feed(self, tokens: Iterable[int | np.integer]) -> str:
        """Adds tokens; returns the new text that no later token can change."""
        self.tokens += [int(token) for token in tokens]
        # An incomplete character decodes as U+FFFD until its bytes arrive.
        text = self.text.rstrip("\ufffd")
        held = max(
            (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
        return self._new(text[: len(text) - held])

    def finish(self) -> str:
        """The rest of the text, which `feed` held back."""
        return self._new(self.text)

    def _new(self, text: str) -> str:
        new = text[self._emitted :]
        self._emitted += len(new)
        return new


def until_stop(text: str, stops: Iterable[str]) -> str:
    """The text before the first stop string in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
