"""The engine's compiled programs: a few pure functions over slots and pages, with shapes from a closed set.

`prefill` computes a piece of prompts into pages, `copy_pages` copies those that other slots begin with, and `decode`
samples tokens in some slots until they have ended.

A slot's last hidden state is in `State.hidden`: a step samples a token from it, then runs the model on that token, so
that prompts, observations and sampled tokens all leave a slot in the same condition. A dispatch takes what it reads out
of the layers' caches: pages in their places, or gathered so that each slot has its own; states of its slots.

Axes: Sl slots, C tokens at a time, D model width, V vocabulary, St decode steps, s shards of the rows, L layers,
k chosen experts of a token.
"""

from collections.abc import Callable
from functools import lru_cache, partial, update_wrapper
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from tunix.mesh import APART, constrain, platform, shards
from tunix.models.attention.attend import at_each_device
from tunix.models.attention.decoding import BY_NAME
from tunix.models.attention.pages import (
    NOWHERE,
    Copies,
    Gathered,
    Pages,
    PieceView,
    SlotsView,
    Table,
    Writes,
    brought_back,
    copied,
    gathered,
)
from tunix.models.blocks import Cache
from tunix.models.deltanet import PieceStates, SlotStates, StatesAhead, StepView, by_first
from tunix.models.kv_cache import Weights, draft, embeddings, empty, extend
from tunix.models.model import Model
from tunix.models.vision import seen_ahead
from tunix.rollout.engine.lookup import GRAM, NO_TOKEN, DraftTables, draft_tokens
from tunix.rollout.engine.page_tables import Reads
from tunix.rollout.engine.pieces import Inputs
from tunix.rollout.engine.sampling import MOST_TOP, Draw, Transform, draw
from tunix.rollout.engine.shapes import Sizes
from tunix.types import TokenScores
from tunix.util.exact import jit

Host = jax.Array | np.ndarray
Result = TypeVar("Result")

SCORED = 64
"""Tokens of a prompt whose logits are there at a time."""
IN_TURN = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA's usual order on a CPU begins with everything that depends on nothing, which would keep the matrices of all
layers dequantized at once; in this order each is dequantized when it is needed."""


class Compiled(Generic[Result]):
    """`jax.jit` of a function that multiplies by a model's weights, which is its first argument."""

    def __init__(self, function: Callable[..., Result], **arguments: Any):
        """Compiles nothing yet; `arguments` are those of `jax.jit`."""
        update_wrapper(self, function)
        self._jit = lru_cache(None)(lambda *options: jit(function, options=dict(options), **arguments))

    def __call__(self, model: Model, *rest: Any) -> Result:
        return self._program(model)(model, *rest)

    def lower(self, model: Model, *rest: Any) -> jax.stages.Lowered:
        """The program for these arguments, which may be shapes; under the mesh that it is for."""
        return self._program(model).lower(model, *rest)

    def _program(self, model: Model) -> Any:
        in_turn = IN_TURN if model.quantized and platform() == "cpu" else {}
        rounds_alike = APART if platform() == "cpu" and model.dtype == "bfloat16" else {}  # as programs of training do
        return self._jit(*{**in_turn, **rounds_alike}.items())


class State(NamedTuple):
    """The slots' arrays on the device."""

    caches: tuple[Cache | None, ...]
    """Keys and values of each layer, or states; None where it reads those of another."""
    hidden: Float[Array, "Sl D"]
    """The hidden state from which the next token of each slot is sampled."""
    progress: "Progress"
    """How far each slot is."""
    recent: Int[Array, "Sl n"]
    """The last tokens of each slot, from which draft tokens are looked up."""


class Progress(NamedTuple):
    """How far each slot is: counted on the device, so that a dispatch can be sent before the last one is read."""

    held: Any
    """`[Sl]` int32: tokens in the cache."""
    left: Any
    """`[Sl]` int32: tokens that may still be sampled; 0 for slots that are idle, or whose turn has ended."""
    drawn: Any
    """`[Sl]` int32: index of the next token among those sampled for the request."""


class Flow(NamedTuple):
    """What a dispatch reads of its slots, from the host."""

    slots: Host
    """`[Sl]` int32: the slots, in the order of their shards."""
    progress: Progress
    """As the host knows it."""
    fresh: Host
    """`[Sl]` bool: slots whose progress is the host's, since their turn began after the last dispatch was sent."""
    seeds: Host
    """`[Sl 2]` uint32: high and low word of the seed."""
    request: Host
    """`[Sl]` int32: index of the request."""
    adapter: Host
    """`[Sl]` int32: number of the request's adapter, from 1; 0 for none."""
    stops: Host
    """`[Sl stops]` int32: the request's stop ids, padded with -1."""
    transform: Transform
    """The request's sampling settings."""
    turned: Host | None = None
    """`[Sl]` int32: what is added to the place of a token for rope, after pictures; None where rope turns tokens to
    their places."""
    drafts: DraftTables | None = None
    """Where draft tokens are looked up; None where there are none, or where the model's head makes them."""


class Steps(NamedTuple):
    """The tokens of a dispatch, step by step; in slot s the first `counts[s]` were sampled."""

    draws: Draw
    """Arrays `[St Sl ...]`."""
    counts: Int[Array, "Sl"]
    passes: Int[Array, "Sl"]
    """Passes through the model in which each slot sampled them: fewer than tokens where drafts were accepted."""
    experts: Int[Array, "St Sl L k"] | None
    """int16: those that each token used; None for a model without."""


@partial(jit, static_argnames=("model", "sizes"))
def initial_state(model: Model, sizes: Sizes) -> State:
    """Slots without anything, and empty pages."""
    hidden = constrain(jnp.zeros((sizes.slots, model.config.d_model), model.dtype), "rows", None)
    numbers = [number * sizes.shards for number in sizes.pages]
    nothing = Progress(*(constrain(jnp.zeros(sizes.slots, jnp.int32), "rows") for _ in Progress._fields))
    layout = BY_NAME[sizes.reader].layout
    recent = constrain(jnp.full((sizes.slots, GRAM - 1), NO_TOKEN), "rows", None)
    caches = empty(model.config, numbers, sizes.page, sizes.cache_dtype, layout, slots=sizes.slots, dtype=model.dtype)
    return State(caches, hidden, nothing, recent)


@partial(Compiled, static_argnames="model", donate_argnames="state")
def prefill(
    model: Model, weights: Weights, state: State, piece: Inputs
) -> tuple[State, tuple[Int[Array, "s C L k"] | None, TokenScores | None]]:
    """Computes a piece: its tokens are in pages then, and slots have their last states. Returns int16 experts that each
    token used, too; None for a model without. And log-probs of the piece's targets; None without any."""
    new: Any = jax.tree.map(jnp.asarray, piece)
    size = _page_size(state)
    ahead = seen_ahead(new.pictures, model.config.vision)
    views = [
        PieceView(new.ids, new.positions, new.begins, visits, Writes(page, new.positions % size), kind.window, **ahead)
        for visits, page, kind in zip(new.visits, new.writes, model.config.paged_kinds, strict=True)
    ]
    states = None if new.sources is None else PieceStates(new.ids, new.sources, new.ends)
    turned = new.positions if new.pictures is None or new.pictures.rope is None else new.pictures.rope
    layers = model.config.num_layers
    x = embeddings(model, weights, new.tokens, new.pictures)
    hidden, caches, experts = extend(
        model, weights, state.caches[:layers], new.tokens, turned, views, states, new.adapters, x
    )
    last = new.last
    if new.before is not None:  # what the head that drafts keeps of each token and the next, but of the last one
        assert states is not None, "families with such a head have states"
        last = states.ends  # the next piece of a prompt begins with it
        rows, parts = states.sources.shape
        of_slots = state.hidden.reshape(rows, -1, state.hidden.shape[-1])
        earlier = jnp.take_along_axis(of_slots, jnp.maximum(states.sources, 0)[..., None], axis=1)
        before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))).reshape(rows, parts, -1, hidden.shape[-1])
        first = by_first(states.sources >= 0, earlier, before[:, :, 0])
        before = before.at[:, :, 0].set(first).reshape(hidden.shape)
        kind = model.config.paged_kinds.index(model.config.cached_kinds[-1])
        follows, places = jnp.where(new.positions > 0, new.ids, 0), jnp.maximum(new.positions - 1, 0)
        writes = Writes(new.before, places % size)
        view = PieceView(follows, new.positions - 1, new.begins - 1, new.visits[kind], writes)
        turned = places if new.before_rope is None else new.before_rope
        _, head = draft(model, weights, state.caches[-1], before, x, turned, view)
        caches = (*caches, head)
    by_shard = last.reshape(len(new.adapters), -1)
    ends = jnp.take_along_axis(hidden, jnp.maximum(by_shard, 0)[..., None], axis=1).reshape(state.hidden.shape)
    of_slots = jnp.where(last[:, None] >= 0, ends, state.hidden)
    state = state._replace(caches=caches, hidden=constrain(of_slots, "rows", None))
    if new.targets is None:
        return state, (experts, None)

    def scored(block: tuple[jax.Array, jax.Array]) -> TokenScores:
        logits = constrain(model.logits(weights.top, block[0]), "rows", None, None)
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        log_total = jnp.log(jnp.sum(jnp.exp(below), axis=-1, keepdims=True))
        top, ids = jax.lax.top_k(below, min(MOST_TOP, logits.shape[-1]))
        target = jnp.take_along_axis(below, block[1][..., None], axis=-1)
        return TokenScores((target - log_total)[..., 0], ids, top - log_total)

    # Block by block: logits of a whole piece would take gigabytes.
    length = min(SCORED, new.targets.shape[1])
    blocks = [jnp.swapaxes(x.reshape(len(x), -1, length, *x.shape[2:]), 0, 1) for x in (hidden, new.targets)]
    scores = jax.lax.map(scored, tuple(blocks))
    return state, (experts, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(*new.ids.shape, *x.shape[3:]), scores))


@partial(Compiled, static_argnames="model", donate_argnames="state")
def copy_pages(model: Model, state: State, copies: tuple[Copies, ...]) -> tuple[State, None]:
    """Copies pages of each kind of layer, which slots begin with that have a prompt of others."""
    paged, caches, copies = model.config.paged_kinds, [], jax.tree.map(jnp.asarray, copies)
    for cache, kind in zip(state.caches, model.config.cached_kinds, strict=True):
        new = at_each_device(copied, cache, copies[paged.index(kind)]) if isinstance(cache, Pages) else cache
        # One layer after the other: else what all of them copy is there at once.
        new, copies = jax.lax.optimization_barrier((new, copies))
        caches.append(new)
    return state._replace(caches=tuple(caches)), None


def _page_size(state: State) -> int:
    """Pt."""
    return next(cache.size for cache in state.caches if isinstance(cache, Pages))


def view(reads: Any, positions: Int[Array, "Sl C"], live: jax.Array, size: int, window: int | None) -> SlotsView:
    """Where new tokens of each slot go, and what they see; slots that are not at work write nothing, nor do draft
    tokens behind the last token that may be sampled, which have no page."""
    column = positions // size - reads.first[:, None]
    inside = (column >= 0) & (column < reads.places.shape[1])
    place = jnp.take_along_axis(reads.places, jnp.where(inside, column, 0), axis=1)
    place = jnp.where(live[:, None] & inside & (place >= 0), place, NOWHERE)
    pages = None if reads.sources is None else Gathered(reads.sources, reads.owners, reads.starts)
    return SlotsView(Writes(place, positions % size), positions, Table(reads.places, reads.first), pages, window)


@partial(Compiled, static_argnames=("model", "steps", "ahead"), donate_argnames="state")
def decode(
    model: Model,
    steps: int,
    ahead: int,
    weights: Weights,
    state: State,
    flow: Flow,
    reads: tuple[Reads, ...],
    most: Int[Host, ""],
    enough: Int[Host, ""],
) -> tuple[State, Steps]:
    """Samples up to `most` <= `steps` (St) tokens in each of some slots that has some left.

    Args:
        ahead: Gs, draft tokens of each step.
        state: all slots.
        flow: what the host knows of those that take part.
        reads: their pages for each kind of layer, up to the last token that may be sampled.
        enough: the dispatch ends as soon as no more slots than these are running.
    """
    flow, reads = jax.tree.map(jnp.asarray, (flow, reads))
    held, left, drawn = jax.tree.map(
        lambda known, all: jnp.where(flow.fresh, known, all[flow.slots]), flow.progress, state.progress
    )
    # Random keys of the requests, from their seed and index alone.
    keys = jax.random.wrap_key_data(jnp.asarray(flow.seeds), impl="threefry2x32")
    keys, adapters = jax.vmap(jax.random.fold_in)(keys, flow.request), jnp.asarray(flow.adapter)
    size = _page_size(state)
    hidden, recent = state.hidden[flow.slots], state.recent[flow.slots]
    if flow.drafts is not None:
        recent = jnp.where(flow.fresh[:, None], flow.drafts.recent, recent)
    blank_draw = jax.eval_shape(lambda: _draw(model, weights, hidden, flow.transform, keys, drawn, left > 0))
    routed = model.config.routed
    of_token = None if routed is None else jax.ShapeDtypeStruct((len(hidden), *routed), jnp.int16)
    notes = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), (blank_draw, of_token))
    paged = model.config.paged_kinds
    layers = [paged.index(kind) if kind.paged else None for kind in model.config.cached_kinds]
    # What each layer keeps, as the steps read and write it: states of the dispatch's slots, and pages gathered, or all
    # of them in their places; None of a layer that keeps nothing.
    kept: tuple[Any, ...] = state.caches
    taken = list(kept)
    for layer, (cache, kind) in enumerate(zip(kept, layers, strict=True)):
        if isinstance(cache, SlotStates):
            taken[layer] = SlotStates(*(x[flow.slots] for x in cache)).placed()
        elif cache is not None and kind is not None and reads[kind].sources is not None:
            taken[layer] = at_each_device(gathered, cache, reads[kind].sources)
    nothing = jnp.zeros_like(left)
    start = (jnp.int32(0), tuple(taken), hidden, left > 0, (nothing, nothing), recent, notes)
    has_head = model.config.mtp is not None and ahead > 0

    def running(carry: tuple) -> jax.Array:
        step, _, _, live, _, _, _ = carry
        return (step + ahead < most) & (jnp.sum(live) > enough)

    def stops(tokens: jax.Array) -> jax.Array:
        """`[Sl C]` whether these tokens end their turns."""
        return jnp.any(tokens[..., None] == flow.stops[:, None], axis=-1)

    def sample(carry: tuple) -> tuple:
        step, caches, hidden, live, (count, passes), recent, notes = carry
        passes += live
        new = _draw(model, weights, hidden, flow.transform, keys, drawn + count, live)
        tokens = new.tokens[:, None]
        if flow.drafts is not None:
            tokens = jnp.concatenate([tokens, draft_tokens(flow.drafts, recent, new.tokens)], axis=1)
        caches, head = caches[: model.config.num_layers], caches[-1]

        def drafted(
            head: Any, before: Float[Array, "Sl C D"], tokens: Int[Array, "Sl C"], first: Int[Array, "Sl"]
        ) -> tuple[Float[Array, "Sl C D"], Any]:
            """What the model's head makes of tokens behind those from place `first` on, and its pages."""
            places = first[:, None] + jnp.arange(tokens.shape[1])
            seen = view(reads[paged.index(model.config.cached_kinds[-1])], places, live, size, None)
            turned = places if flow.turned is None else places + flow.turned[:, None]
            return draft(model, weights, head, before, embeddings(model, weights, tokens), turned, seen)

        if has_head:
            before = hidden[:, None]
            for further in range(ahead):
                before, head = drafted(head, before, tokens[:, -1:], held + count - 1 + further)
                logits = constrain(model.logits(weights.top, before), "rows", None, "vocab")
                tokens = jnp.concatenate([tokens, jnp.argmax(logits, axis=-1).astype(tokens.dtype)], axis=1)
        positions = (held + count)[:, None] + jnp.arange(1 + ahead)
        views = [view(pages, positions, live, size, kind.window) for pages, kind in zip(reads, paged, strict=True)]
        turned = positions if flow.turned is None else positions + flow.turned[:, None]
        states, caches, experts = extend(
            model, weights, caches, jnp.maximum(tokens, 0), turned, views, StepView(live), adapters
        )
        if not ahead:
            number, last, hidden = live.astype(count.dtype), tokens, states[:, 0]
            every = new, None if experts is None else experts[:, 0]
            notes = jax.tree.map(lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, step, 0), notes, every)
        else:
            # What the request draws after the sampled token and each draft token but the last, `[Sl Gs]`.
            repeated = jax.tree.map(lambda x: jnp.repeat(x, ahead, axis=0), (flow.transform, keys, live))
            numbers = ((drawn + count + 1)[:, None] + jnp.arange(ahead)).reshape(-1)
            before = states[:, :-1].reshape(-1, states.shape[-1])
            after = _draw(model, weights, before, repeated[0], repeated[1], numbers, repeated[2])
            after = jax.tree.map(lambda x: x.reshape(-1, ahead, *x.shape[1:]), after)
            # Accepted are the sampled token, and the draft tokens after it that are what is sampled there anyway, so
            # that drafts change nothing.
            right = (after.tokens == tokens[:, 1:]) & ~stops(tokens[:, :-1])
            right &= jnp.arange(1, tokens.shape[1]) < (left - count)[:, None]
            number = live * (1 + jnp.sum(jnp.cumprod(right, axis=1), axis=1, dtype=jnp.int32))
            every = jax.tree.map(lambda first, more: jnp.concatenate([first[:, None], more], axis=1), new, after)
            # The accepted ones are noted behind what each slot has.
            index = jnp.arange(every.tokens.shape[1])
            places = jnp.where(index < number[:, None], count[:, None] + index, steps)
            rows = jnp.arange(len(count))[:, None]
            notes = jax.tree.map(lambda all, x: all.at[places, rows].set(x, mode="drop"), notes, (every, experts))
            at, take = jnp.maximum(number - 1, 0)[:, None], partial(jnp.take_along_axis, axis=1)
            last, hidden = take(tokens, at), by_first(live, take(states, at[..., None])[:, 0], hidden)
            caches = tuple(x.after(number) if isinstance(x, StatesAhead) else x for x in caches)
            if has_head:  # it has drafted from states of its own; those of the model are known now
                _, head = drafted(head, states[:, :-1], tokens[:, 1:], held + count)
            recent = take(jnp.concatenate([recent, tokens], axis=1), number[:, None] + jnp.arange(GRAM - 1))
        count += number
        caches = (*caches, head) if model.config.mtp else caches
        live &= (count < left) & ~stops(last)[:, 0]
        return step + 1 + ahead, caches, constrain(hidden, "rows", None), live, (count, passes), recent, notes

    _, taken, hidden, live, (count, passes), recent, (draws, experts) = jax.lax.while_loop(running, sample, start)
    # A turn that ended with a stop id has nothing left, whatever the host knows yet.
    progress = Progress(held + count, jnp.where(live, left - count, 0), drawn + count)
    written = []  # of each kind of layer, the places of all pages that the dispatch may have written to
    for pages in reads:
        # With a head that drafts, from the place of the token before on.
        further = int(model.config.mtp is not None)
        begin, most_written = jnp.maximum(held - further, 0), steps + further
        columns = (begin // size - pages.first)[:, None] + jnp.arange((most_written + size - 2) // size + 1)
        places = jnp.take_along_axis(pages.places, jnp.clip(columns, 0, pages.places.shape[1] - 1), axis=1)
        written.append(jnp.where(columns < pages.places.shape[1], places, -1))

    caches = list(taken)
    for layer, (cache, part, kind) in enumerate(zip(kept, taken, layers, strict=True)):
        if isinstance(cache, SlotStates):
            updated = jax.tree.map(lambda all, new: all.at[flow.slots].set(new, unique_indices=True), cache, part)
            caches[layer] = updated.placed()
        elif cache is not None and kind is not None and reads[kind].sources is not None:
            caches[layer] = at_each_device(
                lambda both, places, sources: brought_back(both[0], both[1], places, sources),
                (cache, part),
                written[kind],
                reads[kind].sources,
            )

    def put(all: jax.Array, new: jax.Array) -> jax.Array:
        return constrain(all.at[flow.slots].set(new, unique_indices=True), "rows", *(None,) * (all.ndim - 1))

    hidden, progress, recent = jax.tree.map(
        put, (state.hidden, state.progress, state.recent), (hidden, progress, recent)
    )
    return State(tuple(caches), hidden, progress, recent), Steps(draws, count, passes, experts)


def _draw(
    model: Model,
    weights: Weights,
    hidden: Float[Array, "Sl D"],
    transform: Transform,
    keys: Key[Array, "Sl"],
    number: Int[Array, "Sl"],
    live: jax.Array,
) -> Draw:
    logits = model.logits(weights.top, hidden[:, None])[:, 0]
    if len(logits) % shards("draws") == 0:
        # Each device samples for some slots from whole rows: parts of the vocabulary would be gathered time and again.
        logits = constrain(constrain(logits, "rows", "vocab"), "draws", None)
    new = draw(logits, jax.vmap(jax.random.fold_in)(keys, number), transform, live)
    # Where the tokens are split otherwise than the slots are, the embedding would be gathered for them.
    return jax.tree.map(lambda x: constrain(x, "rows", *(None,) * (x.ndim - 1)), new)
