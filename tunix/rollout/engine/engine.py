"""The engine: requests in, completions out, with continuous batching over slots.

Requests wait in a queue. Free slots are filled from it (`prefill.py` computes each prompt once), one dispatch samples
several tokens in all slots (`programs.decode`), and slots whose request has ended are freed, or continue with an
environment's answer. Numbers of slots and cache lengths come from a small closed set, so that compiling ends. Caches
live as long as one call of `run`: none outlasts the weights that filled it, and requests share a prompt only under the
same adapter.

Axes: Sl slots, St decode steps.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tunix.config import DType
from tunix.errors import UserError
from tunix.lora.multi_lora import LoadedAdapter, Mixture
from tunix.models.kv_cache import TOP, Weights, gains, magnified, unstack
from tunix.models.model import Model, Params, is_adapter
from tunix.rollout.engine.prefill import Piece, Prefix, Rows, append, compute
from tunix.rollout.engine.programs import State, blank, decode, put, resize, take
from tunix.rollout.engine.request import Decode, Episode, Request, StopText
from tunix.rollout.engine.sampling import check
from tunix.rollout.engine.shapes import Sizes, batches, narrowed
from tunix.rollout.engine.slots import Slots
from tunix.rollout.engine.warmup import Warmth
from tunix.types import Completion, Reply, Sampling, Workload
from tunix.util.exact import jit

OnTokens = Callable[[int, np.ndarray], None]
"""Callback that receives (index of the request, its new tokens) after each dispatch."""
SHORT = 8
"""Steps of a dispatch where the host looks at the text: a single answer that is streamed, and stop strings."""
REFILL = 8
"""A dispatch ends early when one slot in so many has ended and another request can be admitted or continued."""


class Engine:
    """Samples from the weights that were published last; a `protocols.Sampler` on this process's devices."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        *,
        slots: int,
        length: int,
        cache_dtype: DType | None = None,
        decode: Decode | None = None,
        moving: Collection[str] = (),
        chunk: int = 256,
        steps: int = 32,
    ):
        """An engine without weights: `publish` gives it some.

        Args:
            model: what is sampled from.
            mesh: the devices.
            slots: requests that are answered at a time.
            length: tokens of prompt and completion at most.
            cache_dtype: of keys and values; None takes the model's.
            decode: token ids -> text, for stop strings.
            moving: names of tables that train along with an adapter, and so change with every `publish`.
            chunk: tokens of a prompt that are computed at a time; a power of two.
            steps: St, tokens that a slot samples in one dispatch at most.

        Raises:
            ValueError: a size is not positive, or the chunk is no power of two.
        """
        if min(slots, length, chunk, steps) < 1 or chunk & (chunk - 1):
            given = f"slots={slots} length={length} chunk={chunk} steps={steps}"
            raise ValueError(f"sizes must be positive and the chunk a power of two, not {given}")
        self.model, self.mesh, self.steps, self.decode, self.moving = model, mesh, steps, decode, moving
        self.sizes = Sizes(slots, length, chunk, max(chunk, steps), cache_dtype or model.dtype)
        self.weights: Weights | None = None
        self.version = 0
        self.adapters: dict[str, int] = {}
        """Number of each adapter that is loaded with the weights, from 1, by name."""
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

    def publish(
        self, params: Mapping[str, Any], version: int, adapters: Mapping[str, LoadedAdapter] | None = None
    ) -> None:
        """Copies these weights; from now on completions are sampled from the copies.

        Under adapters the base is frozen: it is copied once, and only the adapters' weights move afterwards.

        Args:
            params: all weights by name.
            version: recorded with each token of the completions, e.g. 3.
            adapters: by name, for requests to choose from; adapters of the same settings compile nothing again.

        Raises:
            ValueError: an adapter does not fit a model that is adapted already, or holds more than an adapter.
        """
        adapters = adapters or {}
        adapter = {name: x for name, x in params.items() if is_adapter(name) or name in self.moving}
        base = {name: x for name, x in params.items() if name not in adapter}
        copied, frozen = self._base, bool(adapter or adapters)
        with jax.set_mesh(self.mesh):
            if copied is None or not frozen or not self._holds(base):
                # The old copy goes first: there is never room for two.
                self.weights = self._base = copied = None
                copied = self._base = self._copy(base, frozen=frozen)
                self._base_of = {name: weakref.ref(x) for name, x in base.items()}
            views = _unstack(self.model, adapter)
            layers = tuple({**mine, **more} for mine, more in zip(copied.layers, views.layers, strict=True))
            weights = Weights({**copied.top, **views.top}, layers)
            if magnified(self.model):
                settled = zip(layers, _gains(self.model, weights), strict=True)
                weights = weights._replace(layers=tuple({**mine, **more} for mine, more in settled))
            self._mixture = self._mixed(adapters)
            if self._mixture is not None:
                weights = self._mixture.with_adapters(weights, [one.params for one in adapters.values()])
        self.weights, self.version = weights, version
        self.adapters = {name: number for number, name in enumerate(adapters, start=1)}

    def warm(self, work: Workload) -> None:
        """Compiles all that this workload needs, so that nothing compiles while it is sampled.

        Raises:
            ValueError: no weights were loaded.
        """
        with jax.set_mesh(self.mesh):
            Warmth(self.sampled_model, self._loaded, self.sizes, self.steps, work)()

    def sample(
        self, prompts: Sequence[np.ndarray], n: int, sampling: Sampling, seed: int, reply: Reply | None = None
    ) -> list[list[Completion]]:
        """`n` completions for each prompt; see `protocols.SamplingClient.sample`.

        Raises:
            UserError: a sampling setting or a prompt is invalid.
        """
        if n < 1:
            raise UserError(f"n is {n}: ask for at least one completion of each prompt")
        requests = [
            Request(prompt, sampling, seed, index) for index, prompt in enumerate(p for p in prompts for _ in range(n))
        ]
        completions = self.run(requests, reply)
        return [completions[i : i + n] for i in range(0, len(completions), n)]

    def run(
        self, requests: Sequence[Request], reply: Reply | None = None, on_tokens: OnTokens | None = None
    ) -> list[Completion]:
        """Completes each request; the completions are in the order of the requests.

        Args:
            reply: (index of the request, completion so far) -> an observation to continue with, or None.
            on_tokens: receives new tokens while the requests run.

        Raises:
            UserError: a sampling setting or a prompt is invalid.
            ValueError: no weights were loaded.
        """
        for number, request in enumerate(requests):
            self._check(number, request)
        with jax.set_mesh(self.mesh):
            return _Run(self, self._loaded, requests, reply, on_tokens).finish()

    @property
    def sampled_model(self) -> Model:
        """The model that is sampled from, with the adapters that are loaded with it."""
        return self.model if self._mixture is None else self._mixture.model

    def _mixed(self, adapters: Mapping[str, LoadedAdapter]) -> Mixture | None:
        """The adapters' mixture: the present one where it has their settings, so that its programs are used again."""
        settings = tuple(one.settings for one in adapters.values())
        if self._mixture is not None and self._mixture.settings == settings:
            return self._mixture
        return Mixture(self.model, settings) if adapters else None

    def _holds(self, base: Params) -> bool:
        """Whether the present copy of the base was made from these arrays."""
        return all(name in self._base_of and self._base_of[name]() is x for name, x in base.items())

    @property
    def _loaded(self) -> Weights:
        if self.weights is None:
            raise ValueError("the engine has no weights: publish() them before sampling")
        return self.weights

    def _copy(self, base: Params, *, frozen: bool) -> Weights:
        """A copy of the base; where it is frozen, tables that have the right dtype are shared instead."""
        right = {name: x for name, x in base.items() if name in TOP and x.dtype == self.model.dtype}
        shared = right if frozen else {}
        views = _unstack(self.model, {name: x for name, x in base.items() if name not in shared})
        return views._replace(top={**views.top, **shared})

    def _check(self, number: int, request: Request) -> None:
        """Refuses a request that cannot be answered."""
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
        self.engine, self.model, self.weights, self.sizes = engine, engine.sampled_model, weights, engine.sizes
        self.reply, self.on_tokens, self.version = reply, on_tokens, engine.version
        numbers = [engine.adapters[x.adapter] if x.adapter is not None else 0 for x in requests]
        given = enumerate(zip(requests, numbers, strict=True))
        episodes = [Episode(x, number, _stop_text(x, engine.decode), adapter) for number, (x, adapter) in given]
        self.waiting = deque(episodes)
        self.expected = Counter(_prompt_key(x) for x in requests)
        self.prefixes: dict[tuple, Prefix] = {}
        self.slots = Slots(0, engine.length)
        self.length = 0
        self.state: State | None = None
        self.done: list[Completion | None] = [None] * len(episodes)

    def finish(self) -> list[Completion]:
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
                self.slots = Slots(width, self.engine.length)
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
        most = np.int32(min(SHORT if looks else self.engine.steps, self.engine.steps, self.length - self.slots.held))
        enough = np.int32(self._enough(len(running)))
        assert self.state is not None
        self.state, sampled = decode(
            self.model, self.engine.steps, self.weights, self.state, self.slots.flow(), most, enough
        )
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


_unstack = jit(unstack, static_argnames="model")
_gains = jit(gains, static_argnames="model")
