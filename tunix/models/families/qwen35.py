"""Qwen 3.5, and 3.6 and 3.8 of the same shape (https://huggingface.co/Qwen): three Gated DeltaNets to one attention.

Attention has a gate on each head's output, norms of queries and keys, and a rope on a quarter of each head; all norms
but that of the DeltaNet multiply by 1 + w. Published folders are multimodal, with a tower for pictures of any shape
(films are not read): where pictures are not asked for their text part is read, and an export is a `qwen3_5_text`
folder. Their heads that draft tokens (`mtp.`) are taken along, and draft in the engine if asked. A folder's config.json
decides about sizes; those of presets are slime's (github.com/THUDM/slime, scripts/models) for 0.8B and 27B, of public
descriptions for 4B and 9B, and unchecked for 2B and for how many heads the values of 0.8B, 2B and 27B have. The tower's
are those of https://huggingface.co/Qwen/Qwen3.5-27B as transformers documents them.

Models with a mixture of experts (https://huggingface.co/Qwen/Qwen3.5-35B-A3B) have in every layer experts and a shared
one, whose result is weighed by a sigmoid. Published folders hold the matrices of all experts of a layer in two tensors,
gate and up in one of them; transformers' text model, and so an export, has those of each expert. Sizes are those of the
folder's config.json as transformers documents them.

Axes: D model width, F ffn width, Fs ffn width of a shared expert, E experts, N query heads, H head dim, Hg head dim and
its gate's, Hk key heads, Hv value heads, U runs of a key head's channels, Dk width of a key, Dv width of a value, Ta
taps, Pl learned positions, Pr rows of a patch, Pc columns of a patch, Rb colours, Fr frames, Dt width of a tower, Ft
ffn width of a tower, Nt heads of a tower, Ht head dim of a tower, Qk parts of an attention's matrix, Ds width of a
square, Fm ffn width of a merger, Dm twice the model width.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunix.models.config import (
    COLOURS,
    DELTANET,
    EXPERTS,
    FRAMES,
    ROPE_THETA,
    DecoderConfig,
    DeltaNet,
    Experts,
    Rope,
    VisionConfig,
)
from tunix.models.families import base
from tunix.models.families.hf_config import Fields, write_rope, written_integers
from tunix.models.families.qwen import BANKS

GELU = "gelu_pytorch_tanh"
VISION_TYPE = "qwen3_5_vision"
SOFT_TOKENS = 256
"""Soft tokens of a picture at most, which a recipe decides (`data.picture_tokens`), not a folder."""
VISION_SIZES = {
    "width": ("hidden_size", 1152),
    "ffn": ("intermediate_size", 4304),
    "num_layers": ("depth", 27),
    "num_heads": ("num_heads", 16),
    "patch": ("patch_size", 16),
    "pool": ("spatial_merge_size", 2),
}
VISION_IDS = {
    "begin_id": ("vision_start_token_id", 248_053),
    "end_id": ("vision_end_token_id", 248_054),
    "soft_id": ("image_token_id", 248_056),
    "film_id": ("video_token_id", 248_057),
}


def read_vision(fields: Fields) -> VisionConfig:
    """The tower that a `qwen3_5` config.json describes."""
    inner = Fields(fields.mapping("vision_config"), fields.file, "vision_config.")
    inner.only("model_type", VISION_TYPE, "qwen3_5")
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
    learned = inner.integer("num_position_embeddings", 2304)
    numbers = inner.integers(VISION_SIZES) | fields.integers(VISION_IDS)
    config = VisionConfig("qwen", positions=math.isqrt(learned), norm_eps=1e-6, tokens=SOFT_TOKENS, **numbers)
    inner.finish()
    if config.positions**2 != learned:
        inner.refuse("num_position_embeddings", "is no square.")
    if config.width % (4 * config.num_heads):
        inner.refuse("num_heads", f"times 4 does not divide hidden_size = {config.width}.")
    return config


def write_vision(config: DecoderConfig, c: VisionConfig) -> dict[str, Any]:
    """What the config.json of a `qwen3_5` folder says of the tower."""
    return {
        "vision_config": {
            "model_type": VISION_TYPE,
            **written_integers(VISION_SIZES, c),
            "num_position_embeddings": c.positions**2,
            "out_hidden_size": config.d_model,
            "temporal_patch_size": FRAMES,
            "in_channels": COLOURS,
            "hidden_act": GELU,
        },
        **written_integers(VISION_IDS, c),
    }


_TOWER = {
    "patch": ("patch_embed.proj", "Dt Rb Fr Pr Pc", "Fr Pr Pc Rb Dt"),
    "norm": ("merger.norm", "Dt", "Dt"),
    "merge_up": ("merger.linear_fc1", "Fm Ds", "Ds Fm"),
    "merge_down": ("merger.linear_fc2", "D Fm", "Fm D"),
}
_TOWER_LAYER = {
    "attn_norm": ("norm1", "Dt", "Dt"),
    "qkv": ("attn.qkv", "(Qk Nt Ht) Dt", "Dt Qk Nt Ht"),
    "o": ("attn.proj", "Dt (Nt Ht)", "Nt Ht Dt"),
    "mlp_norm": ("norm2", "Dt", "Dt"),
    "up": ("mlp.linear_fc1", "Ft Dt", "Dt Ft"),
    "down": ("mlp.linear_fc2", "Dt Ft", "Ft Dt"),
}
QWEN35_VISION = base.VisionText(
    architecture="Qwen3_5ForConditionalGeneration",
    read=read_vision,
    write=write_vision,
    tensors={
        **base.of_tower("visual.", _TOWER, "blocks.", _TOWER_LAYER),
        "vision/position": base.Tensor("visual.pos_embed.weight", "Pl Dt", "Pl Dt"),
    },
    prefixes=(("model.language_model.", "model."), ("model.visual.", "visual."), ("mtp.", None)),
    written=(("model.", "model.language_model."), ("visual.", "model.visual.")),
    published=VisionConfig(
        "qwen", 1152, 4304, 27, 16, 16, 2, 48, 1e-6, SOFT_TOKENS, 248_053, 248_054, 248_056, 248_057
    ),
    small=VisionConfig("qwen", 32, 64, 2, 2, 4, 2, 4, 1e-6, 16, 261, 262, 263, 264),
)


VISION = ("vision_config", *(name for name, _ in VISION_IDS.values()))
"""Fields of a multimodal folder that concern its vision part."""
PASSENGERS = {"mtp.": ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")}
"""The heads that draft tokens, and their fields; nothing computes with them where `model.mtp` does not ask for it."""
DEFAULTS = {"head_dim": 256, "max_position_embeddings": 32_768}
"""Sizes that a config.json may leave out."""
SECTIONS = (11, 11, 10)
"""How many pairs of a head's dimensions turn by a token's time, row and column."""
DELTA_SIZES = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}


def read_qwen35(fields: Fields) -> DecoderConfig:
    """A `qwen3_5_text` config.json, or the text part of a multimodal `qwen3_5` one."""
    fields.only("mlp_only_layers", [], None)
    return read_text(fields, _QWEN35, base.sizes(fields, DEFAULTS))


def read_text(fields: Fields, like: DecoderConfig, shape: base.Shape, **different: Any) -> DecoderConfig:
    """The config of a model with these mixers, from a text config.json.

    Args:
        like: as in `base.decoder`, and so is the shape.
        different: what else its feed-forward part sets.
    """
    fields.only("attention_bias", False)
    fields.only("attn_output_gate", True)
    fields.only("mamba_ssm_dtype", "float32")  # states are float32 whatever the folder says; nothing else is
    fields.read |= set(PASSENGERS["mtp."])
    share = fields.number("partial_rotary_factor", 0.25)
    rope = fields.rope(10_000.0, shape["max_positions"], share=share)
    layers, interval = shape["num_layers"], fields.integer("full_attention_interval", 4)
    linear = fields.layer_types(layers, {"linear_attention": True, "full_attention": False})
    linear = linear or tuple((layer + 1) % interval != 0 for layer in range(layers))
    if all(linear) or not any(linear):
        fields.refuse("layer_types", "names one kind of layer only; this family alternates between the two.")
    delta = DeltaNet(**fields.integers(DELTA_SIZES))
    if delta.value_heads % delta.key_heads:
        fields.refuse("linear_num_value_heads", f"is no multiple of linear_num_key_heads = {delta.key_heads}.")
    if delta.value_heads // delta.key_heads * delta.value_dim % delta.key_dim:
        fields.refuse("linear_value_head_dim", "gives a key head values that are no multiple of its keys' width.")
    if delta.taps < 2:
        fields.refuse("linear_conv_kernel_dim", "must be 2 or more.")
    return base.decoder(
        fields,
        like,
        shape,
        rope=rope if rope.sections else replace(rope, sections=SECTIONS),  # those of published folders
        linear_layers=linear,
        delta=delta,
        **different,
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `qwen3_5_text` folder."""
    delta = config.delta
    assert delta is not None, "the family has them"
    return base.written(config, old_rope=False) | {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "rope_parameters": {
            **write_rope(config.rope),
            "partial_rotary_factor": config.rope.share,
            "mrope_section": list(config.rope.sections or SECTIONS),
            "mrope_interleaved": True,
        },
        "layer_types": ["linear_attention" if linear else "full_attention" for linear in config.linear_layers],
        **written_integers(DELTA_SIZES, delta),
    }


def three_to_one(layers: int) -> tuple[bool, ...]:
    """The published pattern: three DeltaNets, then attention; of fewer layers the last one is attention."""
    return tuple((layer + 1) % min(4, layers) != 0 for layer in range(layers))


_QWEN35 = DecoderConfig(
    family="qwen3_5",
    activation="silu",
    norm_eps=1e-6,
    tied=False,
    rope=Rope(theta=10_000_000.0, share=0.25, sections=SECTIONS),
    norm_offset=True,
    qk_norm=True,
    output_gate=True,
    delta=DeltaNet(16, 32, 128, 128),
    **{**base.SMALL, "vocab_size": 248_320, "max_positions": 262_144},
)
_TIED = replace(_QWEN35, tied=True)
_FEW, _MANY = DeltaNet(16, 16, 128, 128), DeltaNet(16, 48, 128, 128)
"""The mixers of 0.8B and 2B, and of 27B, which have fewer and more heads of values than the other sizes."""

_ATTENTION = (*(f"layers/{name}/w" for name in "kvo"), *base.QK_NORMS)
"""What attention alone has, as in other families; its queries come with gates."""
_CHANNELS = ("U", (1, 1))
"""A folder has the queries of all key heads first, then their keys, then the values."""
_DELTA = base.in_layers(
    {
        "z/w": ("linear_attn.in_proj_z.weight", "(Hv Dv) D", "D Hv Dv"),
        "beta/w": ("linear_attn.in_proj_b.weight", "Hv D", "D Hv"),
        "decay/w": ("linear_attn.in_proj_a.weight", "Hv D", "D Hv"),
        "out/w": ("linear_attn.out_proj.weight", "D (Hv Dv)", "Hv Dv D"),
        "out_norm/w": ("linear_attn.norm.weight", "Dv", "Dv"),
        "rate/a_log": ("linear_attn.A_log", "Hv", "Hv"),
        "rate/bias": ("linear_attn.dt_bias", "Hv", "Hv"),
    },
    DELTANET,
)
_MIXED = base.in_layers(
    {
        "qkv/w": ("linear_attn.in_proj_qkv.weight", "(Hk U Dk) D", "D Hk U Dk"),
        "conv/w": ("linear_attn.conv1d.weight", "(Hk U Dk) 1 Ta", "Hk U Dk Ta"),
    },
    DELTANET,
)
PREFIXES = (("model.language_model.", "model."), ("model.visual.", None), ("mtp.", None))
TENSORS: Mapping[str, base.Tensor] = {
    **base.SHARED,
    **base.TWO_NORMS,
    **{name: replace({**base.SHARED, **base.QK_NORMS}[name], mixer="attention") for name in _ATTENTION},
    **base.in_layers({"q/w": ("self_attn.q_proj.weight", "(N Hg) D", "D N Hg")}, "attention"),
    **_DELTA,
    **{name: replace(tensor, runs=_CHANNELS) for name, tensor in _MIXED.items()},
}


def mtp_of(tensors: Mapping[str, base.Tensor]) -> dict[str, base.Tensor]:
    """The tensors of the head that drafts tokens, whose layer is one of a model's that have attention."""
    return {
        "mtp/join/w": base.Tensor("mtp.fc.weight", "D Dm", "Dm D"),
        "mtp/embed_norm/w": base.Tensor("mtp.pre_fc_norm_embedding.weight", "D", "D"),
        "mtp/hidden_norm/w": base.Tensor("mtp.pre_fc_norm_hidden.weight", "D", "D"),
        "mtp/norm/w": base.Tensor("mtp.norm.weight", "D", "D"),
        **{
            f"mtp/layer/{name.removeprefix('layers/')}": replace(
                tensor, name=tensor.name.replace("model.layers.{layer}.", "mtp.layers.0."), mixer=None
            )
            for name, tensor in tensors.items()
            if tensor.layered and tensor.mixer != DELTANET
        },
    }


QWEN35 = base.FamilyText(
    model_types=("qwen3_5_text", "qwen3_5"),
    hub=r"qwen-?3\.[568]",
    template="chatml",
    architecture="Qwen3_5ForCausalLM",
    classifier="Qwen3_5TextForSequenceClassification",
    read=read_qwen35,
    write=write,
    tensors=TENSORS,
    presets={
        "qwen3.5-0.8b": base.sized(_TIED, 1024, 3584, 24, 8, 2, 256, linear=three_to_one, delta=_FEW),
        "qwen3.5-2b": base.sized(_TIED, 2048, 6144, 24, 8, 2, 256, linear=three_to_one, delta=_FEW),
        "qwen3.5-4b": base.sized(_TIED, 2560, 9216, 32, 16, 4, 256, linear=three_to_one),
        "qwen3.5-9b": base.sized(_QWEN35, 4096, 12_288, 32, 16, 4, 256, linear=three_to_one),
        "qwen3.5-27b": base.sized(_QWEN35, 5120, 17_408, 64, 24, 4, 256, linear=three_to_one, delta=_MANY),
    },
    small=base.sized(
        *(_TIED, 64, 192, 4, 4, 2, 16),
        linear=three_to_one,
        vocab_size=512,
        max_positions=2048,
        delta=DeltaNet(2, 4, 16, 16),
    ),
    linear=three_to_one,
    multimodal=VISION,
    prefixes=PREFIXES,
    passengers=PASSENGERS,
    mtp=mtp_of(TENSORS),
    vision=QWEN35_VISION,
)


NUMBER, ACTIVE, FFN = 256, 8, 512


def read_qwen35_moe(fields: Fields) -> DecoderConfig:
    """A `qwen3_5_moe_text` config.json, or the text part of a multimodal `qwen3_5_moe` one."""
    shape = base.sizes(fields, {**DEFAULTS, "intermediate_size": FFN})
    experts = fields.experts(NUMBER, ACTIVE)
    return read_text(
        fields,
        _MOE,
        shape,
        ffn=fields.integer("moe_intermediate_size", FFN),
        experts=replace(experts, shared=fields.integer("shared_expert_intermediate_size", FFN)),
    )


def write_moe(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `qwen3_5_moe_text` folder."""
    assert config.experts is not None, "the family has them"
    fields = write(config)
    del fields["intermediate_size"]  # which the family never had
    return fields | {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": config.ffn,
        "shared_expert_intermediate_size": config.experts.shared,
        "num_experts": config.experts.number,
        "num_experts_per_tok": config.experts.active,
    }


_MOE = replace(_QWEN35, family="qwen3_5_moe", experts=Experts(NUMBER, ACTIVE, shared=FFN), feed_forward=EXPERTS)

_MOE_TENSORS: Mapping[str, base.Tensor] = {
    **TENSORS,
    **BANKS,
    **base.in_layers(
        {
            "shared_gate/w": ("mlp.shared_expert_gate.weight", "1 D", "D"),
            "gate/w": ("mlp.shared_expert.gate_proj.weight", "Fs D", "D Fs"),
            "up/w": ("mlp.shared_expert.up_proj.weight", "Fs D", "D Fs"),
            "down/w": ("mlp.shared_expert.down_proj.weight", "D Fs", "Fs D"),
        }
    ),
}

QWEN35_MOE = base.FamilyText(
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    hub=r"qwen-?3\.[568].*\d+b-a\d+b",
    template="chatml",
    architecture="Qwen3_5MoeForCausalLM",
    classifier=None,
    read=read_qwen35_moe,
    write=write_moe,
    tensors=_MOE_TENSORS,
    presets={"qwen3.5-35b-a3b": base.sized(_MOE, 2048, FFN, 40, 16, 2, 256, linear=three_to_one)},
    small=replace(QWEN35.small, family="qwen3_5_moe", ffn=32, experts=Experts(8, 2, shared=48), feed_forward=EXPERTS),
    linear=three_to_one,
    multimodal=VISION,
    prefixes=PREFIXES,
    stacked=base.STACKED,
    passengers=PASSENGERS,
    mtp=mtp_of(_MOE_TENSORS),
)
