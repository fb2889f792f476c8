"""What the hardware does: FLOPs of the model, share of the device's peak, memory, compilations.

A dense decoder spends 6 FLOPs per weight and token on training (2 forward, 4 backward; Kaplan et al. 2020,
https://arxiv.org/abs/2001.08361), and attention 12 N H per layer and pair of tokens, half of them causal. A frozen base
skips the gradients of its weights: 4 instead of 6. An adapter's A and B are weights that train, beside it.
"""

import resource
import sys

import jax
import numpy as np

from tunix.lora.config import AdapterConfig
from tunix.models.config import DecoderConfig
from tunix.types import Batch

PEAK_FLOPS: dict[str, float] = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bf16 peak by the start of the device's name, from the vendors' data sheets; a CPU's is not known."""


# The ignored rule: jax makes `Device` as a variable, which pyright takes for no type.
def peak_flops(device: jax.Device) -> float | None:  # pyright: ignore[reportInvalidTypeForm]
    """FLOP/s of one device at best, or None where it is not known."""
    known = [peak for name, peak in PEAK_FLOPS.items() if device.device_kind.startswith(name)]
    return known[0] if known else None


def matmul_weights(config: DecoderConfig) -> int:
    """Weights that every token is multiplied by: the layers' matrices and the head, not the embedding look-up."""
    return config.num_layers * layer_weights(config) + config.vocab_size * config.d_model


def layer_weights(config: DecoderConfig) -> int:
    """Weights of one layer's matrices."""
    c = config
    return c.d_model * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.d_model * c.ffn


def adapter_weights(config: DecoderConfig, adapter: AdapterConfig) -> int:
    """Weights of A and B, by which every token is multiplied too: `r (inputs + outputs)` of each adapted matrix."""
    c = config
    wide, narrow = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    sides = {"q": c.d_model + wide, "k": c.d_model + narrow, "v": c.d_model + narrow, "o": wide + c.d_model}
    sides |= dict.fromkeys(("gate", "up", "down"), c.d_model + c.ffn)
    return c.num_layers * sum(low.rank * sides[name] for name, low in adapter.modules.items())


def training_flops(config: DecoderConfig, batch: Batch, adapter: AdapterConfig | None) -> float:
    """FLOPs that one update on this packed batch needs; padding, recomputation and the optimizer are not counted.

    Args:
        adapter: what trains in place of the weights, which are frozen then; None where all of them train.
    """
    real = np.asarray(batch.segment_ids) > 0
    tokens = int(real.sum())
    # A token at position p sees p + 1 tokens.
    pairs = float((np.asarray(batch.positions)[real] + 1).sum())
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * pairs
    if adapter is None:
        return 6 * matmul_weights(config) * tokens + attention
    weights = 4 * matmul_weights(config) + 6 * adapter_weights(config, adapter)
    if adapter.start == "pissa":  # what its A and B began as is multiplied by, too, and frozen
        weights += 4 * adapter_weights(config, adapter)
    if "lm_head" in adapter.also or (config.tied and adapter.also):
        weights += 2 * config.vocab_size * config.d_model
    return weights * tokens + attention


def peak_memory() -> int:
    """Bytes at the highest: of the first device where it tells, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Compilations:
    """Counts compilations of this process from its creation on; `settled()` starts the count that should stay 0."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self._all = 0
        self._settled = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        self._all += event == self._EVENT

    def settled(self) -> None:
        """What has been compiled until now was warm-up."""
        self._settled = self._all

    @property
    def since_warmup(self) -> int:
        """Compilations after warm-up."""
        return self._all - self._settled
