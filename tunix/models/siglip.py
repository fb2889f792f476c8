"""Gemma 3's tower: SigLIP, and a projector to the decoder's width. All pictures are squares of one size.

Patches -> layers -> norm -> the mean of neighbouring patches -> norm -> projection. SigLIP: Zhai et al. 2023,
https://arxiv.org/abs/2303.15343; the projector: Gemma 3's report, https://arxiv.org/abs/2503.19786.

Axes: B rows, D model width, Pl learned positions, Pp patches, Pr rows of a patch, Pc columns of a patch, Rb colours,
So soft tokens, Dt width of a tower.
"""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.models.layers import rms_norm, weight
from tunix.models.quantization.formats import in_compute
from tunix.models.vision import Tower, layer_norm
from tunix.models.vision_config import COLOURS, VisionConfig


class Siglip(Tower):
    """The tower's and the projector's weights. Patches come row by row."""

    def __init__(self, config: VisionConfig, d_model: int, rngs: nnx.Rngs):
        super().__init__(config, rngs, joined=False)
        c, d = config, config.width
        patch, axes = (c.patch, c.patch, COLOURS, d), (None, None, None, "embed")
        self.patch = weight(rngs, patch, axes, std=(c.patch**2 * COLOURS) ** -0.5)
        self.position = weight(rngs, (c.positions**2, d), (None, "embed"), std=1.0)
        self.norm = nnx.Param(jnp.ones(d, jnp.float32), axes=("embed",))
        for name in ("patch_bias", "norm_bias", "soft_norm"):
            setattr(self, name, nnx.Param(jnp.zeros(d, jnp.float32), axes=("embed",)))
        self.projection = weight(rngs, (d, d_model), ("embed", None), std=d**-0.5)

    def soft_tokens(self, x: Float[Array, "B Pp Pr Pc Rb"], grids: Int[Array, "B 2"]) -> Float[Array, "B So D"]:
        """The soft tokens of pictures, which all have one grid."""
        del grids
        c, dtype = self.config, x.dtype.name
        patch, patch_bias, position, norm, norm_bias, soft_norm, projection = (
            in_compute("w", getattr(self, name)[...], dtype)
            for name in ("patch", "patch_bias", "position", "norm", "norm_bias", "soft_norm", "projection")
        )
        x = jnp.einsum("BPrci,rciD->BPD", x, patch) + patch_bias + position
        x = self.mixed(x, jnp.ones(x.shape[:2], jnp.int32))
        x = pooled(layer_norm(x, norm, norm_bias, c.norm_eps), c)
        return jnp.einsum("BSD,DE->BSE", rms_norm(x, soft_norm, eps=c.norm_eps, offset=True), projection)


def pooled(x: Float[Array, "B Pp Dt"], config: VisionConfig) -> Float[Array, "B So Dt"]:
    """The means of squares of patches, as many as a picture has soft tokens."""
    c, number, side = config, len(x), math.isqrt(config.tokens)
    squares = x.reshape(number, side, c.pool, side, c.pool, c.width)
    return jnp.mean(squares.astype(jnp.float32), (2, 4)).astype(x.dtype).reshape(number, c.tokens, c.width)
