"""The scan over a decoder's layers: what it keeps for the backward pass, and where it keeps their weights' gradients.

A layer's weights are cast to the compute dtype when it is its turn, so that float32 weights never exist a second time
as a whole bfloat16 model. Their gradients are held as the products return them, and become float32 after the scan: no
digit is lost, and they take half of the memory.

Axes: B rows, T time, D model width, L layers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

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

Layer = Callable[[Float[Array, "B T D"], PyTree, PyTree], tuple[Float[Array, "B T D"], PyTree]]
Cast = Callable[[tuple, jax.Array], jax.Array]


def policy(remat: Remat) -> Callable[..., Any]:
    """The policy of `jax.checkpoint` that keeps `KEEPS[remat]`."""
    if remat != "offload":
        return jax.checkpoint_policies.save_only_these_names(*KEEPS[remat])
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(KEEPS["block"]),
        offload_src="device",
        offload_dst="pinned_host",
    )


def over_layers(
    layer: Layer, cast: Cast, x: Float[Array, "B T D"], weights: PyTree, others: PyTree, remat: Remat
) -> tuple[Float[Array, "B T D"], PyTree]:
    """`layer(x, weights, others)` for each layer in turn: the last one's x, and the second results, stacked.

    Args:
        layer: computes one layer with its cast weights.
        cast: the weight that a layer uses, given its path in `weights` and its slice. Its gradient has to be that of
            its result, as a cast's is.
        weights: stacked `[L ...]`.
        others: what differs between layers besides, stacked likewise; it has no gradient.
        remat: what is kept for the backward pass.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(weights)
    casts = [partial(cast, path) for path, _ in paths]
    stacked, dtypes = [w for _, w in paths], [w.dtype for _, w in paths]
    used = [jax.eval_shape(one, w).dtype for one, w in zip(casts, stacked, strict=True)]

    def run(x: jax.Array, stacked: list, sinks: list) -> tuple[jax.Array, PyTree]:
        def body(x: jax.Array, inputs: tuple) -> tuple[jax.Array, PyTree]:
            weights, sinks, others = inputs
            leaves = [_cast(*each) for each in zip(casts, weights, sinks, strict=True)]
            return layer(checkpoint_name(x, INPUT), jax.tree.unflatten(tree, leaves), others)

        return jax.lax.scan(jax.checkpoint(body, policy=policy(remat)), x, (stacked, sinks, others))

    nowhere = [None] * len(stacked)
    if used == dtypes:
        return run(x, stacked, nowhere)

    @jax.custom_vjp
    def scanned(x: jax.Array, stacked: list) -> tuple[jax.Array, PyTree]:
        return run(x, stacked, nowhere)

    def forward(x: Any, stacked: list) -> tuple[Any, Any]:
        # Zeros that nobody reads, so that nobody makes them: their gradients are the weights', as the products are.
        sinks = [jnp.zeros(w.value.shape, kind) if w.perturbed else None for w, kind in zip(stacked, used, strict=True)]
        values = [w.value for w in stacked]
        return jax.vjp(lambda x, sinks: run(x, values, sinks), x.value, sinks)

    def backward(pull: Callable, d_results: PyTree) -> tuple[jax.Array, list]:
        d_x, d_sinks = pull(jax.tree.map(_instantiated, d_results, is_leaf=_is_zero))
        return d_x, [d if d is None else d.astype(dtype) for d, dtype in zip(d_sinks, dtypes, strict=True)]

    scanned.defvjp(forward, backward, symbolic_zeros=True)
    return scanned(x, stacked)


def _cast(cast: Callable[[jax.Array], jax.Array], w: jax.Array, sink: jax.Array | None) -> jax.Array:
    return cast(w) if sink is None else _cast_into(cast, w, sink)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cast_into(cast: Callable[[jax.Array], jax.Array], w: jax.Array, sink: jax.Array) -> jax.Array:
    """`cast(w)`, whose gradient is the sink's."""
    return cast(w)


def _cast_into_forward(cast: Callable, w: jax.Array, sink: jax.Array) -> tuple[jax.Array, None]:
    return cast(w), None


def _cast_into_backward(cast: Callable, _: None, d: jax.Array) -> tuple[None, jax.Array]:
    return None, d


_cast_into.defvjp(_cast_into_forward, _cast_into_backward)


def _is_zero(d: Any) -> bool:
    return isinstance(d, SymbolicZero)


def _instantiated(d: Any) -> jax.Array:
    return jnp.zeros(d.aval.shape, d.aval.dtype) if _is_zero(d) else d
