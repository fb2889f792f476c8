"""Gemma 3's sight: the fields and tensors of multimodal folders, which have a SigLIP tower and a projector.

Tensors of such folders are called as published (`language_model.model.`, `vision_tower.vision_model.`) or as
transformers 5 writes them (`vision_tower.`); an export calls them as the folder does that was loaded. Sizes are those
of https://huggingface.co/google/gemma-3-4b-it, whose tower the 12B and 27B share.

Axes: D model width, Pl learned positions, Pr rows of a patch, Pc columns of a patch, Rb colours, Dt width of a tower,
Ft ffn width of a tower, Nt heads of a tower, Ht head dim of a tower.
"""

import math
from typing import Any

from tunix.models.config import TOWER, DecoderConfig
from tunix.models.families.base import Tensor, VisionText, in_layers
from tunix.models.families.hf_config import Fields
from tunix.models.vision_config import COLOURS, VisionConfig

GELU = "gelu_pytorch_tanh"
TYPE = "siglip_vision_model"


def read_vision(fields: Fields) -> VisionConfig:
    """The tower that a `gemma3` config.json describes."""
    inner = Fields(fields.mapping("vision_config"), fields.file, "vision_config.")
    inner.only("model_type", TYPE)
    inner.only("hidden_act", GELU)
    inner.only("num_channels", COLOURS)
    if inner.get("vision_use_head", True) is not False:
        inner.refuse("vision_use_head", "must be false: the tower's own head has no use here.")
    side, patch = inner.integer("image_size", 224), inner.integer("patch_size", 16)
    tokens, positions = fields.integer("mm_tokens_per_image", 256), side // patch
    config = VisionConfig(
        tower="siglip",
        width=inner.integer("hidden_size", 768),
        ffn=inner.integer("intermediate_size", 3072),
        num_layers=inner.integer("num_hidden_layers", 12),
        num_heads=inner.integer("num_attention_heads", 12),
        patch=patch,
        pool=positions // max(math.isqrt(tokens), 1),
        positions=positions,
        norm_eps=inner.number("layer_norm_eps", 1e-6),
        tokens=tokens,
        begin_id=_id(fields, "boi_token", 255_999),
        end_id=_id(fields, "eoi_token", 256_000),
        soft_id=_id(fields, "image_token", 262_144),
    )
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


def _id(fields: Fields, name: str, default: int) -> int:
    """A special token's id, under either of its names."""
    return fields.integer(f"{name}_index", fields.integer(f"{name}_id", default))


def write_vision(config: DecoderConfig, text: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a `gemma3` folder, from that of its text part."""
    c = config.vision
    assert c is not None, "a model that sees pictures"
    outside = {name: text[name] for name, _ in config.stops}
    return outside | {
        "model_type": "gemma3",
        "tie_word_embeddings": config.tied,
        "text_config": text,
        "vision_config": {
            "model_type": TYPE,
            "hidden_size": c.width,
            "intermediate_size": c.ffn,
            "num_hidden_layers": c.num_layers,
            "num_attention_heads": c.num_heads,
            "image_size": c.side,
            "patch_size": c.patch,
            "layer_norm_eps": c.norm_eps,
            "num_channels": COLOURS,
            "hidden_act": GELU,
            "attention_dropout": 0.0,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": c.tokens,
        "boi_token_index": c.begin_id,
        "eoi_token_index": c.end_id,
        "image_token_index": c.soft_id,
    }


def axes_of_tower(config: VisionConfig) -> dict[str, int]:
    """The size of each axis of the tower's weights, by its letters."""
    return {
        "Dt": config.width,
        "Ft": config.ffn,
        "Nt": config.num_heads,
        "Ht": config.head_dim,
        "Pl": config.positions**2,
        "Pr": config.patch,
        "Pc": config.patch,
        "Rb": COLOURS,
    }


TENSORS: dict[str, Tensor] = {
    "vision/patch": Tensor("vision_tower.embeddings.patch_embedding.weight", "Dt Rb Pr Pc", "Pr Pc Rb Dt"),
    "vision/patch_bias": Tensor("vision_tower.embeddings.patch_embedding.bias", "Dt", "Dt"),
    "vision/position": Tensor("vision_tower.embeddings.position_embedding.weight", "Pl Dt", "Pl Dt"),
    **in_layers(
        {
            "attn_norm": ("layer_norm1.weight", "Dt", "Dt"),
            "attn_norm_bias": ("layer_norm1.bias", "Dt", "Dt"),
            "q": ("self_attn.q_proj.weight", "(Nt Ht) Dt", "Dt Nt Ht"),
            "q_bias": ("self_attn.q_proj.bias", "(Nt Ht)", "Nt Ht"),
            "k": ("self_attn.k_proj.weight", "(Nt Ht) Dt", "Dt Nt Ht"),
            "k_bias": ("self_attn.k_proj.bias", "(Nt Ht)", "Nt Ht"),
            "v": ("self_attn.v_proj.weight", "(Nt Ht) Dt", "Dt Nt Ht"),
            "v_bias": ("self_attn.v_proj.bias", "(Nt Ht)", "Nt Ht"),
            "o": ("self_attn.out_proj.weight", "Dt (Nt Ht)", "Nt Ht Dt"),
            "o_bias": ("self_attn.out_proj.bias", "Dt", "Dt"),
            "mlp_norm": ("layer_norm2.weight", "Dt", "Dt"),
            "mlp_norm_bias": ("layer_norm2.bias", "Dt", "Dt"),
            "up": ("mlp.fc1.weight", "Ft Dt", "Dt Ft"),
            "up_bias": ("mlp.fc1.bias", "Ft", "Ft"),
            "down": ("mlp.fc2.weight", "Dt Ft", "Ft Dt"),
            "down_bias": ("mlp.fc2.bias", "Dt", "Dt"),
        },
        TOWER,
        starts=("vision/layers/", "vision_tower.encoder.layers."),
    ),
    "vision/norm": Tensor("vision_tower.post_layernorm.weight", "Dt", "Dt"),
    "vision/norm_bias": Tensor("vision_tower.post_layernorm.bias", "Dt", "Dt"),
    "vision/soft_norm": Tensor("multi_modal_projector.mm_soft_emb_norm.weight", "Dt", "Dt"),
    "vision/projection": Tensor("multi_modal_projector.mm_input_projection_weight", "Dt D", "Dt D"),
}

GEMMA3_VISION = VisionText(
    architecture="Gemma3ForConditionalGeneration",
    read=read_vision,
    write=write_vision,
    tensors=TENSORS,
    axes=axes_of_tower,
    prefixes=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
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
