"""Projections that compute as if their matrix and inputs were stored in few bits (quantization-aware training).

Values are rounded by the arithmetic of `formats.py` and dequantized at once, so that everything after them is an
ordinary product. Gradients pass the rounding as if it were not there (straight-through: Bengio et al. 2013,
https://arxiv.org/abs/1308.3432). Nothing is clipped, since a tile's largest value is within its range.

Axes: B rows, T time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import qwix
from jaxtyping import Array, Float

from tunix.errors import UserError
from tunix.models.quantization.formats import (
    ROUNDED,
    SMALLEST_TILE,
    Quantization,
    check_supported,
    dequantize,
    quantize,
)
from tunix.models.quantization.rules import RULES_FILE, ActivationType, Rules

LARGEST: dict[ActivationType, str] = {"int8": f"absmax,{127.5 / 127}", "fp8": "absmax"}
"""How a token's scale is chosen: its largest value becomes the type's last number. qwix's default puts it half a step
beyond the last integer, between two numbers: trainer and sampler, which sum in different orders, would not round it to
the same one."""
WHOLE = 1 << 31
"""A tile that is larger than any matrix: all inputs share a scale."""


@dataclass(frozen=True)
class Simulated:
    """What a projection rounds in simulation."""

    weights: Quantization | None
    """How the matrix is rounded; None where it is on its grid already."""
    activations: ActivationType | None
    """What inputs are rounded to; None leaves them as they are."""

    def weight(self, w: Float[Array, "..."], contracted: int) -> Float[Array, "..."]:
        """The matrix rounded to its grid, in its own dtype.

        Args:
            contracted: how many of its first axes are inputs.
        """
        quantization = self.weights
        if quantization is None:
            return w
        return straight_through(lambda w: dequantize(*quantize(w, quantization, contracted)), w)

    def inputs(self, x: Float[Array, "B T *inputs"]) -> Float[Array, "B T *inputs"]:
        """The inputs that multiply the matrix: each token rounded with its own scale."""
        kind = self.activations
        if kind is None:
            return x

        def rounded(x: jax.Array) -> jax.Array:
            x32 = x.astype(jnp.float32)
            by_token = qwix.quantize(x32, ROUNDED[kind], channelwise_axes=(0, 1), calibration_method=LARGEST[kind])
            return qwix.dequantize(by_token)

        return straight_through(rounded, x)


def straight_through(function: Callable[[jax.Array], jax.Array], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`function(x)` in the dtype of x, with the gradient of x."""
    still = jax.lax.stop_gradient(x)
    # Not x + (f(x) - x), which would round once more: x - x is 0.
    return function(still).astype(x.dtype) + (x - still)


def simulated(rules: Rules | None, weights: bool = True) -> tuple[tuple[str, Simulated], ...]:
    """The projections that round in simulation, by our names, and what each rounds.

    Args:
        rules: None for no rounding.
        weights: False where the weights are on their grid already, so that only activations are rounded.
    """
    if rules is None:
        return ()
    roundings = {
        name: Simulated(
            Quantization(rule.weights, rule.tile or WHOLE) if weights and rule.weights else None, rule.activations
        )
        for name, rule in rules.modules.items()
    }
    return tuple((name, one) for name, one in roundings.items() if one.weights or one.activations)


def supported(rules: Rules | None) -> tuple[tuple[str, Simulated], ...]:
    """What `simulated` returns, after checking that this device can compute with its types.

    Raises:
        UserError: it cannot, with a type that the rules name.
    """
    roundings = simulated(rules)
    kinds = {one.weights for _, one in roundings if one.weights}
    kinds |= {Quantization(one.activations, SMALLEST_TILE) for _, one in roundings if one.activations}
    for kind in kinds:
        check_supported(kind, key="quantization.rules")
    return roundings


def check_unrounded(folder: Path | None, held: Rules | None, wanted: Rules | None) -> None:
    """Refuses to train from rounded weights where that would not do what the recipe seems to ask for.

    Args:
        folder: where they are.
        held: how they were rounded; None where no rules say that they were.
        wanted: how they are to be rounded while they train.

    Raises:
        UserError: they would be rounded twice, or trained without the rounding of their inputs.
    """
    if held is not None and wanted is not None:
        raise UserError(
            f"model: the weights in {folder} are rounded already ({RULES_FILE}), and a second rounding would move them "
            "again: start from the weights that they were made of, and quantize in the last stage alone"
        )
    if simulated(held, weights=False):
        raise UserError(
            f"model: {folder} rounds its activations too ({RULES_FILE}), which training from it would leave out: start "
            "from the weights that it was made of"
        )
