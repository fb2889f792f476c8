"""Rounds a whole model's matrices to their grids: for the export of a QAT run, and for `tunix quantize`.

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
    """The weights rounded as a model with `simulated` computes with them, one matrix after the other.

    Returns:
        All weights, and for each rounded matrix its change in the compute dtype: the root mean square of the change,
        divided by that of the matrix.
    """
    changed, moved = dict(params), {}
    for name in (f"layers/{one}/w" for one, rounding in model.simulated if rounding.weights and one in model.matrices):
        changed[name], error = _rounded(model, name, params[name])
        moved[name] = math.sqrt(float(error))
    return changed, moved


@partial(jit, static_argnames=("model", "name"))
def _rounded(model: Model, name: str, w: Float[Array, "L ..."]) -> tuple[jax.Array, jax.Array]:
    on_grid = jax.lax.map(partial(model.on_grid, name), w)
    change = on_grid.astype(model.dtype).astype(jnp.float32) - w.astype(jnp.float32)
    return on_grid, jnp.sum(change**2) / jnp.sum(w.astype(jnp.float32) ** 2)
