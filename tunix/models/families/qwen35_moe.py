"""Qwen 3.5 with a mixture of experts (https://huggingface.co/Qwen/Qwen3.5-35B-A3B): Qwen 3.5's mixers, and in every
layer experts and a shared one, whose result is weighed by a sigmoid.

Published folders are multimodal, and hold the matrices of all experts of a layer in two tensors, gate and up in one of
them; transformers' text model, and so an export, has those of each expert. Sizes are those of the folder's config.json
as transformers documents them.

Axes: D model width, F ffn width, Fs ffn width of a shared expert, E experts.
"""

from dataclasses import replace
from typing import Any

from tunix.models.config import EXPERTS, DecoderConfig, DeltaNet, Experts, Rope
from tunix.models.families import qwen35
from tunix.models.families.base import FamilyText, in_layers, sizes
from tunix.models.families.hf_config import Fields
from tunix.models.families.qwen_moe import BANKS

NUMBER, ACTIVE, FFN = 256, 8, 512


def read_qwen35_moe(fields: Fields) -> DecoderConfig:
    """A `qwen3_5_moe_text` config.json, or the text part of a multimodal `qwen3_5_moe` one."""
    if "text_config" in fields.raw:
        return qwen35.read_multimodal(fields, read_qwen35_moe)
    shape = sizes(fields, intermediate_size=FFN, **qwen35.DEFAULTS)
    experts = fields.experts(NUMBER, ACTIVE)
    return qwen35.read_text(
        fields,
        shape,
        family="qwen3_5_moe",
        ffn=fields.integer("moe_intermediate_size", FFN),
        experts=replace(experts, shared=fields.integer("shared_expert_intermediate_size", FFN)),
        feed_forward=EXPERTS,
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `qwen3_5_moe_text` folder."""
    assert config.experts is not None, "the family has them"
    fields = qwen35.write(config)
    del fields["intermediate_size"]  # which the family never had
    return fields | {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": config.ffn,
        "shared_expert_intermediate_size": config.experts.shared,
        "num_experts": config.experts.number,
        "num_experts_per_tok": config.experts.active,
    }


def axes(config: DecoderConfig) -> dict[str, int]:
    """The size of each axis of the family's weights."""
    assert config.experts is not None, "the family has them"
    return {**qwen35.axes(config), "Fs": config.experts.shared}


_35B_A3B = DecoderConfig(
    family="qwen3_5_moe",
    vocab_size=248_320,
    d_model=2048,
    num_layers=40,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    ffn=FFN,
    activation="silu",
    norm_eps=1e-6,
    norm_offset=True,
    tied=False,
    max_positions=262_144,
    rope=Rope(theta=10_000_000.0, share=0.25, sections=qwen35.SECTIONS),
    qk_norm=True,
    output_gate=True,
    linear_layers=qwen35.three_to_one(40),
    delta=DeltaNet(16, 32, 128, 128),
    experts=Experts(NUMBER, ACTIVE, shared=FFN),
    feed_forward=EXPERTS,
)
_SMALL = replace(qwen35.QWEN35.small, family="qwen3_5_moe", ffn=32, feed_forward=EXPERTS)

QWEN35_MOE = FamilyText(
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    hub=r"qwen-?3\.[568].*\d+b-a\d+b",
    template="chatml",
    architecture="Qwen3_5MoeForCausalLM",
    classifier=None,
    read=read_qwen35_moe,
    write=write,
    tensors={
        **qwen35.TENSORS,
        **BANKS,
        **in_layers(
            {
                "shared_gate/w": ("mlp.shared_expert_gate.weight", "1 D", "D"),
                "gate/w": ("mlp.shared_expert.gate_proj.weight", "Fs D", "D Fs"),
                "up/w": ("mlp.shared_expert.up_proj.weight", "Fs D", "D Fs"),
                "down/w": ("mlp.shared_expert.down_proj.weight", "D Fs", "Fs D"),
            }
        ),
    },
    presets={"qwen3.5-35b-a3b": _35B_A3B},
    small=replace(_SMALL, experts=Experts(8, 2, shared=48)),
    linear=qwen35.three_to_one,
    axes=axes,
    prefixes=qwen35.PREFIXES,
    stacked={
        ".gate_up_proj": (".gate_proj.weight", ".up_proj.weight"),
        ".down_proj": (".down_proj.weight",),
    },
    passengers=qwen35.QWEN35.passengers,
    passenger_fields=qwen35.DRAFTING,
)
