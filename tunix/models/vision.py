"""The towers that see pictures: scans over layers in which a picture's patches all see each other.

A tower turns a picture's patches into embeddings of its soft tokens, which stand in the decoder's rows in the place of
those of their ids. `TOWERS` at the end lists them. None of it trains: no gradient is computed here.

Axes: B rows, T time, D model width, Pi pictures, Pp patches, So soft tokens, Lt layers of a tower, Dt width of a tower,
Ft ffn width of a tower, Nt heads of a tower, Ht head dim of a tower.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.config import DType
from tunix.mesh import Axes
from tunix.models.attention.attend import attend
from tunix.models.attention.inputs import Segments
from tunix.models.config import COLOURS, FRAMES, ROPE_THETA, VisionConfig
from tunix.models.layers import RopeTables, rms_norm, rotate, weight
from tunix.models.quantization.formats import in_compute
from tunix.types import Pictures

QKV = ("q", "k", "v")


class Tower(nnx.Module):
    """The weights that towers have in common; those of its layers are stacked."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs, *, joined: bool):
        """Random weights.

        Args:
            joined: whether queries, keys and values have one matrix, and patches the frames of a film.
        """
        self.config, depth, d, f = config, config.num_layers, config.width, config.ffn
        heads, split = (config.num_heads, config.head_dim), ("heads", "head")
        made: dict[str, nnx.Param] = {}

        def matrix(name: str, shape: tuple[int, ...], axes: Axes, inputs: int) -> None:
            made[name] = weight(rngs, (depth, *shape), ("layers", *axes), std=inputs**-0.5)

        def vector(name: str, shape: tuple[int, ...], axes: Axes, value: float = 0.0) -> None:
            made[name] = nnx.Param(jnp.full((depth, *shape), value, jnp.float32), axes=("layers", *axes))

        if joined:
            # Whole on every device: folders have all queries first, so that heads are no runs of theirs to split.
            matrix("qkv", (d, 3, *heads), ("embed", None, None, None), inputs=d)
            vector("qkv_bias", (3, *heads), (None, None, None))
        else:
            for name in QKV:
                matrix(name, (d, *heads), ("embed", *split), inputs=d)
                vector(f"{name}_bias", heads, split)
        matrix("o", (*heads, d), (*split, "embed"), inputs=d)
        matrix("up", (d, f), ("embed", "ffn"), inputs=d)
        vector("up_bias", (f,), ("ffn",))
        matrix("down", (f, d), ("ffn", "embed"), inputs=f)
        for name in ("attn_norm", "mlp_norm", "o_bias", "down_bias", "attn_norm_bias", "mlp_norm_bias"):
            vector(name, (d,), ("embed",), value=float(name.endswith("norm")))
        self.layers = nnx.Dict(made)
        pixels = (*((FRAMES,) if joined else ()), config.patch, config.patch, COLOURS)
        axes = (*(None,) * len(pixels), "embed")
        self.patch = weight(rngs, (*pixels, d), axes, std=math.prod(pixels) ** -0.5)
        self.position = weight(rngs, (config.positions**2, d), (None, "embed"), std=1.0)
        self.norm = nnx.Param(jnp.ones(d, jnp.float32), axes=("embed",))
        for name in ("patch_bias", "norm_bias"):
            setattr(self, name, nnx.Param(jnp.zeros(d, jnp.float32), axes=("embed",)))

    def weights(self, dtype: str) -> dict[str, jax.Array]:
        """Weights outside of the layers by name, in the compute dtype."""
        params = {name: param for name, param in vars(self).items() if isinstance(param, nnx.Param)}
        return {name: in_compute("w", param[...], dtype) for name, param in params.items()}

    def __call__(self, pictures: Pictures, dtype: DType) -> Float[Array, "B Pi So D"]:
        """The embeddings of the soft tokens of pictures; of a picture that has fewer, those after its last mean
        nothing."""
        pixels, grids = (jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in (pictures.pixels, pictures.grids))
        # From -1 to 1: rescaled by 1 / 255, then less 0.5 and divided by 0.5, as transformers' processors do.
        normalised = (pixels.astype(jnp.float32) * jnp.float32(1 / 255) - 0.5) / 0.5
        soft = self.soft_tokens(normalised.astype(dtype), grids)
        return jax.lax.stop_gradient(soft.reshape(*pictures.pixels.shape[:2], *soft.shape[1:]))

    def soft_tokens(self, x: Float[Array, "B Pp Pr Pc Rb"], grids: Int[Array, "B 2"]) -> Float[Array, "B So D"]:
        """The soft tokens of pictures, in the dtype of their patches; see `Pictures`."""
        raise NotImplementedError

    def mixed(
        self, x: Float[Array, "B Pp Dt"], real: Int[Array, "B Pp"], rope: RopeTables | None = None
    ) -> Float[Array, "B Pp Dt"]:
        """The patches after all layers.

        Args:
            x: embedded patches.
            real: 1, and 0 for what fills a picture up.
            rope: turns queries and keys, where the tower does that.
        """
        c, dtype = self.config, x.dtype.name
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), real.shape)
        view = Segments(real, positions, pictures=real, ahead=x.shape[1] - 1)

        def layer(x: Float[Array, "B Pp Dt"], w: dict[str, jax.Array]) -> tuple[Float[Array, "B Pp Dt"], None]:
            y = layer_norm(x, w["attn_norm"], w["attn_norm_bias"], c.norm_eps)
            matrices = [(w["qkv"][:, i], w["qkv_bias"][i]) for i in range(3)] if "qkv" in w else []
            matrices = matrices or [(w[name], w[f"{name}_bias"]) for name in QKV]
            q, k, v = (jnp.einsum("BTD,DNH->BTNH", y, matrix) + bias for matrix, bias in matrices)
            q, k = (q, k) if rope is None else (rotate(q, rope), rotate(k, rope))
            y = attend(q, k, v, view, scale=c.head_dim**-0.5)
            x = x + jnp.einsum("BTNH,NHD->BTD", y, w["o"]) + w["o_bias"]
            y = layer_norm(x, w["mlp_norm"], w["mlp_norm_bias"], c.norm_eps)
            y = jax.nn.gelu(jnp.einsum("BTD,DF->BTF", y, w["up"]) + w["up_bias"], approximate=True)
            return x + jnp.einsum("BTF,FD->BTD", y, w["down"]) + w["down_bias"], None

        return jax.lax.scan(
            layer, x, {name: in_compute("w", param[...], dtype) for name, param in self.layers.items()}
        )[0]


def layer_norm(x: Float[Array, "*B Dt"], w: Float[Array, "Dt"], b: Float[Array, "Dt"], eps: float) -> jax.Array:
    """`(x - mean) / deviation * w + b` over the last axis, in float32 (Ba et al. 2016, arXiv 1607.06450)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, -1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + eps)
    return (scaled * w.astype(jnp.float32) + b.astype(jnp.float32)).astype(x.dtype)


def with_pictures(
    x: Float[Array, "B T D"], soft: Float[Array, "B Pi So D"], pictures: Pictures
) -> Float[Array, "B T D"]:
    """The embedded tokens, with those of pictures in the places of theirs.

    Args:
        x: the embedded tokens.
        soft: what a tower made of the rows' pictures.
        pictures: of the rows.
    """
    places, number = jnp.asarray(pictures.places), numbers(pictures)
    counts = jnp.prod(jnp.asarray(pictures.grids), axis=-1)
    before = jnp.take_along_axis(jnp.cumsum(counts, axis=-1) - counts, jnp.maximum(number - 1, 0), axis=-1)
    index = (number - 1) * soft.shape[2] + places - 1 - before
    flat = soft.reshape(len(soft), -1, soft.shape[-1]).astype(x.dtype)
    pictured = jnp.take_along_axis(flat, jnp.maximum(index, 0)[..., None], axis=1)
    return jnp.where((places > 0)[..., None], pictured, x)


def numbers(pictures: Pictures) -> Int[Array, "B T"]:
    """The number of the picture in its row whose token it is, from 1; 0 for text."""
    places = jnp.asarray(pictures.places)
    ends = jnp.cumsum(jnp.prod(jnp.asarray(pictures.grids), axis=-1), axis=-1)
    return jnp.where(places > 0, 1 + jnp.sum(places[..., None] > ends[:, None], axis=-1, dtype=places.dtype), 0)


def seen_ahead(pictures: Pictures | None, config: VisionConfig | None) -> dict[str, Any]:
    """What a view of rows with pictures is told of them: fields of `Segments` and of `PieceView`."""
    if pictures is None or config is None or config.any_shape:
        return {}
    return {"pictures": numbers(pictures), "ahead": config.tokens - 1}


class Siglip(Tower):
    """Gemma 3's tower and a projector to the decoder's width; all pictures are squares of one size, patches row by row.

    Patches -> layers -> norm -> the mean of neighbouring patches -> norm -> projection. SigLIP: Zhai et al. 2023,
    https://arxiv.org/abs/2303.15343; the projector: Gemma 3's report, https://arxiv.org/abs/2503.19786.
    """

    def __init__(self, config: VisionConfig, d_model: int, rngs: nnx.Rngs):
        super().__init__(config, rngs, joined=False)
        d = config.width
        self.soft_norm = nnx.Param(jnp.zeros(d, jnp.float32), axes=("embed",))
        self.projection = weight(rngs, (d, d_model), ("embed", None), std=d**-0.5)

    def soft_tokens(self, x: Float[Array, "B Pp Pr Pc Rb"], grids: Int[Array, "B 2"]) -> Float[Array, "B So D"]:
        """The soft tokens of pictures, which all have one grid."""
        del grids
        c, w = self.config, self.weights(x.dtype.name)
        x = jnp.einsum("BPrci,rciD->BPD", x, w["patch"]) + w["patch_bias"] + w["position"]
        x = self.mixed(x, jnp.ones(x.shape[:2], jnp.int32))
        x = layer_norm(x, w["norm"], w["norm_bias"], c.norm_eps)
        # The means of squares of patches, as many as a picture has soft tokens.
        side = math.isqrt(c.tokens)
        squares = x.reshape(len(x), side, c.pool, side, c.pool, c.width).astype(jnp.float32)
        x = jnp.mean(squares, (2, 4)).astype(x.dtype).reshape(len(x), c.tokens, c.width)
        return jnp.einsum("BSD,DE->BSE", rms_norm(x, w["soft_norm"], eps=c.norm_eps, offset=True), w["projection"])


class QwenVision(Tower):
    """Qwen 3.5's tower: pictures of any shape, whose patches know their places by a rope and by learned positions.

    Patches + positions, interpolated between learned ones to the picture's shape -> layers, whose queries and keys turn
    by row and column -> norm -> the patches of a square, side by side, through an ffn to the decoder's width.
    Qwen3-VL's report, https://arxiv.org/abs/2511.21631; the rope and the merging of patches: Qwen2-VL's,
    https://arxiv.org/abs/2409.12191. A picture is read as two equal frames of a film. Patches come square by square, as
    each soft token has them.
    """

    def __init__(self, config: VisionConfig, d_model: int, rngs: nnx.Rngs):
        super().__init__(config, rngs, joined=True)
        square = config.width * config.pool**2
        self.merge_up = weight(rngs, (square, square), ("embed", "ffn"), std=square**-0.5)
        self.merge_up_bias = nnx.Param(jnp.zeros(square, jnp.float32), axes=("ffn",))
        self.merge_down = weight(rngs, (square, d_model), ("ffn", None), std=square**-0.5)
        self.merge_down_bias = nnx.Param(jnp.zeros(d_model, jnp.float32), axes=(None,))

    def soft_tokens(self, x: Float[Array, "B Pp Pr Pc Rb"], grids: Int[Array, "B 2"]) -> Float[Array, "B So D"]:
        """The soft tokens of pictures, each of its own grid."""
        c, w = self.config, self.weights(x.dtype.name)
        # The row and the column of each patch, square by square.
        index, columns = jnp.arange(c.patches), jnp.maximum(grids[:, 1:], 1)
        square, inside = index // c.pool**2, index % c.pool**2
        row, column = square // columns * c.pool + inside // c.pool, square % columns * c.pool + inside % c.pool
        at = jnp.stack([row, column], axis=-1)
        x = jnp.einsum("BPrci,rciD->BPD", x, jnp.sum(w["patch"], axis=0)) + w["patch_bias"]
        x = x + interpolated(w["position"], at, c.pool * grids).astype(x.dtype)
        real = jnp.arange(c.patches) < jnp.prod(grids, axis=-1, keepdims=True) * c.pool**2
        # Patches turn by their row in the first half of the pairs, and by their column in the others.
        quarter = c.head_dim // 4
        frequencies = 1.0 / ROPE_THETA ** (jnp.arange(quarter, dtype=jnp.float32) / quarter)
        angles = (at[..., None].astype(jnp.float32) * frequencies).reshape(*at.shape[:2], 2 * quarter)
        x = self.mixed(x, real.astype(jnp.int32), (jnp.cos(angles), jnp.sin(angles)))
        x = layer_norm(x, w["norm"], w["norm_bias"], c.norm_eps)
        x = jnp.einsum("BSD,DF->BSF", x.reshape(len(x), c.tokens, -1), w["merge_up"]) + w["merge_up_bias"]
        return jnp.einsum("BSF,FD->BSD", jax.nn.gelu(x, approximate=False), w["merge_down"]) + w["merge_down_bias"]


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


TOWERS: Mapping[str, Callable[[VisionConfig, int, nnx.Rngs], Tower]] = {"siglip": Siglip, "qwen": QwenVision}
"""`VisionConfig.tower` -> (sizes, D, random numbers) -> one with random weights."""
