"""The pieces of a decoder block: projections, norms, rope and the gated ffn.

Each weight's shape, dtype, logical axes and initialiser are stated where the module is built. Projections are einsums
with their contracted axes first, which is what the adapters of `lora/` rely on.

Axes: B rows, T time, D model width, F ffn width, N query heads, K kv heads, H head dim.
"""

import math
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, Key

from tunix.mesh import Axes, platform
from tunix.models.config import Clamp, DecoderConfig, Rope
from tunix.models.quantization.formats import (
    Quantization,
    Simulated,
    check_tile,
    dequantize,
    in_own_digits,
    narrowed,
    quantize,
    rounded_matrix,
    rounded_tokens,
)


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, std: float) -> nnx.Param:
    """A normal-initialised float32 weight that carries its logical axes."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


class Matrix(nnx.Module):
    """A weight alone, of any shape."""

    def __init__(self, w: nnx.Param):
        self.w = w


MATRICES = ("w", "w_lora_a", "w_lora_b")
"""Names of a projection's parameters that `project` multiplies by."""
RopeTables = tuple[jax.Array, jax.Array]
"""cos and sin `[B T H/2]`."""
TokenKeys = Key[Array, "B T"]
"""A random key for each token."""


class Adapter(NamedTuple):
    """How a projection is adapted; set by `lora/`."""

    scale: float
    """Multiplies x A B."""
    number: int
    """Which of a layer's projections this is; dropout differs between them."""
    dropout: float = 0.0
    magnitude: bool = False
    """Whether outputs are scaled by learned magnitudes (DoRA)."""
    anchored: bool = False
    """Whether the product of the initial A and B is subtracted (PiSSA)."""
    mixed: bool = False
    """Whether several adapters are joined, of which each row uses its own (`lora/multi_lora.py`)."""


class Stored(nnx.Module):
    """A matrix that may be stored, or computed with, as if it were rounded; or such matrices of experts, stacked."""

    w: nnx.Param
    w_scale: nnx.Variable
    """The scales of a quantized `w`."""
    contracted: int
    """How many of a matrix's first axes are summed over."""
    stacked: bool = False
    """Whether the first axis is that of experts, each of which is rounded for itself."""
    quantized: bool = False
    fp8: bool = False
    """Whether its products are those of 8-bit floats (`Model.compute`)."""
    simulated: Simulated | None = None
    """What is rounded in simulation (QAT): inputs where the product is computed, weights by `on_grid`, which whoever
    casts them calls."""

    @property
    def inputs(self) -> int:
        """The numbers that an output of the matrix sums over."""
        return math.prod(self.w.shape[self.stacked :][: self.contracted])

    def quantize(self, name: str, quantization: Quantization) -> None:
        """Replaces the matrix by its rounded values and their scales.

        Args:
            name: of the matrix in its layer, for the error.

        Raises:
            UserError: no tile fits the matrix.
        """
        check_tile(name, self.inputs, quantization)
        axes, tiles = self.w.get_metadata("axes"), self.stacked + 1  # tiles are sharded as inputs are
        rounded = partial(quantize, quantization=quantization, contracted=self.contracted)
        values, scales = (jax.vmap(rounded) if self.stacked else rounded)(self.w[...])
        self.w = nnx.Param(values, axes=axes)
        self.w_scale = nnx.Param(scales, axes=(*axes[:tiles], *axes[self.stacked + self.contracted :]))
        self.quantized = True

    def simulate(self, name: str, rounding: Simulated) -> None:
        """Makes the matrix compute as if it or its inputs were rounded.

        Args:
            name: of the matrix in its layer, for the error.

        Raises:
            UserError: no tile fits the matrix.
        """
        if rounding.weights is not None:
            check_tile(name, self.inputs, rounding.weights, key="quantization.rules")
        self.simulated = rounding

    def on_grid(self, w: jax.Array) -> jax.Array:
        """The matrix `w` with its simulated rounding, if there is one, before it is cast.

        Called where weights are cast: by the trainer in each forward pass, by the sampler when they are published.
        """
        if self.simulated is None:
            return w
        rounded = partial(self.simulated.weight, contracted=self.contracted)
        return (jax.vmap(rounded) if self.stacked else rounded)(w)


class Projection(Stored):
    """`einsum(spec, x, w) + b`. The contracted axes of `w` come first."""

    w_lora_a: nnx.Variable
    w_lora_b: nnx.Variable
    """The adapter's A and B, where there is an adapter."""
    w_lora_a0: nnx.Variable
    w_lora_b0: nnx.Variable
    """The initial A, and the initial B with the opposite sign (PiSSA); they do not train."""
    w_lora_m: nnx.Variable
    """The magnitude of each output (DoRA)."""
    w_lora_share: nnx.Variable
    w_lora_gain: nnx.Variable
    """For several joined adapters: a row's factor on each channel, and the DoRA gain of its adapter."""

    def __init__(
        self, spec: str, shape: tuple[int, ...], axes: Axes, rngs: nnx.Rngs, *, contracted: int, bias: bool = False
    ):
        """Creates the weights with random values.

        Args:
            contracted: how many of the first axes are summed over.
        """
        self.spec, self.contracted = spec, contracted
        self.w = weight(rngs, shape, axes, std=math.prod(shape[:contracted]) ** -0.5)
        self.b = nnx.Param(jnp.zeros(shape[contracted:], jnp.float32), axes=axes[contracted:]) if bias else None
        self.adapter: Adapter | None = None
        self.has_gains = False
        """Whether `w_lora_m` holds the results of `gain`, computed once for decoding."""
        self.turned = False
        """Whether `w` is stored with its contracted axes last (`Model.turned`)."""

    def __call__(self, x: jax.Array, dropout_keys: TokenKeys | None = None) -> jax.Array:
        """The product with the matrix, with adapter and bias where there are any.

        Args:
            dropout_keys: a key for each token, where an adapter with dropout trains.
        """
        x = x if self.simulated is None else self.simulated.inputs(x)
        if self.fp8:
            y = project_in_fp8(self.spec, x, self._matrix, self.w_scale[...] if self.quantized else None)
        else:
            y: jax.Array = project(self.spec, x, self.weight(x))
        if (adapter := self.adapter) is not None:
            of_x, of_w, of_y = axes_of(self.spec)
            summed = "".join(axis for axis in of_w if axis in of_x)
            outputs = "".join(axis for axis in of_w if axis not in of_x)
            a, b = self._pair(adapter)
            dropped_x = dropped(x, dropout_keys, adapter) if adapter.dropout and dropout_keys is not None else x
            narrow = project(f"{of_x},{summed}r->BTr", dropped_x, a)
            if adapter.mixed:
                narrow = narrow * self.w_lora_share[...][:, None]
            added: jax.Array = project(f"BTr,r{outputs}->{of_y}", narrow, b)
            y = y + adapter.scale * added
            if adapter.magnitude:
                y = (self.gain(x) * y).astype(y.dtype)
        return y if self.b is None else y + self.b[...]

    def weight(self, x: jax.Array) -> jax.Array:
        """The matrix that multiplies `x`, or the one that its 8-bit floats stand for."""
        if self.fp8 and not self.quantized:
            w = narrowed(jax.lax.stop_gradient(self._matrix), x.dtype)
            return dequantize(*rounded_matrix(w, self.contracted)).astype(x.dtype)
        if not self.quantized:
            return self._matrix
        # Tied to x: a sampling loop would otherwise dequantize all layers before it starts, and hold them.
        values, _ = jax.lax.optimization_barrier((self._matrix, jax.lax.stop_gradient(x)))
        return dequantize(values, self.w_scale[...]).astype(x.dtype)

    @property
    def _matrix(self) -> jax.Array:
        """What is stored, with its contracted axes first."""
        w = self.w[...]
        return jnp.moveaxis(w, range(-self.contracted, 0), range(self.contracted)) if self.turned else w

    def gain(self, x: jax.Array) -> jax.Array:
        """DoRA's gain `m / |W + s A B|` of each output, in float32.

        The length is that of the weights in the dtype that multiplies `x`, and has no gradient (section 4.3 of
        https://arxiv.org/abs/2402.09353).
        """
        assert self.adapter is not None
        if self.adapter.mixed:
            return self.w_lora_gain[...][:, None]
        if self.has_gains:
            return self.w_lora_m[...]
        w, a, b = (one.astype(x.dtype).astype(jnp.float32) for one in (self.weight(x), *self._pair(self.adapter)))
        whole = w + self.adapter.scale * jnp.tensordot(a, b, 1)
        length = jnp.sqrt(jnp.sum(whole**2, axis=tuple(range(self.contracted))))
        return self.w_lora_m[...] / jax.lax.stop_gradient(length)

    def _pair(self, adapter: Adapter) -> tuple[jax.Array, jax.Array]:
        """A and B, joined with their initial values where the product of those is subtracted (PiSSA)."""
        a, b = self.w_lora_a[...], self.w_lora_b[...]
        if adapter.anchored:
            a0, b0 = jax.lax.stop_gradient((self.w_lora_a0[...], self.w_lora_b0[...]))
            a, b = jnp.concatenate([a, a0], -1), jnp.concatenate([b, b0], 0)
        return a, b


def dropped(x: Float[Array, "B T *inputs"], dropout_keys: TokenKeys, adapter: Adapter) -> jax.Array:
    """Inputs after dropout: a share of them zeroed, the others scaled up to keep the mean.

    What is zeroed follows from the token's key and the projection alone: packing, micro-batches and devices do not
    change it.
    """
    share = 1 - adapter.dropout
    draw = jax.vmap(jax.vmap(lambda key: jax.random.bernoulli(key, share, x.shape[2:])))
    return jnp.where(draw(fold_tokens(dropout_keys, adapter.number)), x / share, 0).astype(x.dtype)


def fold_tokens(keys: TokenKeys, number: Int[Array, ""] | int) -> TokenKeys:
    """Each token's key with a number folded in."""
    return jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, number)))(keys)


def axes_of(spec: str) -> list[str]:
    """The axes of x, of w and of y in `x,w->y`."""
    return re.split(",|->", spec)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def project(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`einsum(spec, x, w)` in the dtype of x. The gradient of w is summed over tokens and devices in the dtype of w.

    On a CPU the backward pass computes both operands of a product once, and transposes the narrow one. XLA's products
    need their left operand row by row there, and fuse what computes it into the copy that transposes it. For the
    gradient of a wide layer's weights JAX puts the wide operand there, and the gated activation's derivative is
    recomputed with strides: four fifths of a small model's step.
    """
    return jnp.einsum(_in_order(spec), x, narrowed(w, x.dtype))


def _in_order(spec: str) -> str:
    """The spec with its summed axes renamed until their alphabetical order is that of the matrix.

    `jnp.einsum` sums over several axes in alphabetical order; in any other order XLA would transpose both operands.
    """
    _, of_w, of_y = axes_of(spec)
    summed = [axis for axis in of_w if axis not in of_y]
    names = dict(zip(summed, sorted(summed), strict=True))
    return "".join(names.get(letter, letter) for letter in spec)


def _project_backward(spec: str, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    of_x, of_w, of_y = axes_of(spec)
    if platform() == "cpu":
        x, dy = jax.lax.optimization_barrier((x, dy))
    dx = jnp.einsum(f"{of_y},{of_w}->{of_x}", dy, narrowed(w, x.dtype))
    return dx, _gradient_of_matrix(spec, x, dy, w.dtype)


def _gradient_of_matrix(spec: str, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
    """The gradient of w in `einsum(spec, x, w)`, summed over tokens and devices in this dtype."""
    of_x, of_w, of_y = axes_of(spec)
    if platform() != "cpu":
        return jnp.einsum(f"{of_x},{of_y}->{of_w}", x, dy, preferred_element_type=dtype)
    # Of two bfloat16 operands XLA's CPU products make no float32.
    x, dy = x.astype(dtype), dy.astype(dtype)
    if x.size <= dy.size:
        return jnp.einsum(f"{of_x},{of_y}->{of_w}", x, dy)
    turned = "".join(sorted(of_w, key=lambda axis: axis not in of_y))
    dw = jnp.einsum(f"{of_y},{of_x}->{turned}", dy, x)
    return jnp.einsum(f"{turned}->{of_w}", dw)


project.defvjp(lambda spec, x, w: (project(spec, x, w), (x, w)), _project_backward)


EXACT_SUMS = jax.lax.Precision.HIGHEST
"""Without it tensor cores of Hopper sum products of 8-bit floats in about 14 bits (section 3.3.2 of DeepSeek-V3,
https://arxiv.org/abs/2412.19437)."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def project_in_fp8(spec: str, x: Float[Array, "B T ..."], w: jax.Array, w_scale: jax.Array | None) -> jax.Array:
    """`einsum(spec, x, w)` in the dtype of x, multiplied in 8-bit floats and summed in float32.

    With q(.) for rounding, s and S for the scales of a token and of an output, and t over tokens:

        y_t = s_t S sum(q(x_t) q(w)),   dx_t = s'_t sum(q'(S dy_t) q(w)),   dw = sum_t(x_t dy_t)

    q rounds to e4m3, q' to e5m2 (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433). Gradients pass the
    rounding as if it were not there. S goes into dy before it is rounded, since dx sums over outputs; so both products
    have one rounded w. dw sums over tokens, whose scales cannot be taken out: one scale for all would have a gradient
    depend on how a batch is split into micro-batches. It is multiplied in the dtype of x.

    On an H200 a step whose products took 149 ms in bfloat16 and 67 in 8 bits was 7 of 492 ms longer with dw in bfloat16
    (docs/devices/nvidia-h200-2026-11-28.md).

    Args:
        w: the matrix, or its values in e4m3 where it does not train.
        w_scale: the scales `[1, *O]` of those values; None for a matrix.
    """
    values, w_scale = _in_fp8(spec, x, w, w_scale)
    tokens, scale = rounded_tokens(x, jnp.float8_e4m3fn)
    y = jnp.einsum(_in_order(spec), tokens, values, preferred_element_type=jnp.float32, precision=EXACT_SUMS)
    return (y * scale.reshape(*scale.shape, *(1,) * (y.ndim - 2)) * w_scale[0]).astype(x.dtype)


def _in_fp8(spec: str, x: jax.Array, w: jax.Array, w_scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The values and the scales of the matrix."""
    if w_scale is not None:
        return w, w_scale
    of_x, of_w, _ = axes_of(spec)
    if platform() == "gpu":
        # The kernel has its inputs side by side, and XLA would transpose the float32 stack of all layers for that,
        # before its loop over them, and hold it.
        w = with_layout_constraint(w, Layout(tuple(range(w.ndim))))
    return rounded_matrix(narrowed(w, x.dtype), len(set(of_x) & set(of_w)))


def _fp8_backward(
    spec: str, saved: tuple[jax.Array, jax.Array, jax.Array | None], dy: jax.Array
) -> tuple[jax.Array, jax.Array | None, None]:
    x, w, w_scale = saved
    of_x, of_w, of_y = axes_of(spec)
    if platform() == "cpu":
        x, dy = jax.lax.optimization_barrier((x, dy))
    values, outputs = _in_fp8(spec, x, w, w_scale)
    gradients, scale = rounded_tokens(in_own_digits(dy) * outputs[0], jnp.float8_e5m2)
    dx = jnp.einsum(
        f"{of_y},{of_w}->{of_x}", gradients, values, preferred_element_type=jnp.float32, precision=EXACT_SUMS
    )
    dx = (dx * scale.reshape(*scale.shape, *(1,) * (dx.ndim - 2))).astype(x.dtype)
    return dx, None if w_scale is not None else _gradient_of_matrix(spec, x, dy, w.dtype), None


project_in_fp8.defvjp(lambda spec, x, w, w_scale: (project_in_fp8(spec, x, w, w_scale), (x, w, w_scale)), _fp8_backward)


class Norm(nnx.Module):
    """RMSNorm over the last axis, in float32: `x / rms(x) * w`, or `* (1 + w)` with an offset (Gemma)."""

    def __init__(self, size: int, axis: str, *, eps: float, offset: bool):
        self.eps, self.offset = eps, offset
        self.w = nnx.Param((jnp.zeros if offset else jnp.ones)((size,), jnp.float32), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.w[...], eps=self.eps, offset=self.offset)


@jax.named_scope("norm")
def rms_norm(x: jax.Array, w: jax.Array, *, eps: float, offset: bool) -> jax.Array:
    """`x / rms(x) * w` over the last axis, or `* (1 + w)`, in float32."""
    x32 = x.astype(jnp.float32)
    scale = w.astype(jnp.float32) + float(offset)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + eps) * scale).astype(x.dtype)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """`[h / 2]` float32 frequencies of the dimensions that are rotated, after scaling, and the factor on cos and sin.

    Of a proportional rope all dimensions are, the last pairs with frequency 0.

    llama3: Dubey et al. 2024, https://arxiv.org/abs/2407.21783. yarn: Peng et al. 2023, https://arxiv.org/abs/2309.00071.
    """
    share, head_dim = (rope.share, head_dim) if rope.kind == "proportional" else (1.0, int(head_dim * rope.share))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    plain = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "proportional":
        plain[int(share * head_dim // 2) :] = 0
        return plain / np.float32(rope.factor), 1.0
    if rope.kind == "default":
        return plain, 1.0
    slow = plain / rope.factor
    if rope.kind == "linear":
        return slow, 1.0
    if rope.kind == "llama3":
        turns = rope.original_length * plain / (2 * np.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return ((1 - keep) * slow + keep * plain).astype(np.float32), 1.0

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    low, high = (math.floor(low), math.ceil(high)) if rope.truncate else (low, high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1)
    factor = 0.1 * math.log(max(rope.factor, 1.0)) + 1.0 if rope.attention_factor is None else rope.attention_factor
    return (ramp * slow + (1 - ramp) * plain).astype(np.float32), factor


def rope_tables(positions: Int[Array, "B T ..."], rope: Rope, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin `[B T h/2]` in float32, of the dimensions that are rotated.

    Args:
        positions: of each token, `[B T]`; or `[B T 3]` its time, row and column (`Pictures.rope`), which take turns:
            of the pairs of dimensions each third from the second one on turns by rows, each third from the third one
            on by columns, as many as `rope.sections` says; all others turn by time.
    """
    frequencies, factor = inverse_frequencies(rope, head_dim)
    if positions.ndim == 3:
        assert rope.sections is not None, "a rope that knows pictures' rows and columns"
        axis = [i % 3 if i < 3 * rope.sections[i % 3] else 0 for i in range(len(frequencies))]
        positions = positions[..., np.array(axis, int)]
    else:
        positions = positions[..., None]
    angles = positions.astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Float[Array, "B T N H"], rope: RopeTables) -> jax.Array:
    """Rotates the pairs (i, i + h) of each head by their position's angle, in float32; dimensions from 2 h on stay."""
    cos, sin = rope
    width = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :width].astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return rotated if width == x.shape[-1] else jnp.concatenate([rotated, x[..., width:]], axis=-1)


class GatedFFN(nnx.Module):
    """`down(act(gate x) * up x)` (GLU variants, Shazeer 2020, https://arxiv.org/abs/2002.05202).

    Its projections are named as the parameters are; one that is twice as wide has names of its own, because a
    parameter has one shape.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, *, width: int | None = None, start: str = ""):
        """Random weights, `width` wide or as wide as the config says, whose names begin with `start`."""
        self.activation = config.activation
        self.names = tuple(start + name for name in ("gate", "up", "down"))
        d, f = config.d_model, width or config.ffn
        for name in self.names[:2]:
            setattr(self, name, Projection("BTD,DF->BTF", (d, f), ("embed", "ffn"), rngs, contracted=1))
        setattr(self, self.names[2], Projection("BTF,FD->BTD", (f, d), ("ffn", "embed"), rngs, contracted=1))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        dropout_keys: TokenKeys | None = None,
        real: Bool[Array, "B T"] | None = None,
        replayed: Int[Array, "B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
        return self.gated(x, dropout_keys), {}

    @jax.named_scope("ffn")
    def gated(self, x: Float[Array, "B T D"], dropout_keys: TokenKeys | None) -> Float[Array, "B T D"]:
        """The output alone."""
        of_gate, of_up, of_down = (getattr(self, name) for name in self.names)
        gate, up = of_gate(x, dropout_keys), of_up(x, dropout_keys)
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        return of_down(joined(self.activation, None, gate, up), dropout_keys)


def joined(
    activation: str, clamp: Clamp | None, gate: Float[Array, "..."], up: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The product of a gate, after its activation, and the other factor; clamped as `Clamp` says where there is one."""
    if clamp is None:
        return (jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up
    gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
    return (up + 1) * gate * jax.nn.sigmoid(clamp.slope * gate)
