"""Requests that are answered together, with continuous batching over slots.

Requests wait in a queue. Free slots are filled from it (`prefill.py` computes each prompt once), one dispatch samples
several tokens in all slots (`programs.decode`), and slots whose request has ended are freed, or continue with an
environment's answer. Caches live as long as the batch: none outlasts the weights that filled it, and requests share a
prompt only under the same adapter.

Axes: St decode steps.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from tunix.models.kv_cache import Weights
from tunix.models.model import Model
from tunix.rollout.engine.prefill import Piece, Prefix, Rows, append, compute
from tunix.rollout.engine.programs import State, blank, decode, put, resize, take
from tunix.rollout.engine.request import Decode, Episode, Request, StopText
from tunix.rollout.engine.shapes import Sizes, batches, narrowed
from tunix.rollout.engine.slots import Slots
from tunix.types import Completion, Reply

OnTokens = Callable[[int, np.ndarray], None]
"""Callback that receives (index of the request, its new tokens) after each dispatch."""
SHORT = 8
"""Steps of a dispatch where the host looks at the text: a single answer that is streamed, and stop strings."""
REFILL = 8
"""A dispatch ends early when one slot in so many has ended and another request can be admitted or continued."""


@dataclass(frozen=True)
class Published:
    """What answers requests: weights that do not change meanwhile, and the shapes of the programs."""

    model: Model
    """With the adapters that are loaded with the weights."""
    weights: Weights
    version: int
    adapters: Mapping[str, int]
    """Number of each adapter, from 1, by name."""
    sizes: Sizes
    steps: int
    """St: tokens that a slot samples in one dispatch at most."""
    decode: Decode | None
    """Token ids -> text, for stop strings."""


class Batch:
    """Requests that are answered together."""

    def __init__(
        self, published: Published, requests: Sequence[Request], reply: Reply | None, on_tokens: OnTokens | None
    ):
        """Queues the requests; for the arguments see `Engine.run`."""
        self.steps, self.version, self.sizes = published.steps, published.version, published.sizes
        self.model, self.weights = published.model, published.weights
        self.reply, self.on_tokens = reply, on_tokens
        numbers = [published.adapters[x.adapter] if x.adapter is not None else 0 for x in requests]
        given = enumerate(zip(requests, numbers, strict=True))
        episodes = [Episode(x, number, _stop_text(x, published.decode), adapter) for number, (x, adapter) in given]
        self.waiting = deque(episodes)
        self.expected = Counter(_prompt_key(x) for x in requests)
        self.prefixes: dict[tuple, Prefix] = {}
        self.slots = Slots(0, self.sizes.length)
        self.length = 0
        self.state: State | None = None
        self.done: list[Completion | None] = [None] * len(episodes)

    def finish(self) -> list[Completion]:
        """The completions, in the order of the requests."""
        while self.waiting or self.slots.running:
            self._admit()
            self._dispatch()
        assert all(self.done)
        return [completion for completion in self.done if completion is not None]

    def _admit(self) -> None:
        """Fills free slots from the queue, and fits the number of slots and the cache length to the requests."""
        running = len(self.slots.running)
        new = [self.waiting.popleft() for _ in range(min(self.sizes.slots - running, len(self.waiting)))]
        held = [len(episode.request.prompt) for episode in new] + [self.slots.held]
        self._fit(running + len(new), max(held))
        if not new:
            return
        self._compute(new)
        sources: dict[int, tuple[Rows, np.ndarray]] = {}
        for episode in new:
            slot, key = self.slots.admit(episode), _prompt_key(episode.request)
            prefix = self.prefixes[key]
            episode.prompt_logprobs = prefix.logprobs
            rows, source = sources.setdefault(id(prefix.rows), (prefix.rows, np.full(len(self.slots), -1, np.int32)))
            source[slot] = prefix.row
            self.expected[key] -= 1
            if not self.expected[key]:
                del self.prefixes[key]
        for rows, source in sources.values():
            rows.lengthen(self.model, self.sizes, self.length)
            self.state = put(self.state, rows.state, source)

    def _compute(self, episodes: Sequence[Episode]) -> None:
        """Computes the prefixes of prompts that occur for the first time."""
        fresh = {_prompt_key(x.request): x for x in episodes if _prompt_key(x.request) not in self.prefixes}
        prompts = [np.asarray(x.request.prompt, np.int32) for x in fresh.values()]
        adapters, settings = [x.adapter for x in fresh.values()], [x.request.sampling for x in fresh.values()]
        prefixes = compute(self.model, self.weights, prompts, adapters, settings, self.sizes)
        self.prefixes |= zip(fresh, prefixes, strict=True)

    def _fit(self, number: int, held: int) -> None:
        """Resizes slots and caches so that each of `number` requests has room for one more token; slots in use move to
        the front.

        Args:
            number: requests that run next.
            held: tokens of the longest one.
        """
        width, length = self.sizes.width(number), max(self.length, self.sizes.bucket(held + 1))
        if self.state is None or not self.slots.running:
            if (width, length) != (len(self.slots), self.length):
                self.state = blank(self.model, width, length, self.sizes.piece, self.sizes.dtype)
                self.slots = Slots(width, self.sizes.length)
                self.length = length
            return
        # One size after the other, so that few changes of shape are compiled.
        while len(self.slots) > width:
            used, fewer = self.slots.running, narrowed(len(self.slots))
            self._resize(used + [0] * (fewer - len(used)), self.length)
            self.slots = self.slots.moved(used, fewer)
        self._lengthen(length)

    def _lengthen(self, length: int) -> None:
        while self.length < length:
            self._resize(range(len(self.slots)), self.sizes.bucket(self.length + 1))

    def _resize(self, source: Sequence[int], length: int) -> None:
        assert self.state is not None
        self.state = resize(self.model, self.state, np.array(source, np.int32), length, self.sizes.piece)
        self.length = length

    def _dispatch(self) -> None:
        """Samples some tokens in every slot, and ends or continues the requests whose turn is over."""
        running = self.slots.running
        watched = self.on_tokens is not None and len(self.done) == 1  # nobody reads many answers word by word
        looks = watched or self.slots.cut_by_text
        most = np.int32(min(SHORT if looks else self.steps, self.steps, self.length - self.slots.held))
        enough = np.int32(self._enough(len(running)))
        assert self.state is not None
        self.state, sampled = decode(self.model, self.steps, self.weights, self.state, self.slots.flow(), most, enough)
        ended = self.slots.take(*jax.device_get(sampled))
        self._show(running)
        answered = []
        for slot in ended:
            episode = self.slots.episodes[slot]
            assert episode is not None
            if (piece := self._answer(slot, episode)) is not None:
                answered.append((slot, piece))
            else:
                self.done[episode.number] = self.slots.completion(slot, self.version)
                self.slots.release(slot)
        if answered:
            self._observe(answered)

    def _show(self, running: Sequence[int]) -> None:
        """Hands the new tokens to whoever reads along."""
        for slot in running if self.on_tokens is not None else ():
            new, episode = self.slots.new(slot), self.slots.episodes[slot]
            if len(new) and self.on_tokens is not None and episode is not None:
                self.on_tokens(episode.number, new)

    def _enough(self, running: int) -> int:
        """The number of running slots at which a dispatch ends."""
        if self.waiting or self.reply is not None:
            return running - max(1, running // REFILL)
        narrower = narrowed(len(self.slots))
        return narrower if narrower < running else 0

    def _answer(self, slot: int, episode: Episode) -> Piece | None:
        """The tokens to append to the cache before the next turn; None where the episode has ended."""
        if self.reply is None or episode.ended != "stop":
            return None
        observation = self.reply(episode.number, self.slots.completion(slot, self.version))
        return None if observation is None else self.slots.observe(slot, np.asarray(observation, np.int32))

    def _observe(self, answered: list[tuple[int, Piece]]) -> None:
        """Appends observations to their slots."""
        # Slots must not move before their pieces are appended, so only the length is fitted.
        self._lengthen(self.sizes.bucket(self.slots.held + 1))
        assert self.state is not None
        for batch in batches(range(len(answered)), lambda item: self.sizes.cut(len(answered[item][1].tokens))):
            slots = np.array([answered[item][0] for item in batch], np.int32)
            pieces = [answered[item][1] for item in batch]
            rows, _ = append(self.model, self.weights, take(self.state, slots), pieces, self.sizes, [])
            source = np.full(len(self.slots), -1, np.int32)
            source[slots] = np.arange(len(slots))
            self.state = put(self.state, rows, source)


def _stop_text(request: Request, decode: Decode | None) -> StopText | None:
    """What looks for a request's stop strings."""
    strings = request.sampling.stop_strings
    return StopText(strings, decode) if strings and decode is not None else None


def _prompt_key(request: Request) -> tuple:
    """The key of a request's prefix: equal for equal prompts under one adapter, with equal settings where the prompt's
    log-probs are wanted."""
    prompt = np.asarray(request.prompt, np.int32).tobytes()
    return (prompt, request.adapter, request.sampling if request.sampling.prompt_logprobs else None)
