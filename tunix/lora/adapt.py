"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): `y = x W + s x A B`, and its variants.

Blocks are adapted before they are stacked: each targeted projection gets an A (random) and a B (zeros), so that
training starts at the base exactly. The products with A and B are computed by the projection (`layers.Projection`).
What depends on the base's values (DoRA's magnitudes, PiSSA's vectors) is computed by `started` once they are loaded.
Each expert of a mixture has an A and a B of its own, multiplied by `models/moe.py`.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from tunix.config import DType
from tunix.errors import UserError
from tunix.lora.config import AdapterConfig, LowRank
from tunix.models.blocks import Block
from tunix.models.config import DecoderConfig, is_adapter
from tunix.models.layers import Adapter
from tunix.models.model import Adapt, Model, Params
from tunix.models.moe import BANK_PAIRS
from tunix.models.quantization.formats import SCALE, Quantization, is_scale, plain
from tunix.models.quantization.modules import PROJECTIONS
from tunix.util.exact import jit

START_OF_A = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""PEFT's initial A (`kaiming_uniform_(a=sqrt(5))`): uniform within 1 / sqrt(inputs), variance 1 / (3 inputs), so that
published learning rates mean the same here. qwix's default, he_uniform, is sqrt(6) = 2.45 times as wide."""
START_OF_EXPERTS = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=1, out_axis=2, batch_axis=0)
"""That of each expert's A."""


def quantization(adapter: AdapterConfig | None) -> Quantization | None:
    """How the base of an adapter is rounded; None where it is not (LoRA), or there is no adapter."""
    if adapter is None or adapter.base is None or adapter.tile is None:
        return None
    return Quantization(adapter.base, adapter.tile)


def adapt(adapter: AdapterConfig, decoder: DecoderConfig) -> Adapt:
    """A function that adapts one block before blocks are stacked.

    Raises:
        UserError: when it is first called, if a rank is above what the matrix can have.
    """
    targets, anchored = adapter.modules_of(decoder), adapter.start == "pissa"

    def refuse_above(most: int, name: str) -> None:
        if targets[name].rank > most:
            (theirs,) = [theirs for theirs, ours in PROJECTIONS.items() if name in ours]
            raise UserError(
                f"adapter.rank: {targets[name].rank} is above {most}, the most that {theirs}'s matrix can have: lower "
                f"it, or set adapter.ranks: {{{theirs}: {most}}}"
            )

    def apply(block: Block, rngs: nnx.Rngs) -> Block:
        for name, bank in block.banks().items():
            if name not in targets or BANK_PAIRS[name][0] != name:
                continue
            (experts, inputs, outputs), (of_expert, of_input, of_output) = bank.w.shape, bank.w.get_metadata("axes")
            halves = sum(stem == name for stem, _ in BANK_PAIRS.values())  # 2 where the A is also another bank's
            refuse_above(min(inputs, halves * outputs), name)
            rank, bank.scale = targets[name]
            a = START_OF_EXPERTS(rngs.params(), (experts, inputs, rank), jnp.float32)
            bank.w_lora_a = nnx.Param(a, axes=(of_expert, of_input, "rank"))
            both, of_both = ((halves,), (None,)) if halves > 1 else ((), ())
            b = jnp.zeros((experts, rank, *both, outputs), jnp.float32)
            bank.w_lora_b = nnx.Param(b, axes=(of_expert, "rank", *of_both, of_output))
        for number, (name, projection) in enumerate(block.projections().items()):
            if name not in targets:
                continue
            axes, contracted = projection.w.get_metadata("axes"), projection.contracted
            inputs, outputs = projection.w.shape[:contracted], projection.w.shape[contracted:]
            refuse_above(min(math.prod(inputs), math.prod(outputs)), name)
            rank, scale = targets[name]
            projection.adapter = Adapter(scale, number, adapter.dropout, adapter.dora, anchored)
            of_a, of_b = (*axes[:contracted], "rank"), ("rank", *axes[contracted:])
            a, b = (*inputs, rank), (rank, *outputs)
            projection.w_lora_a = nnx.Param(START_OF_A(rngs.params(), a, jnp.float32), axes=of_a)
            rngs.params()  # B's, which zeros do not read: a seed's A's are those of qwix, which draws a key for each
            projection.w_lora_b = nnx.Param(jnp.zeros(b, jnp.float32), axes=of_b)
            # What `started` fills in.
            if anchored:
                projection.w_lora_a0 = nnx.Param(jnp.zeros(a, jnp.float32), axes=of_a)
                projection.w_lora_b0 = nnx.Param(jnp.zeros(b, jnp.float32), axes=of_b)
            if adapter.dora:
                projection.w_lora_m = nnx.Param(jnp.ones(outputs, jnp.float32), axes=axes[contracted:])
        return block

    return apply


def started(adapter: AdapterConfig, model: Model, params: Params, frozen: Params, dtype: DType, mesh: Mesh) -> Params:
    """The weights that train, with what depends on the base: a variant's start, and copies of the tables.

    DoRA's magnitudes are the lengths of the base's columns, as they multiply. PiSSA's A and B are the r largest
    singular vectors, `A = U sqrt(S / s)` and `B = sqrt(S / s) V`. The paper subtracts their product from the base; here
    the base stays as it is, for all that share it, and the adapter subtracts it: `y = x W + s (x A B - x A0 B0)`.

    Args:
        params: new weights of the adapter, and of a value head.
        frozen: the base.
        dtype: the dtype of the tables that train.
    """
    names = [f"layers/{name}/w" for name in adapter.modules_of(model.config)]

    def start(params: Params, base: Params) -> Params:
        new = dict(params)
        for name in names:
            low = adapter.modules[name.split("/")[1]]
            w = plain(base, name).astype(model.dtype).astype(jnp.float32)
            if adapter.start == "pissa":
                new |= _principal(name, w, low, contracted_axes(params, name))
            if adapter.dora:
                new[f"{name}_lora_m"] = jnp.sqrt(jnp.sum(w**2, axis=tuple(range(1, 1 + contracted_axes(params, name)))))
        tabled = {name: base[name].astype(dtype) for name in adapter.tables_in(model.config)}
        return {name: x.astype(params.get(name, x).dtype) for name, x in new.items()} | tabled

    if adapter.start == "zero" and not adapter.dora and not adapter.also:
        return params
    places = model.shardings(mesh)
    return jit(start, out_shardings={name: places[name] for name in [*params, *adapter.tables_in(model.config)]})(
        params, frozen
    )


def contracted_axes(params: Params, name: str) -> int:
    """How many axes of a stacked weight, after L, its adapter sums over: A has them between L and r."""
    return params[f"{name}_lora_a"].ndim - 2


def _principal(name: str, w: Float[Array, "L ..."], low: LowRank, contracted: int) -> Params:
    """PiSSA's A and B of a stacked weight, and the A0 and B0 that subtract their product."""
    inputs = math.prod(w.shape[1 : 1 + contracted])

    def decomposed(w: Float[Array, "I O"]) -> tuple[jax.Array, jax.Array]:
        u, s, v = jnp.linalg.svd(w, full_matrices=False)
        root = jnp.sqrt(s[: low.rank] / low.scale)
        return u[:, : low.rank] * root, root[:, None] * v[: low.rank]

    # Layer by layer: a decomposition needs several times the memory of its matrix.
    a, b = jax.lax.map(decomposed, w.reshape(len(w), inputs, -1))
    a, b = a.reshape(*w.shape[: 1 + contracted], -1), b.reshape(len(w), -1, *w.shape[1 + contracted :])
    return {f"{name}_lora_a": a, f"{name}_lora_b": b, f"{name}_lora_a0": a, f"{name}_lora_b0": -b}


def plain_pairs(params: Params) -> Params:
    """The adapter as pairs A, B alone: one of PiSSA becomes the equal one of twice its rank, `[A A0] [B; B0]`."""
    pairs = {name: x for name, x in params.items() if not name.endswith(("_lora_a0", "_lora_b0"))}
    for name in (name for name in pairs if f"{name}0" in params):
        pairs[name] = jnp.concatenate([params[name], params[f"{name}0"]], -1 if name.endswith("a") else 1)
    return pairs


def merge(params: Params, adapter: AdapterConfig) -> Params:
    """The base with `s A B` added to each adapted weight, in the base's dtype and without the adapter's parameters.

    A quantized base is dequantized first, to float32: exactly what the adapter was trained on. A and B are contracted
    in float32: `[L ... r] x [L r ...]`. With DoRA each output's weights are then scaled to their learned length.
    """
    params, merged = plain_pairs(params), Params()
    for name in (name for name in params if not is_adapter(name) and not is_scale(name)):
        w, m, ours = plain(params, name), params.get(f"{name}_lora_m"), name.removeprefix("layers/").removesuffix("/w")
        stem, half = BANK_PAIRS.get(ours, (ours, None))
        a, b = (params.get(f"layers/{stem}/w_lora_{letter}") for letter in "ab")
        if a is not None and b is not None:
            scale, a, b = adapter.modules[ours].scale, a.astype(jnp.float32), b.astype(jnp.float32)
            if ours in BANK_PAIRS:
                delta = scale * jnp.einsum("LEDr,LErF->LEDF", a, b if half is None else b[:, :, :, half])
            else:
                flat_a, flat_b = a.reshape(*a.shape[:1], -1, a.shape[-1]), b.reshape(*b.shape[:2], -1)
                delta = scale * jnp.einsum("LDr,LrF->LDF", flat_a, flat_b)
            whole = w.astype(jnp.float32) + delta.reshape(w.shape)
            if m is not None:
                inputs = tuple(range(1, 1 + contracted_axes(params, name)))
                length = jnp.sqrt(jnp.sum(whole**2, axis=inputs, keepdims=True))
                whole = whole / length * m.reshape(length.shape)
            w = whole.astype(w.dtype)
        merged[name] = w
    return merged


def merge_rounded(params: Params, adapter: AdapterConfig, dtype: DType) -> tuple[Params, float]:
    """What `merge` returns for a quantized base, computed one matrix after the other and cast to `dtype`.

    Returns:
        The weights, and the error of the cast: the root mean square of the change, divided by that of the matrices.
    """

    @jit
    def merged_matrix(parts: Params) -> tuple[jax.Array, jax.Array, jax.Array]:
        (whole,) = merge(parts, adapter).values()
        cast = whole.astype(dtype)
        return cast, jnp.sum((cast.astype(jnp.float32) - whole) ** 2), jnp.sum(whole**2)

    merged, sums = Params(), []
    for name in (name for name in params if not is_adapter(name) and not is_scale(name)):
        if name + SCALE not in params:
            merged[name] = params[name]
            continue
        ours = name.split("/")[1]
        pair = f"layers/{BANK_PAIRS.get(ours, (ours, None))[0]}/w_lora_"
        # The weight, and what `merge` reads with it.
        read = {other: x for other, x in params.items() if other in (name, name + SCALE) or other.startswith(pair)}
        merged[name], moved, size = merged_matrix(read)
        sums.append((float(moved), float(size)))
    return merged, math.sqrt(sum(moved for moved, _ in sums) / sum(size for _, size in sums))
