"""Which products a platform multiplies as they are, and how it computes the others: logged when a run starts.

The facts are those of docs/kernels.md, which has the evidence; a test compares the two. Products of two operands in few
bits are listed along with those that models use, so that a run can report which it leaves unused. Loads without jax.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from tunix.config import BaseType, DType

Way = Literal["native", "inside", "before", "either", "float32", "bfloat16", "tensorfloat32", "int32", "int8"]
"""`native`: multiplied as they are. `inside`: the weight is converted on the way into the product. `before`: the
converted matrix is written to memory first. `either`: inside with many rows, before with few, as in decoding. A type:
both operands are multiplied as that."""

PLACES: Mapping[Way | None, str] = {
    "inside": "on the way into its product",
    "before": "in memory before its product",
    "either": "on the way into its product, or with few rows before it",
}


def line(
    kinds: Sequence[tuple[BaseType | None, BaseType | None]], compute: DType, platform: str, *, simulated: bool = False
) -> str:
    """What a run logs about how its products are computed.

    Args:
        kinds: what the weights and the activations of its layers are rounded to; nothing for a run that rounds nothing.
        compute, platform, simulated: as in `product`.
    """
    describe = partial(product, compute=compute, platform=platform, simulated=simulated)
    described = "; ".join(describe(*kind) for kind in kinds or [(None, None)])
    return f"products of the layers: {described}"


def product(
    weights: BaseType | None,
    activations: BaseType | None,
    compute: DType,
    platform: str,
    *,
    simulated: bool = False,
) -> str:
    """How one kind of product is computed: `nf4 weights, each matrix dequantized to float32 before its product, ...`.

    Args:
        weights: what they are rounded to; None for plain ones.
        activations: what they are rounded to; None for plain ones.
        compute: dtype of the computation.
        platform: `cpu`, `gpu` or `tpu`, as jax calls it.
        simulated: the weights are stored unrounded, and rounded in each forward pass; so are activations always.
    """
    if weights is None:
        return compute + _multiplied(compute, platform)
    if activations is None and not simulated:
        place = PLACES.get(WAYS[f"{weights} weights"].get(platform), "before its product")
        return f"{weights} weights, each matrix dequantized to {compute} {place}{_multiplied(compute, platform)}"
    rounded = f"{weights} weights" + (f" and {activations} activations" if activations else "")
    unused = activations is not None and WAYS[f"{activations} x {weights}"].get(platform) == "native"
    return (
        f"{rounded}, rounded and dequantized to {compute} before each product"
        + _multiplied(compute, platform)
        + (f" (the {platform}'s own {activations} product is not used)" if unused else "")
    )


def _multiplied(compute: DType, platform: str) -> str:
    """A note on how operands in the compute dtype are multiplied; empty where they are multiplied as they are."""
    way = WAYS[compute].get(platform)
    if way is None:
        return f" (how {platform} multiplies is not determined)"
    return "" if way == "native" else f" (which {platform} multiplies as {way})"


WAYS: Mapping[str, Mapping[str, Way]] = {
    "float32": {"cpu": "native", "gpu": "tensorfloat32", "tpu": "bfloat16"},
    "bfloat16": {"cpu": "float32", "gpu": "native", "tpu": "native"},
    "nf4 weights": {"cpu": "before", "gpu": "before", "tpu": "either"},
    "int4 weights": {"cpu": "before", "gpu": "before", "tpu": "inside"},
    "int8 weights": {"cpu": "before", "gpu": "before", "tpu": "inside"},
    "fp8 weights": {"cpu": "before", "gpu": "before", "tpu": "inside"},
    "int8 x int8": {"cpu": "native", "gpu": "native", "tpu": "native"},
    "int8 x int4": {"cpu": "int32", "gpu": "int32", "tpu": "int8"},
    "int4 x int4": {"cpu": "int32", "gpu": "int32", "tpu": "int8"},
    "fp8 x fp8": {"cpu": "float32", "gpu": "native", "tpu": "bfloat16"},
}
"""Operation -> platform -> how it is computed there."""
