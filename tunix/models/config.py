"""The settings in which decoders differ, and layers within one decoder, as plain numbers and switches."""

from dataclasses import dataclass
from typing import Literal

Stops = tuple[tuple[str, int | tuple[int, ...] | None], ...]
"""Special ids by field, e.g. `(("eos_token_id", 2),)`: tuples, so that a config can be a key of compiled functions."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and how it is stretched."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    """How frequencies are scaled beyond the original length."""
    factor: float = 1.0
    """Divides the frequencies: all of them (linear), or the low ones (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_length / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_length / this stay as they are."""
    original_length: int = 8192
    """Positions that the model was pre-trained on."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the original length stay as they are."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are divided by `factor`."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None for 0.1 ln(factor) + 1."""


@dataclass(frozen=True)
class LayerKind:
    """The settings in which layers of one decoder differ. Known while a program is traced: never an array."""

    rope: Rope
    window: int | None = None
    """Positions that a token sees, itself included; None for all of its sequence."""


@dataclass(frozen=True)
class DecoderConfig:
    """The configuration of one decoder; `families` fill it from config.json or a preset."""

    family: str
    """The family's name in the table of `models/families/table.py`, e.g. `gemma3`."""
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
    """Whether the head is the embedding table."""
    max_positions: int
    """Longest sequence that the folder states, in tokens; carried to the export."""
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
    """Gemma 2: cap * tanh(logits / cap)."""
    window: int | None = None
    """Positions that a local layer sees, itself included."""
    local_layers: tuple[bool, ...] = ()
    """For each layer whether it is local; empty where none is."""
    rope_local: Rope | None = None
    """Gemma 3: rope of the local layers; None for `rope`."""
    mixer: str = "attention"
    """The mixer of tokens, by its name in `MIXERS` of `models/blocks.py`."""
    feed_forward: str = "gated"
    """The feed-forward part, by its name in `FEED_FORWARDS` of `models/blocks.py`."""
    stops: Stops = ()
    """bos_token_id, eos_token_id, pad_token_id of the folder, carried to the export."""

    @property
    def scale(self) -> float:
        """The factor on q.k."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        far = LayerKind(self.rope)
        near = far if self.window is None else LayerKind(self.rope_local or self.rope, self.window)
        return tuple(near if local else far for local in self.local_layers or (False,) * self.num_layers)

    @property
    def distinct_kinds(self) -> tuple[LayerKind, ...]:
        """Each kind of layer once, in the order in which they first appear."""
        return tuple(dict.fromkeys(self.kinds))
