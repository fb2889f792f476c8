"""A projection that computes as if its matrix, and what comes in, were held in few bits (quantization-aware training).

Values are rounded by the very arithmetic of `formats.py` and come back at once, so that everything after them is an
ordinary product. Gradients pass the rounding as if it were not there (straight-through: Bengio et al. 2013,
https://arxiv.org/abs/1308.3432). Nothing is cut off, since a tile's largest value is within its range.

Axes: B rows, T time, C inputs, K outputs.
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
"""Of a token, what its type's last number stands for: the largest value. qwix lets that lie half a step beyond an
integer's last, between two numbers: trainer and sampler, which sum in another order, would not take the same one."""
WHOLE = 1 << 31
"""A tile that is larger than any matrix: all inputs share a scale."""


@dataclass(frozen=True)
class Simulated:
    """What a projection rounds."""

    weights: Quantization | None
    """None where they lie on their grid already."""
    activations: ActivationType | None

    def weight(self, w: Float[Array, "..."], contracted: int) -> Float[Array, "..."]:
        """The matrix on its grid, in its own dtype.

        Args:
            contracted: how many of its first axes are inputs.
        """
        how = self.weights
        if how is None:
            return w
        return straight_through(lambda w: dequantize(*quantize(w, how, contracted)), w)

    def inputs(self, x: Float[Array, "B T *inputs"]) -> Float[Array, "B T *inputs"]:
        """What multiplies the matrix: each token rounded by a scale of its own."""
        kind = self.activations
        if kind is None:
            return x

        def rounded(x: jax.Array) -> jax.Array:
            how = {"channelwise_axes": (0, 1), "calibration_method": LARGEST[kind]}
            return qwix.dequantize(qwix.quantize(x.astype(jnp.float32), ROUNDED[kind], **how))

        return straight_through(rounded, x)


def straight_through(function: Callable[[jax.Array], jax.Array], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`function(x)` in the dtype of x, with the gradient of x."""
    still = jax.lax.stop_gradient(x)
    # Not x + (f(x) - x), which would round once more: x - x is 0.
    return function(still).astype(x.dtype) + (x - still)


def simulated(rules: Rules | None, weights: bool = True) -> tuple[tuple[str, Simulated], ...]:
    """Our name of each projection that rounds -> what.

    Args:
        rules: None for no rounding.
        weights: False where they were rounded before, so that only activations are.
    """
    if rules is None:
        return ()
    found = {
        name: Simulated(
            Quantization(rule.weights, rule.tile or WHOLE) if weights and rule.weights else None, rule.activations
        )
        for name, rule in rules.modules.items()
    }
    return tuple((name, how) for name, how in found.items() if how.weights or how.activations)


def supported(rules: Rules | None) -> tuple[tuple[str, Simulated], ...]:
    """`simulated`, of types that this device can compute with.

    Raises:
        UserError: it cannot, with one that the rules name.
    """
    found = simulated(rules)
    kinds = {how.weights for _, how in found if how.weights}
    kinds |= {Quantization(how.activations, SMALLEST_TILE) for _, how in found if how.activations}
    for kind in kinds:
        check_supported(kind, key="quantization.rules")
    return found


def check_unrounded(folder: Path | None, held: Rules | None, wanted: Rules | None) -> None:
    """Refuses to train from weights that were rounded, where that would not do what it seems to.

    Args:
        folder: where they are.
        held: how they were rounded; None where nothing says that they were.
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
