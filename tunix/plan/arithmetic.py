"""What a program multiplies and moves at the least, from the model's config, the packing of its rows and the mesh.

Products and kernels of attention hide what they read behind what they multiply, or the other way round; what stands
between them (norms, rope, activations, the optimizer) waits for memory alone, and adds to that. Nothing is counted that
a better compiler could leave out, so that no run on these devices is faster.
"""

from typing import NamedTuple

import numpy as np

from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.models.scan import KEEPS, Remat
from tunix.plan.chips import Chip
from tunix.trainer.perf import adapter_weights, idle_weights, matmul_weights, matrices, mixing_flops
from tunix.types import Batch

RESULTS = {"q": "q", "k": "k", "v": "v", "o": "x", "gate": "gate", "up": "up"}
"""A layer's matrices -> the names in `KEEPS` of what they compute."""
ITEM = 2
"""Bytes of a number between products, at the least."""


class Work(NamedTuple):
    """The least that one run of a program does on each of its devices."""

    flops: float = 0.0
    """Multiplications and additions of products and of attention, recomputation included."""
    bytes: float = 0.0
    """Weights and caches that products and kernels read."""
    between: float = 0.0
    """Bytes that are read and written outside of products and kernels."""

    def seconds(self, chip: Chip) -> tuple[float, str]:
        """The least time on a chip, and what most of it waits for: `compute` or `memory`."""
        compute, memory, between = self.flops / chip.flops, self.bytes / chip.bandwidth, self.between / chip.bandwidth
        return max(compute, memory) + between, "compute" if compute > max(memory, between) else "memory"


NOTHING = Work()


def training(
    config: DecoderConfig,
    batch: Batch,
    adapter: AdapterConfig | None,
    remat: Remat,
    *,
    weights: int,
    state: int,
    devices: int,
    head: bool = True,
) -> Work:
    """An update on a packed batch.

    A product costs 2 FLOPs a weight and token forward, 2 for its input's gradient and 2 for a trained weight's.
    Attention's backward pass costs 2.5 of its forward, since scores are computed once more; logits are computed twice
    where the head trains.

    Args:
        config: the model.
        batch: the packed batch.
        adapter: what trains on frozen weights; None where all weights do.
        remat: what is recomputed.
        weights: bytes of all weights on each device: read forward and backward.
        state: bytes of the trained weights and their moments on each device: read and written once.
        devices: among how many the batch is divided.
        head: whether there is a head of the vocabulary's size; False for a critic.
    """
    tokens, layers = _tokens(batch), matmul_weights(config, head=False)
    table = config.vocab_size * config.d_model * head
    again = sum(
        len(config.layers_with(mixer)) * sides[0] * sides[1]
        for mixer, of_layer in matrices(config).items()
        for name, sides in of_layer.items()
        if name in RESULTS and RESULTS[name] not in KEEPS[remat]
    )
    products = (
        6 * layers + 8 * table if adapter is None else 4 * (layers + table) + 6 * adapter_weights(config, adapter)
    )
    attention, rest = _attention(config, batch), mixing_flops(config, tokens, 0.0)
    flops = (products + 2 * again) * tokens + 3.5 * attention + 3 * rest
    return Work(flops / devices, 2.0 * weights, 3 * _between(config, tokens) / devices + 2.0 * state)


def scoring(config: DecoderConfig, batch: Batch, *, weights: int, devices: int, head: bool = True) -> Work:
    """A forward pass over a packed batch; the arguments are those of `training`."""
    tokens = _tokens(batch)
    flops = 2 * matmul_weights(config, head) * tokens + _attention(config, batch) + mixing_flops(config, tokens, 0.0)
    return Work(flops / devices, weights, _between(config, tokens) / devices)


def sampling(
    config: DecoderConfig, tokens: int, context: int, *, weights: int, devices: int, item: int = 0, head: bool = True
) -> Work:
    """Tokens computed with the engine's copy of the weights: one in each slot, or those of prompts.

    Args:
        config: the model.
        tokens: how many there are on all devices.
        context: tokens that one sees on average, itself included.
        weights: bytes of the weights on each device, without an embedding that is only looked up.
        devices: how many sample.
        item: bytes of a number in the cache, which each token reads for itself; 0 for prompts, which need not read it.
        head: whether logits are computed.
    """
    seen = [(kind, min(context, kind.window or context)) for kind in config.kinds]
    cache = sum(2.0 * kind.kv_heads * kind.head_dim * number for kind, number in seen)
    attention = sum(4.0 * config.num_heads * kind.head_dim * number for kind, number in seen)
    flops = tokens * (2.0 * matmul_weights(config, head) + attention + mixing_flops(config, 1, 0.0))
    if config.experts is not None:  # few tokens do not meet all experts
        met = min(1.0, tokens * config.experts.active / config.experts.number)
        weights -= int((1 - met) * ITEM * idle_weights(config) / devices)
    return Work(flops / devices, weights + tokens * item * cache / devices)


def _tokens(batch: Batch) -> int:
    return int((np.asarray(batch.segment_ids) > 0).sum())


def _attention(config: DecoderConfig, batch: Batch) -> float:
    """FLOPs of attention forward: `4 N H` for a pair of a token and one that it sees."""
    seen = np.asarray(batch.positions)[np.asarray(batch.segment_ids) > 0] + 1.0
    pairs = {kind: np.minimum(seen, kind.window or np.inf).sum() for kind in config.distinct_kinds}
    return float(sum(4.0 * config.num_heads * kind.head_dim * pairs[kind] for kind in config.kinds))


def _between(config: DecoderConfig, tokens: int) -> float:
    """Bytes that a forward pass reads and writes between products: two norms, rope of queries and keys, an activation
    that reads gate and up."""
    heads = sum(2 * (config.num_heads + kind.kv_heads) * kind.head_dim for kind in config.kinds)
    active = 1 if config.experts is None else config.experts.active
    return float(ITEM * tokens * (heads + config.num_layers * (4 * config.d_model + 3 * active * config.ffn)))
