"""Qwen 3.5's sight: the fields and tensors of its multimodal folders, which have a tower for pictures of any shape.

Films are not read. Sizes are those of https://huggingface.co/Qwen/Qwen3.5-27B as transformers documents them.

Axes: D model width, Pl learned positions, Pr rows of a patch, Pc columns of a patch, Rb colours, Fr frames, Dt width of
a tower, Ft ffn width of a tower, Nt heads of a tower, Ht head dim of a tower, Qk parts of an attention's matrix, Ds
width of a square, Fm ffn width of a merger.
"""

import math
from typing import Any

from tunix.models.config import TOWER, DecoderConfig
from tunix.models.families.base import Tensor, VisionText, in_layers
from tunix.models.families.hf_config import Fields
from tunix.models.vision_config import COLOURS, FRAMES, ROPE_THETA, VisionConfig

GELU = "gelu_pytorch_tanh"
TYPE = "qwen3_5_vision"
TOKENS = 256
"""Soft tokens of a picture at most, which a recipe decides (`data.picture_tokens`), not a folder."""
DEFAULTS = {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16}


def read_vision(fields: Fields) -> VisionConfig:
    """The tower that a `qwen3_5` config.json describes."""
    inner = Fields(fields.mapping("vision_config"), fields.file, "vision_config.")
    inner.only("model_type", TYPE, "qwen3_5")
    inner.only("hidden_act", GELU)
    inner.only("in_channels", COLOURS)
    inner.only("temporal_patch_size", FRAMES)
    inner.only("deepstack_visual_indexes", [], None)
    width = fields.mapping("text_config").get("hidden_size", 4096)
    if inner.integer("out_hidden_size", 3584) != width:
        inner.refuse("out_hidden_size", f"is not the decoder's hidden_size = {width}.")
    rope = Fields(inner.mapping("rope_parameters"), fields.file, "vision_config.rope_parameters.")
    rope.only("rope_type", "axial", None)
    rope.only("rope_theta", ROPE_THETA, None)
    rope.finish()
    sizes = {name: inner.integer(name, value) for name, value in DEFAULTS.items()}
    learned = inner.integer("num_position_embeddings", 2304)
    config = VisionConfig(
        tower="qwen",
        width=sizes["hidden_size"],
        ffn=sizes["intermediate_size"],
        num_layers=sizes["depth"],
        num_heads=sizes["num_heads"],
        patch=sizes["patch_size"],
        pool=inner.integer("spatial_merge_size", 2),
        positions=math.isqrt(learned),
        norm_eps=1e-6,
        tokens=TOKENS,
        begin_id=fields.integer("vision_start_token_id", 248_053),
        end_id=fields.integer("vision_end_token_id", 248_054),
        soft_id=fields.integer("image_token_id", 248_056),
        film_id=fields.integer("video_token_id", 248_057),
        any_shape=True,
        sees_ahead=False,
        turns=True,
    )
    inner.finish()
    if config.positions**2 != learned:
        inner.refuse("num_position_embeddings", "is no square.")
    if config.width % (4 * config.num_heads):
        inner.refuse("num_heads", f"times 4 does not divide hidden_size = {config.width}.")
    return config


def write_vision(config: DecoderConfig, text: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a `qwen3_5` folder, from that of its text part."""
    c = config.vision
    assert c is not None, "a model that sees pictures"
    outside = {name: text[name] for name, _ in config.stops}
    return outside | {
        "model_type": "qwen3_5",
        "tie_word_embeddings": config.tied,
        "text_config": text,
        "vision_config": {
            "model_type": TYPE,
            "hidden_size": c.width,
            "intermediate_size": c.ffn,
            "depth": c.num_layers,
            "num_heads": c.num_heads,
            "patch_size": c.patch,
            "spatial_merge_size": c.pool,
            "num_position_embeddings": c.positions**2,
            "out_hidden_size": config.d_model,
            "temporal_patch_size": FRAMES,
            "in_channels": COLOURS,
            "hidden_act": GELU,
        },
        "vision_start_token_id": c.begin_id,
        "vision_end_token_id": c.end_id,
        "image_token_id": c.soft_id,
        "video_token_id": c.film_id,
    }


def axes_of_tower(config: VisionConfig) -> dict[str, int]:
    """The size of each axis of the tower's weights, by its letters."""
    square = config.width * config.pool**2
    return {
        "Dt": config.width,
        "Ft": config.ffn,
        "Nt": config.num_heads,
        "Ht": config.head_dim,
        "Pl": config.positions**2,
        "Pr": config.patch,
        "Pc": config.patch,
        "Rb": COLOURS,
        "Fr": FRAMES,
        "Qk": 3,
        "Ds": square,
        "Fm": square,
    }


TENSORS: dict[str, Tensor] = {
    "vision/patch": Tensor("visual.patch_embed.proj.weight", "Dt Rb Fr Pr Pc", "Fr Pr Pc Rb Dt"),
    "vision/patch_bias": Tensor("visual.patch_embed.proj.bias", "Dt", "Dt"),
    "vision/position": Tensor("visual.pos_embed.weight", "Pl Dt", "Pl Dt"),
    **in_layers(
        {
            "attn_norm": ("norm1.weight", "Dt", "Dt"),
            "attn_norm_bias": ("norm1.bias", "Dt", "Dt"),
            "qkv": ("attn.qkv.weight", "(Qk Nt Ht) Dt", "Dt Qk Nt Ht"),
            "qkv_bias": ("attn.qkv.bias", "(Qk Nt Ht)", "Qk Nt Ht"),
            "o": ("attn.proj.weight", "Dt (Nt Ht)", "Nt Ht Dt"),
            "o_bias": ("attn.proj.bias", "Dt", "Dt"),
            "mlp_norm": ("norm2.weight", "Dt", "Dt"),
            "mlp_norm_bias": ("norm2.bias", "Dt", "Dt"),
            "up": ("mlp.linear_fc1.weight", "Ft Dt", "Dt Ft"),
            "up_bias": ("mlp.linear_fc1.bias", "Ft", "Ft"),
            "down": ("mlp.linear_fc2.weight", "Dt Ft", "Ft Dt"),
            "down_bias": ("mlp.linear_fc2.bias", "Dt", "Dt"),
        },
        TOWER,
        starts=("vision/layers/", "visual.blocks."),
    ),
    "vision/norm": Tensor("visual.merger.norm.weight", "Dt", "Dt"),
    "vision/norm_bias": Tensor("visual.merger.norm.bias", "Dt", "Dt"),
    "vision/merge_up": Tensor("visual.merger.linear_fc1.weight", "Fm Ds", "Ds Fm"),
    "vision/merge_up_bias": Tensor("visual.merger.linear_fc1.bias", "Fm", "Fm"),
    "vision/merge_down": Tensor("visual.merger.linear_fc2.weight", "D Fm", "Fm D"),
    "vision/merge_down_bias": Tensor("visual.merger.linear_fc2.bias", "D", "D"),
}
_SEES = {"any_shape": True, "sees_ahead": False, "turns": True}

QWEN35_VISION = VisionText(
    architecture="Qwen3_5ForConditionalGeneration",
    read=read_vision,
    write=write_vision,
    tensors=TENSORS,
    axes=axes_of_tower,
    prefixes=(("model.language_model.", "model."), ("model.visual.", "visual."), ("mtp.", None)),
    written=(("model.", "model.language_model."), ("visual.", "model.visual.")),
    published=VisionConfig(
        "qwen", 1152, 4304, 27, 16, 16, 2, 48, 1e-6, TOKENS, 248_053, 248_054, 248_056, 248_057, **_SEES
    ),
    small=VisionConfig("qwen", 32, 64, 2, 2, 4, 2, 4, 1e-6, 16, 261, 262, 263, 264, **_SEES),
)
