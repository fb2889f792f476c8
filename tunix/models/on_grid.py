"""A whole model's matrices put on their grids: what a QAT run exports, and what `tunix quantize` writes.

Axes: L layers.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.models.model import Model, Params
from tunix.util.exact import jit


def rounded(model: Model, params: Params) -> tuple[Params, dict[str, float]]:
    """The weights as a model with `simulated` multiplies them, one matrix after the other.

    Returns:
        All weights, and of each rounded matrix by how much it has moved in the compute dtype: the root mean square of
        the change, by that of the matrix.
    """
    changed, moved = dict(params), {}
    for name in (f"layers/{one}/w" for one, how in model.simulated if how.weights):
        changed[name], error = _rounded(model, name, params[name])
        moved[name] = math.sqrt(float(error))
    return changed, moved


@partial(jit, static_argnames=("model", "name"))
def _rounded(model: Model, name: str, w: Float[Array, "L ..."]) -> tuple[jax.Array, jax.Array]:
    on_grid = jax.lax.map(partial(model.on_grid, name), w)
    change = on_grid.astype(model.dtype).astype(jnp.float32) - w.astype(jnp.float32)
    return on_grid, jnp.sum(change**2) / jnp.sum(w.astype(jnp.float32) ** 2)
