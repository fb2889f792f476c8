"""One request on its way through the engine: the sampled tokens, an environment's observations, and how it ends.

Tokens arrive several at a time. Stop strings are looked for here, token by token, so that the number that arrives at
once changes nothing; tokens that were sampled after a stop string are dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tunix.rollout.engine.programs import Flow
from tunix.rollout.engine.sampling import MOST_STOPS, Draw, Transform
from tunix.types import Completion, Sampling

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


@dataclass(frozen=True)
class Request:
    """A prompt to complete once."""

    prompt: np.ndarray
    """`[T]` token ids, at least one."""
    sampling: Sampling
    """How its tokens are sampled."""
    seed: int
    """A token's random numbers depend on (seed, index, token index) alone."""
    index: int = 0
    """Number of the request among those of one seed."""
    adapter: str | None = None
    """Name of the loaded adapter that answers; None for the weights alone."""


@dataclass
class Episode:
    """A request that is being answered."""

    request: Request
    number: int
    """Its index among the requests of one call of `Engine.run`."""
    length: int
    """Tokens of prompt and completion at most."""
    decode: Decode | None
    """Token ids -> text, for stop strings."""
    adapter: int = 0
    """Number of the request's adapter, from 1; 0 for none."""
    tokens: list[int] = field(default_factory=list)
    """Tokens after the prompt, sampled and observed."""
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each of these tokens; 0 where it was observed."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights for each of these tokens."""
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """The `[A]` most likely ids and their log-probs at each of these tokens."""
    turns: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """Start and end of each turn in `tokens`; the last one grows until an environment answers."""
    prompt_logprobs: np.ndarray | None = None
    """`[T]` log-probs of the prompt's tokens; None where the request does not want them."""
    ended: Literal["stop", "length"] | None = None
    """Why the current turn has ended; None while it goes on."""

    @property
    def held(self) -> int:
        """Tokens of the prompt and after it, which the cache has to hold."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def drawn(self) -> int:
        """Sampled tokens over all turns."""
        return sum(end - start for start, end in self.turns)

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return min(self.request.sampling.max_tokens - self.drawn, self.length - self.held)

    def take(self, draws: Draw, count: int, version: int) -> np.ndarray:
        """Appends the first `count` sampled tokens, up to the end of the turn; returns those that were appended.

        Args:
            draws: the request's sampled tokens, `[St ...]`.
            count: how many of them are real.
            version: of the weights that they were sampled from.
        """
        settings, before = self.request.sampling, len(self.tokens)
        for step in range(count):
            token = int(draws.tokens[step])
            self.tokens.append(token)
            self.logprobs.append(float(draws.logprobs[step]))
            if settings.top_logprobs:
                n = settings.top_logprobs
                self.top.append((np.asarray(draws.top_ids[step, :n]), np.asarray(draws.top_logprobs[step, :n])))
            self.turns[-1] = (self.turns[-1][0], len(self.tokens))
            if token in settings.stop_ids or self._has_stop_string():
                self.ended = "stop"
                break
        if self.ended is None and self.left <= 0:
            self.ended = "length"
        self.versions += [version] * (len(self.tokens) - before)
        return np.array(self.tokens[before:], np.int32)

    def observe(self, observation: np.ndarray, version: int) -> np.ndarray | None:
        """Appends an observation and opens the next turn; returns the tokens to append to the cache, whose last one is
        token `held`.

        The last token before the observation is among them: its state was lost where tokens after it were dropped.
        Returns None, and ends the episode by its length, where nothing could be sampled after the observation.
        """
        if self.request.sampling.max_tokens <= self.drawn or self.held + len(observation) >= self.length:
            self.ended = "length"
            return None
        last = self.tokens[-1]
        self.tokens += observation.tolist()
        self.logprobs += [0.0] * len(observation)
        self.versions += [version] * len(observation)
        n = self.request.sampling.top_logprobs
        if n:
            self.top += [(np.zeros(n, np.int32), np.zeros(n, np.float32))] * len(observation)
        self.turns.append((len(self.tokens), len(self.tokens)))
        self.ended = None
        return np.array([last, *observation.tolist()], np.int32)

    def completion(self) -> Completion:
        """The completion so far; the current turn has ended."""
        assert self.ended is not None
        top = None
        if n := self.request.sampling.top_logprobs:
            ids, logprobs = zip(*self.top, strict=True) if self.top else ((), ())
            top = np.array(ids, np.int32).reshape(-1, n), np.array(logprobs, np.float32).reshape(-1, n)
        return Completion(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            finish=self.ended,
            versions=np.array(self.versions, np.int32),
            sampling=self.request.sampling,
            turns=tuple(self.turns),
            top=top,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _has_stop_string(self) -> bool:
        stops = self.request.sampling.stop_strings
        if not stops or self.decode is None:
            return False
        text = self.decode(self.tokens[self.turns[-1][0] :])
        return any(stop in text for stop in stops)


def flow(slots: Sequence[Episode | None]) -> Flow:
    """The slots' arrays for the device; slots without an episode are idle."""
    running = [(slot, episode) for slot, episode in enumerate(slots) if episode is not None]
    held, left, drawn, index, adapter = np.zeros((5, len(slots)), np.int32)
    seeds = np.zeros((len(slots), 2), np.uint32)
    stops = np.full((len(slots), MOST_STOPS), -1, np.int32)
    settings = [Sampling()] * len(slots)
    for slot, episode in running:
        request = episode.request
        held[slot], left[slot], drawn[slot], index[slot] = episode.held, episode.left, episode.drawn, request.index
        seeds[slot] = (request.seed >> 32) & 0xFFFFFFFF, request.seed & 0xFFFFFFFF
        settings[slot], adapter[slot] = request.sampling, episode.adapter
        stops[slot, : len(request.sampling.stop_ids)] = request.sampling.stop_ids
    return Flow(held, left, drawn, seeds, index, adapter, stops, Transform.of(settings))
