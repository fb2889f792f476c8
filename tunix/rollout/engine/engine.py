"""The engine: requests in, completions out, with continuous batching over slots.

Requests wait in a queue. Free slots are filled from it (`prefill.py` computes each prompt once), all slots draw for
some steps in one dispatch (`programs.decode`), and slots that have ended make room or go on with what an environment
answers. Slots and cache lengths come from a small closed set, so that compiling ends. The caches live as long as one
call of `run`: none can outlast the weights that filled it, and a prompt is shared by requests of one adapter only.

Axes: S slots, K steps of a dispatch.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from tunix.config import DType
from tunix.errors import UserError
from tunix.lora.multi_lora import Laid, Mixture
from tunix.models.kv_cache import TOP, Weights, gains, magnified, unstack
from tunix.models.model import Model, Params, is_adapter
from tunix.rollout.engine.prefill import Piece, Prefix, Rows, append, compute
from tunix.rollout.engine.programs import State, blank, decode, put, resize, take
from tunix.rollout.engine.request import Decode, Episode, Request, flow
from tunix.rollout.engine.sampling import check
from tunix.rollout.engine.shapes import Sizes, batches, narrowed
from tunix.rollout.engine.warmup import Warmth, Workload
from tunix.types import Completion, Reply, Sampling
from tunix.util.exact import jit

OnTokens = Callable[[int, np.ndarray], None]
"""Hears of (request, its new tokens) after each dispatch."""
SHORT = 8
"""Steps of a dispatch where the host looks at the text: a single answer that is streamed, and stop strings."""
REFILL = 8
"""A dispatch ends early when one slot in so many has ended and something is there to go on with."""


class Engine:
    """Samples from the weights that were loaded last."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        *,
        slots: int,
        length: int,
        cache_dtype: DType | None = None,
        decode: Decode | None = None,
        chunk: int = 256,
        steps: int = 32,
    ):
        """Args:
        slots: requests that are answered at a time.
        length: tokens of prompt and completion at most.
        cache_dtype: of keys and values; None for the model's own.
        decode: token ids -> text, for stop strings.
        chunk: tokens of a prompt that are computed at a time; a power of two.
        steps: K, tokens that a slot draws in one dispatch at most.

        Raises:
            ValueError: a size is not positive, or the chunk is no power of two.
        """
        if min(slots, length, chunk, steps) < 1 or chunk & (chunk - 1):
            given = f"slots={slots} length={length} chunk={chunk} steps={steps}"
            raise ValueError(f"sizes must be positive and the chunk a power of two, not {given}")
        self.model, self.mesh, self.steps, self.decode = model, mesh, steps, decode
        self.sizes = Sizes(slots, length, chunk, max(chunk, steps), cache_dtype or model.dtype)
        self.weights: Weights | None = None
        self.version = 0
        self.adapters: dict[str, int] = {}
        """Numbers of the adapters beside the weights, from 1."""
        self._mixture: Mixture | None = None
        self._base: Weights | None = None
        self._base_of: dict[str, weakref.ref] = {}

    @property
    def slots(self) -> int:
        """Requests that are answered at a time."""
        return self.sizes.slots

    @property
    def length(self) -> int:
        """Tokens of prompt and completion at most."""
        return self.sizes.length

    def load(
        self,
        params: Params,
        version: int,
        moving: Collection[str] = (),
        beside: Mapping[str, Laid] | None = None,
    ) -> None:
        """From now on samples come from copies of these weights, which are made here.

        Under adapters the base is frozen: it is copied once, and only the adapters' weights move afterwards.

        Args:
            params: all weights by name.
            version: noted in the completions.
            moving: tables that train beside the adapter.
            beside: adapters that requests choose from, by name; adapters of the same settings compile nothing anew.

        Raises:
            ValueError: one of them does not fit a model that is adapted already, or is no adapter alone.
        """
        beside = beside or {}
        adapter = {name: x for name, x in params.items() if is_adapter(name) or name in moving}
        base = {name: x for name, x in params.items() if name not in adapter}
        own, frozen = self._base, bool(adapter or beside)
        with jax.set_mesh(self.mesh):
            if own is None or not frozen or not self._holds(base):
                own = self._base = self._copy(base, frozen=frozen)
                self._base_of = {name: weakref.ref(x) for name, x in base.items()}
            views = _unstack(self.model, adapter)
            layers = tuple({**mine, **more} for mine, more in zip(own.layers, views.layers, strict=True))
            weights = Weights({**own.top, **views.top}, layers)
            if magnified(self.model):
                settled = zip(layers, _gains(self.model, weights), strict=True)
                weights = weights._replace(layers=tuple({**mine, **own_gains} for mine, own_gains in settled))
            self._mixture = self._mixed(beside)
            if self._mixture is not None:
                weights = self._mixture.laid(weights, [one.params for one in beside.values()])
        self.weights, self.version = weights, version
        self.adapters = {name: number for number, name in enumerate(beside, start=1)}

    def warm(self, work: Workload) -> None:
        """Compiles what this workload can meet: nothing compiles while it is sampled.

        Raises:
            ValueError: no weights were loaded.
        """
        with jax.set_mesh(self.mesh):
            Warmth(self.drawn, self._loaded, self.sizes, self.steps, work)()

    def sample(
        self, prompts: Sequence[np.ndarray], n: int, sampling: Sampling, seed: int, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """`n` completions for each prompt; `client.Client.sample` says more.

        Raises:
            UserError: settings or a prompt that mean nothing.
        """
        if n < 1:
            raise UserError(f"n is {n}: ask for at least one completion of each prompt")
        requests = [
            Request(prompt, sampling, seed, index) for index, prompt in enumerate(p for p in prompts for _ in range(n))
        ]
        found = self.run(requests, reply)
        return [found[i : i + n] for i in range(0, len(found), n)]

    def run(
        self, requests: Sequence[Request], reply: Reply | None = None, on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        """The completion of each request, in their order.

        Args:
            reply: (place in `requests`, completion so far) -> an observation to go on with, or None.
            on_tokens: hears of new tokens while they are drawn.

        Raises:
            UserError: settings or a prompt that mean nothing.
            ValueError: no weights were loaded.
        """
        for number, request in enumerate(requests):
            self._check(number, request)
        with jax.set_mesh(self.mesh):
            return _Run(self, self._loaded, requests, reply, on_tokens).finish()

    @property
    def drawn(self) -> Model:
        """What is drawn from: the model, with the adapters that lie beside it."""
        return self.model if self._mixture is None else self._mixture.model

    def _mixed(self, beside: Mapping[str, Laid]) -> Mixture | None:
        """The adapters' mixture: the present one where it is of their settings, so that its programs serve again."""
        settings = tuple(one.settings for one in beside.values())
        if self._mixture is not None and self._mixture.settings == settings:
            return self._mixture
        return Mixture(self.model, settings) if beside else None

    def _holds(self, base: Params) -> bool:
        """Whether the copy that there is was made of these arrays."""
        return all(name in self._base_of and self._base_of[name]() is x for name, x in base.items())

    @property
    def _loaded(self) -> Weights:
        if self.weights is None:
            raise ValueError("the engine has no weights: load() them before sampling")
        return self.weights

    def _copy(self, base: Params, *, frozen: bool) -> Weights:
        """Views of the base; tables that no step takes over and that have the right dtype are shared, not copied."""
        right = {name: x for name, x in base.items() if name in TOP and x.dtype == self.model.dtype}
        shared = right if frozen else {}
        views = _unstack(self.model, {name: x for name, x in base.items() if name not in shared})
        return views._replace(top={**views.top, **shared})

    def _check(self, number: int, request: Request) -> None:
        tokens, vocab = len(request.prompt), self.model.config.vocab_size
        check(request.sampling, vocab)
        if request.adapter is not None and request.adapter not in self.adapters:
            there = f"there are {', '.join(self.adapters)}" if self.adapters else "none was loaded"
            raise UserError(f"request {number} asks for the adapter {request.adapter!r}: {there}")
        if request.sampling.stop_strings and self.decode is None:
            raise UserError(
                f"sampling: stop_strings is {request.sampling.stop_strings!r}, but the engine was built without a "
                "tokenizer's decode; use stop_ids, or give it one"
            )
        if not tokens:
            raise UserError(f"prompt {number} has no token; begin it with at least one, such as the BOS token")
        if tokens >= self.length:
            raise UserError(
                f"prompt {number} has {tokens} tokens, which leaves no room for a completion in a length of "
                f"{self.length}; shorten it or allow a greater length"
            )
        if not 0 <= int(np.min(request.prompt)) <= int(np.max(request.prompt)) < vocab:
            raise UserError(f"prompt {number} holds ids outside of the vocabulary, 0 to {vocab - 1}")


class _Run:
    """One call of `Engine.run`."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        requests: Sequence[Request],
        reply: Reply | None,
        on_tokens: OnTokens | None,
    ):
        self.engine, self.model, self.weights, self.sizes = engine, engine.drawn, weights, engine.sizes
        self.reply, self.on_tokens = reply, on_tokens
        numbers = [engine.adapters[x.adapter] if x.adapter is not None else 0 for x in requests]
        given = enumerate(zip(requests, numbers, strict=True))
        episodes = [Episode(x, number, engine.length, engine.decode, adapter) for number, (x, adapter) in given]
        self.waiting = deque(episodes)
        self.expected = Counter(_prompt_key(x) for x in requests)
        self.prefixes: dict[tuple, Prefix] = {}
        self.slots: list[Episode | None] = []
        self.length = 0
        self.state: State | None = None
        self.done: list[Completion | None] = [None] * len(episodes)

    def finish(self) -> list[Completion]:
        while self.waiting or any(self.slots):
            self._admit()
            self._draw()
        assert all(self.done)
        return [completion for completion in self.done if completion is not None]

    def _admit(self) -> None:
        """Fills free slots from the queue, and fits their number and length to what is there."""
        running = [episode for episode in self.slots if episode is not None]
        free = self.sizes.slots - len(running)
        new = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        self._fit(len(running) + len(new), max(episode.held for episode in running + new))
        if not new:
            return
        self._compute(new)
        sources: dict[int, tuple[Rows, np.ndarray]] = {}
        for episode in new:
            slot, key = self.slots.index(None), _prompt_key(episode.request)
            self.slots[slot], prefix = episode, self.prefixes[key]
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
        """The prefixes of prompts that are met for the first time."""
        fresh = {_prompt_key(x.request): x for x in episodes if _prompt_key(x.request) not in self.prefixes}
        prompts = [np.asarray(x.request.prompt, np.int32) for x in fresh.values()]
        adapters, settings = [x.adapter for x in fresh.values()], [x.request.sampling for x in fresh.values()]
        found = compute(self.model, self.weights, prompts, adapters, settings, self.sizes)
        self.prefixes |= zip(fresh, found, strict=True)

    def _fit(self, number: int, held: int) -> None:
        """Makes the slots as many and as long as they need to be for one more token each; running ones move up."""
        width, length = self.sizes.width(number), max(self.length, self.sizes.bucket(held + 1))
        if self.state is None or not any(self.slots):
            if (width, length) != (len(self.slots), self.length):
                self.state = blank(self.model, width, length, self.sizes.piece, self.sizes.dtype)
                self.slots = [None] * width
                self.length = length
            return
        # Step by step, so that few ways from shape to shape are compiled.
        while len(self.slots) > width:
            kept = [slot for slot, episode in enumerate(self.slots) if episode is not None]
            fewer = narrowed(len(self.slots))
            self._resize(kept + [0] * (fewer - len(kept)), self.length)
            self.slots = [self.slots[slot] for slot in kept] + [None] * (fewer - len(kept))
        self._lengthen(length)

    def _lengthen(self, length: int) -> None:
        while self.length < length:
            self._resize(range(len(self.slots)), self.sizes.bucket(self.length + 1))

    def _resize(self, source: Sequence[int], length: int) -> None:
        assert self.state is not None
        self.state = resize(self.model, self.state, np.array(source, np.int32), length, self.sizes.piece)
        self.length = length

    def _draw(self) -> None:
        """One dispatch, and what follows from it."""
        running = [episode for episode in self.slots if episode is not None]
        watched = self.on_tokens is not None and len(self.done) == 1  # of many answers nobody reads every word
        looks = watched or any(episode.request.sampling.stop_strings for episode in running)
        room = self.length - max(episode.held for episode in running)
        most = np.int32(min(self.engine.steps, SHORT if looks else self.engine.steps, room))
        enough = np.int32(self._enough(len(running)))
        assert self.state is not None
        self.state, found = decode(
            self.model, self.engine.steps, self.weights, self.state, flow(self.slots), most, enough
        )
        draws, counts = jax.device_get(found)
        answered = []
        for slot, episode in enumerate(self.slots):
            if episode is None:
                continue
            new = episode.take(jax.tree.map(lambda x, slot=slot: x[:, slot], draws), int(counts[slot]))
            if self.on_tokens is not None and len(new):
                self.on_tokens(episode.number, new)
            if episode.ended and (piece := self._answer(episode)) is not None:
                answered.append((slot, piece))
            elif episode.ended:
                self.done[episode.number] = episode.completion(self.engine.version)
                self.slots[slot] = None
        if answered:
            self._observe(answered)

    def _enough(self, running: int) -> int:
        """Down to how many running slots a dispatch goes on."""
        if self.waiting or self.reply is not None:
            return running - max(1, running // REFILL)
        narrower = narrowed(len(self.slots))
        return narrower if narrower < running else 0

    def _answer(self, episode: Episode) -> Piece | None:
        """What the cache is to be given before the next turn; None where the episode has ended."""
        if self.reply is None or episode.ended != "stop":
            return None
        observation = self.reply(episode.number, episode.completion(self.engine.version))
        tokens = None if observation is None else episode.observe(np.asarray(observation, np.int32))
        return None if tokens is None else Piece(tokens, episode.held - len(tokens), episode.adapter)

    def _observe(self, answered: list[tuple[int, Piece]]) -> None:
        """Appends observations to their slots."""
        # Slots must not move before their pieces are in, so only the length is fitted.
        episodes = [episode for episode in self.slots if episode is not None]
        self._lengthen(self.sizes.bucket(max(episode.held for episode in episodes) + 1))
        assert self.state is not None
        for batch in batches(range(len(answered)), lambda item: self.sizes.cut(len(answered[item][1].tokens))):
            slots = np.array([answered[item][0] for item in batch], np.int32)
            pieces = [answered[item][1] for item in batch]
            rows, _ = append(self.model, self.weights, take(self.state, slots), pieces, self.sizes, [])
            source = np.full(len(self.slots), -1, np.int32)
            source[slots] = np.arange(len(slots))
            self.state = put(self.state, rows, source)


def _prompt_key(request: Request) -> tuple:
    """Requests of one key share a prefix: equal prompts under one adapter, and equal settings where the prompt's
    log-probs are asked."""
    prompt = np.asarray(request.prompt, np.int32).tobytes()
    return (prompt, request.adapter, request.sampling if request.sampling.prompt_logprobs else None)


_unstack = jit(unstack, static_argnames="model")
_gains = jit(gains, static_argnames="model")
