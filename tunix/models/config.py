"""What distinguishes one dense decoder from another, as plain numbers and switches."""

from dataclasses import dataclass
from typing import Literal

from tunix.config import Family

Stops = tuple[tuple[str, int | tuple[int, ...] | None], ...]
"""(field, id or ids): tuples, so that a config can be a key of compiled functions."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and how it is stretched."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    """How frequencies are scaled beyond the original length."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_length / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_length / this stay as they are."""
    original_length: int = 8192
    """Positions that the model was pre-trained on."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the original length stay as they are."""
    beta_slow: float = 1.0
    """yarn: those that turn less often are divided by `factor`."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None for 0.1 ln(factor) + 1."""


@dataclass(frozen=True)
class DecoderConfig:
    """One dense decoder. Every field changes the computation; `families` fill it from config.json or a preset."""

    family: Family
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    activation: Literal["silu", "gelu_tanh"]
    norm_eps: float
    tied: bool
    """The head is the embedding table."""
    max_positions: int
    """Longest sequence that the folder promises; kept for export."""
    rope: Rope
    norm_offset: bool = False
    """Gemma: norms multiply by 1 + w."""
    post_norms: bool = False
    """Gemma 2 and 3: attention and ffn outputs are normed again before the residual."""
    qk_norm: bool = False
    """Gemma 3, Qwen 3: RMSNorm over each head's query and key."""
    qkv_bias: bool = False
    """Qwen 2: biases on q, k, v."""
    scale_embeddings: bool = False
    """Gemma: embeddings are multiplied by sqrt(d_model)."""
    query_scale: float | None = None
    """Multiplies q.k; None for head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Gemma 2: cap * tanh(scores / cap)."""
    logit_softcap: float | None = None
    """Gemma 2: the same on the logits."""
    window: int | None = None
    """Positions that a local layer sees, itself included."""
    local_layers: tuple[bool, ...] = ()
    """For each layer whether it is local; empty where none is."""
    rope_local: Rope | None = None
    """Gemma 3: rope of the local layers; None for `rope`."""
    stops: Stops = ()
    """bos_token_id, eos_token_id, pad_token_id of the folder, carried to the export."""

    @property
    def scale(self) -> float:
        """What q.k is multiplied by."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale
