"""The tower that turns pictures into embeddings of soft tokens: SigLIP and Gemma 3's projector.

Pixels -> patches -> a scan over layers in which every patch sees all others -> norm -> the mean of neighbouring patches
-> norm -> projection to the decoder's width. SigLIP: Zhai et al. 2023, https://arxiv.org/abs/2303.15343; the projector:
Gemma 3's report, https://arxiv.org/abs/2503.19786. None of it trains: no gradient is computed here.

Axes: B rows, T time, D model width, Pi pictures, Px pixels, Pp patches, Pr rows of a patch, Pc columns of a patch, Rb
colours, So soft tokens, Lt layers of a tower, Dt width of a tower, Ft ffn width of a tower, Nt heads of a tower, Ht
head dim of a tower.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from tunix.config import DType
from tunix.models.attention.attend import attend
from tunix.models.attention.inputs import Segments
from tunix.models.config import VisionConfig
from tunix.models.layers import rms_norm, weight
from tunix.models.quantization.formats import in_compute
from tunix.types import Pictures

COLOURS = 3


class Vision(nnx.Module):
    """The weights of a tower and its projector; those of its layers are stacked."""

    def __init__(self, config: VisionConfig, d_model: int, rngs: nnx.Rngs):
        c, depth = config, config.num_layers
        d, f, heads = c.width, c.ffn, (c.num_heads, c.head_dim)
        self.config = config

        def matrix(*shape: int, axes: tuple[str | None, ...], inputs: int) -> nnx.Param:
            return weight(rngs, shape, axes, std=inputs**-0.5)

        def vector(*shape: int, axes: tuple[str | None, ...], value: float = 0.0) -> nnx.Param:
            return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)

        patch = (c.patch, c.patch, COLOURS, d)
        self.patch = matrix(*patch, axes=(None, None, None, "embed"), inputs=c.patch**2 * COLOURS)
        self.patch_bias = vector(d, axes=("embed",))
        self.position = matrix(c.patches, d, axes=(None, "embed"), inputs=1)
        layers = {}
        for name in ("q", "k", "v"):
            layers[name] = matrix(depth, d, *heads, axes=("layers", "embed", "heads", "head"), inputs=d)
            layers[f"{name}_bias"] = vector(depth, *heads, axes=("layers", "heads", "head"))
        layers["o"] = matrix(depth, *heads, d, axes=("layers", "heads", "head", "embed"), inputs=d)
        layers["up"] = matrix(depth, d, f, axes=("layers", "embed", "ffn"), inputs=d)
        layers["up_bias"] = vector(depth, f, axes=("layers", "ffn"))
        layers["down"] = matrix(depth, f, d, axes=("layers", "ffn", "embed"), inputs=f)
        layers["attn_norm"], layers["mlp_norm"] = (
            vector(depth, d, axes=("layers", "embed"), value=1.0) for _ in range(2)
        )
        for name in ("o_bias", "down_bias", "attn_norm_bias", "mlp_norm_bias"):
            layers[name] = vector(depth, d, axes=("layers", "embed"))
        self.layers = nnx.Dict(layers)
        self.norm, self.norm_bias = vector(d, axes=("embed",), value=1.0), vector(d, axes=("embed",))
        self.soft_norm = vector(d, axes=("embed",))
        self.projection = matrix(d, d_model, axes=("embed", None), inputs=d)

    def __call__(self, pixels: UInt8[Array, "B Pi Px Px Rb"], dtype: DType) -> Float[Array, "B Pi So D"]:
        """The embeddings of the soft tokens of pictures."""
        c, rows = self.config, pixels.shape[:2]

        def used(param: nnx.Variable) -> jax.Array:
            return in_compute("w", param[...], dtype)

        x = patches(normalised(pixels.reshape(-1, *pixels.shape[2:])), c.patch)
        x = jnp.einsum("BPrci,rciD->BPD", x.astype(dtype), used(self.patch)) + used(self.patch_bias)
        x = x + used(self.position)
        stacked = {name: used(param) for name, param in self.layers.items()}
        x, _ = jax.lax.scan(lambda x, weights: (self._layer(x, weights), None), x, stacked)
        x = layer_norm(x, used(self.norm), used(self.norm_bias), c.norm_eps)
        soft = rms_norm(pooled(x, c), used(self.soft_norm), eps=c.norm_eps, offset=True)
        soft = jnp.einsum("BSD,DE->BSE", soft, used(self.projection))
        return jax.lax.stop_gradient(soft.reshape(*rows, c.tokens, -1))

    def _layer(self, x: Float[Array, "B Pp Dt"], w: dict[str, jax.Array]) -> Float[Array, "B Pp Dt"]:
        """The stream after a layer."""
        c = self.config
        y = layer_norm(x, w["attn_norm"], w["attn_norm_bias"], c.norm_eps)
        q, k, v = (jnp.einsum("BTD,DNH->BTNH", y, w[name]) + w[f"{name}_bias"] for name in ("q", "k", "v"))
        every = jnp.ones(x.shape[:2], jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(c.patches), every.shape)
        # A picture, of which every patch sees all others.
        view = Segments(every, positions, pictures=every, ahead=c.patches - 1)
        y = attend(q, k, v, view, scale=c.head_dim**-0.5)
        x = x + jnp.einsum("BTNH,NHD->BTD", y, w["o"]) + w["o_bias"]
        y = layer_norm(x, w["mlp_norm"], w["mlp_norm_bias"], c.norm_eps)
        y = jax.nn.gelu(jnp.einsum("BTD,DF->BTF", y, w["up"]) + w["up_bias"], approximate=True)
        return x + jnp.einsum("BTF,FD->BTD", y, w["down"]) + w["down_bias"]


def normalised(pixels: UInt8[Array, "*B Px Px Rb"]) -> Float[Array, "*B Px Px Rb"]:
    """Pixels from -1 to 1: rescaled by 1 / 255, then less 0.5 and divided by 0.5, as transformers' processor does."""
    return (pixels.astype(jnp.float32) * jnp.float32(1 / 255) - 0.5) / 0.5


def patches(x: Float[Array, "B Px Px Rb"], size: int) -> Float[Array, "B Pp Pr Pc Rb"]:
    """Pictures cut into squares, row by row."""
    number, side = len(x), x.shape[1] // size
    cut = x.reshape(number, side, size, side, size, COLOURS).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(number, side * side, size, size, COLOURS)


def pooled(x: Float[Array, "B Pp Dt"], config: VisionConfig) -> Float[Array, "B So Dt"]:
    """The means of squares of patches, as many as a picture has soft tokens."""
    c, number = config, len(x)
    squares = x.reshape(number, c.tokens_per_side, c.pool, c.tokens_per_side, c.pool, c.width)
    return jnp.mean(squares.astype(jnp.float32), (2, 4)).astype(x.dtype).reshape(number, c.tokens, c.width)


def layer_norm(x: Float[Array, "*B Dt"], w: Float[Array, "Dt"], b: Float[Array, "Dt"], eps: float) -> jax.Array:
    """`(x - mean) / deviation * w + b` over the last axis, in float32 (Ba et al. 2016, arXiv 1607.06450)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, -1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + eps)
    return (scaled * w.astype(jnp.float32) + b.astype(jnp.float32)).astype(x.dtype)


def with_pictures(
    x: Float[Array, "B T D"], soft: Float[Array, "B Pi So D"], places: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """The embedded tokens, with those of pictures in the places of theirs.

    Args:
        x: the embedded tokens.
        soft: what a tower made of the rows' pictures.
        places: as in `types.Pictures`.
    """
    flat = soft.reshape(len(soft), -1, soft.shape[-1]).astype(x.dtype)
    found = jnp.take_along_axis(flat, jnp.maximum(places - 1, 0)[..., None], axis=1)
    return jnp.where((places > 0)[..., None], found, x)


def numbers(pictures: Pictures, config: VisionConfig) -> Int[Array, "B T"]:
    """The number of the picture in its row whose token it is, from 1; 0 for text."""
    return (jnp.asarray(pictures.places) + config.tokens - 1) // config.tokens
