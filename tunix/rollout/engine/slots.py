"""The slots as the host knows them: arrays over all of them, so that no Python runs for each sampled token.

A slot holds an episode's tokens after its prompt, sampled and observed, until the episode ends. What a dispatch has to
know of the slots is a `Flow`, which is kept up to date here.

Axes: Sl slots, St decode steps, T time.
"""

from collections.abc import Sequence

import jax
import numpy as np

from tunix.rollout.engine.prefill import Piece
from tunix.rollout.engine.programs import Flow
from tunix.rollout.engine.request import Episode
from tunix.rollout.engine.sampling import MOST_STOPS, Draw, Transform
from tunix.types import Completion, Sampling


class Slots:
    """Slots, each of which is idle or has an episode."""

    def __init__(self, number: int, length: int):
        """Idle slots.

        Args:
            number: of slots.
            length: tokens of prompt and completion at most.
        """
        self.episodes: list[Episode | None] = [None] * number
        self._length = length
        held, left, drawn, request, adapter = np.zeros((5, number), np.int32)
        seeds, stops = np.zeros((number, 2), np.uint32), np.full((number, MOST_STOPS), -1, np.int32)
        self._flow = Flow(held, left, drawn, seeds, request, adapter, stops, Transform.of([Sampling()] * number))
        # Memory that nothing is written to is never taken.
        self._tokens = np.empty((number, length), np.int32)
        self._logprobs = np.empty((number, length), np.float32)
        self._written, self._before = np.zeros((2, number), np.int32)
        self._looked_at = np.zeros(number, bool)

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def running(self) -> list[int]:
        """The slots that have an episode."""
        return [slot for slot, episode in enumerate(self.episodes) if episode is not None]

    @property
    def held(self) -> int:
        """Tokens that the longest of the caches in use has to hold."""
        return int(self._flow.held.max(initial=0))

    @property
    def cut_by_text(self) -> bool:
        """Whether an episode has stop strings."""
        return any(episode is not None and episode.stop_text is not None for episode in self.episodes)

    def flow(self) -> Flow:
        """What a dispatch reads: copies, which stay as they are while it runs."""
        return jax.tree.map(np.copy, self._flow)

    def admit(self, episode: Episode) -> int:
        """Puts an episode into the first idle slot; returns the slot."""
        slot, request, flow = self.episodes.index(None), episode.request, self._flow
        sampling = request.sampling
        self.episodes[slot], self._written[slot] = episode, 0
        self._looked_at[slot] = episode.stop_text is not None or sampling.top_logprobs > 0
        flow.held[slot], flow.drawn[slot] = len(request.prompt), 0
        flow.left[slot] = min(sampling.max_tokens, self._length - len(request.prompt))
        flow.seeds[slot] = (request.seed >> 32) & 0xFFFFFFFF, request.seed & 0xFFFFFFFF
        flow.request[slot], flow.adapter[slot] = request.index, episode.adapter
        flow.stops[slot] = -1
        flow.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids
        for rows, (own,) in zip(flow.transform, Transform.of([sampling]), strict=True):
            rows[slot] = own
        return slot

    def release(self, slot: int) -> None:
        """Makes a slot idle."""
        self.episodes[slot], self._looked_at[slot] = None, False
        self._flow.held[slot] = self._flow.left[slot] = 0

    def moved(self, source: Sequence[int], number: int) -> "Slots":
        """So many slots, the first of which are these."""
        other = Slots(number, self._length)
        other.episodes[: len(source)] = [self.episodes[slot] for slot in source]
        for new, old in zip(other._arrays(), self._arrays(), strict=True):
            new[: len(source)] = old[list(source)]
        return other

    def take(self, draws: Draw, counts: np.ndarray) -> list[int]:
        """Writes down what a dispatch sampled; returns the slots whose turn has ended.

        Args:
            draws: `[St Sl ...]`, on the host.
            counts: `[Sl]`: in slot s the first `counts[s]` were sampled.
        """
        step, slot = np.nonzero(np.arange(len(draws.tokens))[:, None] < counts)
        at = self._written[slot] + step
        self._tokens[slot, at], self._logprobs[slot, at] = draws.tokens[step, slot], draws.logprobs[step, slot]
        self._before = self._written.copy()
        self._count(slice(None), counts)
        last = draws.tokens[counts - 1, np.arange(len(counts))]
        stopped = (counts > 0) & np.any(last[:, None] == self._flow.stops, axis=1)
        for slot in map(int, np.flatnonzero(self._looked_at & (counts > 0))):
            stopped[slot] |= self._look(slot, draws)
        ended = [slot for slot in map(int, np.flatnonzero(stopped | (self._flow.left <= 0))) if self.episodes[slot]]
        for slot in ended:
            episode = self.episodes[slot]
            assert episode is not None
            episode.end_turn("stop" if stopped[slot] else "length", int(self._written[slot]))
        return ended

    def new(self, slot: int) -> np.ndarray:
        """`[T]` the tokens of the last dispatch."""
        return self._tokens[slot, self._before[slot] : self._written[slot]].copy()

    def observe(self, slot: int, observation: np.ndarray) -> Piece | None:
        """Appends an observation and opens the next turn; returns what to append to the cache.

        The last token before the observation is among them: its state was lost where tokens after it were dropped.
        Returns None, and ends the episode by its length, where nothing could be sampled after the observation.
        """
        episode, flow, start = self.episodes[slot], self._flow, int(self._written[slot])
        assert episode is not None
        more = episode.request.sampling.max_tokens - int(flow.drawn[slot])
        room = self._length - int(flow.held[slot]) - len(observation)
        if min(more, room) <= 0:
            episode.ended = "length"
            return None
        end = start + len(observation)
        self._tokens[slot, start:end], self._logprobs[slot, start:end] = observation, 0.0
        self._written[slot], flow.left[slot] = end, min(more, room)
        flow.held[slot] += len(observation)
        episode.open_turn(start, end)
        tokens = self._tokens[slot, start - 1 : end].copy()
        return Piece(tokens, int(flow.held[slot]) - len(tokens), episode.adapter)

    def completion(self, slot: int, version: int) -> Completion:
        """The completion so far, whose current turn has ended."""
        episode, number = self.episodes[slot], int(self._written[slot])
        assert episode is not None
        return episode.completion(self._tokens[slot, :number].copy(), self._logprobs[slot, :number].copy(), version)

    def _look(self, slot: int, draws: Draw) -> bool:
        """Drops what was sampled behind a stop string, and keeps alternatives; whether there was a stop string."""
        episode, before, end = self.episodes[slot], int(self._before[slot]), int(self._written[slot])
        assert episode is not None
        start, found = episode.turns[-1][0], None
        if episode.stop_text is not None:
            found = episode.stop_text.find(self._tokens[slot, start:end], end - before)
        if found is not None:
            self._count(slot, start + found - end)
        kept = int(self._written[slot]) - before
        top = (np.asarray(of_step[:kept, slot]) for of_step in (draws.top_ids, draws.top_logprobs))
        episode.keep_top(*top)
        return found is not None

    def _count(self, slots: slice | int, tokens: np.ndarray | int) -> None:
        """Counts tokens that were sampled; fewer than 0 are taken back."""
        flow = self._flow
        for counted in (self._written, flow.held, flow.drawn):
            counted[slots] += tokens
        flow.left[slots] -= tokens

    def _arrays(self) -> list[np.ndarray]:
        """Everything that has an entry for each slot."""
        return jax.tree.leaves((self._flow, self._tokens, self._logprobs, self._written, self._before, self._looked_at))
