"""The engine: requests in, completions out, with continuous batching over slots.

It keeps a copy of the weights that were published last, and of their adapters; `batch.py` answers requests from them.
Numbers of slots, pages and tokens of a piece come from a small closed set (`shapes.py`), so that compiling ends.
"""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tunix.config import CacheType
from tunix.errors import UserError
from tunix.lora.multi_lora import LoadedAdapter, Mixture
from tunix.mesh import compile_on, row_shards, sharding
from tunix.models.attention.decoding import unsaved
from tunix.models.config import is_adapter
from tunix.models.deltanet import PIECE_CHUNK
from tunix.models.kernel_gates import reader_here
from tunix.models.kv_cache import Weights, decode_specs, gains, is_top, magnified, unstack
from tunix.models.model import Model, Params
from tunix.protocols import Sampler
from tunix.rollout.engine.batch import SHORT, Batch, OnProgress, OnTokens, Published, Pull
from tunix.rollout.engine.page_tables import PageTables
from tunix.rollout.engine.pieces import Piece, copies_of
from tunix.rollout.engine.programs import Compiled, State, copy_pages, decode, initial_state, prefill
from tunix.rollout.engine.request import Decode, check_pictures, check_prompt
from tunix.rollout.engine.sampling import check
from tunix.rollout.engine.shapes import PAGE, Sizes, within
from tunix.rollout.engine.slots import Slots
from tunix.rollout.types import Pause
from tunix.types import Completion, OnDone, Reply, Request, Usage, Workload
from tunix.util.exact import jit


class Call(NamedTuple):
    """A call of a program; the state of the slots is among its arguments, and returned first."""

    program: Compiled[tuple[State, Any]]
    before: tuple[Any, ...]
    """The arguments before the state."""
    after: tuple[Any, ...]
    """Those after it."""

    def lowered(self, state: State) -> jax.stages.Lowered:
        """The program, traced."""
        return self.program.lower(*self.before, state, *self.after)


def warmup_calls(model: Model, weights: Weights, sizes: Sizes) -> Iterator[Call]:
    """Calls of all programs, in all shapes, that leave the state as it is."""
    nothing, page_tables, slots = np.int32(0), PageTables(sizes), Slots(sizes)
    for width in sizes.widths:
        chosen = np.flatnonzero(np.arange(sizes.slots) % sizes.slots_of_shard < width // sizes.shards)
        flow = slots.flow(chosen)
        for numbers in sizes.gathered(width):
            reads = page_tables.reads(chosen, numbers)
            yield Call(decode, (model, sizes.steps, sizes.speculate, weights), (flow, reads, nothing, nothing))
    for length in sizes.pieces:
        yield Call(prefill, (model, weights), (Piece(page_tables, length).inputs,))
    yield Call(copy_pages, (model,), (tuple(copies_of([[]] * sizes.shards) for _ in sizes.windows),))


class Engine(Sampler):
    """Samples from the weights that were published last, on this process's devices."""

    exclusive = False
    """Whether a publication waits until nobody holds the weights before: it copies what it publishes."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        *,
        max_length: int,
        slots: int | None = None,
        cache_dtype: CacheType | None = None,
        speculate: int = 0,
        decode: Decode | None = None,
        moving: Collection[str] = (),
        piece: int = 2048,
        page: int = PAGE,
        steps: int = 32,
        ahead: int | None = None,
        room: float | None = None,
        bring: Callable[[str, jax.Array], jax.Array] | None = None,
    ):
        """An engine without weights: `publish` gives it some.

        Args:
            model: what is sampled from.
            mesh: the devices.
            max_length: tokens of prompt and completion at most.
            slots: requests that are answered at a time, rounded up to as many in each shard of the rows; None for as
                many as there is room for.
            cache_dtype: what keys and values are kept in; None for the model's dtype.
            speculate: draft tokens of each step, by the model's own head where it has one (`DraftHead`), else from
                what followed the same tokens before; fewer than 8 and `steps`. They change nothing but the time.
            decode: token ids -> text, for stop strings.
            moving: names of tables that train along with an adapter, and so change with every `publish`.
            piece: tokens of prompts that each shard of the slots computes at a time; a power of two.
            page: tokens of a page of the cache; a power of two.
            steps: tokens that a slot samples in one dispatch at most.
            ahead: dispatches that are sent before the last one is read; None for what suits the platform.
            room: bytes for keys and values on each device; None for as many as slots can ever need.
            bring: (name, published array) -> the array on these devices; None where they hold what is published.

        Raises:
            UserError: there is no room for one request, or these devices have no use for such a cache.
            ValueError: a size is not positive, a piece or page is no power of two, draft tokens are too many, or a
                piece is shorter than a convolution or a picture.
        """
        if (
            min(1 if slots is None else slots, max_length, piece, page, steps) < 1
            or piece & (piece - 1)
            or page & (page - 1)
            or not 0 <= speculate < min(SHORT, steps)
        ):
            raise ValueError(
                f"sizes must be positive, piece and page powers of two, and speculate less than {SHORT} and steps, not "
                f"{slots=} {max_length=} {piece=} {page=} {steps=} {speculate=}"
            )
        self.model, self.mesh, self.decode, self.moving = model, mesh, decode, moving
        self.room = room
        self._bring = bring
        if ahead is None:  # a CPU computes on the cores that would wait
            ahead = 0 if mesh.devices.flat[0].platform == "cpu" else 1
        cache_dtype = cache_dtype or model.dtype
        specs = decode_specs(model.config, mesh, model.dtype, cache_dtype, page)
        if reason := unsaved(specs):
            where = specs[0].platform
            raise UserError(
                f"rollout.cache_dtype: {cache_dtype} saves nothing on these devices ({where}): {reason}. Leave it out"
            )
        chunk, delta, vision = None, model.config.delta, model.config.vision
        if delta is not None:
            if piece < delta.taps:
                raise ValueError(
                    f"a piece of {piece} tokens is shorter than the convolutions of {delta.taps} of the model"
                )
            chunk = min(PIECE_CHUNK, piece)
        if vision is not None and piece < vision.tokens:
            raise ValueError(f"a piece of {piece} tokens is shorter than a picture of {vision.tokens}")
        bare = Sizes(
            slots=0,
            max_length=max_length,
            piece=piece,
            page=page,
            steps=steps,
            ahead=ahead,
            speculate=speculate,
            windows=tuple(kind.window for kind in model.config.paged_kinds),
            pages=(),
            shards=row_shards(mesh),
            cache_dtype=cache_dtype,
            reader=reader_here(specs, mesh).name,
            chunk=chunk,
            mtp=model.config.mtp is not None,
            vision=vision,
        )
        self.sizes = within(bare, model.config, mesh, slots, room)
        self.slots = self.sizes.slots
        """Requests that are answered at a time."""
        self._published: Published | None = None
        self.lock = threading.RLock()
        """Held while programs are sent: those of several threads have to reach all devices in one order."""
        self._one_at_a_time = threading.Lock()
        """Held while requests are answered: there is room for one cache."""
        self.usage: Usage | None = None
        """What the last requests took; None where there were none."""
        self._ended = Usage(0, 0, 0.0)
        self._serving: Batch | None = None
        self._prefilled = 0
        self._warm: Sizes | None = None
        """The shapes that were compiled in advance."""
        self._mixture: Mixture | None = None
        self._base: Weights | None = None
        self._base_of: dict[str, weakref.ref] = {}

    def publish(
        self, params: Mapping[str, Any], version: int, adapters: Mapping[str, LoadedAdapter] | None = None
    ) -> None:
        """Copies these weights; from now on completions are sampled from the copies.

        Under adapters the base is frozen: it is copied once, and only the adapters' weights move afterwards.

        Args:
            params: all weights by name.
            version: recorded with each token of the completions, e.g. 3.
            adapters: by name, for requests to choose from, on a base that stays as it is; adapters of the same settings
                compile nothing again.

        Raises:
            ValueError: an adapter does not fit a model that is adapted already, or holds more than an adapter.
        """
        adapter = {name: x for name, x in params.items() if is_adapter(name) or name in self.moving}
        base = {name: x for name, x in params.items() if name not in adapter}
        frozen, adapters = bool(adapter) or adapters is not None, adapters or {}
        with self.lock, jax.set_mesh(self.mesh):
            copied = self._base
            same = all(name in self._base_of and self._base_of[name]() is x for name, x in base.items())
            if copied is None or not frozen or not same:
                # The old copy goes first: there is never room for two.
                self._published = self._base = copied = None
                copied = self._base = self._copy(base, frozen=frozen)
                self._base_of = {name: weakref.ref(x) for name, x in base.items()}
            views = self._copy(adapter, frozen=False)
            layers = tuple({**layer, **more} for layer, more in zip(copied.layers, views.layers, strict=True))
            weights = Weights({**copied.top, **views.top}, layers)
            if magnified(self.model):
                pairs = zip(layers, _gains(self.model, weights), strict=True)
                weights = weights._replace(layers=tuple({**layer, **more} for layer, more in pairs))
            settings = tuple(loaded.settings for loaded in adapters.values())
            # A mixture with the same settings stays, so that its programs are used again.
            if self._mixture is None or self._mixture.settings != settings:
                self._mixture = Mixture(self.model, settings) if adapters else None
            if self._mixture is not None:
                weights = self._mixture.with_adapters(weights, [loaded.params for loaded in adapters.values()])
            model = self.model if self._mixture is None else self._mixture.model
            numbers = {name: number for number, name in enumerate(adapters, start=1)}
            self._published = Published(model, weights, version, numbers)

    def borrow(self, policy: "Engine") -> None:
        """Takes the frozen base of an engine that samples with an adapter, without a copy: completions are the base's.

        Raises:
            ValueError: that engine has no weights, or all of them train.
        """
        with policy.lock:
            base = policy._base
            if base is None or not (policy.model.adapt or policy.moving):
                raise ValueError("there is no frozen base: the policy has no adapter, or was not published")
            self._published = Published(self.model, base, 0, {})

    def warm(self, work: Workload) -> None:
        """Compiles all that this workload needs, so that nothing compiles while it is sampled.

        The programs are traced one after the other, and compiled at the same time, as many as this machine has cores: a
        compiler works outside of the interpreter's lock, and takes minutes for a large model. Then each is called once
        with nothing to do, which loads it: a dispatch in which no slot is running returns at once.

        Raises:
            ValueError: no weights were loaded.
        """
        self._warm, published = self.sizes.of_requests([work.length] * work.requests), self.hold()
        with jax.set_mesh(self.mesh):
            state = initial_state(published.model, self._warm)
            calls = list(warmup_calls(published.model, published.weights, self._warm))
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                mesh = jax.sharding.get_mesh()
                for waiting in [pool.submit(compile_on, mesh, call.lowered(state)) for call in calls]:
                    waiting.result()
            for call in calls:
                state, _ = call.program(*call.before, state, *call.after)

    def run(
        self,
        requests: Sequence[Request],
        reply: Reply | None = None,
        on_done: OnDone | None = None,
        pause: Pause | None = None,
        held: Published | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Completes each request; the completions are in the order of the requests. One call at a time does so.

        Args:
            reply: (index of the request, completion so far) -> an observation to continue with, or None.
            on_done: receives completions while others run; see `types.OnDone`.
            pause: whether all requests are paused where they are, instead of the next dispatch.
            held: the weights, from `hold`; None for those that were published last.
            on_tokens: receives new tokens while the requests run.

        Raises:
            UserError: a sampling setting or a prompt is invalid.
            ValueError: no weights were loaded.
        """
        published, vocab = held or self.hold(), self.model.config.vocab_size
        for number, request in enumerate(requests):
            check(request.sampling, vocab)
            if request.adapter is not None and request.adapter not in published.adapters:
                there = f"there are {', '.join(published.adapters)}" if published.adapters else "none was loaded"
                raise UserError(f"request {number} asks for the adapter {request.adapter!r}: {there}")
            if request.sampling.stop_strings and self.decode is None:
                raise UserError(
                    f"sampling: stop_strings is {request.sampling.stop_strings!r}, but the engine was built without a "
                    "tokenizer's decode; use stop_ids, or give it one"
                )
            room = self.sizes.max_length + (request.sampling.max_tokens == 0)
            check_prompt(number, request.prompt, room, vocab)
            check_pictures(number, request.prompt, request.pictures, self.model.config.vision)
        if not requests:
            return []
        # An environment's answers may take all that is left.
        most = [self.sizes.max_length if reply else len(x.prompt) + x.sampling.max_tokens for x in requests]
        sizes = self.sizes.of_requests(most)
        if self._warm is not None and self._warm.covers(sizes):  # compiled in advance, however few the requests
            sizes = self._warm
        with self._one_at_a_time, jax.set_mesh(self.mesh):
            batch = Batch(published, sizes, self.decode, requests, reply, on_tokens, on_done, pause, self.lock)
            completions = batch.finish()
        self.usage = batch.meter.usage
        self._ended += self.usage
        return completions

    def serve(self, pull: Pull, on_done: OnDone, on_progress: OnProgress) -> None:
        """Completes requests as they come, until there are to be no more, with the weights that were published last.
        One call of this or of `run` at a time does so.

        Args:
            pull: what has come since the last dispatch, checked by `check` and `check_prompt`; None to end the call.
            on_done: receives (number of the request, its completion).
            on_progress: receives new tokens of requests that are watched.

        Raises:
            ValueError: no weights were loaded.
        """
        published = self.hold()
        sizes = self._warm or self.sizes.of_requests([self.sizes.max_length] * self.slots)
        with self._one_at_a_time, jax.set_mesh(self.mesh):
            batch = Batch(
                published,
                sizes,
                self.decode,
                (),
                on_done=on_done,
                lock=self.lock,
                pull=pull,
                on_progress=on_progress,
            )
            self._serving = batch
            try:
                batch.finish()
            finally:
                self._serving, self._prefilled, self._ended = None, self.prefilled, self.total
        self.usage = batch.meter.usage

    @property
    def prefilled(self) -> int:
        """Tokens of prompts that `serve` has computed so far."""
        return self._prefilled + (0 if self._serving is None else self._serving.prefilled)

    @property
    def total(self) -> Usage:
        """What all requests took so far."""
        serving = self._serving
        return self._ended if serving is None else self._ended + serving.meter.usage

    @property
    def drafts(self) -> str:
        """What came of draft tokens so far, e.g. `, 245 of 819 draft tokens accepted`; empty where there were none."""
        total = self.total
        return f", {total.accepted} of {total.drafted} draft tokens accepted" if total.drafted else ""

    def hold(self) -> Published:
        """The weights that were published last, which stay as long as they are held.

        Raises:
            ValueError: no weights were loaded.
        """
        with self.lock:
            if self._published is None:
                raise ValueError("the engine has no weights: publish() them before sampling")
            return self._published

    def _copy(self, base: Params, *, frozen: bool) -> Weights:
        """A copy of the base; where it is frozen, tables that have the right dtype are shared instead."""
        if self._bring is not None:
            # One after the other, so that few are here both as they came and as they are read.
            parts = [_unstack(self.model, {name: self._bring(name, x)}) for name, x in base.items()]
            top = {name: x for part in parts for name, x in part.top.items()}
            layers = range(self.model.config.num_layers)
            return Weights(top, tuple({k: x for part in parts for k, x in part.layers[i].items()} for i in layers))
        right = {name: x for name, x in base.items() if frozen and is_top(name) and x.dtype == self.model.dtype}
        read_at = {name: sharding(self.model.axes[name], x.shape, self.mesh) for name, x in right.items()}
        shared = {name: x for name, x in right.items() if x.sharding.is_equivalent_to(read_at[name], x.ndim)}
        views = _unstack(self.model, {name: x for name, x in base.items() if name not in shared})
        return views._replace(top={**views.top, **shared})


_unstack = jit(unstack, static_argnames="model")
_gains = jit(gains, static_argnames="model")
