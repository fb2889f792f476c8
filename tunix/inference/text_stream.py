"""Text of tokens that come in pieces, and where a stop string ends it."""

from collections.abc import Iterable

import numpy as np

from tunix.data.tokenizer import Tokenizer


class TextStream:
    """Text of tokens that come in pieces: whole characters only, and nothing of a stop string or behind it."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = ()):
        self.tokens: list[int] = []
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._said = 0

    @property
    def text(self) -> str:
        """All of it so far; special tokens and what follows a stop string left out."""
        return until_stop(self._tokenizer.decode(self.tokens, skip_special=True), self._stops)

    def feed(self, tokens: Iterable[int | np.integer]) -> str:
        """The text that is settled by further tokens."""
        self.tokens += [int(token) for token in tokens]
        # A character of which some bytes are missing reads as U+FFFD until they come.
        text = self.text.rstrip("\ufffd")
        held = max(
            (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
        return self._new(text[: len(text) - held])

    def finish(self) -> str:
        """What was held back."""
        return self._new(self.text)

    def _new(self, text: str) -> str:
        new = text[self._said :]
        self._said += len(new)
        return new


def until_stop(text: str, stops: Iterable[str]) -> str:
    """The text before the first of the stop strings."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
