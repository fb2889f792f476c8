"""One request on its way through the engine: what was drawn, what an environment added, and how it ends.

Tokens arrive in pieces of some steps. Stop strings are looked for here, token by token, so that the size of a piece
changes nothing; what was drawn behind one is cut.
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
    """What is asked of the engine once."""

    prompt: np.ndarray
    """`[T]` token ids, at least one."""
    sampling: Sampling
    """How its tokens are drawn."""
    seed: int
    """A draw depends on (seed, index, token index) alone."""
    index: int = 0
    """Tells requests of one seed apart."""
    adapter: str | None = None
    """Of those that lie beside the loaded weights, the one that answers; None for the loaded weights alone."""


@dataclass
class Episode:
    """A request that is being answered."""

    request: Request
    number: int
    """Its place among the requests of the run."""
    length: int
    """Tokens of prompt and completion at most."""
    decode: Decode | None
    """For stop strings."""
    adapter: int = 0
    """Number of the request's, from 1; 0 for none."""
    tokens: list[int] = field(default_factory=list)
    """Behind the prompt: drawn and observed."""
    logprobs: list[float] = field(default_factory=list)
    """0 where observed."""
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """`[n]` ids and log-probs of each token."""
    turns: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """Closed by a new one only when an environment has answered."""
    prompt_logprobs: np.ndarray | None = None
    ended: Literal["stop", "length"] | None = None
    """Whether the current turn has, and why."""

    @property
    def held(self) -> int:
        """Tokens that the cache should hold."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def drawn(self) -> int:
        """Drawn tokens over all turns."""
        return sum(end - start for start, end in self.turns)

    @property
    def left(self) -> int:
        """Tokens that may still be drawn."""
        return min(self.request.sampling.max_tokens - self.drawn, self.length - self.held)

    def take(self, draws: Draw, count: int) -> np.ndarray:
        """Appends the first `count` drawn tokens, up to the end of the turn; those that were kept.

        Args:
            draws: of this request, `[K ...]`.
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
            if token in settings.stop_ids or self._said_a_stop():
                self.ended = "stop"
                break
        if self.ended is None and self.left <= 0:
            self.ended = "length"
        return np.array(self.tokens[before:], np.int32)

    def observe(self, observation: np.ndarray) -> np.ndarray | None:
        """Opens the next turn behind an observation; the tokens that the cache has to be given, from `held - len`.

        The last token before the observation is among them: its state was lost where tokens behind it were cut.
        None, and the end by length, where nothing could be drawn behind the observation.
        """
        if self.request.sampling.max_tokens <= self.drawn or self.held + len(observation) >= self.length:
            self.ended = "length"
            return None
        last = self.tokens[-1]
        self.tokens += observation.tolist()
        self.logprobs += [0.0] * len(observation)
        n = self.request.sampling.top_logprobs
        if n:
            self.top += [(np.zeros(n, np.int32), np.zeros(n, np.float32))] * len(observation)
        self.turns.append((len(self.tokens), len(self.tokens)))
        self.ended = None
        return np.array([last, *observation.tolist()], np.int32)

    def completion(self, version: int) -> Completion:
        """What there is of it."""
        assert self.ended is not None
        top = None
        if n := self.request.sampling.top_logprobs:
            ids, found = zip(*self.top, strict=True) if self.top else ((), ())
            top = np.array(ids, np.int32).reshape(-1, n), np.array(found, np.float32).reshape(-1, n)
        return Completion(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            finish=self.ended,
            version=version,
            sampling=self.request.sampling,
            turns=tuple(self.turns),
            top=top,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _said_a_stop(self) -> bool:
        stops = self.request.sampling.stop_strings
        if not stops or self.decode is None:
            return False
        text = self.decode(self.tokens[self.turns[-1][0] :])
        return any(stop in text for stop in stops)


def flow(slots: Sequence[Episode | None]) -> Flow:
    """What the device is told of the slots; those without an episode rest."""
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
