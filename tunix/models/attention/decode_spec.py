"""What a way of reading pages has to be able to read, known before any program is traced."""

from dataclasses import dataclass

from tunix.config import CacheType


@dataclass(frozen=True)
class DecodeSpec:
    """The properties of a cache and of the queries that read it, on each device; of layers with one shape of heads."""

    heads: int
    """N, query heads of a device."""
    kv_heads: int
    """K of a device; each serves N / K query heads."""
    head_dim: int
    """H, e.g. 128."""
    dtype: str
    """Dtype of the queries, e.g. bfloat16."""
    cache: CacheType
    """What keys and values are kept in."""
    page: int
    """Pt, e.g. 128."""
    windows: tuple[int | None, ...]
    """The window of each kind of these layers; None for all of a sequence."""
    softcap: float | None
    """Scores become `softcap * tanh(scores / softcap)`; None leaves them."""
    platform: str
    """cpu, gpu or tpu."""
    capability: float | None
    """Compute capability of an NVIDIA GPU, e.g. 9.0; None of another device."""
    sinks: bool = False
    """Whether sinks take part in the softmax."""
