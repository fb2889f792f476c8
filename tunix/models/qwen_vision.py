"""Qwen 3.5's tower: pictures of any shape, whose patches know their places by a rope and by learned positions.

Patches + positions, interpolated between learned ones to the picture's shape -> layers, whose queries and keys turn by
row and column -> norm -> the patches of a square, side by side, through an ffn to the decoder's width. Qwen3-VL's
report, https://arxiv.org/abs/2511.21631; the rope and the merging of patches: Qwen2-VL's,
https://arxiv.org/abs/2409.12191. A picture is read as two equal frames of a film.

Axes: B rows, D model width, Pl learned positions, Pp patches, Pr rows of a patch, Pc columns of a patch, Rb colours,
So soft tokens, Dt width of a tower, Ht head dim of a tower.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.models.layers import RopeTables, weight
from tunix.models.quantization.formats import in_compute
from tunix.models.vision import Tower, layer_norm
from tunix.models.vision_config import COLOURS, FRAMES, ROPE_THETA, VisionConfig


class QwenVision(Tower):
    """The tower's and the merger's weights. Patches come square by square, as each soft token has them."""

    def __init__(self, config: VisionConfig, d_model: int, rngs: nnx.Rngs):
        super().__init__(config, rngs, joined=True)
        c, d, square = config, config.width, config.width * config.pool**2
        patch = (FRAMES, c.patch, c.patch, COLOURS, d)
        self.patch = weight(rngs, patch, (None, None, None, None, "embed"), std=(FRAMES * c.patch**2 * COLOURS) ** -0.5)
        self.position = weight(rngs, (c.positions**2, d), (None, "embed"), std=1.0)
        self.norm = nnx.Param(jnp.ones(d, jnp.float32), axes=("embed",))
        for name in ("patch_bias", "norm_bias"):
            setattr(self, name, nnx.Param(jnp.zeros(d, jnp.float32), axes=("embed",)))
        self.merge_up = weight(rngs, (square, square), ("embed", "ffn"), std=square**-0.5)
        self.merge_up_bias = nnx.Param(jnp.zeros(square, jnp.float32), axes=("ffn",))
        self.merge_down = weight(rngs, (square, d_model), ("ffn", None), std=square**-0.5)
        self.merge_down_bias = nnx.Param(jnp.zeros(d_model, jnp.float32), axes=(None,))

    def soft_tokens(self, x: Float[Array, "B Pp Pr Pc Rb"], grids: Int[Array, "B 2"]) -> Float[Array, "B So D"]:
        """The soft tokens of pictures, each of its own grid."""
        c, dtype = self.config, x.dtype.name
        names = ("patch", "patch_bias", "norm", "norm_bias", "merge_up", "merge_up_bias", "merge_down")
        patch, patch_bias, norm, norm_bias, merge_up, merge_up_bias, merge_down = (
            in_compute("w", getattr(self, name)[...], dtype) for name in names
        )
        at = places_of_patches(grids, c)
        x = jnp.einsum("BPrci,rciD->BPD", x, jnp.sum(patch, axis=0)) + patch_bias
        position = in_compute("w", self.position[...], dtype)
        x = x + interpolated(position, at, c.pool * grids).astype(x.dtype)
        real = jnp.arange(c.patches) < jnp.prod(grids, axis=-1, keepdims=True) * c.pool**2
        x = layer_norm(self.mixed(x, real.astype(jnp.int32), rope_of_patches(at, c)), norm, norm_bias, c.norm_eps)
        x = jnp.einsum("BSD,DF->BSF", x.reshape(len(x), c.tokens, -1), merge_up) + merge_up_bias
        down_bias = in_compute("w", self.merge_down_bias[...], dtype)
        return jnp.einsum("BSF,FD->BSD", jax.nn.gelu(x, approximate=False), merge_down) + down_bias


def places_of_patches(grids: Int[Array, "B 2"], config: VisionConfig) -> Int[Array, "B Pp 2"]:
    """The row and the column of each patch, square by square."""
    index, pool = jnp.arange(config.patches), config.pool
    square, inside, columns = index // pool**2, index % pool**2, jnp.maximum(grids[:, 1:], 1)
    row = square // columns * pool + inside // pool
    return jnp.stack([row, square % columns * pool + inside % pool], axis=-1)


def rope_of_patches(places: Int[Array, "B Pp 2"], config: VisionConfig) -> RopeTables:
    """cos and sin of the angles by which patches turn: the first half of the pairs by their row, the others by their
    column."""
    quarter = config.head_dim // 4
    frequencies = 1.0 / ROPE_THETA ** (jnp.arange(quarter, dtype=jnp.float32) / quarter)
    angles = (places[..., None].astype(jnp.float32) * frequencies).reshape(*places.shape[:2], 2 * quarter)
    return jnp.cos(angles), jnp.sin(angles)


def interpolated(
    learned: Float[Array, "Pl Dt"], places: Int[Array, "B Pp 2"], sizes: Int[Array, "B 2"]
) -> Float[Array, "B Pp Dt"]:
    """Positions of patches, float32, bilinearly between the learned ones, whose corners are those of the picture.

    Args:
        learned: of a square, row by row.
        places: the row and the column of each patch.
        sizes: rows and columns of patches of each picture.
    """
    side = round(len(learned) ** 0.5)
    exact = places.astype(jnp.float32) * (side - 1) / jnp.maximum(sizes[:, None] - 1, 1)
    low = jnp.floor(exact).astype(jnp.int32)
    share = exact - low

    def corner(down: int, right: int) -> jax.Array:
        row, column = (jnp.clip(low[..., axis] + more, 0, side - 1) for axis, more in enumerate((down, right)))
        weights = [share[..., axis] if more else 1 - share[..., axis] for axis, more in enumerate((down, right))]
        return learned[row * side + column].astype(jnp.float32) * (weights[0] * weights[1])[..., None]

    return corner(0, 0) + corner(0, 1) + corner(1, 0) + corner(1, 1)
