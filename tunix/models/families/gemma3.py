"""Gemma 3's text models (https://arxiv.org/abs/2503.19786): five local layers to a global one, a rope for each kind.

Over Gemma 2: norms of each head's query and key instead of soft caps. Of a multimodal folder the text part is read,
whose tensors have a prefix, and exported as a `gemma3_text` folder; where a recipe has pictures, with the SigLIP tower
and the projector. Tensors of such folders are called as published (`language_model.model.`,
`vision_tower.vision_model.`) or as transformers 5 writes them (`vision_tower.`); an export calls them as the folder
that was loaded does. Sizes are those of the config.json files under https://huggingface.co/google (gemma-3-270m,
-1b-pt, -4b-pt, -12b-pt, -27b-pt), and of the tower, which 12B and 27B share, of gemma-3-4b-it.

Axes: D model width, Pl learned positions, Pr rows of a patch, Pc columns of a patch, Rb colours, Dt width of a tower,
Ft ffn width of a tower, Nt heads of a tower, Ht head dim of a tower.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from tunix.models.config import COLOURS, DecoderConfig, Rope, VisionConfig
from tunix.models.families import base, gemma
from tunix.models.families.hf_config import Fields, write_rope, written_integers

VISION_TYPE = "siglip_vision_model"
VISION_SIZES = {
    "width": ("hidden_size", 768),
    "ffn": ("intermediate_size", 3072),
    "num_layers": ("num_hidden_layers", 12),
    "num_heads": ("num_attention_heads", 12),
}
VISION_IDS = {"begin_id": ("boi_token", 255_999), "end_id": ("eoi_token", 256_000), "soft_id": ("image_token", 262_144)}


def read_vision(fields: Fields) -> VisionConfig:
    """The tower that a `gemma3` config.json describes."""
    inner = Fields(fields.mapping("vision_config"), fields.file, "vision_config.")
    inner.only("model_type", VISION_TYPE)
    inner.only("hidden_act", gemma.GELU)
    inner.only("num_channels", COLOURS)
    if inner.get("vision_use_head", True) is not False:
        inner.refuse("vision_use_head", "must be false: the tower's own head has no use here.")
    side, patch = inner.integer("image_size", 224), inner.integer("patch_size", 16)
    tokens, positions = fields.integer("mm_tokens_per_image", 256), side // patch
    read = inner.integers(VISION_SIZES) | {"patch": patch, "positions": positions, "tokens": tokens}
    read["pool"] = positions // max(math.isqrt(tokens), 1)
    for ours, (name, default) in VISION_IDS.items():  # under either of its names
        read[ours] = fields.integer(f"{name}_index", fields.integer(f"{name}_id", default))
    config = VisionConfig("siglip", norm_eps=inner.number("layer_norm_eps", 1e-6), **read)
    inner.finish()
    if config.width % config.num_heads:
        inner.refuse("num_attention_heads", f"does not divide hidden_size = {config.width}.")
    if side % patch:
        inner.refuse("patch_size", f"does not divide image_size = {side}.")
    if math.isqrt(tokens) ** 2 != tokens or positions % math.isqrt(tokens):
        fields.refuse(
            "mm_tokens_per_image", f"is no square whose side divides the {positions} patches of a picture's side."
        )
    return config


def write_vision(config: DecoderConfig, c: VisionConfig) -> dict[str, Any]:
    """What the config.json of a `gemma3` folder says of the tower."""
    return {
        "vision_config": {
            "model_type": VISION_TYPE,
            **written_integers(VISION_SIZES, c),
            "image_size": c.side,
            "patch_size": c.patch,
            "layer_norm_eps": c.norm_eps,
            "num_channels": COLOURS,
            "hidden_act": gemma.GELU,
            "attention_dropout": 0.0,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": c.tokens,
        **{f"{name}_index": getattr(c, ours) for ours, (name, _) in VISION_IDS.items()},
    }


_TOWER = {
    "patch": ("embeddings.patch_embedding", "Dt Rb Pr Pc", "Pr Pc Rb Dt"),
    "norm": ("post_layernorm", "Dt", "Dt"),
}
_TOWER_LAYER = {
    "attn_norm": ("layer_norm1", "Dt", "Dt"),
    **{name: (f"self_attn.{name}_proj", "(Nt Ht) Dt", "Dt Nt Ht") for name in "qkv"},
    "o": ("self_attn.out_proj", "Dt (Nt Ht)", "Nt Ht Dt"),
    "mlp_norm": ("layer_norm2", "Dt", "Dt"),
    "up": ("mlp.fc1", "Ft Dt", "Dt Ft"),
    "down": ("mlp.fc2", "Dt Ft", "Ft Dt"),
}
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
GEMMA3_VISION = base.VisionText(
    architecture="Gemma3ForConditionalGeneration",
    read=read_vision,
    write=write_vision,
    tensors={
        **base.of_tower("vision_tower.", _TOWER, "encoder.layers.", _TOWER_LAYER),
        "vision/position": base.Tensor("vision_tower.embeddings.position_embedding.weight", "Pl Dt", "Pl Dt"),
        "vision/soft_norm": base.Tensor("multi_modal_projector.mm_soft_emb_norm.weight", "Dt", "Dt"),
        "vision/projection": base.Tensor("multi_modal_projector.mm_input_projection_weight", "Dt D", "Dt D"),
    },
    prefixes=(
        *_TEXT_PREFIXES,
        ("model.vision_tower.vision_model.", "vision_tower."),
        ("model.vision_tower.", "vision_tower."),
        ("vision_tower.vision_model.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    written=(
        ("model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("vision_tower.", "vision_tower.vision_model."),
    ),
    published=VisionConfig("siglip", 1152, 4304, 27, 16, 14, 4, 64, 1e-6, 256, 255_999, 256_000, 262_144),
    small=VisionConfig("siglip", 32, 64, 2, 2, 4, 2, 4, 1e-6, 4, 261, 262, 263),
)


def read_gemma3(fields: Fields) -> DecoderConfig:
    """A `gemma3_text` config.json, or the text part of a multimodal `gemma3` one."""
    fields.only("hidden_activation", gemma.GELU)
    fields.only("hidden_act", gemma.GELU)
    fields.only("attn_logit_softcapping", None)
    fields.get("_sliding_window_pattern")
    shape = gemma.read_sizes(fields, GEMMA3_DEFAULTS)
    positions, pattern = shape["max_positions"], fields.integer("sliding_window_pattern", 6)
    return base.decoder(
        fields,
        _TEXT_ONLY,
        shape,
        tied=True,
        rope=fields.rope(1_000_000.0, positions, layer_type="full_attention"),
        rope_local=fields.rope(
            10_000.0, positions, layer_type="sliding_attention", theta_field="rope_local_base_freq", scaling_field=None
        ),
        query_scale=gemma.read_query_scale(fields, shape["head_dim"]),
        logit_softcap=fields.optional("final_logit_softcapping"),
        **gemma.windows(fields, gemma.every(pattern, shape["num_layers"])),
    )


def write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `gemma3_text` folder."""
    local = config.rope_local or config.rope
    return gemma.write_gemma2(config) | {
        "model_type": "gemma3_text",
        "rope_parameters": {"full_attention": write_rope(config.rope), "sliding_attention": write_rope(local)},
        "rope_local_base_freq": local.theta,
    }


five_to_one = partial(gemma.every, 6)
"""Gemma 3's pattern of local layers: five local ones, then a global one."""
_LARGE = replace(
    gemma.GEMMA_BASE,
    family="gemma3",
    vocab_size=262_208,
    max_positions=131_072,
    rope=Rope(theta=1_000_000.0, kind="linear", factor=8.0),
    rope_local=Rope(theta=10_000.0),
    post_norms=True,
    qk_norm=True,
    window=1024,
)
_TEXT_ONLY = replace(_LARGE, vocab_size=262_144, max_positions=32_768, rope=Rope(theta=1_000_000.0), window=512)

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

GEMMA3 = base.FamilyText(
    model_types=("gemma3_text", "gemma3"),
    hub="gemma-?3",
    template="gemma",
    architecture="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    read=read_gemma3,
    write=write_gemma3,
    tensors={**base.SHARED, **gemma.FOUR_NORMS, **base.QK_NORMS},
    presets={
        "gemma3-270m": base.sized(_TEXT_ONLY, 640, 2048, 18, 4, 1, 256, local=five_to_one),
        "gemma3-1b": base.sized(_TEXT_ONLY, 1152, 6912, 26, 4, 1, 256, local=five_to_one),
        "gemma3-4b": base.sized(_LARGE, 2560, 10_240, 34, 8, 4, 256, local=five_to_one),
        "gemma3-12b": base.sized(_LARGE, 3840, 15_360, 48, 16, 8, 256, local=five_to_one),
        "gemma3-27b": base.sized(_LARGE, 5376, 21_504, 62, 32, 16, 128, local=five_to_one, query_scale=168**-0.5),
    },
    # Six layers, so that the tiny one has a global layer too.
    small=base.sized(
        _TEXT_ONLY, 64, 192, 6, 4, 1, 32, local=five_to_one, vocab_size=512, max_positions=2048, window=256
    ),
    local=five_to_one,
    whole_heads=True,
    multimodal=(
        *("vision_config", "mm_tokens_per_image"),
        *(f"{name}_{end}" for name, _ in VISION_IDS.values() for end in ("index", "id")),
    ),
    prefixes=(
        *_TEXT_PREFIXES,
        *((f"{start}{part}.", None) for start in ("model.", "") for part in ("vision_tower", "multi_modal_projector")),
    ),
    vision=GEMMA3_VISION,
)
