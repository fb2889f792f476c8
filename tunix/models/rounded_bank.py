"""The matrices of experts in few bits, dequantized one at a time where experts take turns.

Axes: E experts; D inputs and F outputs of a product, t tiles of inputs.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Shaped

from tunix.models.quantization.formats import dequantize


class RoundedBank(NamedTuple):
    """A matrix of each expert, rounded (`quantization/formats.py`)."""

    values: Shaped[Array, "E D F"]
    scales: Float[Array, "E t F"]
    like: Shaped[Array, "0"]
    """Nothing, of the dtype that matrices are dequantized to."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(E, D, F)`."""
        return self.values.shape

    def matrix(self, number: jax.Array) -> Float[Array, "D F"]:
        """An expert's matrix."""
        return dequantize(self.values[number], self.scales[number]).astype(self.like.dtype)

    def whole(self, x: jax.Array) -> Float[Array, "E D F"]:
        """All of them, for what multiplies `x` with all at once: as much memory as if they were not rounded, until the
        layer is computed."""
        # Tied to x: a sampling loop would otherwise dequantize all layers before it starts, and hold them.
        values, _ = jax.lax.optimization_barrier((self.values, jax.lax.stop_gradient(x)))
        return jax.vmap(dequantize)(values, self.scales).astype(self.like.dtype)
