"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685) through qwix: `y = x W + (alpha / r) x A B`.

qwix's provider watches the einsums of a block once, before blocks are stacked, and gives each targeted projection an A
(contracted axes x r, random) and a B (r x the rest, zeros), so that training starts at the base exactly. The products
with A and B are the projection's own (`layers.project`): qwix's three-operand einsum took twice the step on a CPU.
"""

import math
from typing import cast

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.models.decoder import Adapt, Block
from tunix.models.layers import Segments, rope_tables
from tunix.models.model import Params, is_adapter

PROJECTIONS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""Hugging Face's module names -> ours."""


def targets(config: AdapterConfig) -> tuple[str, ...]:
    """The adapted modules by their Hugging Face names."""
    return tuple(PROJECTIONS) if config.targets == "all-linear" else config.targets


def scale(config: AdapterConfig) -> float:
    """What the product A B is multiplied by: alpha / r, or alpha / sqrt(r) (rsLoRA, https://arxiv.org/abs/2312.03732)."""
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def adapt(adapter: AdapterConfig, decoder: DecoderConfig) -> Adapt:
    """A function that adapts one block before blocks are stacked."""
    mine = [PROJECTIONS[name] for name in targets(adapter)]
    provider = qwix.LoraProvider(module_path="|".join(mine), rank=adapter.rank, alpha=adapter.alpha)

    def apply(block: Block, rngs: nnx.Rngs) -> Block:
        projections = block.projections()
        for projection in projections.values():
            projection.watched = True
        x = jnp.zeros((1, 1, decoder.d_model))
        here = jnp.zeros((1, 1), jnp.int32)
        rope = rope_tables(here, decoder.rope, decoder.head_dim)
        segments = Segments(here, here)
        adapted = cast(Block, qwix.apply_lora_to_model(block, provider, x, segments, rope, None, rngs=rngs))
        made = adapted.projections()
        for name, projection in projections.items():
            projection.watched = False
            if name in mine:
                projection.w_lora_a, projection.w_lora_b = made[name].w_lora_a, made[name].w_lora_b
                projection.adapter_scale = scale(adapter)
        return block

    return apply


def merge(params: Params, adapter: AdapterConfig) -> Params:
    """The base with `scale * A B` added to each adapted weight, in the base's dtype; adapters are gone.

    A and B are contracted in float32: `[L ... r] x [L r ...]`.
    """

    def merged(name: str, w: jax.Array) -> jax.Array:
        a, b = params.get(f"{name}_lora_a"), params.get(f"{name}_lora_b")
        if a is None or b is None:
            return w
        flat_a, flat_b = a.reshape(*a.shape[:1], -1, a.shape[-1]), b.reshape(*b.shape[:2], -1)
        delta = jnp.einsum("LDr,LrF->LDF", flat_a.astype(jnp.float32), flat_b.astype(jnp.float32))
        return (w.astype(jnp.float32) + scale(adapter) * delta.reshape(w.shape)).astype(w.dtype)

    return {name: merged(name, w) for name, w in params.items() if not is_adapter(name)}
