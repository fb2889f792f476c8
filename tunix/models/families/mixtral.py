"""Mixtral (https://arxiv.org/abs/2401.04088): Llama's attention, and experts in every layer.

Its tensors call an expert's gate, up and down matrices w1, w3 and w2. The weights of the chosen experts are always
divided by their sum. Sizes are those of https://huggingface.co/mistralai/Mixtral-8x7B-Instruct-v0.1, config.json.

Axes: D model width, F ffn width, E experts.
"""

from dataclasses import replace
from typing import Any

from tunix.models.config import EXPERTS, DecoderConfig, Experts, Rope
from tunix.models.families.base import SHARED, SMALL, TWO_NORMS, FamilyText, in_layers, sizes, written
from tunix.models.families.hf_config import Fields

NUMBER, ACTIVE = 8, 2


def read_mixtral(fields: Fields) -> DecoderConfig:
    """A `mixtral` config.json."""
    fields.only("hidden_act", "silu")
    fields.only("sliding_window", None)
    fields.only("router_jitter_noise", 0, 0.0)
    shape = sizes(fields, max_position_embeddings=131_072)
    return DecoderConfig(
        family="mixtral",
        activation="silu",
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        tied=fields.flag("tie_word_embeddings", False),
        rope=fields.rope(1_000_000.0, shape["max_positions"]),
        experts=fields.experts(NUMBER, ACTIVE),
        feed_forward=EXPERTS,
        stops=fields.stops(),
        **shape,
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `mixtral` folder."""
    assert config.experts is not None, "the family has them"
    return written(config) | {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "sliding_window": None,
        "num_local_experts": config.experts.number,
        "num_experts_per_tok": config.experts.active,
    }


_8X7B = DecoderConfig(
    family="mixtral",
    vocab_size=32_000,
    d_model=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn=14_336,
    activation="silu",
    norm_eps=1e-5,
    tied=False,
    max_positions=32_768,
    rope=Rope(theta=1_000_000.0),
    experts=Experts(NUMBER, ACTIVE),
    feed_forward=EXPERTS,
)

MIXTRAL = FamilyText(
    model_types=("mixtral",),
    hub="mixtral",
    template="chatml",
    architecture="MixtralForCausalLM",
    classifier="MixtralForSequenceClassification",
    read=read_mixtral,
    write=write,
    tensors={
        **SHARED,
        **TWO_NORMS,
        **in_layers(
            {
                "router/w": ("block_sparse_moe.gate.weight", "E D", "D E"),
                "gates/w": ("block_sparse_moe.experts.{expert}.w1.weight", "F D", "E D F"),
                "ups/w": ("block_sparse_moe.experts.{expert}.w3.weight", "F D", "E D F"),
                "downs/w": ("block_sparse_moe.experts.{expert}.w2.weight", "D F", "E F D"),
            }
        ),
    },
    presets={"mixtral-8x7b": _8X7B},
    small=replace(_8X7B, **SMALL),
)
