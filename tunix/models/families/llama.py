"""Llama 3, 3.1 and 3.2 (Dubey et al. 2024, https://arxiv.org/abs/2407.21783): the plainest architecture here.

From 3.1 on its rope is stretched (`llama3`). Sizes are those of the config.json files under
https://huggingface.co/meta-llama (Meta-Llama-3-8B, Llama-3.1-8B, Llama-3.1-70B, Llama-3.2-1B, Llama-3.2-3B).
"""

from typing import Any

from tunix.models.config import DecoderConfig, Rope
from tunix.models.families.base import SHARED, SMALL, TWO_NORMS, FamilyText, sizes, written
from tunix.models.families.hf_config import Fields


def read(fields: Fields) -> DecoderConfig:
    """A `llama` config.json. Llama 1 and 2, and models derived from them, read the same way."""
    fields.only("hidden_act", "silu")
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    shape = sizes(fields, max_position_embeddings=2048)
    return DecoderConfig(
        family="llama",
        activation="silu",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", False),
        rope=fields.rope(10_000.0, shape["max_positions"]),
        stops=fields.stops(),
        **shape,
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `llama` folder."""
    return written(config) | {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _preset(
    d_model: int, ffn: int, layers: int, heads: int, head_dim: int, *, tied: bool, stretch: float | None
) -> DecoderConfig:
    plain = Rope(theta=500_000.0)
    stretched = Rope(theta=500_000.0, kind="llama3", factor=stretch or 1.0, original_length=8192)
    return DecoderConfig(
        family="llama",
        vocab_size=128_256,
        d_model=d_model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        ffn=ffn,
        activation="silu",
        norm_eps=1e-5,
        tied=tied,
        max_positions=8192 if stretch is None else 131_072,
        rope=plain if stretch is None else stretched,
    )


LLAMA = FamilyText(
    model_types=("llama",),
    hub="llama",
    template="llama3",
    architecture="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    read=read,
    write=write,
    tensors={**SHARED, **TWO_NORMS},
    presets={
        "llama3-8b": _preset(4096, 14_336, 32, 32, 128, tied=False, stretch=None),
        "llama3.1-8b": _preset(4096, 14_336, 32, 32, 128, tied=False, stretch=8.0),
        "llama3.1-70b": _preset(8192, 28_672, 80, 64, 128, tied=False, stretch=8.0),
        "llama3.2-1b": _preset(2048, 8192, 16, 32, 64, tied=True, stretch=32.0),
        "llama3.2-3b": _preset(3072, 8192, 28, 24, 128, tied=True, stretch=32.0),
    },
    small=DecoderConfig(
        family="llama", activation="silu", norm_eps=1e-5, tied=True, rope=Rope(theta=10_000.0), **SMALL
    ),
    whole_heads=True,
)
