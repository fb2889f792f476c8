"""Gemma 3's text models (https://arxiv.org/abs/2503.19786): five local layers to a global one, a rope for each kind.

Over Gemma 2: norms of each head's query and key instead of soft caps. Of a multimodal folder the text part is read,
whose tensors have a prefix, and exported as a `gemma3_text` folder; where a recipe has pictures `gemma3_vision.py` has
the rest. Sizes are those of the config.json files under
https://huggingface.co/google (gemma-3-270m, -1b-pt, -4b-pt, -12b-pt, -27b-pt).
"""

from dataclasses import replace
from typing import Any

from tunix.models.config import DecoderConfig, Rope
from tunix.models.families.base import QK_NORMS, SHARED, FamilyText
from tunix.models.families.gemma import (
    FOUR_NORMS,
    GELU,
    every,
    gemma_config,
    gemma_preset,
    gemma_query_scale,
    gemma_sizes,
    windows,
    write_gemma2,
)
from tunix.models.families.gemma3_vision import GEMMA3_VISION
from tunix.models.families.hf_config import Fields, write_rope

MULTIMODAL = frozenset(
    (
        "vision_config",
        "mm_tokens_per_image",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
    )
)
"""Fields of a multimodal folder that concern its vision part."""


def read_gemma3(fields: Fields) -> DecoderConfig:
    """A `gemma3_text` config.json, or the text part of a multimodal `gemma3` one."""
    if "text_config" in fields.raw:
        return read_multimodal(fields)
    fields.only("hidden_activation", GELU)
    fields.only("hidden_act", GELU)
    fields.only("attn_logit_softcapping", None)
    fields.get("_sliding_window_pattern")
    shape = gemma_sizes(fields, **GEMMA3_DEFAULTS)
    positions = shape["max_positions"]
    pattern = fields.integer("sliding_window_pattern", 6)
    return gemma_config(
        fields,
        shape,
        family="gemma3",
        rope=fields.rope(1_000_000.0, positions, layer_type="full_attention"),
        rope_local=fields.rope(
            10_000.0,
            positions,
            layer_type="sliding_attention",
            theta_field="rope_local_base_freq",
            scaling_field=None,
        ),
        post_norms=True,
        qk_norm=True,
        query_scale=gemma_query_scale(fields, shape["head_dim"]),
        logit_softcap=fields.optional("final_logit_softcapping"),
        **windows(fields, every(pattern, shape["num_layers"])),
    )


def read_multimodal(fields: Fields) -> DecoderConfig:
    """The text part of a `gemma3` config.json."""
    text = Fields(fields.mapping("text_config"), fields.file, "text_config.")
    config = read_gemma3(text)
    text.finish()
    fields.only("tie_word_embeddings", config.tied)
    fields.read |= MULTIMODAL
    # Chat folders name the end of a turn outside the text part only: [1, 106] there, 1 inside.
    return replace(config, stops=tuple({**dict(config.stops), **dict(fields.stops())}.items()))


def write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `gemma3_text` folder."""
    local = config.rope_local or config.rope
    return write_gemma2(config) | {
        "model_type": "gemma3_text",
        "rope_parameters": {"full_attention": write_rope(config.rope), "sliding_attention": write_rope(local)},
        "rope_local_base_freq": local.theta,
    }


def five_to_one(layers: int) -> tuple[bool, ...]:
    """Gemma 3's pattern of local layers: five local ones, then a global one."""
    return every(6, layers)


def _preset(
    d_model: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, **different: Any
) -> DecoderConfig:
    large = {"vocab_size": 262_208, "max_positions": 131_072, "window": 1024}
    ropes = {"rope": Rope(theta=1_000_000.0, kind="linear", factor=8.0), "rope_local": Rope(theta=10_000.0)}
    local = {"post_norms": True, "qk_norm": True, "local_layers": five_to_one(layers)}
    return gemma_preset("gemma3", d_model, ffn, layers, heads, kv_heads, head_dim, **large | ropes | local | different)


GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "max_position_embeddings": 131_072,
}
"""What the text part of the published multimodal folders leaves out (transformers' Gemma3TextConfig)."""

_TEXT_ONLY: dict[str, Any] = {
    "vocab_size": 262_144,
    "max_positions": 32_768,
    "window": 512,
    "rope": Rope(theta=1_000_000.0),
}

GEMMA3 = FamilyText(
    model_types=("gemma3_text", "gemma3"),
    hub="gemma-?3",
    template="gemma",
    architecture="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    read=read_gemma3,
    write=write_gemma3,
    tensors={**SHARED, **FOUR_NORMS, **QK_NORMS},
    presets={
        "gemma3-270m": _preset(640, 2048, 18, 4, 1, 256, **_TEXT_ONLY),
        "gemma3-1b": _preset(1152, 6912, 26, 4, 1, 256, **_TEXT_ONLY),
        "gemma3-4b": _preset(2560, 10_240, 34, 8, 4, 256),
        "gemma3-12b": _preset(3840, 15_360, 48, 16, 8, 256),
        "gemma3-27b": _preset(5376, 21_504, 62, 32, 16, 128, query_scale=168**-0.5),
    },
    # Six layers, so that the tiny one has a global layer too.
    small=_preset(64, 192, 6, 4, 1, 32, **_TEXT_ONLY | {"vocab_size": 512, "max_positions": 2048, "window": 256}),
    local=five_to_one,
    whole_heads=True,
    prefixes=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.vision_tower.", None),
        ("model.multi_modal_projector.", None),
        ("vision_tower.", None),
        ("multi_modal_projector.", None),
    ),
    vision=GEMMA3_VISION,
)
