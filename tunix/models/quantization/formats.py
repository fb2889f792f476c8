"""Weights in four or eight bits: how a matrix is rounded, stored and dequantized, frozen or in simulation.

A quantized matrix is two parameters: `w` holds the rounded values, in the matrix's own shape, and `w_scale` one float32
number for each tile of inputs and each output. The values' dtype gives the type, the scales' shape the tile: `uint4`
are indices into NF4's table, all others are numbers. qwix rounds (`quantize`); a layer multiplies with the result of
`dequantize`, one matrix at a time, so that the unrounded base is never in memory as a whole.

In quantization-aware training projections compute as if their matrix and inputs were stored in few bits. Values are
rounded by the same arithmetic and dequantized at once, so that everything after them is an ordinary product. Gradients
pass the rounding as if it were not there (straight-through: Bengio et al. 2013, https://arxiv.org/abs/1308.3432).
Nothing is clipped, since a tile's largest value is within its range.

With `model.quantization: {compute: fp8}` projections multiply the few bits themselves (`layers.project_in_fp8`): the
matrix by `rounded_matrix`, activations and their gradients by `rounded_tokens`, in trainer and sampler alike.

Axes: B rows, T time, I inputs, O outputs, L layers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from jaxtyping import Array, Float, Shaped

from tunix.config import BaseType, DType
from tunix.errors import UserError
from tunix.mesh import bytes_of, platform
from tunix.models.quantization.modules import BANKS
from tunix.models.quantization.rules import RULES_FILE, ActivationType, Rules
from tunix.util.exact import jit

SCALE = "_scale"
"""Suffix of the scales' name, after the name of the values."""

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""4-bit NormalFloat, quantiles of a normal distribution: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, E."""

ROUNDED: Mapping[BaseType, Any] = {"nf4": "nf4", "int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}
"""Our name of a type -> qwix's."""
SMALLEST_TILE = 8
"""With fewer inputs to a scale, the scales take as much memory as the values."""


@dataclass(frozen=True)
class Quantization:
    """How a frozen base is rounded."""

    base: BaseType
    """The type of the values, e.g. `nf4`."""
    tile: int
    """Inputs that share a scale, at most: a matrix takes the largest divisor of its inputs up to this."""


def quantize(w: Float[Array, "..."], quantization: Quantization, contracted: int) -> tuple[jax.Array, jax.Array]:
    """The rounded values in the shape of `w`, and the scales `[I / tile, *O]` in float32.

    A tile's largest value becomes the type's last number, or lies half a step beyond it.

    Args:
        w: the matrix, of any float type.
        contracted: how many of its first axes are inputs.
    """
    flat = w.astype(jnp.float32).reshape(-1, *w.shape[contracted:])
    tile, outputs = tile_of(len(flat), quantization.tile), range(1, flat.ndim)
    rounded = qwix.quantize(flat, ROUNDED[quantization.base], channelwise_axes=outputs, tiled_axes={0: tile})
    return rounded.qvalue.reshape(w.shape), rounded.scale


def dequantize(values: Shaped[Array, "..."], scales: Float[Array, "..."]) -> Float[Array, "..."]:
    """The matrix that the rounded one stands for, in float32."""
    if values.dtype == jnp.uint4:
        # qwix looks NF4 up in the flattened matrix, which a mesh would have to gather. All indices are in the table: to
        # check each would take a CPU twice as long as looking it up.
        numbers = jnp.asarray(NF4).at[values.astype(jnp.int32)].get(mode="promise_in_bounds")
    else:
        numbers = values.astype(jnp.float32)
    tiles = numbers.reshape(scales.shape[0], -1, *scales.shape[1:])
    return (tiles * scales[:, None]).reshape(values.shape)


def plain(params: Mapping[str, jax.Array], name: str) -> Float[Array, "L ..."]:
    """A stacked weight by name: dequantized if it is stored in few bits, else as it is."""
    scales = params.get(name + SCALE)
    if scales is None:
        return params[name]
    return jax.vmap(jax.vmap(dequantize) if _of_experts(name) else dequantize)(params[name], scales)


def _of_experts(name: str) -> bool:
    """Whether a stacked weight has a matrix for each expert of a layer."""
    return name.split("/")[1] in BANKS


def quantize_stack(
    name: str, w: Float[Array, "L ..."], quantization: Quantization, contracted: int
) -> tuple[jax.Array, jax.Array]:
    """`quantize` of each layer's matrix in a stacked weight, or of each expert's, one after the other."""
    each = partial(quantize, quantization=quantization, contracted=contracted)
    return jax.lax.map(partial(jax.lax.map, each) if _of_experts(name) else each, w)


def tile_of(inputs: int, most: int) -> int:
    """The largest divisor of `inputs` up to `most`."""
    return next(tile for tile in range(min(inputs, most), 0, -1) if inputs % tile == 0)


def check_tile(name: str, inputs: int, quantization: Quantization, key: str = "adapter.tile") -> None:
    """Refuses a matrix that no tile fits.

    Args:
        name: of the projection.
        inputs: I, e.g. 2048.
        key: the recipe's key, for the error.

    Raises:
        UserError: its largest tile is so small that the scales would be as large as the values.
    """
    if (tile := tile_of(inputs, quantization.tile)) < SMALLEST_TILE:
        raise UserError(
            f"{key}: {quantization.tile} leaves tiles of {tile} for the {inputs} inputs of {name}, because no larger "
            f"number up to it divides them: choose one of {SMALLEST_TILE} or more that does"
        )


def check_supported(quantization: Quantization, key: str = "adapter.base") -> None:
    """Refuses a type that this device cannot compute with: rounds and dequantizes a few numbers to see.

    Args:
        quantization: the type to check.
        key: the recipe's key, for the error.

    Raises:
        UserError: the device's compiler does not know the type.
    """
    try:
        jax.block_until_ready(jit(lambda w: dequantize(*quantize(w, quantization, 1)))(jnp.ones((SMALLEST_TILE, 1))))
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason, others = str(error).splitlines()[0], ", ".join(base for base in ROUNDED if base != quantization.base)
        raise UserError(
            f"{key}: {quantization.base} cannot be computed on this {jax.devices()[0].device_kind} ({reason}): choose "
            f"another of {others}"
        ) from error


def bytes_per_weight(params: Mapping[str, jax.Array]) -> float:
    """Mean bytes for each quantized weight among these, its share of the scales included."""
    pairs = [(x, params[name + SCALE]) for name, x in params.items() if name + SCALE in params]
    whole = [jax.ShapeDtypeStruct(x.shape, x.dtype) for pair in pairs for x in pair]
    return bytes_of(whole) / sum(x.size for x, _ in pairs)


def is_scale(name: str) -> bool:
    """Whether a parameter holds the scales of a quantized one."""
    return name.endswith(SCALE)


def in_compute(name: str, w: jax.Array, dtype: Any) -> jax.Array:
    """A weight in the compute dtype; rounded values, their scales, DoRA's magnitudes and gains stay as they are."""
    stays = is_scale(name) or name.endswith(("_lora_m", "_lora_gain")) or w.dtype not in (jnp.float32, jnp.bfloat16)
    return w if stays else narrowed(w, dtype)


def narrowed(w: jax.Array, dtype: Any) -> jax.Array:
    """`w.astype(dtype)`, computed where it is written.

    XLA's TPU compiler takes a cast to bfloat16 out of a loop over layers, and holds a copy of them all. What rounds
    before the cast needs float32 there.
    """
    if w.dtype == jnp.float32 and jnp.dtype(dtype) == jnp.bfloat16 and platform() == "tpu":
        w = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)
    return w.astype(dtype)


LARGEST: dict[ActivationType, str] = {"int8": f"absmax,{127.5 / 127}", "fp8": "absmax"}
"""How a token's scale is chosen: its largest value becomes the type's last number. qwix's default puts it half a step
beyond the last integer, between two numbers: trainer and sampler, which sum in different orders, would not round it to
the same one."""
WHOLE = 1 << 31
"""A tile that is larger than any matrix: all inputs share a scale."""


OLDEST_FP8 = 8.9, 7
"""The first compute capability of NVIDIA's GPUs, and the first generation of TPUs, that multiply 8-bit floats."""
LARGEST_EXPONENT = {jnp.float8_e4m3fn: 8, jnp.float8_e5m2: 15}
"""e4m3's last number is 448, 1.75 x 2^8, and e5m2's 57344, 1.75 x 2^15."""


def in_own_digits(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` in float32, with the digits of its own dtype.

    XLA takes a cast to bfloat16 and back for nothing where it fuses both, and would round other numbers to 8 bits in
    one program than in another.
    """
    digits = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), digits.nexp, digits.nmant)


def rounded_to_fp8(x: Float[Array, "..."], kind: Any, summed: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """`x` in an 8-bit float, and float32 scales for it, whose `summed` axes have one entry.

    A scale is the least power of two with which the largest number along these axes fits. Floats have as many digits at
    half their range as at the whole, and both the division and its inverse are exact: numbers are rounded alike
    however a program divides, and where trainer and sampler differ in the last bit of a token's largest number, its
    others stay.

    Args:
        kind: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
        summed: axes that share a scale, those which a product sums over.
    """
    x = in_own_digits(x)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=tuple(summed), keepdims=True), jnp.int32)
    # The exponent of the largest number, and one more where its first digits are above 1.75. Scales and their inverse
    # are normal numbers.
    exponent = jnp.clip((bits + 0x1FFFFF >> 23) - LARGEST_EXPONENT[kind], 1, 253)
    scale, inverse = (jax.lax.bitcast_convert_type(e << 23, jnp.float32) for e in (exponent, 254 - exponent))
    return (x * inverse).astype(kind), scale


def rounded_matrix(w: Float[Array, "..."], contracted: int) -> tuple[jax.Array, jax.Array]:
    """A matrix in e4m3, and the scales `[1, *O]` of its outputs.

    Args:
        contracted: how many of its first axes are inputs.
    """
    values, scales = rounded_to_fp8(w, jnp.float8_e4m3fn, range(contracted))
    return values, scales.reshape(1, *w.shape[contracted:])


def rounded_tokens(x: Float[Array, "B T ..."], kind: Any) -> tuple[jax.Array, jax.Array]:
    """Each token's numbers in an 8-bit float and their scales `[B T]`: nothing of a token depends on its neighbours."""
    values, scales = rounded_to_fp8(x, kind, range(2, x.ndim))
    return values, scales.reshape(x.shape[:2])


def check_multiplies_fp8(device: Any, dtype: DType) -> None:
    """Refuses products of 8-bit floats on devices without them; a CPU computes the same from float32.

    Args:
        device: of those that train or sample.
        dtype: what would be multiplied without them.

    Raises:
        UserError: the device has no such products.
    """
    gpu, tpu = OLDEST_FP8
    kind, reason = device.device_kind, None
    if (generation := re.match(r"TPU\D*(\d+)", kind)) is not None:
        reason = f"they begin with v{tpu}x" if int(generation[1]) < tpu else None
    elif device.platform != "cpu":
        version = str(getattr(device, "compute_capability", None))
        if not re.fullmatch(r"\d+\.\d+", version):
            reason = "NVIDIA's GPUs and TPUs are known to have them"
        elif float(version) < gpu:
            reason = f"its compute capability is {version}, and they begin with {gpu}: L4, L40, H100, H200, Blackwell"
    if reason is not None:
        raise UserError(
            f"model.quantization: compute fp8: {kind} has no products of 8-bit floats ({reason}): leave the key out, "
            f"and it multiplies in {dtype}"
        )


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
    roundings: list[tuple[str, Simulated]] = []
    for name, rule in rules.modules.items() if rules is not None else ():
        kind = Quantization(rule.weights, rule.tile or WHOLE) if weights and rule.weights else None
        if kind is not None or rule.activations is not None:
            roundings.append((name, Simulated(kind, rule.activations)))
    return tuple(roundings)


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
