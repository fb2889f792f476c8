"""One request on its way through the engine: its turns, the stop strings that end them, and its completion.

Stop strings are looked for in the tail of a turn's text, so that a token costs the same however long the turn is. The
first token that completes one ends the turn, so that the number that arrives at once changes nothing; tokens that were
sampled after it are dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tunix.errors import UserError
from tunix.models.config import VisionConfig
from tunix.rollout.engine.experts import Known, of_sequence
from tunix.types import Completion, Pictures, Request, TokenScores

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""
SPARE = 8
"""Tokens by which the tail of a text is longer than a stop string has bytes: characters of several tokens, and the
spaces that a tokenizer takes off the first one."""


def check_prompt(number: int, prompt: np.ndarray, length: int, vocab_size: int) -> None:
    """Checks that the prompt `[T]` of a request, whose number is for the message, can be completed.

    Raises:
        UserError: it is empty, too long for so many tokens of prompt and completion, or of another vocabulary (V).
    """
    tokens = len(prompt)
    if not tokens:
        raise UserError(f"prompt {number} has no token; begin it with at least one, such as the BOS token")
    if tokens >= length:
        raise UserError(
            f"prompt {number} has {tokens} tokens, which leaves no room for a completion in a length of {length}; "
            "shorten it or allow a greater length"
        )
    if not 0 <= int(np.min(prompt)) <= int(np.max(prompt)) < vocab_size:
        raise UserError(f"prompt {number} holds ids outside of the vocabulary, 0 to {vocab_size - 1}")


def check_pictures(number: int, prompt: np.ndarray, pictures: Pictures | None, vision: VisionConfig | None) -> None:
    """Checks that the pictures of a prompt `[T]` can be seen by the model's tower, if it has one.

    Raises:
        UserError: the model sees no pictures, or they have another size or other places than it needs.
    """
    if pictures is None:
        return
    if vision is None:
        raise UserError(f"prompt {number} has pictures, and the model was loaded without the tower that sees them")
    places, counts = np.asarray(pictures.places), np.prod(pictures.grids, axis=-1)
    if pictures.pixels.shape[1:] != vision.shape or places.shape != np.shape(prompt):
        raise UserError(
            f"prompt {number} has pictures of the shape {pictures.pixels.shape} at {len(places)} of {len(prompt)} "
            f"tokens; they need {vision.shape} patches, rows, columns and colours, and a place for each token"
        )
    soft = places[places > 0]
    if counts.max(initial=0) > vision.tokens or (not vision.any_shape and counts.min(initial=1 << 31) < vision.tokens):
        raise UserError(f"prompt {number} has pictures of {counts} tokens; the model's have {vision.tokens}")
    if not np.array_equal(soft, np.arange(1, counts.sum() + 1)) or places[-1]:
        raise UserError(
            f"prompt {number} has {len(soft)} tokens for {pictures.number} pictures of {counts}: "
            "each needs all of its own, one after the other, and text after the last"
        )
    if vision.any_shape and pictures.rope is None:
        raise UserError(
            f"prompt {number} has pictures without places for rope: data.pictures.rope_positions finds them"
        )


class StopText:
    """Looks for stop strings in one turn after the other."""

    def __init__(self, strings: Sequence[str], decode: Decode):
        """Looks for any of these, of which there is at least one."""
        self._strings, self._decode = strings, decode
        self._longest = max(map(len, strings))
        # A token has at least a byte, unless it is one that is not shown.
        self._reach = max(len(string.encode()) for string in strings) + SPARE
        self._start = 0

    def find(self, turn: np.ndarray, new: int) -> int | None:
        """How many tokens of the turn `[T]` there are when a stop string is complete; None where there is none. The
        last `new` of them were not looked at before."""
        if new == len(turn):  # it begins
            self._start = 0
        if not self._within(turn[self._start :]):
            # The tail gets shorter, while its text can still hold all but the last character of a stop string.
            start = len(turn) - self._reach
            if start >= self._start + 3 * self._reach and len(self._decode(turn[start:].tolist())) >= self._longest:
                self._start = start
            return None
        return next(end for end in range(len(turn) - new + 1, len(turn) + 1) if self._within(turn[self._start : end]))

    def _within(self, tokens: np.ndarray) -> bool:
        text = self._decode(tokens.tolist())
        return any(string in text for string in self._strings)


@dataclass
class Episode:
    """A request that is being answered; whoever answers it holds its tokens."""

    request: Request
    number: int
    """Its index among the requests of one call of `SamplingClient.run`."""
    stop_text: StopText | None
    """What looks for its stop strings; None where it has none."""
    adapter: int = 0
    """Number of the request's adapter, from 1; 0 for none."""
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """`[T A]` most likely ids and their log-probs, piece by piece."""
    turns: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """Start and end of each turn among the tokens after the prompt; the end of the last one is 0 while it goes on."""
    restarts: list[int] = field(default_factory=list)
    """Where among the tokens after the prompt further transcripts begin."""
    so_far: Completion | None = None
    """What it had when it was preempted, or another call sampled; None where that is nothing, or it is in a slot."""
    ended: Literal["stop", "length"] | None = None
    """Why the current turn has ended; None while it goes on."""
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """`[T]` the versions of the tokens that another call has sampled."""
    experts: list[Known] = field(default_factory=list)
    """What pieces tell about the experts of the prompt and of observations."""
    scores: TokenScores | None = None
    """Those of the prompt, which pieces fill in; None where they are not asked for."""

    def __post_init__(self) -> None:
        before, prompt, sampling = self.request.so_far, len(self.request.prompt), self.request.sampling
        if sampling.prompt_logprobs:
            ids, logprobs = np.zeros((2, prompt, sampling.top_logprobs), np.float32)
            self.scores = TokenScores(np.zeros(prompt, np.float32), ids.astype(np.int32), logprobs)
        if before is not None and len(before.tokens):  # another call has paused it
            self.so_far, self.versions = before, before.versions
            self.turns = [*before.turns[:-1], (before.turns[-1][0], 0)]
            self.restarts = list(before.restarts)
            self.top = [] if before.top is None else [before.top]
            if before.experts is not None:
                self.experts = [Known.of(before.experts[:prompt], 0)]

    @property
    def key(self) -> tuple:
        """Equal for episodes whose prompt is computed once: equal prompts under one adapter, unless it is scored."""
        request = self.request
        alone = self.number if request.sampling.prompt_logprobs else None
        return np.asarray(request.prompt, np.int32).tobytes(), request.adapter, id(request.pictures), alone

    def pictures(self, tokens: int) -> Pictures | None:
        """The pictures of so many of its tokens, the prompt's included; None without any."""
        pictures = self.request.pictures
        return pictures and pictures.followed(tokens - len(self.request.prompt))

    @property
    def begin(self) -> int:
        """Where its last transcript begins, among the tokens of the prompt and all that follows it."""
        return len(self.request.prompt) + self.restarts[-1] if self.restarts else 0

    def keep_top(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Keeps the alternatives `[T A]` of some tokens, where the request wants them."""
        if n := self.request.sampling.top_logprobs:
            self.top.append((ids[:, :n].copy(), logprobs[:, :n].copy()))

    def observe(self, start: int, end: int, restart: bool) -> None:
        """Opens the next turn, behind an observation that is tokens `start` to `end` - 1 of those after the prompt, and
        the prompt of another transcript where it is a restart."""
        self.restarts += [start] if restart else []
        n = self.request.sampling.top_logprobs
        self.keep_top(np.zeros((end - start, n), np.int32), np.zeros((end - start, n), np.float32))
        self.turns.append((end, 0))
        self.ended = None

    def completion(
        self, tokens: np.ndarray, logprobs: np.ndarray, version: int, experts: np.ndarray | None
    ) -> Completion:
        """The completion so far: tokens `[T]` after the prompt, of which this version of the weights sampled what no
        other call has; paused, unless its current turn has ended."""
        top = None
        if n := self.request.sampling.top_logprobs:
            pieces = [(np.zeros((0, n), np.int32), np.zeros((0, n), np.float32)), *self.top]
            ids = np.concatenate([ids for ids, _ in pieces]).astype(np.int32)
            top = ids, np.concatenate([logprobs for _, logprobs in pieces]).astype(np.float32)
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            finish=self.ended or "paused",
            versions=np.append(self.versions, np.full(len(tokens) - len(self.versions), version, np.int32)),
            sampling=self.request.sampling,
            turns=(*self.turns[:-1], (self.turns[-1][0], len(tokens))),
            top=top,
            experts=of_sequence(len(self.request.prompt), experts, self.experts),
            prompt_scores=self.scores,
            restarts=tuple(self.restarts),
        )
