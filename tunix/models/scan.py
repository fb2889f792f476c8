"""The scan over a decoder's layers: what it keeps for the backward pass, and where it keeps their weights' gradients.

Layers that differ in their weights alternate in a period, such as three of one kind and one of another. The scan is
over periods, so that a program grows with the layers of one and not with all.

A layer's weights are cast to the compute dtype when it is its turn, so that float32 weights never exist a second time
as a whole bfloat16 model. Their gradients are held as the products return them, and become float32 after the scan: no
digit is lost, and they take half of the memory.

Axes: B rows, T time, D model width, L layers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, PyTree

from tunix.models.attention.attend import KEPT

Remat = Literal["none", "attention", "mlp", "block", "offload"]
"""What is recomputed in the backward pass; `KEEPS` says what is not."""
INPUT = "input"
"""The residual stream before a layer; where it is not offloaded, a scan keeps it in any case."""
KEEPS: Mapping[Remat, tuple[str, ...]] = {
    "none": (INPUT, *KEPT, "x", "q", "k", "v", "gate", "up"),
    "attention": (INPUT, *KEPT, "x", "gate", "up"),
    "mlp": (INPUT, *KEPT, "x", "q", "k", "v"),
    "block": (INPUT, *KEPT),
    "offload": (),
}
"""What a layer keeps for its backward pass, by `checkpoint_name`: results of products, never norms, rope and
activations, which are faster recomputed than stored. Those of attention (`KEPT`) are always among them, so that no
kernel's forward pass runs twice; `offload` keeps what `block` does in the host's memory."""

Path = tuple[str, ...]
"""Where a layer's weight is in its block, e.g. `("mixer", "q", "w")`."""
Weights = Mapping[Path, jax.Array]
Terms = dict[str, PyTree]


class Others(NamedTuple):
    """What layers read besides the stream and their weights."""

    plain: PyTree = None
    """Stacked over all layers; it has no gradient."""
    differentiable: PyTree = None
    """Stacked likewise; it has a gradient."""
    shared: PyTree = None
    """Read by all layers alike, with a gradient."""


Layer = Callable[[int, Float[Array, "B T D"], Weights, Others], tuple[Float[Array, "B T D"], Terms]]
Cast = Callable[[Path, jax.Array], jax.Array]


def over_layers(
    layer: Layer,
    cast: Cast,
    x: Float[Array, "B T D"],
    weights: Weights,
    others: Others,
    remat: Remat,
    period: Sequence[Collection[Path]],
) -> tuple[Float[Array, "B T D"], Terms]:
    """`layer(place, x, weights, others)` for each layer in turn: the last one's x, and the second results.

    Those are stacked, each over the layers that return it.

    Args:
        layer: computes the layer at a place of the period with its cast weights.
        cast: the weight that a layer uses, given its path and its slice. Its gradient has to be that of its result, as
            a cast's is.
        weights: each stacked over the layers that have it.
        others: what else layers read; each gets its part of what is stacked.
        remat: what is kept for the backward pass.
        period: the weights that each layer of a period has.
    """
    paths, places = list(weights), []
    for number, members in enumerate(period):
        indices = [at for at, path in enumerate(paths) if path in members]
        turns = [sum(paths[at] in before for before in period[:number]) for at in indices]
        places.append(_Place(number, indices, turns))
    policy = jax.checkpoint_policies.save_only_these_names(*KEEPS[remat])
    if remat == "offload":
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(KEEPS["block"]),
            offload_src="device",
            offload_dst="pinned_host",
        )
    casts, stacked = [partial(cast, path) for path in paths], list(weights.values())
    slices = [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in stacked]
    # The dtypes of the stacked weights, and those in which layers use them.
    dtypes = [w.dtype for w in stacked]
    used = [jax.eval_shape(cast, part).dtype for cast, part in zip(casts, slices, strict=True)]

    def compute_layer(place: _Place, x: jax.Array, shared: PyTree, inputs: tuple) -> tuple:
        # Taken here, and so again in the backward pass: taken before, every layer's weights would be kept for that.
        weights, sinks, each = inputs
        indices = place.weights
        if len(places) > 1:  # of a period's
            where = list(zip(indices, place.turns, strict=True))
            weights = [weights[at][turn] for at, turn in where]
            sinks = [None if sinks[at] is None else sinks[at][turn] for at, turn in where]
            each = jax.tree.map(lambda x: x[place.number], each)
        leaves: list[Any] = [
            casts[at](w) if sink is None else _cast_into(casts[at], w, sink)
            for at, w, sink in zip(indices, weights, sinks, strict=True)
        ]
        layer_weights = dict(zip((paths[at] for at in indices), leaves, strict=True))
        return layer(place.number, checkpoint_name(x, INPUT), layer_weights, Others(each[0], each[1], shared))

    def run(x: jax.Array, stacked: list, sinks: list, more: tuple) -> tuple[jax.Array, Terms]:
        differentiable, shared = more

        def body(x: jax.Array, inputs: tuple) -> tuple[jax.Array, Terms]:
            by_name: dict[str, list[PyTree]] = {}
            for place in places:
                # A scan keeps its passes apart by itself. The barrier that does it otherwise has every slice of a stack
                # copied before it is used; between the layers of a period it keeps recomputation in turn.
                layer_of = jax.checkpoint(partial(compute_layer, place), policy=policy, prevent_cse=len(places) > 1)
                x, terms = layer_of(x, shared, inputs)
                for name, term in terms.items():
                    by_name.setdefault(name, []).append(term)
            return x, {name: jax.tree.map(lambda *each: jnp.stack(each), *every) for name, every in by_name.items()}

        # What is stacked over layers, by periods; as it is where a period is one layer.
        inputs = (stacked, sinks, (others.plain, differentiable))
        if len(places) > 1:

            def split(x: jax.Array | None, each: int) -> jax.Array | None:
                return None if x is None else x.reshape(-1, each, *x.shape[1:])

            numbers = [sum(at in place.weights for place in places) for at in range(len(stacked))]
            stacked, sinks = ([split(x, n) for x, n in zip(all, numbers, strict=True)] for all in (stacked, sinks))
            inputs = (stacked, sinks, jax.tree.map(lambda x: split(x, len(places)), inputs[2]))
        x, terms = jax.lax.scan(body, x, inputs)
        return x, jax.tree.map(lambda term: term.reshape(-1, *term.shape[2:]), terms)

    nowhere = [None] * len(stacked)
    more = (others.differentiable, others.shared)
    if used == dtypes:
        return run(x, stacked, nowhere, more)

    @jax.custom_vjp
    def scanned(x: jax.Array, stacked: list, more: tuple) -> tuple[jax.Array, Terms]:
        return run(x, stacked, nowhere, more)

    def forward(x: Any, stacked: list, more: tuple) -> tuple[Any, Any]:
        # Zeros that nobody reads, so that nobody makes them: their gradients are the weights', as the products are.
        sinks = [jnp.zeros(w.value.shape, kind) if w.perturbed else None for w, kind in zip(stacked, used, strict=True)]
        values = [w.value for w in stacked]
        others = jax.tree.map(lambda leaf: leaf.value, more)
        return jax.vjp(lambda x, sinks, more: run(x, values, sinks, more), x.value, sinks, others)

    def backward(pull: Callable, d_results: PyTree) -> tuple[jax.Array, list, tuple]:
        def is_zero(d: Any) -> bool:
            return isinstance(d, SymbolicZero)

        d_results = jax.tree.map(
            lambda d: jnp.zeros(d.aval.shape, d.aval.dtype) if is_zero(d) else d, d_results, is_leaf=is_zero
        )
        d_x, d_sinks, d_more = pull(d_results)
        return d_x, [d if d is None else d.astype(dtype) for d, dtype in zip(d_sinks, dtypes, strict=True)], d_more

    scanned.defvjp(forward, backward, symbolic_zeros=True)
    return scanned(x, stacked, more)


class _Place(NamedTuple):
    """A layer of a period."""

    number: int
    weights: list[int]
    """Which of all weights it has."""
    turns: list[int]
    """For each of these how many layers before it in the period have it."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cast_into(cast: Callable[[jax.Array], jax.Array], w: jax.Array, sink: jax.Array) -> jax.Array:
    """`cast(w)`, whose gradient is the sink's."""
    return cast(w)


_cast_into.defvjp(lambda cast, w, sink: (cast(w), None), lambda cast, saved, d: (None, d))
