"""What the backward pass recomputes where a recipe leaves it to the device's memory: `remat: auto`.

Axes: B rows, T time, D model width, V vocabulary.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix.mesh import RULES, bytes_of, row_shards
from tunix.models.attention.attend import SHORT
from tunix.models.config import DELTANET, WIDE, DecoderConfig
from tunix.models.deltanet import CHUNKS
from tunix.models.scan import KEEPS, Remat
from tunix.models.token_logprobs import CHUNK_LOGITS_ELSEWHERE
from tunix.trainer.learner import abstract_moments
from tunix.trainer.microbatches import TrainerSpec

CANDIDATES: tuple[Remat, ...] = ("none", "attention", "mlp", "block")
"""From the least to the most that is recomputed."""
SHARE = 0.92
"""The part of a device's memory that a step may take by estimate; what XLA cannot place without gaps is in the rest."""
LAYER = 3
"""How often the results of a layer's products exist during its backward pass: made again, their gradients, and float32
copies in norms, rope and activations. By XLA's compiler for an H100 a step of Qwen3 0.6B over 16k tokens takes 0 to 1 %
less than the estimate under each of CANDIDATES, one of Llama 3.1 8B on eight 7 % more under `block`."""
TABLES = 3
"""How often the table exists in the compute dtype in the head: gathered, padded and in chunks."""
LOGITS = 3
"""How often a chunk of logits exists in the head: logits, probabilities and their gradient."""


class Held(NamedTuple):
    """Bytes that each device holds during a step, whatever is recomputed."""

    weights: float
    """Weights, moments, frozen weights, and what else stays, such as a reference or a sampler's copy."""
    gradients: float
    """Gradients of one micro-batch, and the sum of several."""


def chosen(spec: TrainerSpec, held: Held, limit: float | None) -> tuple[Remat, str]:
    """The first of CANDIDATES that fits, or `block`; and why, such as `11.9 of 79.6 GiB by estimate`.

    Args:
        limit: bytes that a device gives to programs; None where it does not say.
    """
    if limit is None:
        return "block", "the device does not say how much memory it has"
    sizes: dict[Remat, float] = {remat: step_bytes(spec, held, remat) for remat in CANDIDATES}
    fits: list[Remat] = [remat for remat in CANDIDATES if sizes[remat] <= SHARE * limit]
    remat: Remat = fits[0] if fits else "block"
    return remat, f"{sizes[remat] / 2**30:.1f} of {limit / 2**30:.1f} GiB by estimate"


def step_bytes(spec: TrainerSpec, held: Held, remat: Remat) -> float:
    """Bytes of a step on each device, by arithmetic.

    Two moments are the fullest: in the head, and in the backward pass of the first layer that is left. In both the
    layers' kept results exist, in the second also the gradients.
    """
    config, shards = spec.model.config, spec.mesh.shape[str(RULES["ffn"])]
    tokens = spec.microbatcher.rows // row_shards(spec.mesh) * -(-spec.length // spec.mesh.shape["context"])
    needed = activations(config, remat, jnp.dtype(spec.model.dtype).itemsize, tokens, spec.length, shards)
    return held.weights + needed.kept + max(needed.head, held.gradients + needed.layer)


class Activations(NamedTuple):
    """Bytes on each device of what a step computes for a micro-batch."""

    kept: float
    """What all layers keep for the backward pass."""
    head: float
    """What the head takes."""
    layer: float
    """What the backward pass of one layer takes."""


def activations(
    config: DecoderConfig, remat: Remat, itemsize: int, tokens: int, length: int, shards: int = 1
) -> Activations:
    """What a step computes, by arithmetic.

    Args:
        itemsize: bytes of a number of the computation.
        tokens: of a micro-batch, on each device.
        length: T, the tokens of a row.
        shards: devices that a layer's products are split over.
    """
    counts = {mixer: per_token(config, mixer, shards) for mixer in config.mixers}
    kept = itemsize * tokens * sum(counts[kind.mixer].get(name, 0.0) for kind in config.kinds for name in KEEPS[remat])
    table = config.vocab_size * config.d_model / shards
    head = 4 * table + TABLES * itemsize * table + LOGITS * 4 * CHUNK_LOGITS_ELSEWHERE
    # Of short rows all scores are written, and their gradient.
    scores = 8 * tokens * config.num_heads / shards * length if length <= SHORT else 0
    widest = itemsize * tokens * max(sum(each.values()) for each in counts.values())
    return Activations(kept, head, LAYER * widest + scores)


def per_token(config: DecoderConfig, mixer: str, shards: int) -> Mapping[str, float]:
    """How many numbers of each name in `scan.KEEPS` a layer with this mixer makes for a token, on each shard.

    What is float32 counts twice: the log-sum-exp, and the products within the chunks of a DeltaNet, which have no name
    there.
    """
    c, kind = config, config.kinds_with(mixer)[0]
    wide, narrow = c.num_heads * kind.head_dim / shards, kind.paged * kind.kv_heads * kind.head_dim / shards
    ffn = (2 if mixer in WIDE else 1) * c.ffn / shards
    if c.experts is not None:
        ffn = (c.experts.active * c.ffn + c.experts.shared) / shards
    # A layer's inputs of its own are made before the layers, and so are kept, and their gradients.
    stream = {"input": float(c.d_model + 2 * c.layer_inputs), "x": float(c.d_model)}
    if mixer == DELTANET and c.delta is not None:
        size, heads, values = (
            CHUNKS["gpu"],
            c.delta.value_heads / shards,
            c.delta.value_heads * c.delta.value_dim / shards,
        )
        # Three matrices of pairs, what is solved for and multiplied by, and a state for each chunk.
        each = 3 * size + 4 * (c.delta.key_dim + c.delta.value_dim) + c.delta.key_dim * c.delta.value_dim / size
        channels = c.delta.key_heads * c.delta.channels / shards
        return {**stream, "q": channels, "gate": ffn + values, "up": ffn, "chunks": 2 * heads * each}
    sizes = {**stream, "q": wide, "k": narrow, "v": narrow, "gate": ffn, "up": ffn}
    return {**sizes, "mixed": wide, "lse": 2 * c.num_heads / shards}


def held_by(
    spec: TrainerSpec,
    params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    frozen: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    *,
    copies: int,
) -> Held:
    """What each device holds of a run with these weights.

    Args:
        params: the trainable weights.
        frozen: the other weights.
        copies: how many more times all weights are there in the compute dtype: for a reference, for the sampler.
    """
    size = jnp.dtype(spec.model.dtype).itemsize
    moments = jax.tree.leaves(abstract_moments(spec, params))
    weights = [*params.values(), *frozen.values()]
    whole = bytes_of([*weights, *moments]) + copies * bytes_of(weights, size)
    # Those of a micro-batch, and their sum in float32.
    layers = size if spec.model.gradient_sums == "compute" else 4
    return Held(whole, bytes_of(params, 4) + bytes_of(params, layers))
