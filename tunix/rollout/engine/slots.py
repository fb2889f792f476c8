"""The slots as the host knows them: arrays over all of them, so that no Python runs for each sampled token.

A slot holds an episode's tokens after its prompt, sampled and observed, until the episode ends. What a dispatch has to
know of the slots is a `Flow`, which is kept up to date here.

Axes: Sl slots, St decode steps, T time, L layers, k chosen experts of a token.
"""

import jax
import numpy as np

from tunix.rollout.engine.experts import UNKNOWN
from tunix.rollout.engine.lookup import DraftCaches
from tunix.rollout.engine.programs import Flow, Progress
from tunix.rollout.engine.request import Episode
from tunix.rollout.engine.sampling import MOST_STOPS, Draw, Transform
from tunix.rollout.engine.shapes import Sizes
from tunix.types import Completion, Sampling


class Slots:
    """Slots, each of which is idle or has an episode."""

    def __init__(self, sizes: Sizes, routed: tuple[int, int] | None = None):
        """Idle slots; `routed` has the layers with experts and the experts of a token (L, k), if it uses several."""
        number, max_length = sizes.slots, sizes.max_length
        self._drafts = DraftCaches(number, max_length, sizes.speculate) if sizes.speculate and not sizes.mtp else None
        self.episodes: dict[int, Episode] = {}
        """By slot, the one that came first at the front."""
        self._length = max_length
        self.held, self.left, drawn, request, adapter = np.zeros((5, number), np.int32)
        """`[Sl]` tokens in the cache, and tokens that may still be sampled, as far as dispatches have been read."""
        seeds, stops = np.zeros((number, 2), np.uint32), np.full((number, MOST_STOPS), -1, np.int32)
        settings, every = Transform.of([Sampling()] * number), np.arange(number, dtype=np.int32)
        fresh = np.zeros(number, bool)
        turned = np.zeros(number, np.int32) if sizes.vision is not None and sizes.vision.any_shape else None
        progress = Progress(self.held, self.left, drawn)
        self._flow = Flow(every, progress, fresh, seeds, request, adapter, stops, settings, turned)
        # Memory that nothing is written to is never taken.
        self._tokens = np.empty((number, max_length), np.int32)
        self._logprobs = np.empty((number, max_length), np.float32)
        self._experts = None if routed is None else np.empty((number, max_length, *routed), np.int16)
        self._written, self._before = np.zeros((2, number), np.int32)
        self._looked_at, self.beyond = np.zeros((2, number), bool)
        """`beyond`: the devices have gone on behind the end of a turn, as they could not know of a stop string."""
        self._waits = np.ones(number, bool)
        """For its tokens to be computed, or for an episode."""
        self.generations = np.zeros(number, np.int64)
        """What was sampled in an earlier one of a slot is dropped."""

    @property
    def running(self) -> np.ndarray:
        """The slots that can be decoded, the one that came first at the front."""
        taken = np.array(list(self.episodes), int)
        return taken[~self._waits[taken]]

    def flow(self, slots: np.ndarray) -> Flow:
        """What a dispatch of these slots reads, which is sent now: copies, which stay as they are while it runs."""
        flow = jax.tree.map(lambda x: x[slots], self._flow)
        still = self._waits[slots]
        self._flow.fresh[slots[~still]] = False
        progress = flow.progress._replace(left=np.where(still, 0, flow.progress.left))
        drafts = None if self._drafts is None else self._drafts.tables(slots)
        return flow._replace(progress=progress, fresh=flow.fresh | still, drafts=drafts)

    def admit(self, slot: int, episode: Episode) -> np.ndarray:
        """Puts an episode into an idle slot, which waits for its tokens to be computed; returns these tokens."""
        request, flow, progress = episode.request, self._flow, self._flow.progress
        sampling, tokens, drawn, so_far = request.sampling, np.asarray(request.prompt, np.int32), 0, episode.so_far
        prompt, self.episodes[slot], episode.so_far = len(tokens), episode, None
        if so_far is not None:
            tokens, drawn, number = np.concatenate([tokens, so_far.tokens]), int(so_far.drawn.sum()), len(so_far.tokens)
            self._tokens[slot, :number], self._logprobs[slot, :number] = so_far.tokens, so_far.logprobs
            if self._experts is not None:
                self._experts[slot, :number] = UNKNOWN if so_far.experts is None else so_far.experts[prompt:]
        self._written[slot] = self._before[slot] = len(tokens) - prompt
        whole, tokens = len(tokens), tokens[episode.begin :]
        self._looked_at[slot] = episode.stop_text is not None or sampling.top_logprobs > 0
        self.beyond[slot] = False
        self.held[slot], progress.drawn[slot] = len(tokens), drawn
        self.left[slot] = min(sampling.max_tokens - drawn, self._length - whole)
        flow.seeds[slot] = (request.seed >> 32) & 0xFFFFFFFF, request.seed & 0xFFFFFFFF
        flow.request[slot], flow.adapter[slot] = request.index, episode.adapter
        if flow.turned is not None:
            rope = None if request.pictures is None else request.pictures.rope
            flow.turned[slot] = 0 if rope is None else np.max(rope[-1]) - (prompt - 1)
        flow.stops[slot] = -1
        flow.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids
        for rows, (setting,) in zip(flow.transform, Transform.of([sampling]), strict=True):
            rows[slot] = setting
        self._begin(slot)
        if self._drafts is not None:
            self._drafts.open(slot, (tokens[:prompt].tobytes(), episode.adapter), tokens)
        return tokens

    def start(self, slot: int) -> None:
        """A slot's tokens will have been computed before it is decoded."""
        self._waits[slot] = False

    def suspend(self, slot: int, version: int) -> Episode:
        """Takes an episode out of its slot, to be continued in another or by another call."""
        episode = self.episodes[slot]
        episode.ended = None
        episode.so_far = self.completion(slot, version)
        self.release(slot)
        return episode

    def release(self, slot: int) -> None:
        """Makes a slot idle."""
        del self.episodes[slot]
        self._looked_at[slot], self._waits[slot] = False, True
        self.held[slot] = self.left[slot] = 0
        self.generations[slot] += 1
        if self._drafts is not None:
            self._drafts.close(slot)

    def take(
        self,
        slots: np.ndarray,
        generations: np.ndarray,
        draws: Draw,
        counts: np.ndarray,
        experts: np.ndarray | None = None,
    ) -> list[int]:
        """Writes down what a dispatch of slots `[Sl]` sampled; returns those whose turn has ended, and which wait now.

        Args:
            generations: `[Sl]` theirs when it was sent; what it sampled for a turn that has ended since is dropped.
            draws: `[St Sl ...]`, on the host.
            counts: `[Sl]`: in slot s the first `counts[s]` were sampled.
            experts: `[St Sl L k]` that these tokens used; None for a model without.
        """
        counts = np.where(generations == self.generations[slots], counts, 0)
        step, row = np.nonzero(np.arange(len(draws.tokens))[:, None] < counts)
        slot = slots[row]
        at = self._written[slot] + step
        self._tokens[slot, at], self._logprobs[slot, at] = draws.tokens[step, row], draws.logprobs[step, row]
        if self._experts is not None and experts is not None:
            self._experts[slot, at] = experts[step, row]
        self._before = self._written.copy()
        self._count(slots, counts)
        if self._drafts is not None:
            self._drafts.write(slots, np.asarray(draws.tokens).T, counts)
        last = draws.tokens[counts - 1, np.arange(len(counts))]
        stopped = (counts > 0) & np.any(last[:, None] == self._flow.stops[slots], axis=1)
        for row in map(int, np.flatnonzero(self._looked_at[slots] & (counts > 0))):
            slot = int(slots[row])
            episode, before, end = self.episodes[slot], int(self._before[slot]), int(self._written[slot])
            start, end_of_stop = episode.turns[-1][0], None
            if episode.stop_text is not None:
                end_of_stop = episode.stop_text.find(self._tokens[slot, start:end], end - before)
            if end_of_stop is not None:  # what was sampled behind it is dropped
                self._count(slot, start + end_of_stop - end)
                stopped[row] = self.beyond[slot] = True
            kept = int(self._written[slot]) - before
            episode.keep_top(np.asarray(draws.top_ids[:kept, row]), np.asarray(draws.top_logprobs[:kept, row]))
        ended = []
        for row in map(int, np.flatnonzero(stopped | ((counts > 0) & (self.left[slots] <= 0)))):
            slot = int(slots[row])
            episode = self.episodes[slot]
            episode.ended = "stop" if stopped[row] else "length"
            episode.turns[-1] = (episode.turns[-1][0], int(self._written[slot]))
            self._begin(slot)
            ended.append(slot)
        return ended

    def new(self, slot: int) -> np.ndarray:
        """`[T]` the tokens of the last dispatch."""
        return self._tokens[slot, self._before[slot] : self._written[slot]].copy()

    def transcript(self, slot: int) -> np.ndarray:
        """`[T]` the tokens of its last transcript, the prompt's included."""
        episode, written = self.episodes[slot], self._tokens[slot, : self._written[slot]]
        return np.concatenate([np.asarray(episode.request.prompt, np.int32), written])[episode.begin :]

    def observe(self, slot: int, observation: np.ndarray, restart: bool = False) -> np.ndarray | None:
        """Appends an observation and opens the next turn, which waits; returns the tokens that are to be computed.

        The last token before the observation is among them: its state was lost where tokens after it were dropped. With
        `restart` the observation is the prompt of another transcript, and only its tokens are.
        Returns None, and ends the episode by its length, where nothing could be sampled after the observation.
        """
        episode, start = self.episodes[slot], int(self._written[slot])
        more = episode.request.sampling.max_tokens - int(self._flow.progress.drawn[slot])
        room = self._length - len(episode.request.prompt) - start - len(observation)
        if min(more, room) <= 0:
            episode.ended = "length"
            return None
        end = start + len(observation)
        self._tokens[slot, start:end], self._logprobs[slot, start:end] = observation, 0.0
        if self._experts is not None:
            self._experts[slot, start:end] = UNKNOWN
        self._written[slot], self.left[slot] = end, min(more, room)
        self.held[slot] = len(observation) if restart else self.held[slot] + len(observation)
        episode.observe(start, end, restart)
        if self._drafts is not None:
            self._drafts.write(np.array([slot]), observation[None], np.array([len(observation)]))
        return self._tokens[slot, start - (not restart) : end].copy()

    def completion(self, slot: int, version: int) -> Completion:
        """The completion so far; paused, unless its current turn has ended."""
        episode, number = self.episodes[slot], int(self._written[slot])
        tokens, logprobs = self._tokens[slot, :number].copy(), self._logprobs[slot, :number].copy()
        experts = None if self._experts is None else self._experts[slot, :number].copy()
        return episode.completion(tokens, logprobs, version, experts)

    def _begin(self, slot: int) -> None:
        """A turn begins, or is over until the next one: what is on its way is not the slot's any more."""
        self.generations[slot] += 1
        self._waits[slot] = self._flow.fresh[slot] = True

    def _count(self, slots: np.ndarray | int, tokens: np.ndarray | int) -> None:
        """Counts tokens that were sampled; fewer than 0 are taken back."""
        for counted in (self._written, self.held, self._flow.progress.drawn):
            counted[slots] += tokens
        self.left[slots] -= tokens
