"""Performance numbers: the model's FLOPs, memory, compilations; `util/chips.py` has the devices' peaks.

A dense decoder spends 6 FLOPs per weight and token on training (2 forward, 4 backward; Kaplan et al. 2020,
https://arxiv.org/abs/2001.08361), and attention 12 N H per layer and pair of tokens, half of them causal. A frozen base
needs no gradients of its weights: 4 instead of 6. An adapter's A and B are additional trainable weights.
"""

import resource
import sys
from dataclasses import dataclass

import jax
import numpy as np

from tunix.lora.config import AdapterConfig
from tunix.models.config import DELTANET, DecoderConfig
from tunix.models.families.table import matrices
from tunix.models.quantization.modules import BANKS
from tunix.types import Batch


def matmul_weights(config: DecoderConfig, head: bool = True) -> int:
    """Number of weights that every token is multiplied by: all matrices and the head, not the embedding look-up."""
    number, used = config.d_model * config.num_layers * config.layer_inputs, 1
    if config.experts is not None:
        used = config.experts.active
    for name, (layers, inputs, outputs) in matrices(config).items():
        number += layers * inputs * outputs * (used if name in BANKS else 1)
    return number + head * config.vocab_size * config.d_model


def idle_weights(config: DecoderConfig) -> int:
    """Number of weights of experts that a token does not use, in all layers; 0 without experts."""
    if config.experts is None:
        return 0
    idle = config.experts.number - config.experts.active
    return config.num_layers * idle * 3 * config.d_model * config.ffn


def adapter_weights(config: DecoderConfig, adapter: AdapterConfig) -> int:
    """Number of weights in all A and B that a token uses."""
    return adapter.count_pairs(config, 0 if config.experts is None else config.experts.active)


def mixing_flops(config: DecoderConfig, tokens: int, pairs: float) -> float:
    """FLOPs of a forward pass between tokens: `4 N H` for a pair in a layer of attention (its score, its value), and
    `6 Hv Dk Dv` for a token in a DeltaNet (it reads the state for its key and its query, and writes its value)."""
    attention = 4 * config.num_heads * sum(kind.head_dim for kind in config.kinds) * pairs
    if config.delta is None:
        return attention
    state = config.delta.value_heads * config.delta.key_dim * config.delta.value_dim
    return attention + 6 * len(config.layers_with(DELTANET)) * state * tokens


def training_flops(config: DecoderConfig, batch: Batch, adapter: AdapterConfig | None, head: bool = True) -> float:
    """FLOPs of one update on a packed batch, without padding, recomputation and the optimizer.

    Args:
        config: the model.
        batch: the packed batch.
        adapter: the adapter that trains on frozen weights; None where all weights train.
        head: whether there is a head of the vocabulary's size; False for a critic.
    """
    tokens, pairs = _tokens_and_pairs(batch)
    mixing = 3 * mixing_flops(config, tokens, pairs)
    if adapter is None:
        return 6 * matmul_weights(config, head) * tokens + mixing
    weights = 4 * matmul_weights(config, head) + 6 * adapter_weights(config, adapter)
    if adapter.start == "pissa":  # the initial A and B are frozen, and multiplied by as well
        weights += 4 * adapter_weights(config, adapter)
    if "lm_head" in adapter.also or (config.tied and adapter.also):
        weights += 2 * config.vocab_size * config.d_model
    return weights * tokens + mixing


@dataclass(frozen=True)
class Work:
    """What an update computes, for counts of its FLOPs and its padding."""

    decoder: DecoderConfig
    """The model's structure."""
    adapter: AdapterConfig | None = None
    """The adapter that trains on a frozen base; None where all weights train."""
    rows: int = 1
    """R, the rows of a micro-batch: a batch's rows are padded to a multiple of it."""
    reference: bool = False
    """Whether an update computes the reference's log-probs of its rows."""
    critic: bool = False
    """Whether an update trains a critic that is a separate model of the same structure."""

    def update_flops(self, batch: Batch) -> float:
        """FLOPs of all models in an update; a teacher's are not counted."""
        flops = training_flops(self.decoder, batch, self.adapter)
        if self.reference:
            tokens, pairs = _tokens_and_pairs(batch)
            flops += 2 * matmul_weights(self.decoder) * tokens + mixing_flops(self.decoder, tokens, pairs)
        if self.critic:
            flops += training_flops(self.decoder, batch, self.adapter, head=False)
        return flops

    def padded(self, batch: Batch) -> int:
        """Tokens of the batch's micro-batches, padding included."""
        rows, length = batch.tokens.shape
        return -(-rows // self.rows) * self.rows * length


def _tokens_and_pairs(batch: Batch) -> tuple[int, float]:
    """Tokens of a batch, and pairs of a token and one that it attends to: p + 1 at position p."""
    real = np.asarray(batch.segment_ids) > 0
    return int(real.sum()), float((np.asarray(batch.positions)[real] + 1).sum())


def peak_memory() -> int:
    """Peak memory in bytes: of the first device where it reports that, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Compilations:
    """Counts the compilations of this process; those after the last `settled()` should stay 0."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.total = 0
        """Number of compilations since this was made."""
        self._settled = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_compilation)

    def _on_compilation(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.total += event == self._EVENT

    def settled(self) -> None:
        """Marks everything compiled until now as warm-up."""
        self._settled = self.total

    @property
    def since_warmup(self) -> int:
        """Number of compilations after the warm-up."""
        return self.total - self._settled
