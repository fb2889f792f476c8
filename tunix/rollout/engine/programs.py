"""The engine's compiled programs: a few pure functions over slots, with shapes from a closed set.

`prefill` computes prompts in rows of their own, `put` copies rows into slots (one prompt's row into all slots of its
group), `decode` samples tokens until slots have ended, `take` copies slots out so that `prefill` can append to them,
and `resize` changes the number of slots and the length of their caches.

A slot's last hidden state is in `State.hidden`: a step samples a token from it, then runs the model on that token, so
that prompts, observations and sampled tokens all leave a slot in the same condition.

Axes: Sl slots, B rows (of a prefill), C tokens at a time, D model width, V vocabulary, St decode steps.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from tunix.config import DType
from tunix.mesh import constrain, platform
from tunix.models.attention.inputs import Cache, placed
from tunix.models.kv_cache import Weights, empty, extend
from tunix.models.model import Model, Params
from tunix.rollout.engine.sampling import Draw, Transform, draw, logprobs
from tunix.util.exact import jit

Host = jax.Array | np.ndarray
Found = TypeVar("Found")

IN_TURN = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA's usual order on a CPU begins with everything that depends on nothing, which would keep the matrices of all
layers dequantized at once; in this order each is dequantized when it is needed."""


class Compiled(Generic[Found]):
    """`jax.jit` of a function that multiplies by a model's weights, which is its first argument."""

    def __init__(self, function: Callable[..., Found], **arguments: Any):
        """Compiles nothing yet; `arguments` are those of `jax.jit`."""
        update_wrapper(self, function)
        self._usual, self._in_turn = jit(function, **arguments), jit(function, **arguments, options=IN_TURN)

    def __call__(self, model: Model, *rest: Any) -> Found:
        """Calls the program for these arguments."""
        return self._program(model)(model, *rest)

    def lower(self, model: Model, *rest: Any) -> jax.stages.Lowered:
        """The program for these arguments, which may be shapes; under the mesh that it is for."""
        return self._program(model).lower(model, *rest)

    def _program(self, model: Model) -> Any:
        return self._in_turn if model.quantized and platform() == "cpu" else self._usual


def compiled(**arguments: Any) -> Callable[[Callable[..., Found]], Compiled[Found]]:
    """Decorates with `Compiled` and these arguments of `jax.jit`."""
    return lambda function: Compiled(function, **arguments)


class State(NamedTuple):
    """The slots' arrays on the device."""

    caches: tuple[Cache, ...]
    """Keys and values of each layer."""
    hidden: Float[Array, "Sl D"]
    """The hidden state from which the next token of each slot is sampled."""


class Flow(NamedTuple):
    """The slots' arrays from the host, new at each dispatch."""

    held: Host
    """`[Sl]` int32: tokens in the cache."""
    left: Host
    """`[Sl]` int32: tokens that may still be sampled; 0 for idle slots."""
    drawn: Host
    """`[Sl]` int32: index of the next token among those sampled for the request."""
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


class Steps(NamedTuple):
    """The tokens of a dispatch, step by step; in slot s the first `counts[s]` were sampled."""

    draws: Draw
    """Arrays `[St Sl ...]`."""
    counts: Int[Array, "Sl"]


@partial(jit, static_argnames=("model", "rows", "length", "piece", "dtype"))
def blank(model: Model, rows: int, length: int, piece: int, dtype: DType) -> State:
    """Empty slots or rows."""
    hidden = constrain(jnp.zeros((rows, model.config.d_model), model.dtype), "rows", None)
    return State(empty(model.config, rows, length, piece, dtype), hidden)


@compiled(static_argnames="model", donate_argnames="rows")
def prefill(
    model: Model,
    weights: Weights,
    rows: State,
    tokens: Int[Host, "B C"],
    start: Int[Host, "B"],
    count: Int[Host, "B"],
    adapters: Int[Host, "B"],
) -> tuple[State, Float[Array, "B C D"]]:
    """Appends a chunk of `count` tokens to each row, which holds `start` tokens; also the chunk's hidden states."""
    new = (jnp.asarray(x) for x in (tokens, start, count, adapters))
    hidden, caches = extend(model, weights, rows.caches, *new)
    last = jnp.take_along_axis(hidden, (count - 1)[:, None, None], axis=1)[:, 0]
    return State(caches, last), hidden


@partial(jit, static_argnames="model")
def score(
    model: Model, top: Params, hidden: Float[Array, "B C D"], targets: Int[Host, "B C"], transform: Transform
) -> Float[Array, "B C"]:
    """Log-probs of the tokens that follow the states of a chunk, under each row's transform."""

    def column(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        state, target = inputs
        return logprobs(model.logits(top, state[:, None])[:, 0], target, transform)

    # One column at a time: logits of a whole chunk would be [B C V].
    return jax.lax.map(column, (hidden.swapaxes(0, 1), targets.T)).T


@partial(jit, donate_argnames="state")
def put(state: State, rows: State, source: Int[Host, "Sl"]) -> State:
    """Copies row `source[s]` into slot s; where that is -1, the slot is unchanged. Rows may be shorter than slots."""
    chosen, taken = jnp.maximum(source, 0), source >= 0

    def one(slots: jax.Array, rows: jax.Array) -> jax.Array:
        corner = slots[tuple(slice(size) for size in (slots.shape[0], *rows.shape[1:]))]
        new = jnp.where(taken[:, None, None, None], rows[chosen], corner)
        return placed(jax.lax.dynamic_update_slice(slots, new, (0, 0, 0, 0)))

    hidden = jnp.where(taken[:, None], rows.hidden[chosen], state.hidden)
    return State(jax.tree.map(one, state.caches, rows.caches), constrain(hidden, "rows", None))


@jit
def take(state: State, slots: Int[Host, "B"]) -> State:
    """Copies some slots into rows."""
    return State(jax.tree.map(lambda x: placed(x[slots]), state.caches), state.hidden[slots])


@partial(jit, static_argnames=("model", "length", "piece"))
def resize(model: Model, state: State, source: Int[Host, "Sl"], length: int, piece: int) -> State:
    """Copies slots into caches of another length; slot s is the old slot `source[s]`."""

    dtype: DType = "bfloat16" if state.caches[0][0].dtype == jnp.bfloat16 else "float32"
    shapes = jax.eval_shape(lambda: empty(model.config, source.shape[0], length, piece, dtype))

    def one(x: jax.Array, goal: jax.ShapeDtypeStruct) -> jax.Array:
        moved = x[source]
        return placed(jnp.pad(moved, [(0, new - old) for old, new in zip(moved.shape, goal.shape, strict=True)]))

    return State(jax.tree.map(one, state.caches, shapes), constrain(state.hidden[source], "rows", None))


@compiled(static_argnames=("model", "steps"), donate_argnames="state")
def decode(
    model: Model,
    steps: int,
    weights: Weights,
    state: State,
    flow: Flow,
    most: Int[Host, ""],
    enough: Int[Host, ""],
) -> tuple[State, Steps]:
    """Samples up to `most` <= `steps` (St) tokens in each slot that has some left.

    Args:
        model: what is sampled from.
        steps: K.
        weights: the model's weights.
        state: the slots.
        flow: what the host knows of them.
        most: tokens of a slot at most.
        enough: the dispatch ends as soon as no more slots than these are running.
    """
    flow = jax.tree.map(jnp.asarray, flow)
    keys, left, drawn = _request_keys(flow), jnp.asarray(flow.left), jnp.asarray(flow.drawn)
    adapters = jnp.asarray(flow.adapter)
    blank_draw = jax.eval_shape(lambda: _draw(model, weights, state, flow, keys, drawn, left > 0))
    draws = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), blank_draw)
    start = (jnp.int32(0), state, left > 0, jnp.zeros_like(left), draws)

    def running(carry: tuple) -> jax.Array:
        step, _, live, _, _ = carry
        return (step < most) & (jnp.sum(live) > enough)

    def one(carry: tuple) -> tuple:
        step, state, live, count, draws = carry
        new = _draw(model, weights, state, flow, keys, drawn + count, live)
        draws = jax.tree.map(lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, step, 0), draws, new)
        hidden, caches = extend(
            model, weights, state.caches, new.tokens[:, None], flow.held + count, live.astype(jnp.int32), adapters
        )
        count += live
        live &= (count < left) & ~jnp.any(new.tokens[:, None] == flow.stops, axis=1)
        return step + 1, State(caches, constrain(hidden[:, 0], "rows", None)), live, count, draws

    _, state, _, count, draws = jax.lax.while_loop(running, one, start)
    return state, Steps(draws, count)


def _request_keys(flow: Flow) -> Key[Array, "Sl"]:
    """`[Sl]` random keys of the requests, from their seed and index alone."""
    keys = jax.random.wrap_key_data(jnp.asarray(flow.seeds), impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, flow.request)


def _draw(
    model: Model,
    weights: Weights,
    state: State,
    flow: Flow,
    keys: Key[Array, "Sl"],
    number: Int[Array, "Sl"],
    live: jax.Array,
) -> Draw:
    logits = model.logits(weights.top, state.hidden[:, None])[:, 0]
    return draw(logits, jax.vmap(jax.random.fold_in)(keys, number), flow.transform, live)
