"""Gemma 1 (https://arxiv.org/abs/2403.08295), 2 (https://arxiv.org/abs/2408.00118), and what Gemma 3 shares with them.

All scale their embeddings, norm by 1 + w and gate with the tanh-GELU. Gemma 2 also norms the output of each part, caps
scores and logits softly, and makes every other layer local. Sizes are those of the config.json files under
https://huggingface.co/google (gemma-2b, gemma-7b, gemma-2-2b, gemma-2-9b, gemma-2-27b).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tunix.models.config import DecoderConfig, Rope
from tunix.models.families import base
from tunix.models.families.hf_config import Fields

GELU = "gelu_pytorch_tanh"
GEMMA_BASE = DecoderConfig(
    family="gemma",
    activation="gelu_tanh",
    norm_eps=1e-6,
    tied=True,
    rope=Rope(theta=10_000.0),
    norm_offset=True,
    scale_embeddings=True,
    **{**base.SMALL, "vocab_size": 256_000, "max_positions": 8192},
)
"""What the published Gemma 1 have in common, and much of it later ones too."""


def read_gemma(fields: Fields) -> DecoderConfig:
    """A `gemma` config.json; its legacy `hidden_act: gelu` always meant the tanh form (transformers#29402)."""
    fields.only("hidden_act", GELU, "gelu")
    fields.only("hidden_activation", GELU, None)
    shape = read_sizes(fields, {"head_dim": 256, "max_position_embeddings": 8192})
    return base.decoder(fields, GEMMA_BASE, shape, tied=True, rope=fields.rope(10_000.0, shape["max_positions"]))


def read_gemma2(fields: Fields) -> DecoderConfig:
    """A `gemma2` config.json. `sliding_window_size` is a leftover of the first folders that nothing reads."""
    fields.only("hidden_activation", GELU)
    fields.only("hidden_act", GELU)
    fields.get("sliding_window_size")
    shape = read_sizes(fields, {"head_dim": 256, "max_position_embeddings": 8192})
    return base.decoder(
        fields,
        _GEMMA2,
        shape,
        tied=True,
        rope=fields.rope(10_000.0, shape["max_positions"]),
        query_scale=read_query_scale(fields, shape["head_dim"]),
        attention_softcap=fields.optional("attn_logit_softcapping", 50.0),
        logit_softcap=fields.optional("final_logit_softcapping", 30.0),
        **windows(fields, alternating(shape["num_layers"])),
    )


def read_sizes(fields: Fields, defaults: Mapping[str, int | None]) -> base.Shape:
    """The shape that a config.json states, after refusing the switches that no Gemma here has."""
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", False, None)
    return base.sizes(fields, defaults)


def windows(fields: Fields, default: tuple[bool, ...], usual: int = 4096) -> dict[str, Any]:
    """`window` and `local_layers`, as keyword arguments; None and none where no layer is local.

    Args:
        default: which layers are local where the file does not say.
        usual: the window where the file does not say.
    """
    local = fields.local_layers(len(default), default)
    if local and fields.get("sliding_window", usual) is None:
        fields.refuse("sliding_window", "must be a number where layers are local.")
    window = fields.integer("sliding_window", usual)
    return {"window": window if local else None, "local_layers": local}


def read_query_scale(fields: Fields, head_dim: int) -> float | None:
    """1 / sqrt(query_pre_attn_scalar); None where that is head_dim, so that it follows a changed head_dim."""
    scalar = fields.integer("query_pre_attn_scalar", 256)
    return None if scalar == head_dim else scalar**-0.5


def every(period: int, layers: int) -> tuple[bool, ...]:
    """A pattern of local layers: all are local but each `period`-th."""
    return tuple((layer + 1) % period != 0 for layer in range(layers))


alternating = partial(every, 2)
"""Gemma 2's pattern of local layers: local, global, local, ..."""


def write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `gemma2` folder."""
    return base.written(config) | {
        "hidden_activation": GELU,
        "attention_bias": False,
        "query_pre_attn_scalar": round((config.query_scale or config.head_dim**-0.5) ** -2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.window or 4096,
        "layer_types": base.layer_types(config),
    }


_GEMMA2 = replace(GEMMA_BASE, family="gemma2", post_norms=True, attention_softcap=50.0, logit_softcap=30.0, window=4096)
FOUR_NORMS = base.in_layers(
    {
        "pre_attn_norm/w": ("input_layernorm.weight", "D", "D"),
        "post_attn_norm/w": ("post_attention_layernorm.weight", "D", "D"),
        "pre_mlp_norm/w": ("pre_feedforward_layernorm.weight", "D", "D"),
        "post_mlp_norm/w": ("post_feedforward_layernorm.weight", "D", "D"),
    }
)
"""Norms of a block that norms the outputs of its parts too."""

GEMMA = base.FamilyText(
    model_types=("gemma",),
    hub="gemma",
    template="gemma",
    architecture="GemmaForCausalLM",
    classifier="GemmaForSequenceClassification",
    read=read_gemma,
    write=lambda config: base.written(config) | {"hidden_act": GELU, "attention_bias": False},
    tensors={**base.SHARED, **base.TWO_NORMS},
    presets={
        "gemma-2b": base.sized(GEMMA_BASE, 2048, 16_384, 18, 8, 1, 256),
        "gemma-7b": base.sized(GEMMA_BASE, 3072, 24_576, 28, 16, 16, 256),
    },
    small=base.sized(GEMMA_BASE, 64, 192, 2, 4, 1, 32, vocab_size=512, max_positions=2048),
)

GEMMA2 = base.FamilyText(
    model_types=("gemma2",),
    hub="gemma-?2-",
    template="gemma",
    architecture="Gemma2ForCausalLM",
    classifier="Gemma2ForSequenceClassification",
    read=read_gemma2,
    write=write_gemma2,
    tensors={**base.SHARED, **FOUR_NORMS},
    presets={
        "gemma2-2b": base.sized(_GEMMA2, 2304, 9216, 26, 8, 4, 256, local=alternating),
        "gemma2-9b": base.sized(_GEMMA2, 3584, 14_336, 42, 16, 8, 256, local=alternating),
        "gemma2-27b": base.sized(_GEMMA2, 4608, 36_864, 46, 32, 16, 128, local=alternating, query_scale=144**-0.5),
    },
    small=base.sized(_GEMMA2, 64, 192, 2, 4, 2, 32, local=alternating, vocab_size=512, max_positions=2048, window=256),
    local=alternating,
    whole_heads=True,
)
